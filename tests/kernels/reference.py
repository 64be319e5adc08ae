"""The float64 reference that every log-prob kernel is compared with, its inputs, and the allowed errors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

IGNORED = -100


@dataclass(frozen=True)
class Tolerance:
    """Allowed errors: absolute for log-probs and entropies; |gradient error| <= absolute + relative * |gradient|."""

    logprob: float
    entropy: float
    gradient: float
    relative: float


TOLERANCES = {
    # Log-probs and entropies are float32 whatever the logits are, and the logits' own rounding is part of the input. A
    # gradient is rounded once, to the logits' dtype: half a unit in the last place, and float16's smallest number.
    torch.float32: Tolerance(4e-6, 8e-6, 2e-6, 1e-5),
    torch.bfloat16: Tolerance(4e-6, 8e-6, 2e-6, 2**-8),
    torch.float16: Tolerance(4e-6, 8e-6, 2e-6, 2**-10),
}


@dataclass
class Case:
    """Logits with padding columns that would dominate everything if they counted."""

    logits: Tensor  # [..., columns]
    targets: Tensor  # int64 [...]
    vocab_size: int
    temperature: float = 1.0
    upstream: Tensor | None = None  # [...], random: all ones would hide rows exchanged
    upstream_entropy: Tensor | None = None


def make_case(
    shape: tuple[int, ...],
    vocab_size: int,
    columns: int | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    temperature: float = 1.0,
    scale: float = 4.0,
    shift: float = 0.0,
    ignored: float = 0.2,
    seed: int = 0,
) -> Case:
    g = torch.Generator().manual_seed(seed)
    columns = columns or vocab_size
    logits = (torch.randn(*shape, columns, generator=g) * scale + shift).to(dtype)
    logits[..., vocab_size:] = 1e4
    targets = torch.randint(0, vocab_size, shape, generator=g)
    targets[torch.rand(shape, generator=g) < ignored] = IGNORED
    upstream, upstream_entropy = torch.randn(shape, generator=g), torch.randn(shape, generator=g)
    return Case(logits, targets, vocab_size, temperature, upstream, upstream_entropy)


@dataclass
class Expected:
    logprobs: Tensor
    entropies: Tensor
    gradient: Tensor  # of sum(upstream * logprobs + upstream_entropy * entropies), by the logits


def expected_of(case: Case, *, entropy_gradient: bool = True) -> Expected:
    """float64, from the very logits the kernel reads."""
    logits = case.logits.detach().double().requires_grad_()
    logprobs, entropies = reference_logprob(logits, case.targets, case.temperature, case.vocab_size)
    total = (logprobs * case.upstream).sum()
    if entropy_gradient:
        total = total + (entropies * case.upstream_entropy).sum()
    total.backward()
    return Expected(logprobs.detach(), entropies.detach(), logits.grad)


def reference_logprob(logits: Tensor, targets: Tensor, temperature: float, vocab_size: int) -> tuple[Tensor, Tensor]:
    """(log-probs, entropies) of float64 logits, differentiable, 0 where ignored; excluded tokens (-inf) count as 0."""
    log_p = torch.log_softmax(logits[..., :vocab_size] / temperature, -1)
    ignored = targets == IGNORED
    logprobs = log_p.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    # The surprise of an excluded token is not 0 x inf: it is left out before it is multiplied, in the gradient too.
    finite = log_p.masked_fill(torch.isneginf(log_p), 0.0)
    entropies = -(finite.exp().masked_fill(torch.isneginf(log_p), 0.0) * finite).sum(-1)
    return logprobs.masked_fill(ignored, 0.0), entropies.masked_fill(ignored, 0.0)


def assert_close(actual: Tensor, expected: Tensor, absolute: float, relative: float = 0.0) -> None:
    assert actual.shape == expected.shape
    error = (actual.detach().double() - expected.detach().double()).abs()
    allowed = absolute + relative * expected.detach().double().abs()
    assert bool((error <= allowed).all()), f"error {float(error.max()):.3g}, {float((error / allowed).max()):.3g} times allowed"


def rounding_of(case: Case) -> float:
    """Two of float32's units in the last place of the largest logit over the temperature: a log-prob is the difference of
    two such numbers, each of them rounded when it is multiplied by a rounded 1/T."""
    x = case.logits[..., : case.vocab_size].double()
    x = x[x > -1e30].abs()  # neither excluded tokens nor those as low as floats go
    return 0.0 if x.numel() == 0 else float(x.max()) / case.temperature * 2.0**-22


def assert_agrees(logprobs: Tensor, entropies: Tensor | None, gradient: Tensor, case: Case, expected: Expected) -> None:
    """Values, gradients, and the exact zeros: padding columns and ignored rows."""
    tolerance, rounding = TOLERANCES[case.logits.dtype], rounding_of(case)
    assert_close(logprobs, expected.logprobs, tolerance.logprob + rounding)
    if entropies is not None:
        assert_close(entropies, expected.entropies, tolerance.entropy + rounding)
    absolute = (tolerance.gradient + rounding) / case.temperature
    assert_close(gradient, expected.gradient, absolute, tolerance.relative + rounding)
    assert float(gradient[..., case.vocab_size :].float().abs().sum()) == 0.0
    assert float(gradient[case.targets == IGNORED].float().abs().sum()) == 0.0
