"""Flags, made from the rooms' settings: a dataclass field `max_staleness` is the flag `--max-staleness`.

`--config FILE.yaml` gives values under the same names; the command line wins over it. A field that two rooms need (such
as global_batch_size) is one flag and fills both. Every user error is a ValueError that names the flag.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from m2po_megatron.algo.losses import LossSettings, policy_loss
from m2po_megatron.data.packing import PackingLayout
from m2po_megatron.policy.settings import ModelSettings, OptimizerSettings, ParallelSettings
from m2po_megatron.rollout.settings import RolloutSettings
from m2po_megatron.run_settings import RunSettings
from m2po_megatron.trainer import BatchSettings


@dataclass
class Settings:
    """Everything, by room. Only pretrain_rl.py and tools/ see it whole."""

    model: ModelSettings
    parallel: ParallelSettings
    optimizer: OptimizerSettings
    loss: LossSettings
    batch: BatchSettings
    rollout: RolloutSettings
    run: RunSettings


_GROUPS: dict[str, type] = {
    "model": ModelSettings,
    "parallel": ParallelSettings,
    "optimizer": OptimizerSettings,
    "loss": LossSettings,
    "batch": BatchSettings,
    "rollout": RolloutSettings,
    "run": RunSettings,
}


class _Parser(argparse.ArgumentParser):
    """Raises ValueError, with a near flag's name for a misspelt one, instead of printing usage and exiting."""

    def error(self, message: str) -> typing.NoReturn:
        raise ValueError(message)


def _fields() -> Iterator[tuple[str, dataclasses.Field[Any], Any]]:
    """(group, field, its type) of every flag, each flag once."""
    seen = set()
    for group, cls in _GROUPS.items():
        hints = typing.get_type_hints(cls)
        for entry in dataclasses.fields(cls):
            if entry.name not in seen:
                seen.add(entry.name)
                yield group, entry, hints[entry.name]


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _default(entry: dataclasses.Field[Any]) -> Any:
    return entry.default_factory() if entry.default_factory is not dataclasses.MISSING else entry.default


def _value_type(hint: Any) -> tuple[Any, bool]:
    """(scalar type, is a list) of `int`, `int | None` or `list[int]`."""
    if isinstance(hint, types.UnionType):
        hint = next(arm for arm in typing.get_args(hint) if arm is not type(None))
    if typing.get_origin(hint) in (list, tuple):
        return typing.get_args(hint)[0], True
    return hint, False


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="pretrain_rl.py", description="M2PO on megatron-core", allow_abbrev=False)
    parser.add_argument("--config", help="YAML file of the same names; the command line wins")
    groups = {
        name: parser.add_argument_group(name, (cls.__doc__ or "").split("\n")[0]) for name, cls in _GROUPS.items()
    }
    for group, entry, hint in _fields():
        kind, is_list = _value_type(hint)
        text = entry.metadata.get("help", "").replace("%", "%%")
        options: dict[str, Any] = {"dest": entry.name, "default": argparse.SUPPRESS}
        options["help"] = f"{text} (default: {_default(entry)})"
        if kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        else:
            options.update(type=kind, choices=entry.metadata.get("choices"))
            if is_list:
                options["nargs"] = "+"
        groups[group].add_argument(flag(entry.name), **options)
    return parser


def parse_arguments(argv: Sequence[str] | None = None) -> Settings:
    """Settings from a command line. Raises ValueError naming the flag or the file's key at fault."""
    parser = build_parser()
    given, unknown = parser.parse_known_args(argv)
    if unknown:
        raise ValueError(_unknown(unknown[0]))
    values = vars(given)
    config = values.pop("config", None)
    if config is not None:
        values = {**_read_config(config), **values}
    settings = Settings(
        **{
            group: cls(**{e.name: values[e.name] for e in dataclasses.fields(cls) if e.name in values})
            for group, cls in _GROUPS.items()
        }
    )
    for _, entry, _ in _fields():  # one flag, several rooms: the first room's default holds for all of them
        owners = [g for g in _GROUPS if hasattr(getattr(settings, g), entry.name)]
        for owner in owners[1:]:
            setattr(getattr(settings, owner), entry.name, getattr(getattr(settings, owners[0]), entry.name))
    check_settings(settings)
    return settings


