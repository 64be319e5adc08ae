"""Log-probs and entropies of tokens from vocabulary-parallel logits: the functions everything else calls.

The policy's passes, the reference's and the embedded engine's log-probs all come from here, so that trainer and engine
differ by nothing but their logits. Letters: t = tokens, V = vocabulary, TP = tensor-parallel size.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from m2po_megatron.kernels.logprob_torch import IGNORED, TorchLogprob


def vocab_parallel_logprob(
    logits: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    entropy: Literal["none", "value", "grad"] = "none",
    tp_group: dist.ProcessGroup | None = None,
    vocab_size: int | None = None,
    inplace_backward: bool = False,
    backend: Literal["auto", "torch"] = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Log-softmax(logits / temperature) at the targets, and the entropy of that distribution.

    All arithmetic is float32. One collective per call (an all-gather of 16 bytes a token), and none in the backward pass.
    Every rank of the group gets bitwise the same result.

    Args:
        logits: [..., V/TP], any float dtype: this rank's part of the vocabulary, parts in rank order.
        targets: int64 [...]: ids in the whole vocabulary; -100 = ignored.
        temperature: > 0.
        entropy: "none" returns None for it, "value" computes it without gradient, "grad" with.
        tp_group: the ranks that hold the other parts; None = this rank holds all.
        vocab_size: the true V where the parts carry padding (columns from V on are ignored); default: all columns.
        inplace_backward: the backward pass overwrites `logits` with their gradient instead of allocating another tensor
            of that size; a second backward pass then raises RuntimeError. Only for logits that nothing else reads.
        backend: "auto" takes the best one available; today that is "torch" everywhere.

    Returns:
        (log-probs float32 [...], entropies float32 [...] or None)

    Raises:
        ValueError: shapes, dtypes, temperature, vocabulary size or backend that cannot be; on CPU also a target outside
            the vocabulary (elsewhere, where looking would stall the device, its log-prob is NaN).
    """
    parts = dist.get_world_size(tp_group) if tp_group is not None else 1
    size = logits.shape[-1] * parts if vocab_size is None else vocab_size
    _check(logits, targets, temperature, entropy, parts, size, backend)
    logprobs, entropies = TorchLogprob.apply(
        logits.reshape(-1, logits.shape[-1]), targets.reshape(-1), temperature, entropy, tp_group, size, inplace_backward
    )
    if entropy == "none":
        return logprobs.view(targets.shape), None
    return logprobs.view(targets.shape), entropies.view(targets.shape)


def _check(
    logits: Tensor, targets: Tensor, temperature: float, entropy: str, parts: int, vocab_size: int, backend: str
) -> None:
    if backend not in ("auto", "torch"):
        raise ValueError(f"backend {backend!r} of vocab_parallel_logprob is not known; known: auto, torch")
    if entropy not in ("none", "value", "grad"):
        raise ValueError(f"entropy must be 'none', 'value' or 'grad', not {entropy!r}")
    if not (temperature > 0 and math.isfinite(temperature)):
        raise ValueError(f"temperature must be a positive number, not {temperature}")
    if not logits.is_floating_point():
        raise ValueError(f"logits must be of a float dtype, not {logits.dtype}")
    if targets.dtype != torch.int64 or targets.shape != logits.shape[:-1]:
        raise ValueError(
            f"targets must be int64 {tuple(logits.shape[:-1])} for logits {tuple(logits.shape)}, "
            f"not {targets.dtype} {tuple(targets.shape)}"
        )
    columns = logits.shape[-1]
    if not 0 < vocab_size <= columns * parts:
        raise ValueError(f"{parts} parts of {columns} columns cannot hold a vocabulary of {vocab_size}")
    if parts > 1 and columns == vocab_size:
        raise ValueError(f"logits have all {vocab_size} columns of the vocabulary: pass this rank's part, not gathered ones")
    if targets.device.type == "cpu" and targets.numel():
        bad = ((targets < 0) | (targets >= vocab_size)) & (targets != IGNORED)
        if bool(bad.any()):
            raise ValueError(f"target {int(targets[bad][0])} is outside the vocabulary of {vocab_size}")
