"""PackedAttention on several context-parallel ranks against softmax attention written out, in float64, on one process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from m2po_megatron import cpu
from m2po_megatron.data.packing import zigzag_rows
from tests.distributed.harness import run_ranks

HEADS, GROUPS, SIZE = 4, 2, 8
LENGTHS = {1: [1, 7, 3, 20, 2], 2: [4, 8, 24, 4, 12], 4: [8, 32, 16, 8]}


def inputs(lengths: list[int]) -> list[torch.Tensor]:
    """query [t, 1, n, h], key and value [t, 1, g, h], and the gradient of the output [t, 1, n*h], of the whole row."""
    generator = torch.Generator().manual_seed(len(lengths))
    shapes = [(sum(lengths), 1, n, SIZE) for n in (HEADS, GROUPS, GROUPS)] + [(sum(lengths), 1, HEADS * SIZE)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def written_out(lengths: list[int]) -> list[torch.Tensor]:
    """Output and the gradients of query, key and value."""
    query, key, value, gradient = inputs(lengths)
    q, k, v = (x.squeeze(1).requires_grad_() for x in (query, key, value))
    outputs = []
    for start, n in zip(torch.tensor([0, *lengths]).cumsum(0).tolist(), lengths, strict=False):
        here = slice(start, start + n)
        spread = [x[here].repeat_interleave(HEADS // GROUPS, dim=1) for x in (k, v)]
        scores = torch.einsum("inh,jnh->nij", q[here], spread[0]) * SIZE**-0.5
        scores = scores.masked_fill(torch.triu(torch.ones(n, n, dtype=torch.bool), 1), float("-inf"))
        outputs.append(torch.einsum("nij,jnh->inh", scores.softmax(-1), spread[1]).flatten(1))
    output = torch.cat(outputs)[:, None]
    return [output.detach(), *(g[:, None] for g in torch.autograd.grad(output, (q, k, v), gradient))]


def on_a_rank(rank: int, size: int, lengths: list[int]) -> list[torch.Tensor]:
    """The same of this rank's tokens."""
    cpu.install()
    from m2po_megatron.policy.attention import PackedAttention, pack_sequences

    held = torch.from_numpy(zigzag_rows(lengths, rank, size))
    query, key, value, gradient = (x[held] for x in inputs(lengths))
    leaves = [x.requires_grad_() for x in (query, key, value)]
    groups = SimpleNamespace(cp=torch.distributed.group.WORLD)
    attention = PackedAttention(SimpleNamespace(kv_channels=SIZE), 1, pg_collection=groups)
    row = pack_sequences(lengths, torch.device("cpu"), context_rank=rank, context_size=size)
    output = attention(*leaves, None, packed_seq_params=row)
    return [output.detach(), *torch.autograd.grad(output, leaves, gradient)]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_output_and_gradients_equal_attention_written_out(size: int) -> None:
    lengths = LENGTHS[size]
    expected = written_out(lengths)
    results: list[Any] = run_ranks(on_a_rank, size, size, lengths)
    for rank, result in enumerate(results):
        held = torch.from_numpy(zigzag_rows(lengths, rank, size))
        for name, value, whole in zip(("output", "dq", "dk", "dv"), result, expected, strict=True):
            assert (value - whole[held]).abs().max() <= 1e-12, f"{name} of rank {rank}"