def _unknown(word: str) -> str:
    if not word.startswith("-"):
        return f"unexpected argument {word}: it belongs to no flag"
    known = ["--config"]
    for _, entry, hint in _fields():
        known += [flag(entry.name)] + ([flag("no_" + entry.name)] if hint is bool else [])
    near = difflib.get_close_matches(word.split("=")[0], known, n=1)
    return f"unknown flag {word}" + (f"; did you mean {near[0]}?" if near else "")


def _read_config(path: str) -> dict[str, Any]:
    try:
        text = Path(path).read_text(encoding="utf-8")
        content, tree = yaml.safe_load(text), yaml.compose(text)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"--config {path}: cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"--config {path}: must be a mapping of flag names to values")
    fields = {entry.name: (entry, hint) for _, entry, hint in _fields()}
    names = [str(key.value).lstrip("-").replace("-", "_") for key, _ in tree.value]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"--config {path}: {twice} is given twice")
    values = {}
    for key, value in content.items():
        name = str(key).lstrip("-").replace("-", "_")
        if name not in fields:
            near = difflib.get_close_matches(name, fields, n=1)
            raise ValueError(f"--config {path}: unknown key {key}" + (f"; did you mean {near[0]}?" if near else ""))
        entry, hint = fields[name]
        values[name] = _convert(f"--config {path}: {key}", value, hint, entry.metadata.get("choices"))
    return values


def _convert(where: str, value: Any, hint: Any, choices: Sequence[Any] | None) -> Any:
    kind, is_list = _value_type(hint)
    if value is None and isinstance(hint, types.UnionType):
        return None
    items = list(value) if is_list and isinstance(value, list) else [value]
    try:
        items = [_scalar(item, kind) for item in items]
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{where}: {value!r} is not a {kind.__name__}: {error}") from None
    if choices and not all(item in choices for item in items):
        raise ValueError(f"{where}: {value!r} is not one of {', '.join(map(str, choices))}")
    return items if is_list else items[0]


def _scalar(value: Any, kind: Any) -> Any:
    """`value` as YAML gave it, as `kind`; nothing is rounded or guessed. A number may be a text: YAML reads 1e-6 as one."""
    if kind is bool and not isinstance(value, bool):
        raise TypeError("true or false expected")
    if kind is not bool and (isinstance(value, bool) or not isinstance(value, str | int | float)):
        raise TypeError("one value expected")
    if kind is str and not isinstance(value, str):
        raise TypeError("write it in quotes")
    if kind is int and isinstance(value, float) and not value.is_integer():
        raise ValueError("a whole number expected")
    return kind(value)


_AT_LEAST_ONE = (
    *("train_iters", "global_batch_size", "micro_batch_size", "max_tokens_per_micro_batch", "eval_samples_per_prompt"),
    *(entry.name for entry in dataclasses.fields(ParallelSettings) if entry.name.split("_")[-1] in ("size", "rank")),
    *("make_vocab_size_divisible_by", "recompute_num_layers", "lr_decay_iters"),
    *("distributed_timeout_minutes", "engine_floor_samples", "logprob_chunk_tokens"),
)
_BELOW = {"adam_beta1": 1.0, "adam_beta2": 1.0, "seed": 2**32}
_BELOW |= {"make_vocab_size_divisible_by": 2**20, "distributed_timeout_minutes": 10**6}  # beyond are slips of the hand


def check_settings(settings: Settings) -> None:
    """What contradicts itself, or names what is not there, is refused here, before anything is started."""
    if not settings.model.hf_path:
        raise ValueError("--hf-path is required: a Hugging Face directory with config, safetensors and tokenizer")
    policy_loss(settings.loss.policy_loss)  # raises, naming the flag and the known losses
    _check_numbers(settings)
    settings.rollout.validate()
    _check_contradictions(settings)
    _check_token_budget(settings)
    _check_paths(settings)


