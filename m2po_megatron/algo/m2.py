"""M2PO's second-moment mask: Algorithm 1 of arXiv 2510.01161, exact over the tokens of all ranks.

Algorithm 1 drops, from the trust-region tokens (A > 0 and r > 1, or A < 0 and r < 1), the one with the largest
(log r)^2 until the mean of the rest is at most the threshold. In ascending order prefix means never decrease, so what is
kept are the k smallest squares for the largest k whose mean is within the threshold: the mask is a cut, and the cut can
be searched for instead of sorting.

A non-negative float32 orders like its bit pattern. Three histograms of the bits (11, then 10, then 10 of them, each
within the bin that holds the cut) find the cut's exact value. All numbers in one bin of the first histogram share their
exponent, so a bin's sum is an integer sum of mantissas: counts and sums are all-reduced as int64, which has no rounding
and no order. Comparisons with the threshold are done on Python integers. Hence the same log-ratios give the same mask,
bit for bit, however they are spread over ranks and micro-batches. Equal squares at the cut are ranked by token id with
the same kind of search.

Cost: one to four small all-reduces (12 where equal squares straddle the cut), at most 73 KiB in all, whatever the number
of tokens; one pass over the trust region, then passes over ever smaller parts of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
import torch.distributed as dist
from torch import Tensor

VARIANTS = ("paper",)

_SQUARE_DIGITS = ((20, 11), (10, 10), (0, 10))
"""(shift, bits) of the three digits of a square's 31 significant bits; the first fixes the exponent."""
_ID_DIGITS = tuple((shift, 8) for shift in range(56, -8, -8))
_UNIT = 149
"""Every float32 is an integer multiple of 2^-149: sums of squares are kept as integers of that unit."""


@dataclass(frozen=True)
class SecondMomentMask:
    """The mask of this rank's tokens, and the mini-batch's numbers, which are equal on every rank.

    mask                 bool, the log-ratios' shape: True where the token contributes to the loss
    m2_before, m2_after  mean (log r)^2 over the trust region, before and after the mask; 0.0 for an empty one
    trust_region_tokens  tokens of the trust region before the mask (finite ones)
    masked_tokens        those of them that Algorithm 1 dropped
    nonfinite_tokens     response tokens whose log-ratio, or its square, is not a finite float32: masked as well
    cutoff               the largest kept square; 0.0 if none was kept; None if none was dropped
    """

    mask: Tensor
    m2_before: float
    m2_after: float
    trust_region_tokens: int
    masked_tokens: int
    nonfinite_tokens: int
    cutoff: float | None


def second_moment_mask(
    log_ratio: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    threshold: float,
    *,
    token_ids: Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    variant: str = "paper",
) -> SecondMomentMask:
    """Algorithm 1 over the union of all ranks' tokens. Collective over `group`, also for a rank without tokens.

    Args:
        log_ratio: log pi_theta - log pi_behaviour, float32, any shape. Squares are taken in float32.
        advantages: broadcastable to log_ratio; only the sign matters.
        loss_mask: bool, broadcastable to log_ratio: the response tokens.
        threshold: the largest mean square allowed, compared exactly; inf masks nothing.
        token_ids: int64, log_ratio's shape, unique over the mini-batch: of equal squares at the cut, those with the
            smallest ids are kept. Required with a group; without one, the position by default.
        group: the ranks over which the tokens are spread (data x context parallel), or None for this process alone.
        variant: "paper".

    Raises:
        ValueError: threshold negative or NaN, unknown variant, shapes that do not fit, missing token_ids.
    """
    _check_arguments(threshold, variant, token_ids, group)
    shape = log_ratio.shape
    ratio = log_ratio.detach().float().reshape(-1)
    advantage = advantages.detach().broadcast_to(shape).reshape(-1)
    response = loss_mask.broadcast_to(shape).reshape(-1)
    if token_ids is None:
        token_ids = torch.arange(ratio.numel(), device=ratio.device)
    elif token_ids.shape != shape or token_ids.dtype != torch.int64:
        raise ValueError(
            f"token_ids must be int64 of log_ratio's shape {tuple(shape)}, not {token_ids.dtype} {tuple(token_ids.shape)}"
        )
    squares = ratio.square()
    mask = response & torch.isfinite(squares)
    nonfinite = response.sum() - mask.sum()
    region = mask & (((advantage > 0) & (ratio > 0)) | ((advantage < 0) & (ratio < 0)))
    where = region.nonzero().squeeze(1)
    keys, ids = squares[where].view(torch.int32).long(), token_ids.reshape(-1)[where]
    cut = _find_cut(keys, ids, nonfinite, threshold, group)
    if cut.key is not None:
        kept = keys < cut.key
        if cut.last_id is not None:
            kept |= (keys == cut.key) & (ids <= cut.last_id)
        mask[where] = kept
    return SecondMomentMask(
        mask=mask.reshape(shape),
        m2_before=_mean(cut.total_units, cut.total),
        m2_after=_mean(cut.kept_units, cut.kept),
        trust_region_tokens=cut.total,
        masked_tokens=cut.total - cut.kept,
        nonfinite_tokens=cut.nonfinite,
        cutoff=None if cut.key is None else cut.largest_kept,
    )


def _check_arguments(
    threshold: float, variant: str, token_ids: Tensor | None, group: dist.ProcessGroup | None
) -> None:
    if math.isnan(threshold) or threshold < 0:
        raise ValueError(f"the M2 threshold must be a number >= 0, not {threshold}")
    if variant not in VARIANTS:
        raise ValueError(f"unknown variant {variant!r} of the second-moment mask; known: {', '.join(VARIANTS)}")
    if group is not None and token_ids is None:
        raise ValueError("token_ids are required with a group: positions on different ranks are not unique")


