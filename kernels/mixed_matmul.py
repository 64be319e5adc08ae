"""Matrix products between the weights' precision and float32, without a float32 copy of a whole operand.

On CUDA the tensor cores multiply bfloat16 or float16 and hand out their float32 accumulators as they are; CPU products
have one dtype, so there the weight is converted a block of rows at a time.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

BLOCK_ELEMENTS = 1 << 20
"""Weights converted at a time on CPU: 4 MiB of float32."""


def project(hidden: Tensor, weight: Tensor, *, out: Tensor) -> None:
    """out [t, V'] = hidden [t, H] @ weight.T, hidden and weight [V', H] of one dtype, out of that dtype or float32."""
    if weight.dtype == out.dtype:
        torch.mm(hidden, weight.t(), out=out)
    elif out.device.type == "cuda":
        torch.ops.aten.mm.dtype_out(hidden, weight.t(), out.dtype, out=out)
    else:
        wide = hidden.float()
        for rows in _blocks(weight):
            torch.mm(wide, weight[rows].float().t(), out=out[:, rows])


def is_taken_as_it_is(gradient: Tensor, weight: Tensor) -> bool:
    """Whether the two functions below multiply this gradient without a copy of it in another precision."""
    return gradient.dtype == weight.dtype and (gradient.device.type == "cuda" or gradient.dtype == torch.float32)


def project_back(gradient: Tensor, weight: Tensor, *, out: Tensor) -> None:
    """out float32 [t, H] = gradient [t, V'] @ weight [V', H].

    A float32 gradient beside a narrower weight is rounded to the weight's dtype on CUDA, as the tensor cores demand; on
    CPU nothing is rounded.
    """
    if gradient.dtype == weight.dtype == out.dtype:
        torch.mm(gradient, weight, out=out)
    elif out.device.type == "cuda":
        torch.ops.aten.mm.dtype_out(gradient.to(weight.dtype), weight, out.dtype, out=out)
    else:
        out.zero_()
        for rows in _blocks(weight):
            out.addmm_(gradient[:, rows].float(), weight[rows].float())


def add_weight_gradient(total: Tensor, gradient: Tensor, hidden: Tensor) -> None:
    """total float32 [V', H] += gradient.T [V', t] @ hidden [t, H]; roundings as in `project_back`."""
    if gradient.dtype == hidden.dtype == total.dtype:
        total.addmm_(gradient.t(), hidden)
    elif total.device.type == "cuda":
        rounded = gradient.to(hidden.dtype).t()
        torch.ops.aten.addmm.dtype_out(total, rounded, hidden, total.dtype, out=total)
    else:
        wide = hidden.float()
        for rows in _blocks(total):
            total[rows].addmm_(gradient[:, rows].float().t(), wide)


def _blocks(matrix: Tensor) -> Iterator[slice]:
    """Slices of rows of at most `BLOCK_ELEMENTS` elements."""
    rows = max(1, BLOCK_ELEMENTS // max(1, matrix.shape[1]))
    return (slice(start, start + rows) for start in range(0, matrix.shape[0], rows))
