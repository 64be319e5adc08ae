"""New weights for a running embedded engine: a Hugging Face directory copied into the existing parameters.

Everything that can be checked is checked before the first parameter changes, so that a bad directory changes nothing.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, PreTrainedModel

from m2po_megatron.rollout.embedded_model import ModelError

FLOAT_TYPES = ("F64", "F32", "F16", "BF16")
SAME_IN_CONFIG = (
    "model_type",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "rope_parameters",
    "tie_word_embeddings",
    "num_experts_per_tok",
    "norm_topk_prob",
)
"""What the arithmetic depends on besides the tensors: shapes alone would not show that these differ."""
NOT_A_PARAMETER = "rotary_emb.inv_freq"
"""A buffer that old checkpoints carry; it follows from the config."""
ERRORS_SHOWN = 3


def load_weights(model: PreTrainedModel, path: str | Path) -> None:
    """Copy the safetensors of the Hugging Face directory `path` into `model`'s parameters, converting to their dtype.

    ModelError, naming directory and tensors, for a directory that is incomplete, unreadable or of another model;
    `model` is unchanged then.
    """
    directory = Path(path)
    _check_config(model, directory)
    targets = _stored_tensors(model)
    with ExitStack() as stack:
        sources: dict[str, Any] = {}
        for file_name in _files(directory):
            try:
                file = stack.enter_context(safe_open(directory / file_name, "pt"))
            except (OSError, SafetensorError) as error:
                raise ModelError(f"{directory / file_name} cannot be read: {error}") from error
            sources.update(dict.fromkeys(file.keys(), file))
        _check_tensors(directory, targets, sources, bool(model.config.tie_word_embeddings))
        with torch.no_grad():
            for name, target in targets.items():
                target.copy_(sources[name].get_tensor(name))


def _stored_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The model's parameters by their names in files: of the experts of a layer, which transformers holds as one tensor
    [experts, ...] with gate and up end to end, a view for each matrix."""
    stored: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        layer, _, kind = name.rpartition(".experts.")
        if kind == "gate_up_proj":
            for number, expert in enumerate(parameter.detach()):
                gate, up = expert.chunk(2)
                stored[f"{layer}.experts.{number}.gate_proj.weight"] = gate
                stored[f"{layer}.experts.{number}.up_proj.weight"] = up
        elif kind == "down_proj":
            stored.update((f"{layer}.experts.{n}.down_proj.weight", expert) for n, expert in enumerate(parameter.detach()))
        else:
            stored[name] = parameter.detach()
    return stored


def _check_config(model: PreTrainedModel, directory: Path) -> None:
    if not (directory / "config.json").is_file():
        raise ModelError(f"{directory} has no config.json; it must be a Hugging Face model directory")
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ModelError(f"{directory}/config.json cannot be read: {error}") from error
    for name in SAME_IN_CONFIG:
        ours, theirs = getattr(model.config, name, None), getattr(config, name, None)
        if ours != theirs:
            raise ModelError(
                f"{directory}/config.json: {name} is {theirs!r}, but the model that is served has {ours!r}"
            )


def _files(directory: Path) -> list[str]:
    """The names of the safetensors files, from the index where there is one."""
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        try:
            return sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"{index} is not an index of safetensors: {type(error).__name__}: {error}") from error
    if (directory / "model.safetensors").is_file():
        return ["model.safetensors"]
    raise ModelError(f"{directory} has neither model.safetensors nor model.safetensors.index.json")


def _check_tensors(
    directory: Path, targets: dict[str, torch.Tensor], sources: dict[str, Any], tied: bool
) -> None:
    missing = sorted(targets.keys() - sources.keys())
    unknown = {name for name in sources.keys() - targets.keys() if not name.endswith(NOT_A_PARAMETER)}
    if tied:
        unknown.discard("lm_head.weight")  # some writers store the tied copy too
    problems = [f"{name} is missing" for name in missing]
    problems += [f"{name} is not a parameter of this model" for name in sorted(unknown)]
    for name in sorted(targets.keys() & sources.keys()):
        stored = sources[name].get_slice(name)
        shape, wanted = tuple(stored.get_shape()), tuple(targets[name].shape)
        if shape != wanted:
            problems.append(f"{name} has shape {shape}, not {wanted}")
        elif stored.get_dtype() not in FLOAT_TYPES:
            problems.append(f"{name} is stored as {stored.get_dtype()}, not as one of {', '.join(FLOAT_TYPES)}")
    if problems:
        more = f" and {len(problems) - ERRORS_SHOWN} more" if len(problems) > ERRORS_SHOWN else ""
        shown = "; ".join(problems[:ERRORS_SHOWN])
        raise ModelError(f"{directory} does not fit the model that is served: {shown}{more}")
