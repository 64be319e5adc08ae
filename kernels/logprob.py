"""Log-probs and entropies of tokens over a vocabulary spread over tensor-parallel ranks: what everything else calls.

The policy's passes, the reference's and the embedded engine's log-probs all come from here, so that trainer and engine
differ by nothing but their logits. `vocab_parallel_logprob` takes logits; `linear_logprob` takes the hidden states and
the output layer's weight, so that it also decides how many logits exist at a time.

Letters: t = tokens, H = hidden size, V = vocabulary, TP = tensor-parallel size. All arithmetic is float32. One collective
per call (an all-gather of 16 bytes a token a rank) whose parts every rank merges in the same order: results are bitwise
equal on all ranks of the group.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from m2po_megatron.kernels.backends import IGNORED, choose_backend, shard_of
from m2po_megatron.kernels.linear_logprob import LinearLogprob, LinearOptions
from m2po_megatron.kernels.logprob_function import LogprobOfLogits

EntropyMode = Literal["none", "value", "grad"]
BackendName = Literal["auto", "triton", "native", "torch"]


def vocab_parallel_logprob(
    logits: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    entropy: EntropyMode = "none",
    tp_group: dist.ProcessGroup | None = None,
    vocab_size: int | None = None,
    inplace_backward: bool = False,
    backend: BackendName = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Log-softmax(logits / temperature) at the targets, and the entropy of that distribution.

    Args:
        logits: [..., V/TP], any float dtype: this rank's part of the vocabulary, parts in rank order.
        targets: int64 [...]: ids in the whole vocabulary; -100 = ignored (log-prob, entropy and gradient 0).
        temperature: 1e-30 to 1e30; within it no reciprocal leaves float32.
        entropy: "none" returns None for it, "value" computes it without gradient, "grad" with.
        tp_group: the ranks that hold the other parts; None = this rank holds all.
        vocab_size: the true V where the parts carry padding (columns from V on are ignored); default: all columns.
        inplace_backward: the backward pass overwrites `logits` with their gradient instead of allocating another tensor
            of that size; a second backward pass then raises RuntimeError. Only for logits that nothing else reads.
        backend: "auto" takes the fastest that runs here (kernels/backends.py).

    Returns:
        (log-probs float32 [...], entropies float32 [...] or None)

    Raises:
        ValueError: shapes, dtypes, temperature, vocabulary size or backend that cannot be; on CPU also a target outside
            the vocabulary (elsewhere, where looking would stall the device, its log-prob is NaN).
    """
    if not logits.is_floating_point() or logits.dim() == 0:
        raise ValueError(f"logits must be [..., V/TP] of a float dtype, not {logits.dtype} {tuple(logits.shape)}")
    parts = dist.get_world_size(tp_group) if tp_group is not None else 1
    columns = logits.shape[-1]
    size = columns * parts if vocab_size is None else vocab_size
    _check_vocabulary(columns, parts, size)
    _check_targets(targets, logits, logits.shape[:-1], "logits", size)
    if parts > 1 and columns == vocab_size:
        raise ValueError(
            f"logits have all {vocab_size} columns of the vocabulary: pass this rank's part, not gathered ones (a part that "
            "holds everything beside parts of padding alone is not taken here; linear_logprob takes its weight)"
        )
    _check_options(temperature, entropy)
    flat = logits.reshape(-1, columns)
    if flat.stride(-1) != 1:
        flat = flat.contiguous()
    if inplace_backward and len(flat) > 1 and flat.stride(0) < columns:
        raise ValueError("inplace_backward: the rows of these logits share memory (an expanded or overlapping view)")
    logprobs, entropies = LogprobOfLogits.apply(
        flat,
        targets.reshape(-1),
        float(temperature),
        entropy,
        tp_group,
        shard_of(columns, size, tp_group),
        inplace_backward,
        choose_backend(backend, logits),
    )
    return logprobs.view(targets.shape), None if entropy == "none" else entropies.view(targets.shape)


