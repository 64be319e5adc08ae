"""Checkpoints in Megatron's dist_checkpointing format, with the run's position beside the weights.

    SAVE/iter_0000120/   model, optimizer, schedule (sharded; loadable under another layout), run.json
    SAVE/latest          the newest complete one, moved last

A directory is written aside and renamed when every rank is done: what `latest` names is whole. Checkpoints lie at batch
boundaries, so `consumed_batches` says exactly which groups the weights have learnt from. With --use-distributed-optimizer
the optimizer's part can be loaded over another number of data-parallel ranks, but not under another TP or PP.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.models.gpt import GPTModel
from torch.distributed.checkpoint.api import CheckpointException

from m2po_megatron.policy.forward import Policy
from m2po_megatron.weights.publish import replace_text

logger = logging.getLogger(__name__)
_OPTIMIZER_FORMAT = {"distrib_optim_sharding_type": "dp_reshardable"}


@dataclass
class RunPosition:
    """Where a run stands: updates done, batches consumed, and which life of the run this is."""

    version: int = 0
    consumed_batches: int = 0
    incarnation: int = 0
    hf_path: str = ""


def _sharded_state(policy: Policy, *, is_loading: bool) -> dict[str, Any]:
    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True), **_OPTIMIZER_FORMAT}
    model = {}
    for prefix, chunk in _named_chunks(policy):
        state = chunk.sharded_state_dict(metadata=metadata)
        model.update({prefix + name: value for name, value in state.items() if not name.endswith("_extra_state")})
    if is_loading:
        _prime_optimizer(policy)
    optimizer = policy.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata)
    schedule = policy.scheduler.state_dict()
    bound_to = {"architecture": dataclasses.asdict(policy.architecture), "optimizer_layout": _optimizer_layout(policy)}
    return {"model": model, "optimizer": optimizer, "scheduler": schedule, **bound_to}


def _named_chunks(policy: Policy) -> list[tuple[str, GPTModel]]:
    """(prefix of its names in this rank's dictionary, piece). The files know layers by their global number alone."""
    if len(policy.chunks) == 1:
        return [("", policy.chunks[0])]
    return [(f"model{number}.", chunk) for number, chunk in enumerate(policy.chunks)]


def _optimizer_layout(policy: Policy) -> dict[str, Any]:
    """What the optimizer's part is bound to: nothing but its kind, or TP and PP too where it is distributed."""
    distributed = bool(policy.models[0].ddp_config.use_distributed_optimizer)
    sizes = {
        "--tensor-model-parallel-size": parallel_state.get_tensor_model_parallel_world_size(),
        "--pipeline-model-parallel-size": parallel_state.get_pipeline_model_parallel_world_size(),
    }
    return {"--use-distributed-optimizer": distributed, **(sizes if distributed else {})}


def _inner_optimizers(policy: Policy) -> list[torch.optim.Optimizer]:
    return [part.optimizer for part in getattr(policy.optimizer, "chained_optimizers", [policy.optimizer])]


def _prime_optimizer(policy: Policy) -> None:
    """torch's AdamW has no state before its first step; loading needs tensors to load into."""
    for inner in _inner_optimizers(policy):
        for group in inner.param_groups:
            for p in group["params"]:
                if not inner.state[p]:
                    zeros = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
                    inner.state[p] = {"step": torch.zeros(()), **zeros}


def _restore_steps(policy: Policy) -> None:
    """Megatron's distributed optimizer leaves torch's AdamW at step 0, and all its parameters with one counter between
    them; the number it was saved at lies in the parameter groups. Elsewhere the groups have none and nothing is done."""
    for inner in _inner_optimizers(policy):
        for group in inner.param_groups:
            for p in group["params"] if "step" in group else ():
                if "step" in inner.state[p]:
                    inner.state[p]["step"] = torch.tensor(float(group["step"]))


def save_checkpoint(policy: Policy, save: str | Path, position: RunPosition) -> Path:
    """Write a checkpoint and move `latest` to it. Collective over all ranks; returns its directory."""
    root = Path(save)
    final = root / f"iter_{position.version:07d}"
    aside = root / (final.name + ".tmp")
    if dist.get_rank() == 0:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
    dist.barrier()
    dist_checkpointing.save(_sharded_state(policy, is_loading=False), str(aside), sharded_strategy=("torch_dist", 1))
    if dist.get_rank() == 0:
        replace_text(aside / "run.json", json.dumps(dataclasses.asdict(position), indent=2))
        replaced = root / (final.name + ".replaced.tmp")
        shutil.rmtree(replaced, ignore_errors=True)
        if final.exists():  # this version once more, by another life of the run; what `latest` names stays whole till then
            os.replace(final, replaced)
        os.replace(aside, final)
        replace_text(root / "latest", final.name)
        shutil.rmtree(replaced, ignore_errors=True)
    dist.barrier()
    return final


def latest_checkpoint(load: str | Path) -> Path | None:
    """The checkpoint that `latest` names, or None where there is none yet (a run that starts again from its beginning).

    Raises ValueError if `latest` names a missing or half-written one, or if there are checkpoints but no `latest`: a run
    that was meant to be resumed must not begin anew.
    """
    root = Path(load)
    pointer = root / "latest"
    if pointer.is_file():
        path = root / pointer.read_text().strip()
        if path.suffix == ".tmp" or not (path / "run.json").is_file():
            raise ValueError(f"--load {load}: latest names {path.name}, which is not a complete checkpoint there")
        return path
    if (root / "run.json").is_file():
        raise ValueError(f"--load {load}: is one checkpoint; give the directory that holds it and the file latest")
    whole = sorted(p.name for p in root.glob("iter_*") if p.suffix != ".tmp" and (p / "run.json").is_file())
    if whole:
        raise ValueError(f"--load {load}: has no file latest; to resume from {whole[-1]}, write this name into it")
    return None


def read_position(checkpoint: Path) -> RunPosition:
    return RunPosition(**json.loads((checkpoint / "run.json").read_text()))


def load_checkpoint(policy: Policy, checkpoint: Path) -> RunPosition:
    """Fill the policy, its optimizer and its schedule from a checkpoint. Collective over all ranks.

    Learning rates, their schedule and the other numbers of the optimizer stay those of the flags; its moments and the
    place in the schedule come from the checkpoint. Raises ValueError for a checkpoint of another model, or one that
    cannot be read.
    """
    try:
        saved = dist_checkpointing.load_common_state_dict(checkpoint)
        _check_fits(policy, checkpoint, saved)
        wanted = _sharded_state(policy, is_loading=True)
        flags = [{k: v for k, v in group.items() if k not in ("params", "step")} for group in policy.optimizer.param_groups]
        state = dist_checkpointing.load(wanted, str(checkpoint), strict=StrictHandling.RAISE_ALL)
    except CheckpointException as error:  # what any rank met
        first = next(iter(error.failures.values()), (error, None))[0]
        raise ValueError(f"--load: {checkpoint} is not a whole checkpoint: {first}") from error
    except (CheckpointingException, OSError, RuntimeError, KeyError, AttributeError) as error:
        # AttributeError: megatron-core 0.16 stumbles over its own words where common.pt is missing.
        raise ValueError(f"--load: {checkpoint} is not a whole checkpoint: {error}") from error
    with torch.no_grad():
        for prefix, chunk in _named_chunks(policy):
            own = {name.removeprefix(prefix): value for name, value in state["model"].items() if name.startswith(prefix)}
            chunk.load_state_dict(own, strict=False)
        policy.optimizer.load_state_dict(state["optimizer"])
        _restore_steps(policy)
    for group, values in zip(policy.optimizer.param_groups, flags, strict=True):
        group.update(values)
    policy.scheduler.num_steps = state["scheduler"]["num_steps"]
    policy.scheduler.step(increment=0)
    changed = {k: v for k, v in policy.scheduler.state_dict().items() if v != state["scheduler"][k]}
    if changed and dist.get_rank() == 0:
        logger.info("schedule by the flags, not by the checkpoint: %s", changed)
    return read_position(checkpoint)


def _check_fits(policy: Policy, checkpoint: Path, saved: dict[str, Any]) -> None:
    """Megatron itself would load a model of another vocabulary, or with another rotary base, without a word."""
    for name, value in dataclasses.asdict(policy.architecture).items():
        was = saved.get("architecture", {}).get(name, value)
        if was != value:
            raise ValueError(f"--load: {checkpoint} is of a model with {name} {was}, but at --hf-path it is {value}")
    layout, now = saved.get("optimizer_layout", {}), _optimizer_layout(policy)
    if layout and layout != now:
        was, given = (", ".join(f"{flag} {value}" for flag, value in d.items()) for d in (layout, now))
        raise ValueError(f"--load: {checkpoint} was saved under {was}; its optimizer cannot be loaded under {given}")
