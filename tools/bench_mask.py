"""The exact mask against all-gather and sort, on gloo ranks of this machine: time, and bytes each rank sends.

    python tools/bench_mask.py [--ranks 4] [--tokens 100000 1000000 10000000] [--repeats 5] [--output FILE.json]

Both give the same mask (checked in every run). Log-ratios are Student-t (2 degrees of freedom) times 0.2: heavy tails, as
stale data has. Times are the slowest rank's, median over the repeats; bytes are the payload a rank hands to collectives.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from m2po_megatron.algo.m2 import second_moment_mask

THRESHOLD = 0.04


def gathered_mask(ratio: Tensor, advantages: Tensor, response: Tensor, ids: Tensor) -> tuple[Tensor, int]:
    """What the exact mask replaces: every rank gathers and sorts every token. The mask, and the bytes this rank sent."""
    squares = ratio.square()
    region = response & (((advantages > 0) & (ratio > 0)) | ((advantages < 0) & (ratio < 0)))
    values = torch.where(region, squares, torch.inf)
    everything = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(everything, values)
    ordered = torch.cat(everything).sort().values
    ordered = ordered[: int(torch.isfinite(ordered).sum())]
    within = ordered.double().cumsum(0) <= THRESHOLD * torch.arange(1, len(ordered) + 1, dtype=torch.float64)
    kept = int(within.sum())
    cutoff = float(ordered[kept - 1]) if kept else -1.0
    return response & (~region | (squares <= cutoff)), values.nbytes


def exact_mask(ratio: Tensor, advantages: Tensor, response: Tensor, ids: Tensor) -> tuple[Tensor, int]:
    sent = 0
    real = dist.all_reduce

    def counted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        nonlocal sent
        sent += tensor.nbytes
        return real(tensor, *args, **kwargs)

    dist.all_reduce = counted
    try:
        result = second_moment_mask(ratio, advantages, response, THRESHOLD, token_ids=ids, group=dist.group.WORLD)
    finally:
        dist.all_reduce = real
    return result.mask, sent


def timed(function: Callable[..., tuple[Tensor, int]], repeats: int, *args: Tensor) -> tuple[float, Tensor, int]:
    """(seconds, mask, bytes): the median over repeats of the slowest rank's time."""
    seconds = []
    for _ in range(repeats + 1):
        dist.barrier()
        start = time.perf_counter()
        mask, sent = function(*args)
        slowest = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        seconds.append(float(slowest))
    return statistics.median(seconds[1:]), mask, sent  # the first one warms up


def run_rank(rank: int, ranks: int, token_counts: list[int], repeats: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(minutes=5),
    )
    rows = []
    for tokens in token_counts:
        mine = tokens // ranks
        generator = torch.Generator().manual_seed(1000 * tokens + rank)
        ratio = torch.randn(mine, generator=generator)
        ratio *= 0.2 / torch.rand(mine, generator=generator).clamp(1e-7).log().neg().sqrt()  # Student-t, 2 degrees
        advantages = torch.randn(mine, generator=generator)
        data = (ratio, advantages, torch.ones(mine, dtype=torch.bool), torch.arange(mine) + (rank << 32))
        exact_s, exact, exact_bytes = timed(exact_mask, repeats, *data)
        sort_s, gathered, sort_bytes = timed(gathered_mask, repeats, *data)
        differ = (exact != gathered).sum()
        dist.all_reduce(differ)
        rows.append(
            {
                "tokens": mine * ranks,
                "exact_ms": exact_s * 1e3,
                "gather_sort_ms": sort_s * 1e3,
                "speedup": sort_s / exact_s,
                "exact_bytes": exact_bytes,
                "gather_sort_bytes": sort_bytes,
                "differing_bits": int(differ),
            }
        )
    if rank == 0:
        Path(folder, "rows.json").write_text(json.dumps(rows))
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--tokens", type=int, nargs="+", default=[100_000, 1_000_000, 10_000_000])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, default=None, help="also write the rows as JSON")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run_rank, args=(arguments.ranks, arguments.tokens, arguments.repeats, folder), nprocs=arguments.ranks)
        rows = json.loads(Path(folder, "rows.json").read_text())
    print(f"{arguments.ranks} gloo ranks on {os.cpu_count()} cores, one thread each, torch {torch.__version__}")
    print(f"{'tokens':>10} {'exact':>10} {'all-gather+sort':>16} {'faster':>7} {'bytes':>8} {'bytes (gather)':>15} differ")
    for row in rows:
        print(
            f"{row['tokens']:>10,} {row['exact_ms']:>7.1f} ms {row['gather_sort_ms']:>13.1f} ms {row['speedup']:>6.1f}x "
            f"{row['exact_bytes']:>8,} {row['gather_sort_bytes']:>15,} {row['differing_bits']:>6}"
        )
    if arguments.output:
        arguments.output.write_text(json.dumps(rows, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
