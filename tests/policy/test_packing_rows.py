"""How a packed row is described: positions, boundaries, and rectangles that lose and repeat nothing."""

from __future__ import annotations

import pytest
import torch

from m2po_megatron.data.packing import zigzag_rows
from m2po_megatron.policy.attention import PackedSequences, pack_sequences

CPU = torch.device("cpu")
LENGTHS = [[1], [5], [3, 3, 3], [1, 9, 2, 8, 3, 7], [64, 1, 1, 1, 1, 1], [2, 1], list(range(1, 30))]


@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda lengths: f"{len(lengths)} of {max(lengths)}")
def test_a_row_is_described_without_loss(lengths: list[int]) -> None:
    row = pack_sequences(lengths, CPU)
    assert isinstance(row, PackedSequences)
    total = sum(lengths)
    assert row.position_ids.tolist() == [p for n in lengths for p in range(n)]
    assert row.cu_seqlens_q.tolist() == [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    assert row.cu_seqlens_q.dtype == torch.int32
    assert (row.max_seqlen_q, row.max_seqlen_kv) == (max(lengths), max(lengths))
    flat = torch.cat([r.queries.flatten() for r in row.rectangles])
    assert flat[row.restore].tolist() == list(range(total))
    starts = {int(s): n for s, n in zip(row.cu_seqlens_q[:-1], lengths, strict=True)}
    seen = []
    for rectangle in row.rectangles:
        assert rectangle.keys is None and rectangle.allowed is None
        for line in rectangle.queries.tolist():
            n = starts[line[0]]  # every line is one sequence from its start, its last row repeated
            assert line == [line[0] + min(i, n - 1) for i in range(len(line))]
            seen.append(line[0])
        real = sum(starts[line[0]] for line in rectangle.queries.tolist())
        assert rectangle.queries.numel() <= 1.5 * real
    assert sorted(seen) == sorted(starts)


def test_similar_lengths_share_a_rectangle_and_outliers_do_not() -> None:
    def shapes(lengths: list[int]) -> list[tuple[int, ...]]:
        row = pack_sequences(lengths, CPU)
        assert isinstance(row, PackedSequences)
        return sorted(tuple(r.queries.shape) for r in row.rectangles)

    assert shapes([7, 8, 7, 8]) == [(4, 8)]
    assert shapes([64, 2, 2, 2]) == [(1, 64), (3, 2)]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("lengths", [[1], [3, 1, 2], [5, 1, 1, 1], list(range(1, 9))], ids=str)
def test_a_ranks_queries_see_exactly_what_is_not_later_in_their_sequence(lengths: list[int], size: int) -> None:
    lengths = [n * 2 * size for n in lengths]
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    position = torch.cat([torch.arange(n) for n in lengths])
    held = [torch.from_numpy(zigzag_rows(lengths, rank, size)) for rank in range(size)]
    gathered = torch.cat(held)  # the order in which keys arrive
    for rank in range(size):
        row = pack_sequences(lengths, CPU, context_rank=rank, context_size=size)
        assert isinstance(row, PackedSequences)
        assert row.position_ids.tolist() == position[held[rank]].tolist()
        assert row.cu_seqlens_q.tolist() == [sum(lengths[:i]) for i in range(len(lengths) + 1)]
        assert row.max_seqlen_q == max(lengths)
        flat = torch.cat([r.queries.flatten() for r in row.rectangles])
        assert flat[row.restore].tolist() == list(range(sum(lengths) // size))
        for rectangle in row.rectangles:
            assert rectangle.keys is not None and rectangle.allowed is not None
            for queries, keys, allowed in zip(rectangle.queries, rectangle.keys, rectangle.allowed[:, 0], strict=True):
                for query, sees in zip(held[rank][queries].tolist(), allowed, strict=True):
                    seen = sorted(gathered[keys[sees]].tolist())
                    assert seen == [query - int(position[query]) + i for i in range(int(position[query]) + 1)]
                    assert (sequence[seen] == sequence[query]).all()


def test_transformer_engine_is_given_the_rows_boundaries() -> None:
    row = pack_sequences([8, 4, 12], CPU, context_rank=1, context_size=2, layer_spec="transformer_engine")
    assert not isinstance(row, PackedSequences) and row.qkv_format == "thd"
    for boundaries in (row.cu_seqlens_q, row.cu_seqlens_kv, row.cu_seqlens_q_padded, row.cu_seqlens_kv_padded):
        assert boundaries.tolist() == [0, 8, 12, 24] and boundaries.dtype == torch.int32
    assert (row.max_seqlen_q, row.max_seqlen_kv) == (12, 12)
