"""What a rank runs in the checkpoint tests: production code only; the test compares what it returns. Not a test module."""

from __future__ import annotations

import dataclasses
import functools
import os
import random
import shutil
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from m2po_megatron import cpu
from m2po_megatron.data.trajectory import Trajectory
from tests.distributed import workers
from tests.distributed.harness import leave_layout
from tests.distributed.workers import Layout, rows_of

UPDATES_BEFORE = 2
LAYOUTS = {
    "one": Layout("one"),
    "tp2": Layout("tp2", tensor=2),
    "dp2": Layout("dp2"),
    "pp2": Layout("pp2", pipeline=2, micro_batch_size=4),
    "tp2sp": Layout("tp2sp", tensor=2, sequence_parallel=True),
    "vpp2": Layout("vpp2", pipeline=2, virtual=2, micro_batch_size=4),
    "cp2": Layout("cp2", context=2),
    "sharded": Layout("sharded", distributed_optimizer=True),
    "bf16": Layout("bf16", tensor=2, bf16=True),
    "bf16 alone": Layout("bf16 alone", bf16=True),
    "moe": Layout("moe"),
    "moe-ep2": Layout("moe-ep2", expert=2),
    "moe-pp2": Layout("moe-pp2", pipeline=2, micro_batch_size=4),
    "moe-tp2sp": Layout("moe-tp2sp", tensor=2, sequence_parallel=True),
}


@dataclass(frozen=True)
class Data:
    """Mini-batches for three updates, and the models they are for."""

    model_path: str
    experts_path: str
    trajectories: list[list[Trajectory]]
    advantages: list[np.ndarray]

    def model_of(self, layout: str) -> str:
        return self.experts_path if layout.startswith("moe") else self.model_path


def build(name: str, model_path: str, lr: float = 1e-3, train_iters: int = 8, fresh: bool = True) -> Any:

    leave_layout()
    # A large epsilon: where a gradient is rounding alone, Adam would make a whole step of it, another one in each layout.
    optimizer = {"lr": lr, "min_lr": lr / 10, "lr_decay_style": "cosine", "lr_warmup_iters": 1, "adam_eps": 1e-4}
    layout = dataclasses.replace(LAYOUTS[name], optimizer=optimizer)
    return workers.build(layout, model_path, train_iters=train_iters, fresh=fresh)


def update(name: str, world: Any, policy: Any, data: Data, number: int) -> dict[str, Any]:
    """Metrics of one update that masks nothing (the mask's edge is another test's)."""
    from m2po_megatron.algo.losses import LossSettings
    from m2po_megatron.trainer import train_update

    rows = rows_of(LAYOUTS[name], world, data.trajectories[number], data.advantages[number])
    report = train_update(policy, rows, LossSettings(m2_threshold=1e3), temperature=1.0, version=number)
    draws = [random.random(), float(np.random.random()), float(torch.rand(()))]  # noqa: NPY002
    return {"draws": draws} | {key: value for key, value in report.metrics.items() if not key.startswith("time/")}


def state(policy: Any) -> dict[str, Any]:
    """This rank's parameters, exported weights, optimizer tensors and learning rates."""
    from m2po_megatron.weights.hf_io import export_hf

    moments = []
    for part in getattr(policy.optimizer, "chained_optimizers", [policy.optimizer]):
        for group in part.optimizer.param_groups:
            for p in group["params"]:
                entry = part.optimizer.state[p]
                moments.append([p.detach().clone(), *(torch.as_tensor(entry[k]).clone() for k in sorted(entry))])
    return {
        "parameters": {key: p.detach().clone() for chunk in policy.chunks for key, p in chunk.named_parameters()},
        "exported": {key: t.clone() for key, t in export_hf(policy.chunks, policy.architecture)},
        "moments": moments,
        "schedule": policy.scheduler.state_dict(),
        "lr": [group["lr"] for group in policy.optimizer.param_groups],
    }


def save(rank: int, name: str, data: Data, folder: Path) -> dict[str, Any]:
    """Two updates, a checkpoint, one more update: the uninterrupted run."""
    from m2po_megatron.checkpoint import CheckpointWriter
    from m2po_megatron.checkpoint_files import RunPosition

    world, policy = build(name, data.model_of(name))
    for number in range(UPDATES_BEFORE):
        update(name, world, policy, data, number)
    position = RunPosition(version=UPDATES_BEFORE, consumed_batches=1, incarnation=3, hf_path=data.model_path)
    writer = CheckpointWriter(folder / name)
    writer.save(policy, position)
    saved = state(policy)
    metrics = update(name, world, policy, data, UPDATES_BEFORE)
    return {"path": str(writer.newest), "saved": saved, "metrics": metrics, "after": state(policy)}


def load(rank: int, name: str, origin: str, data: Data, folder: Path) -> dict[str, Any]:
    """A fresh policy of this layout, filled from the checkpoint of another, and its next update."""
    from m2po_megatron.checkpoint import load_checkpoint
    from m2po_megatron.checkpoint_files import latest_checkpoint

    world, policy = build(name, data.model_of(name), fresh=False)
    checkpoint = latest_checkpoint(folder / origin)
    assert checkpoint is not None
    position = load_checkpoint(policy, checkpoint)
    loaded = state(policy)
    metrics = update(name, world, policy, data, UPDATES_BEFORE)
    return {"position": position, "saved": loaded, "metrics": metrics, "after": state(policy)}


