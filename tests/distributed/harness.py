"""Runs a function on several gloo ranks, each a process of its own, within a bound of time."""

from __future__ import annotations

import datetime
import io
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch


def leave_layout() -> None:
    """Give up a layout's process groups, so that another can be built in the same ranks. All ranks together.

    Megatron's own function forgets the groups but leaves their threads and sockets: hundreds after a few layouts.
    """
    import torch.distributed as dist
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    dist.barrier()  # nobody is in one of them any more
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 280.0) -> list[Any]:
    """`function(rank, *args)` on every rank with torch.distributed initialised; the ranks' results, in order.

    AssertionError with the rank's traceback as soon as one fails (the others are ended), or when time is up.
    """
    context = multiprocessing.get_context("spawn")
    with TemporaryDirectory() as folder:
        ends, processes = [], []
        for rank in range(world_size):
            ours, theirs = context.Pipe(duplex=False)
            # Not daemonic: saving a checkpoint starts a process of its own, which daemons may not. All are ended below.
            process = context.Process(target=_rank, args=(theirs, rank, world_size, folder, function, args))
            process.start()
            theirs.close()
            ends.append(ours)
            processes.append(process)
        try:
            return _collect(ends, time.monotonic() + timeout_s, timeout_s)
        finally:
            for process in processes:
                process.join(timeout=2.0)
                if process.is_alive():
                    process.kill()
                    process.join()


def _collect(ends: list[Connection], deadline: float, timeout_s: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(ends):
        open_ends = [end for rank, end in enumerate(ends) if rank not in results]
        ready = wait(open_ends, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            missing = [rank for rank in range(len(ends)) if rank not in results]
            raise AssertionError(f"ranks {missing} did not finish within {timeout_s:.0f} s")
        for end in ready:
            rank = ends.index(end)  # type: ignore[arg-type]
            try:
                succeeded, value = torch.load(io.BytesIO(end.recv_bytes()), weights_only=False)  # type: ignore[union-attr]
            except EOFError:
                raise AssertionError(f"rank {rank} ended without a result") from None
            if not succeeded:
                raise AssertionError(f"rank {rank} failed:\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(len(ends))]


def _rank(
    end: Connection, rank: int, world_size: int, folder: str, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    # Megatron-core and our initialize read the launcher's variables, as under torchrun.
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world_size))
    torch.set_num_threads(1)
    try:
        torch.distributed.init_process_group(
            "gloo",
            init_method=f"file://{Path(folder) / 'rendezvous'}",
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=60),
        )
        _send(end, True, function(rank, *args))
        torch.distributed.destroy_process_group()
    except BaseException:
        _send(end, False, traceback.format_exc())


def _send(end: Connection, succeeded: bool, value: Any) -> None:
    """By value: a tensor sent as it is would lie in memory of this process, which may end before it is read."""
    buffer = io.BytesIO()
    torch.save((succeeded, value), buffer)
    end.send_bytes(buffer.getvalue())