def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    mode: Literal["store", "recompute"] = "store",
    temperature: float = 1.0,
    entropy: EntropyMode = "none",
    tp_group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
    vocab_size: int | None = None,
    logits_dtype: torch.dtype = torch.float32,
    chunk_tokens: int = 2048,
    backend: BackendName = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Log-softmax(hidden @ weight.T / temperature) at the targets, without logits in the caller's hands.

    "store" keeps this rank's logits [t, V/TP] for the backward pass, which turns them into their gradient in place: three
    matrix products, the fastest while they fit. "recompute" makes them `chunk_tokens` rows at a time in both passes: four
    products, and no memory for logits that grows with t. Without gradients both work in chunks.

    The gradient of `weight` is added to `weight.main_grad` where that exists (Megatron's float32 buffer), marked as
    Megatron marks it (`grad_added_to_main_grad`); else it is returned in the weight's dtype. The gradient of `hidden` is
    summed over the group exactly once: reduce-scattered under sequence parallelism, all-reduced otherwise. So `hidden`
    must not pass through another operation that reduces its gradient (Megatron's copy-to or gather-from region).

    Args:
        hidden: [t, H], any float dtype; under `sequence_parallel` [t/TP, H], this rank's tokens.
        weight: [V/TP, H] in hidden's dtype: this rank's rows of the output layer, parts in rank order.
        targets: int64 [t]: ids in the whole vocabulary, all t tokens on every rank; -100 = ignored.
        mode: see above.
        logits_dtype: of the logits "store" keeps, and of those either mode computes: float32 (accumulated and kept so), or
            hidden's dtype, which halves the memory of "store" and rounds the logits.
        chunk_tokens: rows of logits that exist at a time, where they are not stored.
        (the others, the results and the errors as in `vocab_parallel_logprob`; "store" goes backward once)
    """
    _check_linear(hidden, weight, mode, logits_dtype, chunk_tokens)
    parts = dist.get_world_size(tp_group) if tp_group is not None else 1
    columns = weight.shape[0]
    size = columns * parts if vocab_size is None else vocab_size
    _check_vocabulary(columns, parts, size)
    tokens = hidden.shape[0] * (parts if sequence_parallel else 1)
    _check_targets(targets, hidden, torch.Size([tokens]), "hidden", size)
    _check_options(temperature, entropy)
    options = LinearOptions(
        store=mode == "store",
        temperature=float(temperature),
        entropy=entropy,
        group=tp_group if parts > 1 else None,
        sequence_parallel=sequence_parallel and parts > 1,
        shard=shard_of(columns, size, tp_group),
        logits_dtype=logits_dtype,
        chunk_tokens=chunk_tokens,
        backend=choose_backend(backend, hidden.new_empty(0, dtype=logits_dtype)),
    )
    needs_gradient = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    logprobs, entropies = LinearLogprob.apply(hidden, weight, targets, options, needs_gradient)
    return logprobs, None if entropy == "none" else entropies


def _check_options(temperature: float, entropy: str) -> None:
    if entropy not in ("none", "value", "grad"):
        raise ValueError(f"entropy must be 'none', 'value' or 'grad', not {entropy!r}")
    if not (isinstance(temperature, int | float) and 1e-30 <= temperature <= 1e30):
        raise ValueError(f"temperature must be a positive number from 1e-30 to 1e30, not {temperature!r}")


def _check_targets(targets: Tensor, of: Tensor, shape: torch.Size, what: str, vocab_size: int) -> None:
    if targets.device != of.device:  # a kernel would take the address as one of its own device
        raise ValueError(f"targets are on {targets.device}, but {what} on {of.device}")
    if targets.dtype != torch.int64 or targets.shape != shape:
        raise ValueError(
            f"targets must be int64 {tuple(shape)} to go with {what}, not {targets.dtype} {tuple(targets.shape)}"
        )
    if targets.device.type == "cpu" and targets.numel():
        bad = ((targets < 0) | (targets >= vocab_size)) & (targets != IGNORED)
        if bool(bad.any()):
            raise ValueError(f"target {int(targets[bad][0])} is outside the vocabulary of {vocab_size}")


def _check_vocabulary(columns: int, parts: int, vocab_size: int) -> None:
    if not 0 < vocab_size <= columns * parts:
        raise ValueError(f"{parts} parts of {columns} columns cannot hold a vocabulary of {vocab_size}")


def _check_linear(hidden: Tensor, weight: Tensor, mode: str, logits_dtype: torch.dtype, chunk_tokens: int) -> None:
    if mode not in ("store", "recompute"):
        raise ValueError(f"mode must be 'store' or 'recompute', not {mode!r}")
    if hidden.device != weight.device:
        raise ValueError(f"hidden is on {hidden.device}, but weight on {weight.device}")
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(f"hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)} must be [t, H] and [V/TP, H]")
    if not hidden.is_floating_point() or hidden.dtype != weight.dtype:
        raise ValueError(f"hidden ({hidden.dtype}) and weight ({weight.dtype}) must share a float dtype")
    if logits_dtype not in (torch.float32, hidden.dtype):
        raise ValueError(f"logits_dtype must be torch.float32 or hidden's {hidden.dtype}, not {logits_dtype}")
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is not None and (main_grad.dtype != torch.float32 or main_grad.shape != weight.shape):
        raise ValueError(
            f"weight.main_grad must be float32 (Megatron's grad_reduce_in_fp32) {tuple(weight.shape)}, not "
            f"{main_grad.dtype} {tuple(main_grad.shape)}"
        )
    if not isinstance(chunk_tokens, int) or chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be a whole number of at least 1, not {chunk_tokens}")