@dataclass
class _Cut:
    """Where the sorted squares are cut. `key` None: nowhere, all are kept.

    Kept are the squares whose bits are below `key`, and of those equal to it the ones with id <= `last_id` (None: none).
    Sums are integers in units of 2^-149.
    """

    nonfinite: int
    total: int
    total_units: int
    kept: int
    kept_units: int
    key: int | None = None
    last_id: int | None = None
    largest_kept: float = 0.0


def _find_cut(
    keys: Tensor, ids: Tensor, nonfinite: Tensor, threshold: float, group: dist.ProcessGroup | None
) -> _Cut:
    """Search the cut among the int64 `keys` (bits of the squares) of all ranks.

    Every decision is taken on all-reduced integers, so every rank takes the same way through the collectives.
    """
    allowed, per = min(threshold, 2.0**200).as_integer_ratio()
    allowed <<= _UNIT  # the threshold is exactly allowed / per units a token
    candidates, candidate_ids, prefix = keys, ids, 0
    cut = None
    for shift, bits in _SQUARE_DIGITS:
        counts, units, extra = _histogram(candidates, prefix, shift, bits, nonfinite, group)
        if cut is None:
            cut = _Cut(extra, sum(counts), sum(units), kept=sum(counts), kept_units=sum(units))
            if cut.total_units * per <= allowed * cut.total:
                return cut
            cut.kept = cut.kept_units = 0
        digit = _pass_what_fits(cut, counts, units, allowed, per)
        prefix = prefix << bits | digit
        here = candidates >> shift == prefix
        candidates, candidate_ids = candidates[here], candidate_ids[here]
    assert cut is not None
    cut.key = prefix
    square = units[digit] // counts[digit]  # the last histogram's bins hold one value each
    equals = (allowed * cut.kept - cut.kept_units * per) // (square * per - allowed)
    if equals:
        cut.last_id = _nth_smallest(candidate_ids, equals, group)
        cut.kept += equals
        cut.kept_units += equals * square
        cut.largest_kept = _as_float(prefix)
    else:
        cut.largest_kept = _as_float(_largest(keys[keys < prefix], group))
    return cut


def _histogram(
    keys: Tensor, prefix: int, shift: int, bits: int, nonfinite: Tensor, group: dist.ProcessGroup | None
) -> tuple[list[int], list[int], int]:
    """Counts and sums (in units) of all ranks' keys by their digit at `shift`, all having `prefix` above it; and the sum
    of `nonfinite`, which travels along. One all-reduce."""
    size = 1 << bits
    digits = (keys >> shift) & (size - 1)
    mantissas = (keys & 0x7FFFFF) | ((keys > 0x7FFFFF).long() << 23)  # no hidden bit in denormals
    numbers = keys.new_zeros(2 * size + 1)
    numbers[:size].scatter_add_(0, digits, keys.new_ones(()).expand_as(digits))
    numbers[size : 2 * size].scatter_add_(0, digits, mantissas)
    numbers[-1] = nonfinite
    if group is not None:
        dist.all_reduce(numbers, group=group)
    *values, extra = numbers.tolist()
    first = prefix << bits
    units = [
        total << max((first | digit) << shift >> 23, 1) - 1 if total else 0 for digit, total in enumerate(values[size:])
    ]
    return values[:size], units, extra


def _pass_what_fits(cut: _Cut, counts: Sequence[int], units: Sequence[int], allowed: int, per: int) -> int:
    """Add to `cut` the bins, in ascending order, with which the mean stays within allowed / per; the first that does not
    fit is returned. There is one: the mean of all of them exceeds it, and prefix means never decrease."""
    for digit, count in enumerate(counts):
        if count:
            if (cut.kept_units + units[digit]) * per > allowed * (cut.kept + count):
                return digit
            cut.kept += count
            cut.kept_units += units[digit]
    raise AssertionError("prefix means decreased: the histograms of the ranks disagree")


def _nth_smallest(ids: Tensor, n: int, group: dist.ProcessGroup | None) -> int:
    """The n-th smallest (from 1) of all ranks' int64 ids, digit by digit. One all-reduce of 2 KiB per digit."""
    ordered = ids ^ torch.iinfo(torch.int64).min  # as unsigned, in the order of the signed ids
    prefix = 0
    for shift, bits in _ID_DIGITS:
        digits = (ordered >> shift) & ((1 << bits) - 1)
        counts = ids.new_zeros(1 << bits).scatter_add_(0, digits, ids.new_ones(()).expand_as(digits))
        if group is not None:
            dist.all_reduce(counts, group=group)
        for digit, count in enumerate(counts.tolist()):
            if n <= count:
                break
            n -= count
        prefix = prefix << bits | digit
        ordered = ordered[digits == digit]
    return prefix - (1 << 63)


def _largest(keys: Tensor, group: dist.ProcessGroup | None) -> int:
    """The largest of all ranks' keys; 0 if there are none."""
    largest = torch.cat([keys, keys.new_zeros(1)]).max().reshape(1)
    if group is not None:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return int(largest)


def _as_float(key: int) -> float:
    """The float32 with these bits."""
    return float(torch.tensor(key, dtype=torch.int32).view(torch.float32))


def _mean(units: int, count: int) -> float:
    return float(Fraction(units, count << _UNIT)) if count else 0.0
