"""An update's time in every layout of two ranks against one process, and how full and how even packing makes the rows.

    python tools/bench_layout.py [--trajectories 512] [--repeats 9] [--output FILE.json]

The same mini-batch everywhere (pass A, mask, pass B, clip and step; the bundled model, its layers as they are). Two ranks on
two cores would take half of one process's time if nothing were lost. Response lengths are lognormal (sigma 1): most short,
some long, as in reinforcement learning.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from bench_ranks import end_rank, make_advantages, make_trajectories, run_group, slowest, start_rank

from m2po_megatron.algo.losses import LossSettings
from m2po_megatron.data.packing import PackingLayout, pack, plan_micro_batches
from m2po_megatron.data.trajectory import Trajectory
from m2po_megatron.policy.settings import ParallelSettings
from m2po_megatron.trainer import train_update


@dataclass(frozen=True)
class Layout:
    ranks: int = 2
    parallel: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)


LAYOUTS = {
    "one process": Layout(ranks=1),
    "DP=2": Layout(),
    "DP=2, distributed optimizer": Layout(optimizer={"use_distributed_optimizer": True}),
    "TP=2": Layout(parallel={"tensor_model_parallel_size": 2}),
    "TP=2, sequence parallel": Layout(parallel={"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "PP=2": Layout(parallel={"pipeline_model_parallel_size": 2}),
    "CP=2": Layout(parallel={"context_parallel_size": 2}),
}


def lognormal_trajectories(count: int, mean_response: int, vocabulary: int) -> list[Trajectory]:
    rng = np.random.default_rng(0)
    responses = rng.lognormal(np.log(mean_response) - 0.5, 1.0, size=count)  # sigma 1: the mean is exp(mu + 1/2)
    lengths = responses.astype(int).clip(1, 8 * mean_response).tolist()
    return make_trajectories(rng.integers(4, 9, size=count).tolist(), lengths, vocabulary)


def run_rank(rank: int, folder: str, name: str, arguments: argparse.Namespace) -> None:
    layout = LAYOUTS[name]
    parallel = ParallelSettings(**layout.parallel)
    world, policy = start_rank(rank, layout.ranks, folder, arguments.hf_path, parallel, layout.optimizer)
    vocabulary = policy.architecture.vocab_size
    trajectories = lognormal_trajectories(arguments.trajectories, arguments.response_length, vocabulary)
    advantages = make_advantages(len(trajectories))
    rows = pack(trajectories, advantages, world.packing, max_tokens=arguments.max_tokens)
    seconds = [
        slowest(lambda: train_update(policy, rows, LossSettings(), temperature=1.0, version=0))
        for _ in range(arguments.repeats + 2)
    ]
    end_rank(folder, {"ms": 1e3 * statistics.median(seconds[2:]), "micro_batches": len(rows)})


def measure_step_times(arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    print(f"{'layout':<30}{'ms':>8}{'x one process':>15}{'micro-batches a rank':>22}")
    for name, layout in LAYOUTS.items():
        found[name] = run_group(run_rank, layout.ranks, name, arguments)
        found[name]["ratio"] = found[name]["ms"] / found["one process"]["ms"]
        row = found[name]
        print(f"{name:<30}{row['ms']:>8.0f}{row['ratio']:>14.2f}x{row['micro_batches']:>22}", flush=True)
    return found


def measure_packing(arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Against what packing replaces: micro-batches of as many sequences in order, padded to the longest of each."""
    trajectories = lognormal_trajectories(arguments.trajectories, arguments.response_length, vocabulary=32)
    lengths = [len(trajectory.token_ids) for trajectory in trajectories]
    found: dict[str, dict[str, float]] = {}
    print(f"\n{'rows':<30}{'real tokens':>12}{'largest rank / mean':>21}{'micro-batches a rank':>22}")
    for ranks, context in ((1, 1), (8, 1), (4, 2)):
        layout = PackingLayout(data_parallel_size=ranks, context_parallel_size=context)
        plan = plan_micro_batches(lengths, layout, micro_batch_size=None, max_tokens=arguments.max_tokens)
        rows = [row for rank_rows in plan.rows for row in rank_rows]
        held = sum(layout.row_tokens([lengths[i] for i in row]) for row in rows)
        name = f"packed, DP={ranks} CP={context}"
        found[name] = {"real": sum(lengths) / held, "balance": plan.balance, "micro_batches": len(plan.rows[0])}
    at_once = max(1, len(lengths) // (8 * int(found["packed, DP=8 CP=1"]["micro_batches"])))
    padded = [max(lengths[i : i + at_once]) * len(lengths[i : i + at_once]) for i in range(0, len(lengths), at_once)]
    by_rank = [sum(padded[rank::8]) for rank in range(8)]
    found["padded, in order, DP=8"] = {
        "real": sum(lengths) / sum(padded),
        "balance": max(by_rank) * len(by_rank) / sum(by_rank),
        "micro_batches": -(-len(padded) // 8),
    }
    for name, row in found.items():
        print(f"{name:<30}{100 * row['real']:>11.1f}%{row['balance']:>21.3f}{row['micro_batches']:>22}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hf-path", default="examples/arithmetic/model")
    parser.add_argument("--trajectories", type=int, default=512)
    parser.add_argument("--response-length", type=int, default=24, help="mean, in tokens")
    parser.add_argument("--max-tokens", type=int, default=1024, help="of a micro-batch, on a context-parallel rank")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--output", type=Path, default=None, help="also write the results as JSON")
    arguments = parser.parse_args()
    results = {"step": measure_step_times(arguments), "packing": measure_packing(arguments)}
    if arguments.output:
        arguments.output.write_text(json.dumps(results, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
