"""A run without engines for the tests of resuming: production code but for its batches, which are made from their numbers.

    python -m tests.integration.resume_run FOLDER --updates 12 --save-interval 3 [flags of pretrain_rl.py]

FOLDER/model is the policy's; FOLDER/save takes the checkpoints; FOLDER/curve.jsonl gets a line an update and FOLDER/end.json
what the run came to. FOLDER/die_at.RANK, if it is there, holds "POINT VERSION": the rank is killed at this point of the save
of this version, and the file removed first, so that the same command goes on from there. Not a test module.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

POINTS = ("begun", "writing", "written", "renamed", "pointed")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--updates", type=int, required=True)
    parser.add_argument("--save-interval", type=int, required=True)
    parser.add_argument("--keep-last", type=int, default=2)
    parser.add_argument("--async-save", action="store_true")
    parser.add_argument("--tensor-model-parallel-size", type=int, default=1)
    run(parser.parse_args())


def run(flags: argparse.Namespace) -> None:
    from m2po_megatron import cpu

    cpu.install()
    from m2po_megatron.checkpoint import CheckpointWriter, load_checkpoint
    from m2po_megatron.checkpoint_files import RunPosition, latest_checkpoint
    from m2po_megatron.initialize import initialize, shut_down
    from m2po_megatron.policy.forward import build_policy
    from m2po_megatron.policy.settings import ModelSettings, OptimizerSettings, ParallelSettings
    from m2po_megatron.weights.hf_io import load_hf

    model, save = flags.folder / "model", flags.folder / "save"
    parallel = ParallelSettings(tensor_model_parallel_size=flags.tensor_model_parallel_size)
    world = initialize(parallel, seed=11)
    checkpoint = latest_checkpoint(save)
    policy = build_policy(
        ModelSettings(hf_path=str(model)),
        parallel,
        OptimizerSettings(lr=1e-3, min_lr=1e-4, lr_decay_style="cosine", lr_warmup_iters=2),
        train_iters=flags.updates,
        device=world.device,
        load_weights=lambda chunks, arch: load_hf(chunks, arch, model) if checkpoint is None else None,
    )
    position = RunPosition(hf_path=str(model)) if checkpoint is None else load_checkpoint(policy, checkpoint)
    writer = CheckpointWriter(save, keep_last=flags.keep_last, in_background=flags.async_save, loaded=checkpoint)
    be_killed_at(flags.folder / f"die_at.{world.rank}", position)
    with (flags.folder / "curve.jsonl").open("a") as curve:
        while position.version < flags.updates:
            record = one_update(policy, world, position.version)
            position.version += 1
            position.consumed_batches += 1
            if world.is_main:
                curve.write(json.dumps({"version": position.version, **record}) + "\n")
                curve.flush()
            writer.poll()
            if position.version % flags.save_interval == 0:
                writer.save(policy, position)
        writer.save(policy, position)
        writer.finish()
    if world.is_main:
        end = {"digest": digest(policy), "newest": str(writer.newest), "failure": writer.failure}
        (flags.folder / "end.json").write_text(json.dumps(end))
    shut_down()


def one_update(policy: Any, world: Any, version: int) -> dict[str, Any]:
    """Metrics of the update, and a number from each generator that it could have drawn from."""
    import numpy as np
    import torch

    from m2po_megatron.algo.losses import LossSettings
    from m2po_megatron.data.packing import pack
    from m2po_megatron.trainer import train_update

    trajectories, advantages = batch(version)
    rows = pack(trajectories, advantages, world.packing, micro_batch_size=5)
    report = train_update(policy, rows, LossSettings(m2_threshold=0.2), temperature=1.0, version=version)
    draws = [random.random(), float(np.random.random()), float(torch.rand(()))]  # noqa: NPY002
    return {"draws": draws} | {key: value for key, value in report.metrics.items() if not key.startswith("time/")}


def batch(number: int) -> tuple[list[Any], Any]:
    """(12 trajectories, their advantages): a function of the number alone."""
    import numpy as np

    from m2po_megatron.data.trajectory import Trajectory

    rng = np.random.default_rng(number)
    trajectories = []
    for i in range(12):
        prompt, length = int(rng.integers(1, 5)), int(rng.integers(6, 14))
        mask = np.arange(length) >= prompt
        trajectories.append(
            Trajectory(
                id=f"{number}.{i}",
                group_id=f"{number}.{i // 4}",
                token_ids=rng.integers(0, 32, length),
                loss_mask=mask,
                behaviour_logprobs=np.where(mask, rng.normal(-3.5, 0.5, length), 0.0).astype(np.float32),
                versions=np.where(mask, number, -1),
                reward=0.0,
            )
        )
    return trajectories, rng.normal(size=12).astype(np.float32)


def digest(policy: Any) -> str:
    """Of this rank's parameters and optimizer tensors, bit for bit."""
    import torch

    found = hashlib.sha256()
    for part in getattr(policy.optimizer, "chained_optimizers", [policy.optimizer]):
        for group in part.optimizer.param_groups:
            for p in group["params"]:
                entry = part.optimizer.state[p]
                for tensor in (p.detach(), *(torch.as_tensor(entry[key]) for key in sorted(entry))):
                    found.update(tensor.contiguous().numpy().tobytes())
    return found.hexdigest()


def be_killed_at(order: Path, position: Any) -> None:
    """Put a SIGKILL into the save that `order` names, if there is such a file."""
    if not order.is_file():
        return
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    import m2po_megatron.checkpoint as checkpoint
    import m2po_megatron.checkpoint_files as files

    point, version = order.read_text().split()
    order.unlink()
    rank = os.getpid()

    def killing(owner: Any, name: str, at: Callable[..., bool], after: bool = False) -> None:
        real = getattr(owner, name)

        @functools.wraps(real)
        def call(*args: Any, **kwargs: Any) -> Any:
            due = at(*args, **kwargs)
            result = real(*args, **kwargs) if after or not due else None
            if due:
                os.kill(rank, signal.SIGKILL)
                signal.pause()  # where this is a process that writes for the rank, till it is ended with it
            return result

        setattr(owner, name, call)

    # Which save it is, its own arguments say: a save in the background may end when the run has come to a later version.
    name = f"iter_{int(version):07d}"

    def is_begun(root: Path, number: int) -> bool:
        return number == int(version)

    def is_complete(aside: Path, saved: Any, *_: Any) -> bool:
        return saved.version == int(version)

    def is_pointed_to(path: Path, text: str) -> bool:
        return path.name == "latest" and text == name

    if point == "begun":
        killing(checkpoint, "begin_directory", is_begun, after=True)
    elif point == "writing":
        items = iter(range(10**6))  # counted in the writer, whose copy of `position` is of when it was forked
        killing(filesystem_async, "_write_item", lambda *_, **__: position.version == int(version) and next(items) == 5)
    elif point == "written":
        killing(checkpoint, "complete_directory", is_complete)
    elif point == "renamed":
        killing(files, "replace_text", is_pointed_to)
    elif point == "pointed":
        killing(files, "replace_text", is_pointed_to, after=True)
    else:
        raise ValueError(f"{order}: {point} is none of {POINTS}")


if __name__ == "__main__":
    main()
