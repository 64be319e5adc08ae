"""Losses and their gradients against the per-token formulas, written out one token at a time."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random

import pytest
import torch
from torch import Tensor

from m2po_megatron.algo.losses import MAX_LOG_RATIO, LossInputs, LossOutputs, LossSettings, policy_loss

NAMES = ("m2po", "grpo", "reinforce")
EPS = 0.2


def make_inputs(seed: int = 0, tokens: int = 60, dtype: torch.dtype = torch.float64) -> LossInputs:
    """Ratios on both sides of the clip range, advantages of both signs and zero, prompt tokens, masked tokens."""
    g = torch.Generator().manual_seed(seed)
    behaviour = -3 * torch.rand(tokens, generator=g, dtype=dtype) - 0.1
    shift = 0.5 * torch.randn(tokens, generator=g, dtype=dtype)
    advantages = torch.randn(tokens, generator=g, dtype=dtype)
    advantages[::9] = 0.0
    loss_mask = torch.rand(tokens, generator=g) < 0.7
    return LossInputs(
        logprobs=(behaviour + shift).requires_grad_(),
        behaviour_logprobs=behaviour,
        advantages=advantages,
        loss_mask=loss_mask,
        denominator=float(loss_mask.sum()) + 13,  # other ranks have tokens too
        trust_mask=loss_mask & (torch.rand(tokens, generator=g) < 0.8),
    )


def literal(name: str, inputs: LossInputs) -> tuple[float, list[float], dict[str, float]]:
    """(loss, d loss / d log-prob of each token, metrics) of the formulas in the docstring of algo/losses.py."""
    assert inputs.trust_mask is not None
    loss, gradient = 0.0, []
    sums = {"kl/behavior": 0.0, "ratio": 0.0, "clipped": 0.0}
    columns = (inputs.logprobs, inputs.behaviour_logprobs, inputs.advantages, inputs.loss_mask, inputs.trust_mask)
    for new, old, a, response, trusted in zip(*(c.tolist() for c in columns), strict=True):
        if not response:
            gradient.append(0.0)
            continue
        r = math.exp(new - old)
        sums["ratio"] += r
        sums["kl/behavior"] += r - 1 - (new - old)
        if name == "m2po":
            value, slope = (-r * a, -r * a) if trusted else (0.0, 0.0)
            stopped = not trusted
        elif name == "reinforce":
            value, slope, stopped = -r * a, -r * a, False
        else:
            clipped = min(max(r, 1 - EPS), 1 + EPS)
            stopped = (a > 0 and r > 1 + EPS) or (a < 0 and r < 1 - EPS)
            value, slope = -min(r * a, clipped * a), 0.0 if stopped else -r * a
        sums["clipped"] += stopped
        loss += value / inputs.denominator
        gradient.append(slope / inputs.denominator)
    return loss, gradient, sums


def run(name: str, inputs: LossInputs) -> tuple[LossOutputs, Tensor]:
    outputs = policy_loss(name)(inputs, LossSettings(policy_loss=name, eps_clip=EPS))
    (gradient,) = torch.autograd.grad(outputs.loss, inputs.logprobs)
    return outputs, gradient


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(3))
def test_value_gradient_and_sums_are_the_formulas(name: str, seed: int) -> None:
    inputs = make_inputs(seed)
    outputs, gradient = run(name, inputs)
    loss, slopes, sums = literal(name, inputs)
    assert outputs.loss.item() == pytest.approx(loss, rel=1e-12)
    assert gradient.tolist() == pytest.approx(slopes, rel=1e-12, abs=1e-18)
    assert {key: value.item() for key, value in outputs.metrics.items()} == pytest.approx(sums, rel=1e-12)
    if name != "reinforce":
        assert sums["clipped"] > 3  # the case is one in which the trust region works


@pytest.mark.parametrize("name", NAMES)
def test_the_parts_of_any_split_sum_to_the_whole(name: str) -> None:
    whole = make_inputs(1, tokens=50)
    outputs, gradient = run(name, whole)
    rng = random.Random(2)
    order = list(range(50))
    rng.shuffle(order)
    cuts = [0, *sorted(rng.sample(range(1, 50), 4)), 50]
    loss, sums, pieces = 0.0, dict.fromkeys(outputs.metrics, 0.0), torch.zeros_like(gradient)
    for start, end in itertools.pairwise(cuts):
        rows = torch.tensor(order[start:end])
        part = dataclasses.replace(
            whole,
            **{
                f.name: getattr(whole, f.name).detach()[rows]
                for f in dataclasses.fields(whole)
                if f.name != "denominator"
            },
        )
        part.logprobs.requires_grad_()
        out, piece = run(name, part)
        loss += out.loss.item()
        pieces[rows] = piece
        sums = {key: sums[key] + out.metrics[key].item() for key in sums}
    assert loss == pytest.approx(outputs.loss.item(), rel=1e-12)
    torch.testing.assert_close(pieces, gradient, rtol=1e-14, atol=0)
    assert sums == pytest.approx({key: value.item() for key, value in outputs.metrics.items()}, rel=1e-12)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_what_is_not_counted_may_be_anything(name: str, poison: float) -> None:
    """Non-finite log-probs at prompt tokens, and at masked tokens for m2po, change neither value nor gradient."""
    clean = make_inputs(3)
    assert clean.trust_mask is not None
    uncounted = ~clean.trust_mask if name == "m2po" else ~clean.loss_mask
    logprobs = clean.logprobs.detach().clone()
    logprobs[uncounted] = poison
    dirty = dataclasses.replace(clean, logprobs=logprobs.requires_grad_())
    outputs, gradient = run(name, dirty)
    expected, slopes = run(name, clean)
    assert outputs.loss.item() == expected.loss.item()
    assert gradient.tolist() == slopes.tolist()
    assert all(value.isfinite() for value in outputs.metrics.values())


def test_a_poisoned_behaviour_log_prob_of_a_masked_token_is_harmless() -> None:
    clean = make_inputs(4)
    assert clean.trust_mask is not None
    behaviour = clean.behaviour_logprobs.clone()
    behaviour[~clean.trust_mask] = math.nan
    outputs, gradient = run("m2po", dataclasses.replace(clean, behaviour_logprobs=behaviour))
    expected, slopes = run("m2po", clean)
    assert outputs.loss.item() == expected.loss.item()
    assert gradient.tolist() == slopes.tolist()


@pytest.mark.parametrize("name", NAMES)
def test_a_huge_ratio_in_float32_stays_finite(name: str) -> None:
    inputs = LossInputs(
        logprobs=torch.tensor([0.0, -1.0], requires_grad=True),
        behaviour_logprobs=torch.tensor([-500.0, -1.0]),
        advantages=torch.tensor([-1.0, 1.0]),
        loss_mask=torch.tensor([True, True]),
        denominator=2.0,
        trust_mask=torch.tensor([True, True]),
    )
    outputs, gradient = run(name, inputs)
    assert outputs.loss.item() == pytest.approx((math.exp(MAX_LOG_RATIO) - 1) / 2, rel=1e-4)
    assert gradient.isfinite().all()
    assert gradient[1].item() == -0.5


@pytest.mark.parametrize("name", NAMES)
def test_a_micro_batch_without_response_tokens_takes_part_with_nothing(name: str) -> None:
    none = torch.zeros(60, dtype=torch.bool)
    outputs, gradient = run(name, dataclasses.replace(make_inputs(5), loss_mask=none, trust_mask=none))
    assert outputs.loss.item() == 0.0
    assert gradient.tolist() == [0.0] * 60
    assert [value.item() for value in outputs.metrics.values()] == [0.0, 0.0, 0.0]


def test_at_equal_policies_all_three_are_the_policy_gradient() -> None:
    base = make_inputs(6)
    same = base.behaviour_logprobs.clone().requires_grad_()
    gradients = [
        run(name, dataclasses.replace(base, logprobs=same, trust_mask=base.loss_mask))[1].tolist() for name in NAMES
    ]
    expected = torch.where(base.loss_mask, -base.advantages, 0.0) / base.denominator
    assert gradients == [pytest.approx(expected.tolist(), rel=1e-14)] * 3


def test_only_m2po_needs_the_mask_and_says_so() -> None:
    assert [policy_loss(name).needs_second_moment_mask for name in NAMES] == [True, False, False]
    inputs = dataclasses.replace(make_inputs(), trust_mask=None)
    with pytest.raises(ValueError, match="--policy-loss m2po needs the second-moment mask"):
        policy_loss("m2po")(inputs, LossSettings())
    for name in ("grpo", "reinforce"):
        assert policy_loss(name)(inputs, LossSettings()).loss.isfinite()


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="--policy-loss 'ppo' is not known; known: m2po, grpo, reinforce"):
        policy_loss("ppo")
