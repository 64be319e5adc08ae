"""The methods that bench_logprob.py compares, ours and other projects', as one kind of function; data and checks for them."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from m2po_megatron.kernels.logprob import linear_logprob, vocab_parallel_logprob

Method = Callable[[Tensor, Tensor, bool], tuple[Tensor, Tensor | None]]
"""(logits [t, V], targets [t], with entropy) -> (log-probs [t], entropies [t] or None)."""


@dataclass(frozen=True)
class Problem:
    logits: Tensor
    targets: Tensor
    upstream: Tensor
    upstream_entropy: Tensor
    """Gradients of the log-probs and of the entropies, float32 [t]."""


@dataclass(frozen=True)
class Results:
    logprobs: Tensor
    entropies: Tensor | None
    gradient: Tensor


def make_problem(tokens: int, columns: int, dtype: torch.dtype, device: torch.device) -> Problem:
    """Logits [tokens, columns] of standard deviation 2, made without a second tensor of their size."""
    generator = torch.Generator(device).manual_seed(tokens + columns)
    return Problem(
        torch.empty(tokens, columns, dtype=dtype, device=device).normal_(std=2.0, generator=generator),
        torch.randint(columns, (tokens,), generator=generator, device=device),
        torch.randn(tokens, generator=generator, device=device),
        torch.randn(tokens, generator=generator, device=device),
    )


def forward_backward(method: Method, problem: Problem, logits: Tensor, with_entropy: bool) -> Results:
    """One pass each way over `logits` (a leaf). The gradient is caught as it leaves the function: nothing copies it."""
    logprobs, entropies = method(logits, problem.targets, with_entropy)
    if entropies is None:
        (gradient,) = torch.autograd.grad([logprobs], [logits], [problem.upstream])
    else:
        upstream = [problem.upstream, problem.upstream_entropy]
        (gradient,) = torch.autograd.grad([logprobs, entropies], [logits], upstream)
    return Results(logprobs.detach(), None if entropies is None else entropies.detach(), gradient)


def log_softmax_gather(logits: Tensor, targets: Tensor, with_entropy: bool) -> tuple[Tensor, Tensor | None]:
    log_p = torch.log_softmax(logits, -1, dtype=torch.float32)
    entropies = -(log_p.exp() * log_p).sum(-1) if with_entropy else None
    return log_p.gather(-1, targets[:, None])[:, 0], entropies


def megatron_cross_entropy(logits: Tensor, targets: Tensor, with_entropy: bool) -> tuple[Tensor, None]:
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    return -vocab_parallel_cross_entropy(logits, targets), None


def ours(
    logits: Tensor, targets: Tensor, with_entropy: bool, *, backend: Any = "auto", inplace: bool = True
) -> tuple[Tensor, Tensor | None]:
    return vocab_parallel_logprob(
        logits,
        targets,
        entropy="grad" if with_entropy else "none",
        inplace_backward=inplace,
        backend=backend,
    )


def flash_attention() -> Method:
    loss = importlib.import_module("flash_attn.ops.triton.cross_entropy").cross_entropy_loss
    return lambda logits, targets, _: (-loss(logits, targets, inplace_backward=True)[0], None)


def liger() -> Method:
    loss = importlib.import_module("liger_kernel.transformers.functional").liger_cross_entropy
    return lambda logits, targets, _: (-loss(logits, targets, reduction="none"), None)


def transformer_engine() -> Method:
    loss = importlib.import_module("transformer_engine.pytorch.cross_entropy").parallel_cross_entropy
    return lambda logits, targets, _: (-loss(logits[None], targets[None])[0], None)


FOREIGN: dict[str, tuple[str, Callable[[], Method]]] = {
    "flash-attn in place": ("flash_attn", flash_attention),
    "Liger": ("liger_kernel", liger),
    "TransformerEngine": ("transformer_engine", transformer_engine),
}
"""Name, top-level package, and what loads it. None of them has an entropy."""


def gpu_methods() -> dict[str, tuple[Method, bool]]:
    """Name -> (method, has an entropy); a printed line for each that is not there."""
    methods: dict[str, tuple[Method, bool]] = {
        "ours in place": (ours, True),
        "ours": (functools.partial(ours, inplace=False), True),
        "torch": (log_softmax_gather, True),
        "torch.compile": (torch.compile(log_softmax_gather, dynamic=False), True),
    }
    for name, (package, load) in FOREIGN.items():
        if importlib.util.find_spec(package) is None:
            print(f"{name}: not installed")
            continue
        try:
            methods[name] = (load(), False)
        except Exception as error:  # noqa: BLE001 - whatever another project's import raises, the others are measured
            print(f"{name}: cannot be imported, {first_line(error)}")
    return methods


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def linear_problem(
    device: torch.device, tokens: int, hidden_size: int, columns: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """bfloat16 hidden states and weight with gradients, targets, upstream gradients; logits of about unit size."""
    generator = torch.Generator(device).manual_seed(tokens)
    hidden = torch.randn(tokens, hidden_size, generator=generator, device=device)
    weight = torch.randn(columns, hidden_size, generator=generator, device=device) / hidden_size**0.5
    targets = torch.randint(columns, (tokens,), generator=generator, device=device)
    upstream = torch.randn(tokens, generator=generator, device=device)
    return hidden.bfloat16().requires_grad_(), weight.bfloat16().requires_grad_(), targets, upstream


def fail_if(wrong: bool, what: str) -> None:
    if wrong:
        raise SystemExit(f"wrong result, nothing is timed: {what}")


def check_logits(device: torch.device, tokens: int, columns: int) -> None:
    """bfloat16 logits, in place, against float32 torch on the same numbers."""
    problem = make_problem(tokens, columns, torch.bfloat16, device)
    for with_entropy in (False, True):
        expected = forward_backward(log_softmax_gather, problem, problem.logits.float().requires_grad_(), with_entropy)
        found = forward_backward(ours, problem, problem.logits.clone().requires_grad_(), with_entropy)
        # Half a unit in the last place of bfloat16, twice over, and what float32 itself leaves open.
        excess = (found.gradient.float() - expected.gradient).abs() - expected.gradient.abs() / 256
        where = f"bfloat16 logits [{tokens}, {columns}], entropy {with_entropy}"
        fail_if(not float(excess.max()) < 5e-5, f"gradient of {where} is off by {float(excess.max()):.1e}")
        for mine, reference in ((found.logprobs, expected.logprobs), (found.entropies, expected.entropies)):
            if mine is not None and reference is not None:
                error = float((mine - reference).abs().max())
                fail_if(not error < 1e-4, f"{where} is off by {error:.1e}")


def check_linear(device: torch.device, tokens: int, hidden_size: int, columns: int) -> None:
    hidden, weight, targets, upstream = linear_problem(device, tokens, hidden_size, columns)
    wide = [hidden.detach().float().requires_grad_(), weight.detach().float().requires_grad_()]
    expected = log_softmax_gather(wide[0] @ wide[1].T, targets, False)[0]
    expected_gradients = torch.autograd.grad([expected], wide, [upstream])
    for mode in ("store", "recompute"):
        found, _ = linear_logprob(hidden, weight, targets, mode=mode, chunk_tokens=max(1, tokens // 2))  # type: ignore[arg-type]
        gradients = torch.autograd.grad([found], [hidden, weight], [upstream])
        error = float((found - expected).detach().abs().max())
        fail_if(not error < 1e-3, f"linear_logprob {mode}: log-probs are off by {error:.1e}")
        for name, mine, reference in zip(("hidden", "weight"), gradients, expected_gradients, strict=True):
            error = float((mine.float() - reference).norm() / reference.norm())
            fail_if(not error < 1e-2, f"linear_logprob {mode}: gradient of {name} is off by {error:.1e} of its norm")