def run(rank: int, saves: list[str], loads: list[tuple[str, str]], data: Data, folder: str) -> dict[str, Any]:
    """Uninterrupted runs in the layouts of `saves`, then loads of (layout, the layout that saved)."""
    cpu.install()
    out: dict[str, Any] = {f"save {name}": save(rank, name, data, Path(folder)) for name in saves}
    out.update({f"load {name} from {origin}": load(rank, name, origin, data, Path(folder)) for name, origin in loads})
    return out


def run_misfits(rank: int, data: Data, folder: str, others: dict[str, str], damaged: list[str]) -> dict[str, Any]:
    """What loads that must fail are answered with; a resume under other flags. One rank."""
    cpu.install()
    from m2po_megatron.checkpoint import load_checkpoint

    root = Path(folder)
    cases = {name: ("one", "one", path) for name, path in others.items()}
    cases.update({name: ("one", name, data.model_path) for name in damaged})
    cases["sharded, was not"] = ("sharded", "one", data.model_path)
    cases["bfloat16, was not"] = ("bf16 alone", "one", data.model_path)
    cases["not sharded, was"] = ("one", "sharded", data.model_path)
    errors = {}
    for name, (layout, origin, model_path) in cases.items():
        _, policy = build(layout, model_path)
        try:
            load_checkpoint(policy, root / origin / "iter_0000002")
            errors[name] = "no error"
        except ValueError as error:
            errors[name] = str(error)
    return {
        "errors": errors,
        **other_flags(data, root / "one" / "iter_0000002"),
        "version 0": version_0(data, root / "zero"),
    }


def other_flags(data: Data, checkpoint: Path) -> dict[str, Any]:
    from m2po_megatron.checkpoint import load_checkpoint

    flags: dict[str, Any] = {"lr": 1e-2, "train_iters": 16}
    _, policy = build("one", data.model_path, fresh=False, **flags)
    load_checkpoint(policy, checkpoint)
    resumed = state(policy)
    world, policy = build("one", data.model_path, **flags)
    for number in range(UPDATES_BEFORE):
        update("one", world, policy, data, number)
    return {"other flags": resumed, "other flags from the start": state(policy)}


def version_0(data: Data, root: Path) -> list[dict[str, Any]]:
    """The first update of a run, and of one that was resumed before any."""
    from m2po_megatron.checkpoint import CheckpointWriter, load_checkpoint
    from m2po_megatron.checkpoint_files import RunPosition

    world, policy = build("one", data.model_path)
    writer = CheckpointWriter(root)
    writer.save(policy, RunPosition())
    first = {"metrics": update("one", world, policy, data, 0), "after": state(policy)}
    world, policy = build("one", data.model_path, fresh=False)
    assert writer.newest is not None
    load_checkpoint(policy, writer.newest)
    return [first, {"metrics": update("one", world, policy, data, 0), "after": state(policy)}]


def run_writer(rank: int, data: Data, folder: str) -> dict[str, Any]:
    """Saves in the background, one of them failing on rank 1, one whose process is killed. Two ranks."""
    cpu.install()
    import torch.distributed as dist
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    from m2po_megatron.checkpoint import CheckpointWriter, load_checkpoint
    from m2po_megatron.checkpoint_files import RunPosition

    root = Path(folder)
    world, policy = build("tp2", data.model_path)
    writer = CheckpointWriter(root, keep_last=2, in_background=True)
    position = RunPosition(hf_path=data.model_path)
    real, gate = filesystem_async._write_item, root.parent / "gate"
    out: dict[str, Any] = {"failures": [], "latest": [], "left": []}

    @functools.wraps(real)  # Megatron looks at the names of its parameters
    def gated(*args: Any, **kwargs: Any) -> Any:  # runs in the writer's processes, which are forked
        deadline = time.monotonic() + 60.0
        while not gate.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        return real(*args, **kwargs)

    @functools.wraps(real)
    def full(*args: Any, **kwargs: Any) -> Any:
        raise OSError(28, "No space left on device")

    @functools.wraps(real)
    def killed(*args: Any, **kwargs: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    def note() -> None:
        pointer = root / "latest"
        out["failures"].append(writer.failure)
        out["latest"].append(pointer.read_text().strip() if pointer.is_file() else None)
        dist.barrier()
        out["left"].append(sorted(p.name for p in root.iterdir()))
        dist.barrier()

    for number, behaviour in enumerate((gated, full, killed, real, real)):
        update("tp2", world, policy, data, number % 3)
        position.version = number + 1
        filesystem_async._write_item = behaviour if behaviour is gated or rank == 1 else real
        writer.save(policy, position)
        if behaviour is gated:
            out["saved"] = state(policy)
            writer.poll()
            update("tp2", world, policy, data, 2)  # while it is being written
            position.version = 99
            note()
            gate.touch()
            out["moved"] = state(policy)
            deadline = time.monotonic() + 60.0
            while writer.newest is None and time.monotonic() < deadline:
                writer.poll()
            note()
            if rank == 0:
                shutil.copytree(root / "iter_0000001", root.parent / "copy")
        else:
            writer.finish()
            note()
    (root / "iter_0000005" / "mark").touch()
    writer.save(policy, position)  # it is there already
    writer.finish()
    out["mark"] = (root / "iter_0000005" / "mark").is_file()
    _, fresh = build("tp2", data.model_path, fresh=False)
    out["position"] = load_checkpoint(fresh, root.parent / "copy")
    out["loaded"] = state(fresh)
    return out
