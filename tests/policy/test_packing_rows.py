"""How a packed row is described: positions, boundaries, and rectangles that lose and repeat nothing."""

from __future__ import annotations

import pytest
import torch

from m2po_megatron.policy.attention import pack_sequences

CPU = torch.device("cpu")
LENGTHS = [[1], [5], [3, 3, 3], [1, 9, 2, 8, 3, 7], [64, 1, 1, 1, 1, 1], [2, 1], list(range(1, 30))]


@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda lengths: f"{len(lengths)} of {max(lengths)}")
def test_a_row_is_described_without_loss(lengths: list[int]) -> None:
    row = pack_sequences(lengths, CPU)
    total = sum(lengths)
    assert row.position_ids.tolist() == [p for n in lengths for p in range(n)]
    assert row.cu_seqlens_q.tolist() == [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    assert row.cu_seqlens_q.dtype == torch.int32
    assert (row.max_seqlen_q, row.max_seqlen_kv) == (max(lengths), max(lengths))
    flat = torch.cat([r.flatten() for r in row.rectangles])
    assert flat[row.restore].tolist() == list(range(total))
    starts = {int(s): n for s, n in zip(row.cu_seqlens_q[:-1], lengths, strict=True)}
    seen = []
    for rectangle in row.rectangles:
        for line in rectangle.tolist():
            n = starts[line[0]]  # every line is one sequence from its start, its last row repeated
            assert line == [line[0] + min(i, n - 1) for i in range(len(line))]
            seen.append(line[0])
        real = sum(starts[line[0]] for line in rectangle.tolist())
        assert rectangle.numel() <= 1.5 * real
    assert sorted(seen) == sorted(starts)


def test_similar_lengths_share_a_rectangle_and_outliers_do_not() -> None:
    assert len(pack_sequences([7, 8, 7, 8], CPU).rectangles) == 1
    assert sorted(r.shape for r in pack_sequences([64, 2, 2, 2], CPU).rectangles) == [(1, 64), (3, 2)]