def _check_numbers(settings: Settings) -> None:
    """No flag takes a negative number, NaN or infinity; some have a narrower range."""
    for group, entry, hint in _fields():
        value = getattr(getattr(settings, group), entry.name)
        if _value_type(hint)[0] not in (int, float) or value is None:
            continue
        name = entry.name
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{flag(name)} {value}: must be a finite number")
        if name in _AT_LEAST_ONE and value < 1:
            raise ValueError(f"{flag(name)} {value}: must be at least 1")
        if value < 0:
            raise ValueError(f"{flag(name)} {value}: must not be negative")
        if name in _BELOW and value >= _BELOW[name]:
            raise ValueError(f"{flag(name)} {value}: must be below {_BELOW[name]}")
    if settings.optimizer.adam_eps == 0:
        raise ValueError("--adam-eps 0.0: must be above 0; where a gradient is 0 the step would be 0 / 0")


def _check_contradictions(settings: Settings) -> None:
    run, batch, optimizer = settings.run, settings.batch, settings.optimizer
    if batch.micro_batch_size is not None and batch.max_tokens_per_micro_batch is not None:
        raise ValueError("--micro-batch-size and --max-tokens-per-micro-batch: give one of them, not both")
    if settings.rollout.group_size == 1:
        raise ValueError("--group-size 1: an advantage compares the samples of a group, so it needs at least 2")
    if settings.model.logits_dtype == "bf16" and not settings.model.bf16:
        raise ValueError("--logits-dtype bf16: needs --bf16; a float32 model's logits are float32")
    for name in ("recompute_method", "recompute_num_layers"):
        if getattr(settings.model, name) is not None and settings.model.recompute_granularity != "full":
            raise ValueError(f"{flag(name)}: needs --recompute-granularity full")
    if optimizer.min_lr > optimizer.lr:
        raise ValueError(f"--min-lr {optimizer.min_lr}: is above --lr {optimizer.lr}")
    if optimizer.lr_decay_iters is not None and optimizer.lr_decay_iters <= optimizer.lr_warmup_iters:
        raise ValueError(
            f"--lr-decay-iters {optimizer.lr_decay_iters}: must be above --lr-warmup-iters {optimizer.lr_warmup_iters}"
        )
    updates = settings.rollout.updates_per_batch
    if run.train_iters % updates:
        raise ValueError(
            f"--train-iters {run.train_iters}: must be a multiple of the {updates} updates of a batch "
            "(--rollout-batch-size / --global-batch-size)"
        )
    for name in ("save_interval", "async_save", "keep_last"):
        if getattr(run, name) and not run.save:
            raise ValueError(f"{flag(name)}: needs --save DIR")
    if run.eval_interval and not run.eval_data:
        raise ValueError("--eval-interval: needs --eval-data FILE")


def _check_token_budget(settings: Settings) -> None:
    """A sequence that no micro-batch can hold is refused before it is generated; the controller does so for each prompt."""
    budget, rollout, parallel = settings.batch.max_tokens_per_micro_batch, settings.rollout, settings.parallel
    if budget is None:
        return
    layout = PackingLayout(context_parallel_size=parallel.context_parallel_size, alignment=parallel.row_alignment)
    longest = layout.longest_sequence(budget)
    prompt = rollout.max_prompt_length or 1
    if prompt + rollout.max_response_length > longest:
        known = f"--max-prompt-length {prompt}" if rollout.max_prompt_length else "1 prompt token"
        share = f" x --context-parallel-size {layout.context_parallel_size}" if layout.context_parallel_size > 1 else ""
        raise ValueError(
            f"--max-tokens-per-micro-batch {budget}{share}: a micro-batch holds sequences of at most {longest} tokens; "
            f"{known} + --max-response-length {rollout.max_response_length} is more"
        )


def _check_paths(settings: Settings) -> None:
    run = settings.run
    if not (Path(settings.model.hf_path) / "config.json").is_file():
        raise ValueError(
            f"--hf-path {settings.model.hf_path}: no config.json there; give a Hugging Face model directory"
        )
    for name, path in {"prompt_data": settings.rollout.prompt_data, "eval_data": run.eval_data}.items():
        if path and not Path(path).is_file():
            raise ValueError(f"{flag(name)} {path}: there is no such file")
    for name in ("run_dir", "save", "load", "tensorboard_dir"):
        path = getattr(run, name)
        if path and Path(path).exists() and not Path(path).is_dir():
            raise ValueError(f"{flag(name)} {path}: is not a directory")
