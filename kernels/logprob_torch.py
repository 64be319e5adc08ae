"""The log-prob kernel in plain PyTorch: the CPU path, and the reference for others.

Forward: one read of the logits in chunks of rows; each row leaves four float32 numbers on this rank,

    m = max x,  d = sum e^(x - m),  s = sum (x - m) e^(x - m),  x_y (0 where another rank owns y)

which all ranks gather once and merge in the same order. Taking s relative to m avoids cancellation at large logits.

    logp = (x_y - m) - log d,   H = log d - s / d

Backward: one read and one write, no communication, where p = e^(x - lse):

    dx = (1 / temperature) [g (1_y - p) - g_H p (log p + H)]
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

IGNORED = -100
"""A target that stands for "no token": log-prob 0, entropy 0, gradient 0."""
CHUNK_ELEMENTS = 1 << 20
"""Logits converted at a time: 4 MiB of float32, a size at which chunking costs nothing and memory stays flat."""
MOST_NEGATIVE = torch.finfo(torch.float32).min


class TorchLogprob(torch.autograd.Function):
    """See kernels/logprob.py for the contract; logits [t, V/TP], targets [t]."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        temperature: float,
        entropy: str,
        group: dist.ProcessGroup | None,
        vocab_size: int,
        inplace_backward: bool,
    ) -> tuple[Tensor, Tensor]:
        first = dist.get_rank(group) * logits.shape[1] if group is not None else 0
        columns = max(0, min(logits.shape[1], vocab_size - first))
        local = targets - first
        local = torch.where((local >= 0) & (local < columns), local, -1)
        largest, total, moment, target_logit = _merge(
            _row_statistics(logits, local, columns, temperature, entropy != "none"), group
        )
        ignored = targets == IGNORED
        unknown = (targets >= vocab_size) | ((targets < 0) & ~ignored)
        log_total = total.log()
        logprobs = torch.where(unknown, torch.nan, target_logit - largest - log_total).masked_fill_(ignored, 0.0)
        entropies = (log_total - moment / total).masked_fill_(ignored, 0.0)
        ctx.save_for_backward(logits, local, largest + log_total, entropies, ignored)
        ctx.columns, ctx.temperature, ctx.inplace, ctx.consumed = columns, temperature, inplace_backward, False
        ctx.entropy_has_gradient = entropy == "grad"
        if not ctx.entropy_has_gradient:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.consumed:
            raise RuntimeError("the logits were overwritten by an earlier backward pass (inplace_backward=True)")
        logits, local, lse, entropies, ignored = ctx.saved_tensors
        ctx.consumed = ctx.inplace
        target = logits.detach() if ctx.inplace else torch.empty_like(logits)
        upstream = gradients[0].masked_fill(ignored, 0.0) / ctx.temperature
        upstream_entropy = gradients[1].masked_fill(ignored, 0.0) / ctx.temperature if ctx.entropy_has_gradient else None
        idle = upstream == 0
        if upstream_entropy is not None:
            idle &= upstream_entropy == 0
        for rows in _chunks(logits):
            x = _scaled(logits[rows], ctx.columns, ctx.temperature)
            log_p = x.sub_(lse[rows, None])
            p = log_p.exp()
            dx = p * -upstream[rows, None]
            if upstream_entropy is not None:
                surprise = torch.where(p > 0, p * (log_p + entropies[rows, None]), 0.0)  # 0 x -inf where p underflows
                dx.sub_(surprise.mul_(upstream_entropy[rows, None]))
            owned = local[rows] >= 0
            dx.scatter_add_(1, local[rows].clamp(min=0)[:, None], torch.where(owned, upstream[rows], 0.0)[:, None])
            target[rows, : ctx.columns] = dx.masked_fill_(idle[rows, None], 0.0)
        target[:, ctx.columns :] = 0
        return target, None, None, None, None, None, None


def _chunks(logits: Tensor) -> Iterator[slice]:
    rows = max(1, CHUNK_ELEMENTS // max(1, logits.shape[1]))
    return (slice(start, start + rows) for start in range(0, logits.shape[0], rows))


def _scaled(logits: Tensor, columns: int, temperature: float) -> Tensor:
    """A new float32 tensor: the rows' logits without padding columns, over the temperature."""
    return logits[:, :columns].to(torch.float32, copy=True).div_(temperature)


def _row_statistics(logits: Tensor, local: Tensor, columns: int, temperature: float, with_moment: bool) -> Tensor:
    """float32 [4, t]: m, d, s, x_y over this rank's columns. A rank of padding alone gives (most negative, 0, 0, 0)."""
    statistics = torch.zeros(4, logits.shape[0], dtype=torch.float32, device=logits.device)
    statistics[0] = MOST_NEGATIVE
    if columns == 0:
        return statistics
    for rows in _chunks(logits):
        x = _scaled(logits[rows], columns, temperature)
        y = local[rows]
        statistics[3, rows] = torch.where(y >= 0, x.gather(1, y.clamp(min=0)[:, None])[:, 0], 0.0)
        # A row of -inf alone has no maximum to subtract: its exponentials are all 0 this way.
        largest = x.amax(1).clamp_(min=MOST_NEGATIVE)
        x.sub_(largest[:, None])
        exponentials = x.exp()
        statistics[0, rows] = largest
        statistics[1, rows] = exponentials.sum(1)
        if with_moment:
            # An excluded token has logit -inf: 0 x -inf must count as 0.
            statistics[2, rows] = exponentials.mul_(x.clamp_(min=MOST_NEGATIVE)).sum(1)
    return statistics


def _merge(statistics: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(m, d, s, x_y) of the whole vocabulary, each [t]; ranks are merged in their order on every rank."""
    if group is None or dist.get_world_size(group) == 1:
        return statistics[0], statistics[1], statistics[2], statistics[3]
    parts = statistics.new_empty(dist.get_world_size(group), *statistics.shape)
    dist.all_gather(list(parts.unbind(0)), statistics, group=group)
    largest = parts[:, 0].amax(0)
    shift = (parts[:, 0] - largest).clamp_(min=MOST_NEGATIVE)
    scale = shift.exp()
    total = (parts[:, 1] * scale).sum(0)
    # A part of padding alone has scale 0 and an enormous shift: their product is kept out of the sum.
    moment = torch.where(scale > 0, scale * (parts[:, 2] + shift * parts[:, 1]), 0.0).sum(0)
    return largest, total, moment, parts[:, 3].sum(0)
