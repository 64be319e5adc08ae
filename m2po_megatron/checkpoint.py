"""Checkpoints in Megatron's dist_checkpointing format, with the run's position beside the weights.

    SAVE/iter_0000120/   model, optimizer, schedule (sharded; loadable under another layout), run.json
    SAVE/latest          the newest complete one, moved last

A directory is written aside and renamed when every rank is done: what `latest` names is whole. Checkpoints lie at batch
boundaries, so `consumed_batches` says exactly which groups the weights have learnt from.
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
    model = policy.gpt.sharded_state_dict(metadata=metadata)
    model = {name: value for name, value in model.items() if not name.endswith("_extra_state")}
    if is_loading:
        _prime_optimizer(policy)
    optimizer = policy.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata)
    return {"model": model, "optimizer": optimizer, "scheduler": policy.scheduler.state_dict()}


def _prime_optimizer(policy: Policy) -> None:
    """torch's AdamW has no state before its first step; loading needs tensors to load into."""
    for part in getattr(policy.optimizer, "chained_optimizers", [policy.optimizer]):
        inner = part.optimizer
        for group in inner.param_groups:
            for p in group["params"]:
                if not inner.state[p]:
                    zeros = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
                    inner.state[p] = {"step": torch.zeros(()), **zeros}


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
        shutil.rmtree(final, ignore_errors=True)
        os.replace(aside, final)
        replace_text(root / "latest", final.name)
    dist.barrier()
    return final


def latest_checkpoint(load: str | Path) -> Path | None:
    """The checkpoint that `latest` names, or None where there is none yet. Raises ValueError if it names a missing one."""
    pointer = Path(load) / "latest"
    if not pointer.is_file():
        return None
    path = Path(load) / pointer.read_text().strip()
    if not (path / "run.json").is_file():
        raise ValueError(f"--load {load}: latest names {path.name}, which is not a complete checkpoint there")
    return path


def read_position(checkpoint: Path) -> RunPosition:
    return RunPosition(**json.loads((checkpoint / "run.json").read_text()))


def load_checkpoint(policy: Policy, checkpoint: Path) -> RunPosition:
    """Fill the policy, its optimizer and its schedule from a checkpoint. Collective over all ranks."""
    state = dist_checkpointing.load(_sharded_state(policy, is_loading=True), str(checkpoint))
    policy.gpt.load_state_dict(state["model"], strict=False)
    policy.optimizer.load_state_dict(state["optimizer"])
    policy.scheduler.load_state_dict(state["scheduler"])
    return read_position(checkpoint)
