"""What a rank runs in the update tests: production code only, results to files that the test compares."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from m2po_megatron import cpu
from tests.distributed.harness import leave_layout


@dataclass(frozen=True)
class Layout:
    """One way to spread the same update."""

    name: str
    tensor: int = 1
    pipeline: int = 1
    sequence_parallel: bool = False
    virtual: int | None = None
    context: int = 1
    expert: int = 1
    expert_tensor: int | None = None
    aux_loss: float = 0.0
    overlap: bool = False
    distributed_optimizer: bool = False
    recompute: str | None = None
    bf16: bool = False
    optimizer: dict[str, Any] = field(default_factory=lambda: {"lr": 1e-9, "clip_grad": 0.0})
    micro_batch_size: int | None = None
    max_tokens: int | None = None
    policy_loss: str = "m2po"
    logprob_mode: str = "store"
    temperature: float = 1.0


def run_updates(rank: int, layouts: list[Layout], model_path: str, reference_path: str, out_dir: str) -> None:
    """For every layout: build the policy, take the reference's update, save gradients and mask bits by token."""
    cpu.install()

    for layout in layouts:
        result = one_update(layout, model_path, torch.load(reference_path, weights_only=False))
        torch.save(result, Path(out_dir) / f"{layout.name}.{rank}.pt")
        leave_layout()


def build(layout: Layout, model_path: str, *, train_iters: int = 10, fresh: bool = True):
    """(world, policy) in the layout; without `fresh` with Megatron's random weights, all of which must be replaced."""
    from m2po_megatron.initialize import initialize
    from m2po_megatron.policy.forward import build_policy
    from m2po_megatron.policy.settings import ModelSettings, OptimizerSettings, ParallelSettings
    from m2po_megatron.weights.hf_io import load_hf

    parallel = ParallelSettings(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        sequence_parallel=layout.sequence_parallel,
        num_virtual_stages_per_pipeline_rank=layout.virtual,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
    )
    world = initialize(parallel, seed=0 if fresh else 1)
    policy = build_policy(
        ModelSettings(
            hf_path=model_path,
            logprob_mode=layout.logprob_mode,
            logprob_chunk_tokens=11,
            recompute_granularity=layout.recompute,
            bf16=layout.bf16,
            moe_router_load_balancing_type="aux_loss" if layout.aux_loss else "none",
            moe_aux_loss_coeff=layout.aux_loss,
        ),
        parallel,
        OptimizerSettings(
            **layout.optimizer,
            overlap_grad_reduce=layout.overlap,
            use_distributed_optimizer=layout.distributed_optimizer,
        ),
        train_iters=train_iters,
        device=world.device,
        load_weights=lambda chunks, arch: load_hf(chunks, arch, model_path) if fresh else None,
    )
    return world, policy


def rows_of(layout: Layout, world, trajectories, advantages):
    from m2po_megatron.data.packing import pack

    return pack(
        trajectories,
        advantages,
        world.packing,
        micro_batch_size=layout.micro_batch_size,
        max_tokens=layout.max_tokens,
    )


def one_update(layout: Layout, model_path: str, reference) -> dict:
    from m2po_megatron.algo.losses import LossSettings
    from m2po_megatron.policy.forward import compute_logprobs
    from m2po_megatron.trainer import train_update

    world, policy = build(layout, model_path)
    rows = rows_of(layout, world, reference.trajectories, reference.advantages)
    logprobs = compute_logprobs(policy, rows, temperature=layout.temperature)
    settings = LossSettings(policy_loss=layout.policy_loss, m2_threshold=reference.threshold)
    report = train_update(policy, rows, settings, temperature=layout.temperature, version=0)
    bits, scored = {}, {}
    if policy.is_last_stage:
        flat_mask = report.mask.mask
        flat_ids = torch.cat([r.mask_ids for r in rows])
        flat_loss = torch.cat([r.loss_mask for r in rows])
        flat_logprobs = torch.cat(logprobs)
        for i in torch.nonzero(flat_loss).flatten().tolist():
            key = (int(flat_ids[i]) >> 32, int(flat_ids[i]) & 0xFFFFFFFF)
            bits[key], scored[key] = bool(flat_mask[i]), float(flat_logprobs[i])
    return {
        "gradients": gradients_by_hf_name(policy),
        "mask": bits,
        "logprobs": scored,
        "metrics": report.metrics,
        "micro_batches": len(rows),
    }


def gradients_by_hf_name(policy) -> dict[str, torch.Tensor]:
    """The gradient buffers, through the same mapping that exports weights."""
    from m2po_megatron.weights.hf_io import export_hf

    parameters = [p for chunk in policy.chunks for p in chunk.parameters()]
    weights = [p.data for p in parameters]
    for p in parameters:
        p.data = p.main_grad
    try:
        return {name: tensor.clone() for name, tensor in export_hf(policy.chunks, policy.architecture)}
    finally:
        for p, data in zip(parameters, weights, strict=True):
            p.data = data
