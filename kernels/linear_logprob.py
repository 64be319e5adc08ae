"""From hidden states to log-probs: the output layer and the log-prob kernel as one differentiable function.

Why one function: between the output layer and the log-prob lie the largest tensors of the whole model, and only whoever
owns both sides may decide how many logits exist at a time, and in which precision. Contract: `linear_logprob` in
kernels/logprob.py. Letters: t = tokens, c = tokens of a chunk, H = hidden size, V' = this rank's rows of the weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from m2po_megatron.kernels.backends import Backend, Shard
from m2po_megatron.kernels.logprob_function import gather_statistics
from m2po_megatron.kernels.mixed_matmul import add_weight_gradient, is_taken_as_it_is, project, project_back


@dataclass(frozen=True)
class LinearOptions:
    """How to compute; see the arguments of `linear_logprob`."""

    store: bool
    temperature: float
    entropy: str
    group: dist.ProcessGroup | None  # None: this rank has the whole vocabulary
    sequence_parallel: bool
    shard: Shard
    logits_dtype: torch.dtype
    chunk_tokens: int
    backend: Backend


class LinearLogprob(torch.autograd.Function):
    """hidden [t, H] (or [t/W, H] under sequence parallelism), weight [V', H], targets [t] -> (log-probs, entropies) [t]."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, options: LinearOptions, needs_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        everyone = _gather_tokens(hidden, options)
        tokens, columns = len(targets), weight.shape[0]
        store = options.store and needs_gradient
        rows_at_once = tokens if store else min(tokens, options.chunk_tokens)
        logits = hidden.new_empty(rows_at_once, columns, dtype=options.logits_dtype)
        statistics = torch.empty(4, tokens, dtype=torch.float32, device=hidden.device)
        for rows in _chunks(tokens, rows_at_once):
            part = logits[: rows.stop - rows.start]
            project(everyone[rows], weight, out=part)
            options.backend.row_statistics(
                part, targets[rows], statistics[:, rows], options.shard, options.temperature, options.entropy != "none"
            )
        parts = gather_statistics(statistics, options.group)
        logprobs, lse, entropies = options.backend.merge(parts, targets, options.shard.vocab_size)
        if needs_gradient:
            ctx.save_for_backward(hidden, weight, targets, lse, entropies)
            ctx.logits = logits if store else None
            ctx.options, ctx.consumed = options, False
        if options.entropy != "grad":
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.consumed:
            raise RuntimeError("the stored logits became their gradient in an earlier backward pass; use mode='recompute'")
        options: LinearOptions = ctx.options
        hidden, weight, targets, lse, entropies = ctx.saved_tensors
        ctx.consumed = options.store
        everyone = _gather_tokens(hidden, options)
        upstream = gradients[0].contiguous()
        upstream_entropy = gradients[1].contiguous() if options.entropy == "grad" else None
        hidden_gradient = everyone.new_empty(everyone.shape, dtype=torch.float32) if ctx.needs_input_grad[0] else None
        weight_gradient = _accumulator(weight) if ctx.needs_input_grad[1] else None
        reduction = None
        for rows, logits in _logits_again(ctx.logits, everyone, weight, options):
            options.backend.write_gradient(
                logits,
                logits,
                targets[rows],
                lse[rows],
                entropies[rows],
                upstream[rows],
                None if upstream_entropy is None else upstream_entropy[rows],
                options.shard,
                options.temperature,
            )
            if hidden_gradient is not None:
                project_back(logits, weight, out=hidden_gradient[rows])
                if rows.stop == len(targets):  # on its way while the last weight gradient is computed
                    reduction = _start_reduction(hidden_gradient, options)
            if weight_gradient is not None:
                add_weight_gradient(weight_gradient, logits, everyone[rows])
        ctx.logits = None
        if reduction is not None:
            hidden_gradient = reduction.finish()
        given = None if hidden_gradient is None else hidden_gradient.to(hidden.dtype)
        return given, None if weight_gradient is None else _hand_over(weight, weight_gradient), None, None, None


def _chunks(tokens: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, tokens)) for start in range(0, tokens, max(1, size)))


def _logits_again(
    stored: Tensor | None, hidden: Tensor, weight: Tensor, options: LinearOptions
) -> Iterator[tuple[slice, Tensor]]:
    """Chunks of rows and their logits, which the caller overwrites: stored ones, or computed into one buffer."""
    tokens = len(hidden)
    if stored is not None:
        size = tokens if is_taken_as_it_is(stored, weight) else options.chunk_tokens  # else a chunk bounds the copy
        for rows in _chunks(tokens, size):
            yield rows, stored[rows]
        return
    size = min(tokens, options.chunk_tokens)
    buffer = hidden.new_empty(size, weight.shape[0], dtype=options.logits_dtype)
    for rows in _chunks(tokens, size):
        logits = buffer[: rows.stop - rows.start]
        project(hidden[rows], weight, out=logits)
        yield rows, logits


def _gather_tokens(hidden: Tensor, options: LinearOptions) -> Tensor:
    """Under sequence parallelism every rank's tokens, in rank order: [t, H]."""
    if not options.sequence_parallel:
        return hidden
    gathered = hidden.new_empty(hidden.shape[0] * dist.get_world_size(options.group), hidden.shape[1])
    dist.all_gather_into_tensor(gathered, hidden.contiguous(), group=options.group)
    return gathered


@dataclass
class _Reduction:
    """The sum of the hidden states' gradient over the ranks, under way."""

    result: Tensor
    work: dist.Work | None

    def finish(self) -> Tensor:
        if self.work is not None:
            self.work.wait()
        return self.result


def _start_reduction(gradient: Tensor, options: LinearOptions) -> _Reduction:
    if options.group is None:
        return _Reduction(gradient, None)
    if not options.sequence_parallel:
        return _Reduction(gradient, dist.all_reduce(gradient, group=options.group, async_op=True))
    own = gradient.new_empty(gradient.shape[0] // dist.get_world_size(options.group), gradient.shape[1])
    return _Reduction(own, dist.reduce_scatter_tensor(own, gradient, group=options.group, async_op=True))


def _accumulator(weight: Tensor) -> Tensor:
    """Where the weight's gradient is summed in float32: Megatron's own buffer, or a new one."""
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is not None:
        return main_grad
    return torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)


def _hand_over(weight: Tensor, gradient: Tensor) -> Tensor:
    """The gradient as autograd shall see it: real, or zeros where it is already in Megatron's buffer.

    Megatron's hook adds `grad` to the buffer unless the mark says that this was done, or the weight has another use (tied
    embeddings, `zero_out_wgrad`) whose gradient autograd adds to these zeros.
    """
    if getattr(weight, "main_grad", None) is None:
        return gradient.to(weight.dtype)
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    return torch.zeros_like(weight)
