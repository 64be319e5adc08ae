"""What a rank runs in the checkpoint tests: production code only; the test compares what it returns. Not a test module."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from m2po_megatron import cpu
from m2po_megatron.data.trajectory import Trajectory
from tests.distributed.workers import Layout, rows_of

UPDATES_BEFORE = 2
LAYOUTS = {
    "one": Layout("one"),
    "tp2": Layout("tp2", tensor=2),
    "dp2": Layout("dp2"),
    "pp2": Layout("pp2", pipeline=2, micro_batch_size=4),
    "sharded": Layout("sharded"),
    "bf16": Layout("bf16", tensor=2),
}


@dataclass(frozen=True)
class Data:
    """Mini-batches for three updates."""

    model_path: str
    trajectories: list[list[Trajectory]]
    advantages: list[np.ndarray]


def build(name: str, model_path: str, lr: float = 1e-3, train_iters: int = 8, fresh: bool = True) -> Any:
    """(world, policy) in the layout; without `fresh` with Megatron's random weights, all of which must be replaced."""
    from megatron.core import parallel_state

    from m2po_megatron.initialize import initialize
    from m2po_megatron.policy.forward import build_policy
    from m2po_megatron.policy.settings import ModelSettings, OptimizerSettings, ParallelSettings
    from m2po_megatron.weights.hf_io import load_hf

    parallel_state.destroy_model_parallel()
    layout = LAYOUTS[name]
    parallel = ParallelSettings(
        tensor_model_parallel_size=layout.tensor, pipeline_model_parallel_size=layout.pipeline
    )
    world = initialize(parallel, seed=0 if fresh else 1)
    # A large epsilon: where a gradient is rounding alone, Adam would make a whole step of it, another one in each layout.
    optimizer = OptimizerSettings(
        lr=lr,
        min_lr=lr / 10,
        lr_decay_style="cosine",
        lr_warmup_iters=1,
        adam_eps=1e-4,
        use_distributed_optimizer=name == "sharded",
    )
    policy = build_policy(
        ModelSettings(hf_path=model_path, bf16=name == "bf16"),
        parallel,
        optimizer,
        train_iters=train_iters,
        device=world.device,
        load_weights=lambda chunks, arch: load_hf(chunks, arch, model_path) if fresh else None,
    )
    return world, policy


def update(name: str, world: Any, policy: Any, data: Data, number: int) -> dict[str, Any]:
    """Metrics of one update that masks nothing (the mask's edge is another test's)."""
    from m2po_megatron.algo.losses import LossSettings
    from m2po_megatron.trainer import train_update

    rows = rows_of(LAYOUTS[name], world, data.trajectories[number], data.advantages[number])
    report = train_update(policy, rows, LossSettings(m2_threshold=1e3), temperature=1.0, version=number)
    return {key: value for key, value in report.metrics.items() if not key.startswith("time/")}


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
    from m2po_megatron.checkpoint import RunPosition, save_checkpoint

    world, policy = build(name, data.model_path)
    for number in range(UPDATES_BEFORE):
        update(name, world, policy, data, number)
    position = RunPosition(version=UPDATES_BEFORE, consumed_batches=1, incarnation=3, hf_path=data.model_path)
    path = save_checkpoint(policy, folder / name, position)
    saved = state(policy)
    metrics = update(name, world, policy, data, UPDATES_BEFORE)
    return {"path": str(path), "saved": saved, "metrics": metrics, "after": state(policy)}


def load(rank: int, name: str, origin: str, data: Data, folder: Path) -> dict[str, Any]:
    """A fresh policy of this layout, filled from the checkpoint of another, and its next update."""
    from m2po_megatron.checkpoint import latest_checkpoint, load_checkpoint

    world, policy = build(name, data.model_path, fresh=False)
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


def run_misfits(rank: int, data: Data, folder: str, others: dict[str, str]) -> dict[str, Any]:
    """What loads that must fail are answered with; a resume under other flags; a version saved twice. One rank."""
    cpu.install()
    import m2po_megatron.checkpoint as module

    root = Path(folder)
    cases = {name: ("one", "one", path) for name, path in others.items()}
    cases.update({name: ("one", name, data.model_path) for name in ("no part", "no metadata", "no common")})
    cases["sharded, was not"] = ("sharded", "one", data.model_path)
    cases["not sharded, was"] = ("one", "sharded", data.model_path)
    errors = {}
    for name, (layout, origin, model_path) in cases.items():
        _, policy = build(layout, model_path)
        try:
            module.load_checkpoint(policy, root / origin / "iter_0000002")
            errors[name] = "no error"
        except ValueError as error:
            errors[name] = str(error)
    return {"errors": errors, **other_flags(data, root / "one" / "iter_0000002"), **saved_twice(data, root / "twice")}


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


def saved_twice(data: Data, root: Path) -> dict[str, Any]:
    import m2po_megatron.checkpoint as module

    world, policy = build("one", data.model_path)
    update("one", world, policy, data, 0)
    pointed: list[bool] = []
    real = module.replace_text

    def watched(path: Path, text: str) -> None:
        if path.name == "latest":
            pointed.append((path.parent / text / "run.json").is_file() and (path.parent / text / ".metadata").is_file())
        real(path, text)

    module.replace_text = watched
    for incarnation in (4, 5):
        position = module.RunPosition(version=UPDATES_BEFORE, incarnation=incarnation)
        path = module.save_checkpoint(policy, root, position)
    return {
        "pointed to whole": pointed,
        "left": sorted(p.name for p in root.iterdir()),
        "incarnation saved last": module.read_position(path).incarnation,
    }
