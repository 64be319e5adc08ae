"""The log-prob kernel in plain PyTorch: runs everywhere, and is what the other backends are compared with.

Works in chunks of rows, so that the float32 copies stay in the cache and the memory beyond the logits is constant. The
contract of each function is in kernels/backends.py, the maths in kernels/README.md.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from m2po_megatron.kernels.backends import IGNORED, Shard

CHUNK_ELEMENTS = 1 << 18
"""Logits converted at a time: 1 MiB of float32, a size at which chunking costs nothing and memory stays flat."""
MOST_NEGATIVE = torch.finfo(torch.float32).min


def obstacle(logits: Tensor) -> str:
    return ""


def row_statistics(
    logits: Tensor, targets: Tensor, out: Tensor, shard: Shard, temperature: float, with_moment: bool
) -> None:
    out[0].fill_(MOST_NEGATIVE)
    out[1:].zero_()
    if shard.columns == 0:
        return
    local = _local_targets(targets, shard)
    for rows in _chunks(logits):
        x = _scaled(logits[rows], shard, temperature)
        y = local[rows]
        out[3, rows] = torch.where(y >= 0, x.gather(1, y.clamp(min=0)[:, None])[:, 0], 0.0)
        # A row of -inf alone has no maximum to subtract: its exponentials are all 0 this way.
        largest = x.amax(1).clamp_(min=MOST_NEGATIVE)
        out[0, rows] = largest
        x = x - largest[:, None]
        if with_moment:
            exponentials = x.exp()
            out[1, rows] = exponentials.sum(1)
            # An excluded token has logit -inf: 0 x -inf must count as 0.
            out[2, rows] = exponentials.mul_(x.clamp_(min=MOST_NEGATIVE)).sum(1)
        else:
            out[1, rows] = x.exp_().sum(1)


def merge(parts: Tensor, targets: Tensor, vocab_size: int) -> tuple[Tensor, Tensor, Tensor]:
    largest = parts[:, 0].amax(0)
    shift = parts[:, 0] - largest
    scale = shift.exp()
    total = (parts[:, 1] * scale).sum(0)
    # Far below the maximum a part's shift may be infinite, and 0 x inf must not reach the sum.
    moment = torch.where(scale > 0, scale * (parts[:, 2] + shift * parts[:, 1]), 0.0).sum(0)
    log_total = total.log()
    ignored = targets == IGNORED
    unknown = ((targets < 0) | (targets >= vocab_size)) & ~ignored
    # The maximum goes first: two large numbers cancel exactly before the small one is subtracted.
    logprobs = (parts[:, 3].sum(0) - largest - log_total).masked_fill_(unknown, torch.nan).masked_fill_(ignored, 0.0)
    entropies = (log_total - moment / total).masked_fill_(ignored, 0.0)
    return logprobs, largest + log_total, entropies


def write_gradient(
    logits: Tensor,
    gradient: Tensor,
    targets: Tensor,
    lse: Tensor,
    entropies: Tensor,
    upstream: Tensor,
    upstream_entropy: Tensor | None,
    shard: Shard,
    temperature: float,
) -> None:
    if shard.columns == 0:
        gradient.zero_()
        return
    ignored = targets == IGNORED
    g = upstream.masked_fill(ignored, 0.0) / temperature
    g_entropy = None if upstream_entropy is None else upstream_entropy.masked_fill(ignored, 0.0) / temperature
    idle = g == 0 if g_entropy is None else (g == 0) & (g_entropy == 0)
    local = _local_targets(targets, shard)
    for rows in _chunks(logits):
        log_p = _scaled(logits[rows], shard, temperature) - lse[rows, None]
        if g_entropy is None:
            dx = log_p.exp_().mul_(-g[rows, None])
        else:
            p = log_p.exp()
            # p (g + g_H (log p + H)), where 0 x -inf (p underflows, the token is excluded) counts as 0
            weight = log_p.clamp_(min=-1e3).add_(entropies[rows, None]).mul_(g_entropy[rows, None])
            dx = weight.add_(g[rows, None]).mul_(p).neg_()
        y = local[rows]
        dx.scatter_add_(1, y.clamp(min=0)[:, None], torch.where(y >= 0, g[rows], 0.0)[:, None])
        gradient[rows, : shard.columns] = dx.masked_fill_(idle[rows, None], 0.0)
    gradient[:, shard.columns :] = 0


def _chunks(logits: Tensor) -> Iterator[slice]:
    rows = max(1, CHUNK_ELEMENTS // max(1, logits.shape[1]))
    return (slice(start, start + rows) for start in range(0, logits.shape[0], rows))


def _local_targets(targets: Tensor, shard: Shard) -> Tensor:
    """The targets as columns of this rank's logits; -1 where another rank owns it, or none does."""
    local = targets - shard.first
    return torch.where((local >= 0) & (local < shard.columns), local, -1)


def _scaled(logits: Tensor, shard: Shard, temperature: float) -> Tensor:
    """The rows' logits without padding columns, over the temperature, in float32; not to be written to."""
    x = logits[:, : shard.columns].float()
    return x if temperature == 1.0 else x / temperature
