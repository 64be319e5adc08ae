"""From logits to log-probs as one differentiable function: two kernels and the single collective between them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from m2po_megatron.kernels.backends import Backend, Shard


def gather_statistics(statistics: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """float32 [W, 4, t], ranks in order, from each rank's [4, t]: the one collective, 16 bytes a token a rank."""
    if group is None or dist.get_world_size(group) == 1:
        return statistics[None]
    parts = statistics.new_empty(dist.get_world_size(group), *statistics.shape)
    dist.all_gather_into_tensor(parts.flatten(0, 1), statistics, group=group)  # ranks end to end
    return parts


class LogprobOfLogits(torch.autograd.Function):
    """See `vocab_parallel_logprob` in kernels/logprob.py for the contract; logits [t, V'], targets [t]."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        temperature: float,
        entropy: str,
        group: dist.ProcessGroup | None,
        shard: Shard,
        inplace_backward: bool,
        backend: Backend,
    ) -> tuple[Tensor, Tensor]:
        statistics = torch.empty(4, len(targets), dtype=torch.float32, device=logits.device)
        backend.row_statistics(logits, targets, statistics, shard, temperature, entropy != "none")
        logprobs, lse, entropies = backend.merge(gather_statistics(statistics, group), targets, shard.vocab_size)
        ctx.save_for_backward(logits, targets, lse, entropies)
        ctx.shard, ctx.temperature, ctx.inplace, ctx.consumed = shard, temperature, inplace_backward, False
        ctx.backend, ctx.entropy_has_gradient = backend, entropy == "grad"
        if not ctx.entropy_has_gradient:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.consumed:
            raise RuntimeError("the logits were overwritten by an earlier backward pass (inplace_backward=True)")
        logits, targets, lse, entropies = ctx.saved_tensors
        ctx.consumed = ctx.inplace
        gradient = logits.detach() if ctx.inplace else torch.empty_like(logits, memory_format=torch.contiguous_format)
        ctx.backend.write_gradient(
            logits.detach(),
            gradient,
            targets,
            lse,
            entropies,
            gradients[0].contiguous(),
            gradients[1].contiguous() if ctx.entropy_has_gradient else None,
            ctx.shard,
            ctx.temperature,
        )
        if ctx.inplace:  # compiled kernels write past autograd: whoever else saved these logits must hear of it
            torch.autograd.graph.increment_version(logits)
        return gradient, None, None, None, None, None, None, None
