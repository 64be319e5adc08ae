"""Packing: every token once, equal counts on every rank, budgets kept, entries aligned with the predicting position."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from m2po_megatron.data.packing import IGNORED, pack, plan_micro_batches
from m2po_megatron.data.trajectory import Trajectory


def trajectory(index: int, prompt: int, response: int) -> Trajectory:
    length = prompt + response
    mask = np.arange(length) >= prompt
    return Trajectory(
        id=f"t{index}",
        group_id="g",
        token_ids=np.arange(length) + 100 * index,
        loss_mask=mask,
        behaviour_logprobs=np.where(mask, -0.5 - np.arange(length), 0).astype(np.float32),
        versions=np.where(mask, index, -1),
    )


@settings(max_examples=80, deadline=None)
@given(
    lengths=st.lists(st.integers(2, 40), min_size=1, max_size=40),
    ranks=st.integers(1, 5),
    budget=st.one_of(st.none(), st.integers(40, 120)),
    count=st.one_of(st.none(), st.integers(1, 9)),
)
def test_plan_holds_every_sequence_once_within_its_budget(lengths, ranks, budget, count) -> None:
    if budget is not None and count is not None:
        count = None
    bins = plan_micro_batches(lengths, ranks, micro_batch_size=count, max_tokens=budget)
    assert sorted(i for b in bins for i in b) == list(range(len(lengths)))
    assert len(bins) % ranks == 0
    assert all(b == sorted(b) for b in bins)
    if budget is not None:
        assert max(sum(lengths[i] for i in b) for b in bins) <= budget
    if count is not None:
        assert max(len(b) for b in bins) <= count
        assert len(bins) < -(-len(lengths) // count) + ranks


@settings(max_examples=40, deadline=None)
@given(shapes=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=17), ranks=st.integers(1, 4))
def test_every_sampled_token_is_a_target_exactly_once(shapes, ranks) -> None:
    trajectories = [trajectory(i, p, r) for i, (p, r) in enumerate(shapes)]
    advantages = np.arange(len(trajectories), dtype=np.float32)
    rows = [
        pack(trajectories, advantages, data_parallel_rank=r, data_parallel_size=ranks, micro_batch_size=3, max_tokens=None,
             alignment=4)
        for r in range(ranks)
    ]  # fmt: skip
    assert len({len(r) for r in rows}) == 1
    seen = {}
    for row in [m for r in rows for m in r]:
        assert sum(row.lengths) == len(row.token_ids) and len(row.token_ids) % 4 == 0
        for k in torch.nonzero(row.loss_mask).flatten().tolist():
            index, position = int(row.mask_ids[k]) >> 32, int(row.mask_ids[k]) & 0xFFFFFFFF
            t = trajectories[index]
            assert (index, position) not in seen
            seen[index, position] = True
            assert int(row.token_ids[k]) == t.token_ids[position]
            assert int(row.targets[k]) == t.token_ids[position + 1]
            assert float(row.behaviour_logprobs[k]) == t.behaviour_logprobs[position + 1]
            assert int(row.versions[k]) == index and float(row.advantages[k]) == advantages[index]
        assert (row.targets[~row.loss_mask] == IGNORED).all()
        assert (row.behaviour_logprobs[~row.loss_mask] == 0).all()
        assert len(set(row.mask_ids.tolist())) == len(row.mask_ids)
    assert len(seen) == sum(r for _, r in shapes)


def test_a_rank_without_sequences_still_has_a_row() -> None:
    rows = pack([trajectory(0, 2, 3)], np.ones(1, np.float32), data_parallel_rank=1, data_parallel_size=2,
                micro_batch_size=1, max_tokens=None, alignment=2)  # fmt: skip
    assert len(rows) == 1 and not rows[0].loss_mask.any() and rows[0].lengths == [2]


def test_balance_of_long_tailed_lengths() -> None:
    lengths = (np.random.default_rng(0).pareto(1.5, 512) * 40 + 8).astype(int).clip(8, 2000).tolist()
    bins = plan_micro_batches(lengths, 4, micro_batch_size=None, max_tokens=4096)
    loads = [sum(lengths[i] for i in b) for b in bins]
    assert max(loads) / (sum(loads) / len(loads)) < 1.02


def test_a_sequence_over_the_budget_is_refused_by_its_flag() -> None:
    with pytest.raises(ValueError, match="--max-tokens-per-micro-batch 16: a sequence has 17 tokens"):
        plan_micro_batches([4, 17], 1, micro_batch_size=None, max_tokens=16)
