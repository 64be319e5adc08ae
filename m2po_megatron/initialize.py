"""From a process to a rank: torch.distributed, megatron-core's parallel state, seeds, device.

Works under torchrun (any launcher that sets RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT) and alone.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from m2po_megatron.data.packing import PackingLayout
from m2po_megatron.policy.settings import ParallelSettings
from m2po_megatron.randomness import seed_generators


@dataclass(frozen=True)
class World:
    """What this rank knows of itself. `control_group`: all ranks, gloo, for decisions and host data."""

    rank: int
    world_size: int
    device: torch.device
    control_group: dist.ProcessGroup
    packing: PackingLayout = field(default_factory=PackingLayout)  # this rank's place among the rows of a mini-batch

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def data_parallel_size(self) -> int:
        return self.packing.data_parallel_size


def check_layout(parallel: ParallelSettings, world_size: int) -> None:
    """Raise ValueError unless the ranks divide into the layout."""
    for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"):
        _at_least_one(parallel, name)
    for name in ("expert_model_parallel_size", "expert_tensor_parallel_size", "num_virtual_stages_per_pipeline_rank"):
        _at_least_one(parallel, name)
    tensor, pipeline = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    if parallel.sequence_parallel and tensor == 1:
        raise ValueError("--sequence-parallel: needs --tensor-model-parallel-size above 1")
    if parallel.num_virtual_stages_per_pipeline_rank is not None and pipeline == 1:
        raise ValueError("--num-virtual-stages-per-pipeline-rank: needs --pipeline-model-parallel-size above 1")
    ranks = tensor * pipeline * parallel.context_parallel_size
    if world_size % ranks:
        raise ValueError(
            f"{world_size} ranks cannot be divided by --tensor-model-parallel-size x --pipeline-model-parallel-size x "
            f"--context-parallel-size = {ranks}; start a multiple of {ranks} processes or change the layout"
        )
    experts = (parallel.expert_tensor_parallel_size or tensor) * parallel.expert_model_parallel_size
    if (world_size // pipeline) % experts:
        raise ValueError(
            f"{world_size // pipeline} ranks of a pipeline stage cannot be divided by --expert-tensor-parallel-size x "
            f"--expert-model-parallel-size = {experts}"
        )
    if parallel.expert_model_parallel_size > 1 and tensor > 1 and not parallel.sequence_parallel:
        raise ValueError("--expert-model-parallel-size: beside tensor parallelism it needs --sequence-parallel")


def _at_least_one(parallel: ParallelSettings, name: str) -> None:
    value = getattr(parallel, name)
    if value is not None and value < 1:
        raise ValueError(f"--{name.replace('_', '-')} {value}: must be at least 1")


def initialize(parallel: ParallelSettings, seed: int) -> World:
    """Join the job, or take up a process group that stands already. ValueError for a layout that does not fit the ranks."""
    standing = dist.is_initialized()
    world_size = dist.get_world_size() if standing else int(os.environ.get("WORLD_SIZE", "1"))
    rank = dist.get_rank() if standing else int(os.environ.get("RANK", "0"))
    check_layout(parallel, world_size)
    backend = parallel.distributed_backend
    if backend == "nccl" and not torch.cuda.is_available():
        raise ValueError("--distributed-backend nccl: there is no CUDA device here; use auto or gloo")
    if backend == "auto":
        backend = "nccl" if torch.cuda.is_available() else "gloo"
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    timeout = timedelta(minutes=parallel.distributed_timeout_minutes)
    if standing:
        backend = dist.get_backend()
    elif "MASTER_ADDR" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1, timeout=timeout)
    parallel_state.initialize_model_parallel(
        parallel.tensor_model_parallel_size,
        parallel.pipeline_model_parallel_size,
        parallel.num_virtual_stages_per_pipeline_rank if (parallel.num_virtual_stages_per_pipeline_rank or 1) > 1 else None,
        context_parallel_size=parallel.context_parallel_size,
        expert_model_parallel_size=parallel.expert_model_parallel_size,
        expert_tensor_parallel_size=parallel.expert_tensor_parallel_size,
        distributed_timeout_minutes=parallel.distributed_timeout_minutes,
    )
    seed_generators(seed)
    world = dist.group.WORLD
    assert world is not None
    return World(
        rank=rank,
        world_size=world_size,
        device=device,
        control_group=world if backend == "gloo" else dist.new_group(backend="gloo", timeout=timeout),
        packing=PackingLayout(
            data_parallel_rank=parallel_state.get_data_parallel_rank(),
            data_parallel_size=parallel_state.get_data_parallel_world_size(),
            context_parallel_rank=parallel_state.get_context_parallel_rank(),
            context_parallel_size=parallel_state.get_context_parallel_world_size(),
            alignment=parallel.row_alignment,
            count_multiple=parallel.micro_batch_multiple,
        ),
    )


def shut_down() -> None:
    """Leave the job, if it was joined: without it the process may abort at its end, whatever its exit code was to be."""
    if dist.is_initialized():
        dist.destroy_process_group()
