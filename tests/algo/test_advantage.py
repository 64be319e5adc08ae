"""Group advantages against the formula, one trajectory at a time."""

from __future__ import annotations

import math
import random

import pytest
import torch

from m2po_megatron.algo.advantage import group_advantages


def literal(rewards: list[float], groups: list[int]) -> list[float]:
    """(R - mean) / (population std + 1e-6), group by group."""
    out = []
    for reward, group in zip(rewards, groups, strict=True):
        members = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        mean = math.fsum(members) / len(members)
        std = math.sqrt(math.fsum((r - mean) ** 2 for r in members) / len(members))
        out.append((reward - mean) / (std + 1e-6))
    return out


def test_values_are_the_formulas_in_any_order_of_the_groups() -> None:
    rng = random.Random(0)
    groups = [g for g in range(5) for _ in range(g + 2)]  # groups of different sizes
    rng.shuffle(groups)
    rewards = [rng.choice([0.0, 1.0, -0.5, rng.uniform(-3, 3)]) for _ in groups]
    found = group_advantages(torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups))
    assert found.dtype == torch.float32
    assert found.tolist() == pytest.approx(literal(rewards, groups), rel=1e-6, abs=1e-7)


def test_one_success_of_four_by_hand() -> None:
    found = group_advantages(torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.zeros(4, dtype=torch.int64))
    std = math.sqrt(3) / 4
    assert found.tolist() == pytest.approx([0.75 / (std + 1e-6)] + [-0.25 / (std + 1e-6)] * 3, rel=1e-6)


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1 / 3, -7.7, 1e30])
def test_equal_rewards_give_exactly_nothing(reward: float) -> None:
    rewards = torch.tensor([reward] * 7 + [0.0, 1.0])
    found = group_advantages(rewards, torch.tensor([0] * 7 + [1, 1]))
    assert found[:7].tolist() == [0.0] * 7
    assert found[7:].tolist() == pytest.approx([-1.0, 1.0], abs=1e-5)


def test_a_trajectory_alone_in_its_group_has_no_advantage() -> None:
    assert group_advantages(torch.tensor([3.3, 0.1]), torch.tensor([0, 1])).tolist() == [0.0, 0.0]


def test_nothing_in_nothing_out() -> None:
    assert group_advantages(torch.tensor([]), torch.tensor([], dtype=torch.int64)).shape == (0,)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_is_refused_with_its_place(bad: float) -> None:
    with pytest.raises(ValueError, match=rf"trajectory 2 of the batch is {bad}; rewards must be finite"):
        group_advantages(torch.tensor([0.0, 1.0, bad, 0.0]), torch.tensor([0, 0, 1, 1]))


def test_shapes_that_differ_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(3,\) and group_index \(2,\) must both be \[N\]"):
        group_advantages(torch.zeros(3), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"must both be \[N\]"):
        group_advantages(torch.zeros(1, 3), torch.zeros(1, 3, dtype=torch.int64))
