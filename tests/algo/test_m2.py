"""The second-moment mask on one process, against Algorithm 1 run literally in exact arithmetic."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from m2po_megatron.algo.m2 import second_moment_mask
from tests.algo.oracle import literal_mask, random_case


def run(log_ratio, advantages, loss_mask=None, threshold=0.04, **kwargs):
    ratio = torch.as_tensor(log_ratio, dtype=torch.float32)
    mask = torch.ones_like(ratio, dtype=torch.bool) if loss_mask is None else torch.as_tensor(loss_mask)
    return second_moment_mask(ratio, torch.as_tensor(advantages, dtype=torch.float32), mask, threshold, **kwargs)


@pytest.mark.parametrize("seed", range(200))
def test_equals_the_literal_loop(seed: int) -> None:
    case = random_case(np.random.default_rng(seed))
    result = run(case.log_ratio, case.advantages, case.loss_mask, case.threshold, token_ids=torch.from_numpy(case.ids))
    expected = literal_mask(case)
    assert result.mask.tolist() == expected.mask
    assert result.m2_before == expected.m2_before
    assert result.m2_after == expected.m2_after
    assert result.cutoff == expected.cutoff
    assert (result.trust_region_tokens, result.masked_tokens, result.nonfinite_tokens) == (
        expected.trust_region_tokens,
        expected.masked_tokens,
        expected.nonfinite_tokens,
    )


floats = st.floats(width=32, allow_nan=True, allow_infinity=True)


@settings(max_examples=200, deadline=None)
@given(
    ratios=st.lists(floats, max_size=40),
    threshold=st.one_of(st.just(0.0), st.floats(0, 1e300), st.just(math.inf)),
    data=st.data(),
)
def test_equals_the_literal_loop_on_any_floats(ratios, threshold, data) -> None:
    n = len(ratios)
    signs = data.draw(st.lists(st.sampled_from([-1.0, 0.0, 2.0]), min_size=n, max_size=n))
    response = data.draw(st.lists(st.booleans(), min_size=n, max_size=n))
    case = random_case(np.random.default_rng(0), n)._replace(
        log_ratio=np.array(ratios, np.float32),
        advantages=np.array(signs, np.float32),
        loss_mask=np.array(response, bool),
        ids=np.arange(n),
        threshold=threshold,
    )
    result = run(case.log_ratio, case.advantages, case.loss_mask, threshold)
    expected = literal_mask(case)
    assert result.mask.tolist() == expected.mask
    assert result.m2_after == expected.m2_after


def test_worked_example() -> None:
    # Trust region: tokens 0, 1, 3, 4 with squares .01, .04, .09, .16; mean .075 > .05, without .16 it is .0467.
    result = run([0.1, 0.2, 0.3, -0.3, -0.4], [1.0, 1.0, -1.0, -1.0, -1.0], threshold=0.05)
    assert result.mask.tolist() == [True, True, True, True, False]
    assert result.trust_region_tokens == 4
    assert result.masked_tokens == 1
    assert result.m2_before == pytest.approx(0.075, rel=1e-6)
    assert result.m2_after == pytest.approx(0.14 / 3, rel=1e-6)
    assert result.cutoff == pytest.approx(0.09, rel=1e-6)


def test_a_mean_equal_to_the_threshold_is_kept() -> None:
    assert run([0.25, 0.75], [1.0, 1.0], threshold=0.3125).masked_tokens == 0
    assert run([0.25, 0.75], [1.0, 1.0], threshold=math.nextafter(0.3125, 0)).mask.tolist() == [True, False]


def test_a_square_within_the_threshold_is_never_masked() -> None:
    ratios = np.random.default_rng(0).standard_t(2, 5000).astype(np.float32) * 0.2
    result = run(ratios, np.ones(5000))
    assert result.masked_tokens > 0
    assert bool(result.mask[torch.from_numpy(ratios).square() <= 0.04].all())


def test_equal_squares_at_the_cut_go_by_token_id() -> None:
    ids = torch.tensor([-5, 7, 2**40, -(2**63), 2**63 - 1, 0])
    # Six equal squares of .25 and a zero-cost filler: only some of the six fit.
    ratio = torch.cat([torch.full((6,), 0.5), torch.full((6,), 1e-6)])
    all_ids = torch.cat([ids, torch.arange(100, 106)])
    result = run(ratio, torch.ones(12), threshold=0.1, token_ids=all_ids)
    kept = sorted(all_ids[:6][result.mask[:6]].tolist())
    assert kept == sorted(ids.tolist())[: len(kept)]
    assert 0 < len(kept) < 6
    assert result.cutoff == 0.25


def test_threshold_zero_keeps_only_zero_squares() -> None:
    result = run([1e-30, 0.1, 0.2], [1.0, 1.0, 1.0], threshold=0.0)  # 1e-30 squared is 0 in float32
    assert result.mask.tolist() == [True, False, False]
    assert result.cutoff == 0.0


def test_all_above_the_threshold() -> None:
    result = run([1.0, -1.0, 2.0], [1.0, -1.0, 1.0])
    assert result.mask.tolist() == [False, False, False]
    assert (result.m2_after, result.cutoff, result.masked_tokens) == (0.0, 0.0, 3)


@pytest.mark.parametrize("empty", [torch.empty(0), torch.zeros(4)])
def test_an_empty_trust_region(empty: torch.Tensor) -> None:
    result = run(empty, torch.ones_like(empty))
    assert bool(result.mask.all())
    assert (result.m2_before, result.m2_after, result.masked_tokens, result.cutoff) == (0.0, 0.0, 0, None)


def test_non_finite_ratios_are_masked_and_counted() -> None:
    ratio = [float("nan"), float("inf"), float("-inf"), 1e20, 0.1, float("nan")]  # 1e20 squared overflows
    response = [True, True, True, True, True, False]
    result = run(ratio, [1.0, 1.0, 1.0, -1.0, 1.0, 1.0], response)
    assert result.mask.tolist() == [False, False, False, False, True, False]
    assert result.nonfinite_tokens == 4
    assert result.masked_tokens == 0


def test_infinity_as_threshold_masks_nothing() -> None:
    assert run([100.0, 1e18], [1.0, 1.0], threshold=math.inf).masked_tokens == 0


def test_shapes_and_broadcasting() -> None:
    ratio = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    advantages = torch.tensor([[1.0], [-1.0], [0.0]])
    rows = second_moment_mask(ratio, advantages, torch.ones(3, 5, dtype=torch.bool), 0.04)
    flat = run(ratio.flatten(), advantages.expand(3, 5).flatten())
    assert rows.mask.shape == (3, 5)
    assert rows.mask.flatten().tolist() == flat.mask.tolist()
    assert bool(rows.mask[2].all())  # A = 0 is never in the trust region


@pytest.mark.parametrize("threshold", [-1e-9, float("nan"), -math.inf])
def test_bad_thresholds(threshold: float) -> None:
    with pytest.raises(ValueError, match="threshold"):
        run([0.1], [1.0], threshold=threshold)


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="paper"):
        run([0.1], [1.0], variant="nobody's")
    with pytest.raises(ValueError, match="token_ids"):
        run([0.1], [1.0], token_ids=torch.zeros(2, dtype=torch.int64))
