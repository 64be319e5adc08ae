"""The log-prob kernels for GPUs, in Triton. The contract of each function is in kernels/backends.py.

Traffic to and from global memory (b = bytes of a logit; t, V', W as there; a handful of float32 numbers a row left out):

    row_statistics   reads b t V' once, rows of ignored targets not at all; writes 16 t
    merge            reads (16 W + 8) t, writes 12 t
    write_gradient   reads b t V' once, rows without gradient not at all; writes b t V' once

so time is bound by that traffic: about ten instructions and one exponential a logit stay below it on a GPU with 4 TB/s.
One program works on one row. It loads tiles of DEPTH x LANES consecutive logits in which a thread holds whole columns of
the tile, 16 bytes a load, and keeps a running maximum and sums for each column: inside the loop nothing is reduced
across threads, so no warp waits for another, and rescaling the sums costs one exponential in DEPTH. The columns are
merged once, after the loop, as the ranks are merged by `merge`.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from m2po_megatron.kernels.backends import IGNORED, Shard

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WARPS = 4
DEPTH = 4
MERGE_BLOCK = 256

_IGNORED = tl.constexpr(IGNORED)
_MOST_NEGATIVE = tl.constexpr(torch.finfo(torch.float32).min)
_LOG2E = tl.constexpr(1.4426950408889634)


def obstacle(logits: Tensor) -> str:
    if logits.dtype not in DTYPES:
        return f"its kernels take float32, bfloat16 and float16, not {logits.dtype}"
    if logits.device.type == "cuda":
        return ""
    if logits.device.type != "cpu":
        return f"its kernels run on CUDA devices, not on {logits.device}"
    # What Triton's interpreter decorates is not a JITFunction: this asks what these kernels are, not what a variable says.
    compiled = isinstance(_row_statistics, triton.JITFunction)
    return "the tensors are on cpu, where its kernels run only under Triton's interpreter" if compiled else ""


def row_statistics(
    logits: Tensor, targets: Tensor, out: Tensor, shard: Shard, temperature: float, with_moment: bool
) -> None:
    if not len(targets):
        return
    lanes, depth, warps = tile_of(logits.dtype, shard.columns)
    rows = (logits, logits.stride(0), targets.contiguous(), out, out.stride(0))
    numbers = (shard.columns, shard.first, 1.0 / temperature)
    with _device_of(logits):
        _row_statistics[(len(targets),)](*rows, *numbers, MOMENT=with_moment, LANES=lanes, DEPTH=depth, num_warps=warps)


def merge(parts: Tensor, targets: Tensor, vocab_size: int) -> tuple[Tensor, Tensor, Tensor]:
    logprobs, lse, entropies = (torch.empty_like(targets, dtype=torch.float32) for _ in range(3))
    if tokens := len(targets):
        given = (parts, parts.stride(0), parts.stride(1), len(parts), targets.contiguous())
        grid = (triton.cdiv(tokens, MERGE_BLOCK),)
        with _device_of(parts):
            _merge[grid](*given, logprobs, lse, entropies, tokens, vocab_size, BLOCK=MERGE_BLOCK, num_warps=WARPS)
    return logprobs, lse, entropies


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
    if not gradient.numel():
        return
    lanes, depth, warps = tile_of(logits.dtype, gradient.shape[1])
    rows = (logits, logits.stride(0), gradient, gradient.stride(0), targets.contiguous(), lse, entropies)
    upstreams = (upstream.contiguous(), upstream if upstream_entropy is None else upstream_entropy.contiguous())
    numbers = (shard.columns, gradient.shape[1], shard.first, 1.0 / temperature)
    with _device_of(logits):
        _write_gradient[(len(targets),)](
            *rows, *upstreams, *numbers, ENTROPY=upstream_entropy is not None, TILE=lanes * depth, num_warps=warps
        )


def tile_of(dtype: torch.dtype, columns: int) -> tuple[int, int, int]:
    """(lanes, depth, warps) of a tile: 64 bytes a thread in 16-byte loads, less where the row is shorter than a tile."""
    per_warp = 32 * 16 // dtype.itemsize
    lanes = min(WARPS * per_warp, triton.next_power_of_2(max(columns, 1)))
    depth = min(DEPTH, triton.next_power_of_2(triton.cdiv(max(columns, 1), lanes)))
    return lanes, depth, max(1, lanes // per_warp)


def _device_of(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device, which need not be the tensor's."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


# Not specialised: numbers and pointers that differ between calls and ranks and are not in the address of a vector load.
# The strides and widths are, so that rows at multiples of 16 bytes get 16-byte accesses.
@triton.jit(do_not_specialize=["targets", "out", "out_stride", "first"])
def _row_statistics(
    logits: tl.tensor,
    row_stride: tl.tensor,
    targets: tl.tensor,
    out: tl.tensor,
    out_stride: tl.tensor,
    columns: tl.tensor,
    first: tl.tensor,
    inverse_temperature: tl.tensor,
    MOMENT: tl.constexpr,
    LANES: tl.constexpr,
    DEPTH: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    start_of_row = logits + row * row_stride
    offsets = tl.arange(0, DEPTH)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    m = tl.full((LANES,), _MOST_NEGATIVE, tl.float32)
    d = tl.zeros((LANES,), tl.float32)
    s = tl.zeros((LANES,), tl.float32)
    # Rows of ignored targets end before they begin, with the statistics of a row without finite logits.
    end = tl.where(target == _IGNORED, 0, columns)
    whole = end // (LANES * DEPTH) * (LANES * DEPTH)
    for start in range(0, whole, LANES * DEPTH):
        x = tl.load(start_of_row + start + offsets).to(tl.float32)
        m, d, s = _add_tile(m, d, s, x, inverse_temperature, MOMENT)
    if whole < end:
        at = whole + offsets
        x = tl.load(start_of_row + at, mask=at < end, other=-float("inf")).to(tl.float32)
        m, d, s = _add_tile(m, d, s, x, inverse_temperature, MOMENT)

    largest = tl.max(m, 0)
    shift = m - largest
    scale = tl.exp2(shift * (inverse_temperature * _LOG2E))
    total = tl.sum(d * scale, 0)
    local = target - first
    owned = (local >= 0) & (local < columns)
    x_target = tl.load(start_of_row + local, mask=owned, other=0.0).to(tl.float32)
    out += row
    scaled = tl.maximum(largest * inverse_temperature, _MOST_NEGATIVE)
    tl.store(out, tl.where(largest > _MOST_NEGATIVE, scaled, _MOST_NEGATIVE))
    tl.store(out + out_stride, total)
    moment = 0.0
    if MOMENT:
        # A column without finite logits has scale 0 and an enormous shift: kept out as 0 x -inf.
        moment = tl.sum(tl.where(scale > 0, scale * (s + shift * d), 0.0), 0) * inverse_temperature
    tl.store(out + 2 * out_stride, moment)
    tl.store(out + 3 * out_stride, x_target * inverse_temperature)


@triton.jit
def _add_tile(
    m: tl.tensor, d: tl.tensor, s: tl.tensor, x: tl.tensor, inverse_temperature: tl.tensor, MOMENT: tl.constexpr
) -> tuple:
    """Statistics of the columns with one more tile. m and s are in units of the logits, before the temperature.

    Differences of logits are exact where they matter, so a common shift of all logits costs no accuracy. A NaN logit may
    escape m, not d.
    """
    largest = tl.maximum(m, tl.max(x, 0))
    scale = tl.exp2((m - largest) * (inverse_temperature * _LOG2E))
    z = x - largest[None, :]
    e = tl.exp2(z * (inverse_temperature * _LOG2E))
    if MOMENT:
        s = tl.where(scale > 0, scale * (s + (m - largest) * d), 0.0)
        # The bound makes 0 x -inf, an excluded token, a 0.
        s += tl.sum(tl.maximum(z, _MOST_NEGATIVE) * e, 0)
    return largest, d * scale + tl.sum(e, 0), s


@triton.jit(do_not_specialize=["parts_stride", "numbers_stride", "ranks", "tokens", "vocab_size"])
def _merge(
    parts: tl.tensor,
    parts_stride: tl.tensor,
    numbers_stride: tl.tensor,
    ranks: tl.tensor,
    targets: tl.tensor,
    logprobs: tl.tensor,
    lse: tl.tensor,
    entropies: tl.tensor,
    tokens: tl.tensor,
    vocab_size: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < tokens
    target = tl.load(targets + at, mask=inside, other=_IGNORED)
    largest = tl.full((BLOCK,), _MOST_NEGATIVE, tl.float32)
    for rank in range(ranks):
        largest = tl.maximum(largest, tl.load(parts + rank * parts_stride + at, mask=inside, other=0.0))
    total = tl.zeros((BLOCK,), tl.float32)
    moment = tl.zeros((BLOCK,), tl.float32)
    x_target = tl.zeros((BLOCK,), tl.float32)
    for rank in range(ranks):
        part = parts + rank * parts_stride + at
        d = tl.load(part + numbers_stride, mask=inside, other=1.0)
        s = tl.load(part + 2 * numbers_stride, mask=inside, other=0.0)
        x_target += tl.load(part + 3 * numbers_stride, mask=inside, other=0.0)
        shift = tl.maximum(tl.load(part, mask=inside, other=0.0) - largest, _MOST_NEGATIVE)
        scale = tl.exp2(shift * _LOG2E)
        total += d * scale
        # A part of padding alone has scale 0 and an enormous shift: their product is kept out of the sum.
        moment += tl.where(scale > 0, scale * (s + shift * d), 0.0)
    ignored = target == _IGNORED
    # Ignored rows were not read and have no sum; 1 keeps what is stored for them finite.
    total = tl.where(ignored, 1.0, total)
    log_total = tl.log(total)
    # The maximum goes first: two large numbers cancel exactly before the small one is subtracted.
    logprob = tl.where((target < 0) | (target >= vocab_size), float("nan"), x_target - largest - log_total)
    tl.store(logprobs + at, tl.where(ignored, 0.0, logprob), mask=inside)
    tl.store(lse + at, tl.where(ignored, 0.0, largest + log_total), mask=inside)
    tl.store(entropies + at, tl.where(ignored, 0.0, log_total - moment / total), mask=inside)


@triton.jit(do_not_specialize=["targets", "lse", "entropies", "upstream", "upstream_entropy", "first"])
def _write_gradient(
    logits: tl.tensor,
    row_stride: tl.tensor,
    gradient: tl.tensor,
    gradient_stride: tl.tensor,
    targets: tl.tensor,
    lse: tl.tensor,
    entropies: tl.tensor,
    upstream: tl.tensor,
    upstream_entropy: tl.tensor,
    columns: tl.tensor,
    width: tl.tensor,
    first: tl.tensor,
    inverse_temperature: tl.tensor,
    ENTROPY: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    g = tl.load(upstream + row)
    g_entropy = tl.load(upstream_entropy + row) if ENTROPY else 0.0
    h = tl.load(entropies + row) if ENTROPY else 0.0
    log_sum = tl.load(lse + row)
    idle = (target == _IGNORED) | ((g == 0.0) & (g_entropy == 0.0))
    # Rows without gradient end before they begin: what follows a row's end is written as zeros and not read.
    end = tl.where(idle, 0, columns)
    whole = end // TILE * TILE
    local = target - first
    # In 32 bits, relative to the tile: one comparison with a constant for each logit, and no registers held for it.
    local = tl.where((local >= 0) & (local < columns), local.to(tl.int32), -1)
    g *= inverse_temperature
    g_entropy *= inverse_temperature
    logits += row * row_stride
    gradient += row * gradient_stride
    lanes = tl.arange(0, TILE)
    for start in range(0, whole, TILE):
        at = start + lanes
        x = tl.load(logits + at).to(tl.float32) * inverse_temperature
        tl.store(gradient + at, _gradient(x - log_sum, lanes == local - start, g, g_entropy, h, ENTROPY))
    for start in range(whole, width, TILE):
        at = start + lanes
        x = tl.load(logits + at, mask=at < end, other=0.0).to(tl.float32) * inverse_temperature
        dx = _gradient(x - log_sum, lanes == local - start, g, g_entropy, h, ENTROPY)
        tl.store(gradient + at, tl.where(at < end, dx, 0.0), mask=at < width)


@triton.jit
def _gradient(
    log_p: tl.tensor, is_target: tl.tensor, g: tl.tensor, g_entropy: tl.tensor, h: tl.tensor, ENTROPY: tl.constexpr
) -> tl.tensor:
    p = tl.exp2(log_p * _LOG2E)
    weight = g
    if ENTROPY:
        # The bound, far below where p is 0, makes 0 x -inf, an excluded token, a 0.
        weight = g + g_entropy * (tl.maximum(log_p, -1000.0) + h)
    return tl.where(is_target, g, 0.0) - p * weight
