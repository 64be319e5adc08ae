"""Packing: every token once over all ranks and rows, equal counts on every rank, budgets kept, entries aligned with the
predicting position, sequences divided in zigzag."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m2po_megatron.data.packing import IGNORED, MicroBatch, PackingLayout, pack, plan_micro_batches, zigzag_rows
from m2po_megatron.data.trajectory import Trajectory

LAYOUTS = st.builds(
    PackingLayout,
    data_parallel_size=st.integers(1, 4),
    context_parallel_size=st.sampled_from([1, 2, 3, 4]),
    alignment=st.sampled_from([1, 2, 3, 4]),
    count_multiple=st.integers(1, 3),
)
LIMITS = st.one_of(
    st.fixed_dictionaries({"micro_batch_size": st.integers(1, 9), "max_tokens": st.none()}),
    st.fixed_dictionaries({"micro_batch_size": st.none(), "max_tokens": st.integers(64, 120)}),
    st.just({"micro_batch_size": None, "max_tokens": None}),
)


def trajectory(index: int, prompt: int, response: int) -> Trajectory:
    """Every token another number; the second half of a response of more than 3 tokens begins with one not sampled."""
    length = prompt + response
    mask = np.arange(length) >= prompt
    mask[prompt + response // 2] &= response <= 3
    return Trajectory(
        id=f"t{index}",
        group_id="g",
        token_ids=np.arange(length) + 100 * index + 1,
        loss_mask=mask,
        behaviour_logprobs=np.where(mask, -0.5 - np.arange(length), 0).astype(np.float32),
        versions=np.where(mask, index, -1),
    )


def on_every_rank(
    trajectories: list[Trajectory], advantages: np.ndarray, layout: PackingLayout, limits: dict
) -> dict[tuple[int, int], list[MicroBatch]]:
    """(data-parallel rank, context-parallel rank) -> its micro-batches"""
    return {
        (d, c): pack(
            trajectories,
            advantages,
            PackingLayout(d, layout.data_parallel_size, c, layout.context_parallel_size, layout.alignment,
                          layout.count_multiple),
            **limits,
        )
        for d in range(layout.data_parallel_size)
        for c in range(layout.context_parallel_size)
    }  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(lengths=st.lists(st.integers(2, 40), min_size=1, max_size=40), layout=LAYOUTS, limits=LIMITS)
def test_plan_holds_every_sequence_once_within_its_budget(lengths, layout, limits) -> None:
    plan = plan_micro_batches(lengths, layout, **limits)
    rows = [row for rank in plan.rows for row in rank]
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(row == sorted(row) for row in rows)
    assert len(plan.rows) == layout.data_parallel_size
    counts = {len(rank) for rank in plan.rows}
    assert len(counts) == 1 and counts.pop() % layout.count_multiple == 0
    if limits["max_tokens"] is not None:
        whole = limits["max_tokens"] * layout.context_parallel_size
        assert max(layout.row_tokens([lengths[i] for i in row]) for row in rows) <= whole
    if limits["micro_batch_size"] is not None:
        assert max(len(row) for row in rows) <= limits["micro_batch_size"]
        least = -(-len(lengths) // limits["micro_batch_size"])
        assert len(rows) < least + layout.data_parallel_size * layout.count_multiple
    loads = [sum(layout.row_tokens([lengths[i] for i in row]) for row in rank) for rank in plan.rows]
    assert plan.balance == pytest.approx(max(loads) / np.mean(loads))


@settings(max_examples=60, deadline=None)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=17),
    layout=LAYOUTS,
    limits=LIMITS,
)
def test_every_token_is_on_one_rank_once_with_what_belongs_to_it(shapes, layout, limits) -> None:
    trajectories = [trajectory(i, p, r) for i, (p, r) in enumerate(shapes)]
    advantages = np.arange(len(trajectories), dtype=np.float32) - 3
    ranks = on_every_rank(trajectories, advantages, layout, limits)
    assert len({len(rows) for rows in ranks.values()}) == 1
    seen: set[tuple[int, int]] = set()
    for rows in ranks.values():
        for row in rows:
            assert len(row.token_ids) % layout.alignment == 0
            if limits["max_tokens"] is not None:
                assert len(row.token_ids) <= limits["max_tokens"]
            seen |= check_row(row, trajectories, advantages, seen)
    assert seen == {(i, p) for i, t in enumerate(trajectories) for p in range(len(t.token_ids))}
    everywhere = np.concatenate([row.mask_ids.numpy() for rows in ranks.values() for row in rows])
    assert len(set(everywhere.tolist())) == len(everywhere)


def check_row(row: MicroBatch, trajectories: list[Trajectory], advantages: np.ndarray, seen: set) -> set[tuple[int, int]]:
    """The (trajectory, position) of each of its real tokens, after comparing everything else with the trajectory."""
    found = set()
    for k, mask_id in enumerate(row.mask_ids.tolist()):
        index, position = mask_id >> 32, mask_id & 0xFFFFFFFF
        mine = index < len(trajectories) and position < len(trajectories[index].token_ids)
        t = trajectories[index] if mine else None
        predicts = t is not None and position + 1 < len(t.token_ids) and bool(t.loss_mask[position + 1])
        assert bool(row.loss_mask[k]) == predicts
        if t is None:
            assert int(row.token_ids[k]) == 0
        else:
            assert (index, position) not in seen | found
            found.add((index, position))
            assert int(row.token_ids[k]) == t.token_ids[position]
            assert float(row.advantages[k]) == advantages[index]
        assert int(row.targets[k]) == (t.token_ids[position + 1] if predicts else IGNORED)
        assert float(row.behaviour_logprobs[k]) == (t.behaviour_logprobs[position + 1] if predicts else 0)
        assert int(row.versions[k]) == (index if predicts else -1)
    return found


@pytest.mark.parametrize("context", [2, 3])
def test_a_context_parallel_rank_holds_its_two_chunks_of_every_sequence(context: int) -> None:
    trajectories = [trajectory(0, 3, 9), trajectory(1, 1, 2), trajectory(2, 4, 15)]
    layout = PackingLayout(context_parallel_size=context, alignment=5)
    ranks = on_every_rank(trajectories, np.ones(3, np.float32), layout, {})
    lengths = ranks[0, 0][0].lengths
    padded = [-(-len(t.token_ids) // (2 * context)) * 2 * context for t in trajectories]
    assert lengths[:3] == padded and len(lengths) == 4  # and a filler, to a multiple of the alignment
    assert sum(lengths) % (5 * context) == 0 and lengths[3] % (2 * context) == 0
    for (_, rank), (row,) in ranks.items():
        assert row.lengths == lengths
        expected = []
        for index, length in enumerate(padded):
            chunk = length // (2 * context)
            for number in (rank, 2 * context - 1 - rank):
                expected += [(index << 32) + p for p in range(number * chunk, (number + 1) * chunk)]
        assert row.mask_ids.tolist()[: len(expected)] == expected
        assert (row.mask_ids[len(expected) :] >= 1 << 62).all()


def test_zigzag_parts_are_the_whole_row() -> None:
    lengths = [8, 16, 8, 40]
    parts = [zigzag_rows(lengths, rank, 4) for rank in range(4)]
    assert parts[1][:2].tolist() == [1, 6] and parts[1][2:6].tolist() == [10, 11, 20, 21]
    assert sorted(np.concatenate(parts).tolist()) == list(range(72))
    assert zigzag_rows([3, 5], 0, 1).tolist() == list(range(8))


@pytest.mark.parametrize(
    ("layout", "lengths", "local"),
    [
        (PackingLayout(1, 2, alignment=2), [2], 2),
        (PackingLayout(1, 2), [1], 1),
        (PackingLayout(1, 2, context_parallel_rank=1, context_parallel_size=2), [4], 2),
        (PackingLayout(1, 2, context_parallel_rank=1, context_parallel_size=2, alignment=4), [8], 4),
    ],
)
def test_a_rank_without_sequences_still_has_a_row(layout: PackingLayout, lengths: list[int], local: int) -> None:
    rows = pack([trajectory(0, 2, 3)], np.ones(1, np.float32), layout, micro_batch_size=1)
    assert len(rows) == 1 and rows[0].lengths == lengths and len(rows[0].token_ids) == local
    assert not rows[0].loss_mask.any() and (rows[0].targets == IGNORED).all()


def test_balance_of_long_tailed_lengths() -> None:
    lengths = (np.random.default_rng(0).pareto(1.5, 512) * 40 + 8).astype(int).clip(8, 2000).tolist()
    assert plan_micro_batches(lengths, PackingLayout(0, 4), micro_batch_size=None, max_tokens=4096).balance < 1.02
    assert plan_micro_batches([9, 1], PackingLayout(0, 2), micro_batch_size=1, max_tokens=None).balance == 1.8


def test_the_heaviest_row_goes_to_the_rank_with_the_lightest() -> None:
    plan = plan_micro_batches([9, 5, 4, 1], PackingLayout(0, 2), micro_batch_size=1, max_tokens=None)
    assert plan.rows == [[[0], [3]], [[1], [2]]]


def test_a_sequence_over_the_budget_is_refused_by_its_flag() -> None:
    with pytest.raises(ValueError, match="--max-tokens-per-micro-batch 16: a sequence has 17 tokens, and at most 16 fit"):
        plan_micro_batches([4, 17], PackingLayout(), micro_batch_size=None, max_tokens=16)
    divided = PackingLayout(context_parallel_size=2, alignment=4)
    assert divided.longest_sequence(17) == 32
    plan_micro_batches([32], divided, micro_batch_size=None, max_tokens=17)
    with pytest.raises(ValueError, match="17 x --context-parallel-size 2: a sequence has 33 tokens, and at most 32 fit"):
        plan_micro_batches([33], divided, micro_batch_size=None, max_tokens=17)
