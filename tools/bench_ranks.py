"""What the trainer's benchmarks share: a mini-batch, a gloo rank with its policy, the slowest rank's time."""

from __future__ import annotations

import datetime
import json
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.multiprocessing as mp

from m2po_megatron import cpu

warnings.simplefilter(
    "ignore"
)  # of megatron-core, about packages that are absent here and CUDA; the figures are what counts
cpu.install()

import torch.distributed as dist  # noqa: E402

from m2po_megatron.data.trajectory import Trajectory  # noqa: E402
from m2po_megatron.initialize import World, initialize  # noqa: E402
from m2po_megatron.policy.forward import Policy, build_policy  # noqa: E402
from m2po_megatron.policy.settings import ModelSettings, OptimizerSettings, ParallelSettings  # noqa: E402
from m2po_megatron.weights.hf_io import load_hf  # noqa: E402

RESULT = "result.json"


def make_trajectories(prompts: Sequence[int], responses: Sequence[int], vocabulary: int) -> list[Trajectory]:
    """Random tokens in these lengths; the behaviour log-probs are -Exp(2), so the second moment is large."""
    rng = np.random.default_rng(0)
    trajectories = []
    for i, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        length = prompt + response
        sampled = np.arange(length) >= prompt
        trajectories.append(
            Trajectory(
                id=f"t{i}",
                group_id=f"g{i // 8}",
                token_ids=rng.integers(0, vocabulary, length),
                loss_mask=sampled,
                behaviour_logprobs=np.where(sampled, -rng.exponential(2.0, length), 0.0).astype(np.float32),
                versions=np.where(sampled, 0, -1),
                reward=0.0,
            )
        )
    return trajectories


def make_advantages(count: int) -> np.ndarray:
    return np.random.default_rng(1).normal(size=count).astype(np.float32)


def start_rank(
    rank: int, ranks: int, folder: str, hf_path: str, parallel: ParallelSettings, optimizer: dict[str, Any]
) -> tuple[World, Policy]:
    """Join the gloo group that meets in `folder`; the policy's steps are so small that every repeat is the same work."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(minutes=5),
    )
    world = initialize(parallel, seed=0)
    policy = build_policy(
        ModelSettings(hf_path=hf_path),
        parallel,
        OptimizerSettings(lr=1e-9, **optimizer),
        train_iters=1000,
        device=world.device,
        load_weights=lambda chunks, architecture: load_hf(chunks, architecture, hf_path),
    )
    return world, policy


def slowest(function: Callable[[], object]) -> float:
    """Seconds of the slowest rank."""
    dist.barrier()
    start = time.perf_counter()
    function()
    seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds)


def end_rank(folder: str, result: dict[str, Any]) -> None:
    """Rank 0's result is the group's."""
    if dist.get_rank() == 0:
        Path(folder, RESULT).write_text(json.dumps(result))
    dist.destroy_process_group()


def run_group(function: Callable[..., None], ranks: int, *arguments: Any) -> dict[str, Any]:
    """`function(rank, folder, *arguments)` on every rank; what rank 0 gave to `end_rank`."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(function, args=(folder, *arguments), nprocs=ranks)
        result: dict[str, Any] = json.loads(Path(folder, RESULT).read_text())
    return result
