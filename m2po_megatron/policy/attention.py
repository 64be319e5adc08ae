"""Packed attention for Megatron's local layer spec, which refuses packed batches, and the parts that go with it.

A micro-batch is one row of tokens: sequences end to end, no padding between them but what context parallelism asks for.
TransformerEngine has kernels for that (thd); the local spec's attention has none, so here the packed tokens are regrouped
into a few rectangles of sequences of similar length, each attended causally by torch's scaled_dot_product_attention, and
put back. Right padding inside a rectangle needs no mask: a causal query never sees what comes after it, and padded queries
are dropped. Under context parallelism a rank has the queries of its two chunks of every sequence; keys and values are
gathered over the group, and a mask says which of them are not later than the query.

Letters: t = packed tokens on this rank, CP = context-parallel size, b x s = one rectangle, n = heads, g = key/value heads,
h = head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule

from m2po_megatron.data.packing import zigzag_rows

_WASTE = 1.5
"""A rectangle may hold at most this many times the tokens it carries; beyond that a new one is begun."""


@dataclass(frozen=True)
class Rectangle:
    """Sequences of similar length, one a line; a short one repeats its last row.

    queries  int64 [b, s/CP]; row numbers among this rank's t tokens
    keys     int64 [b, s]; row numbers among the t x CP gathered tokens, which lie rank after rank; None where CP is 1:
             then they are the queries' own
    allowed  bool [b, 1, s/CP, s]; True where the key is not later than the query; None where CP is 1: plainly causal
    """

    queries: torch.Tensor
    keys: torch.Tensor | None = None
    allowed: torch.Tensor | None = None


@dataclass
class PackedSequences(PackedSeqParams):
    """How a row divides into sequences, in the form both Megatron and our attention read. Boundaries and longest length
    are the whole row's; what follows is of this rank's t tokens.

    position_ids  int64 [t]; position of each token in its own sequence
    rectangles    all of the row's sequences, each in one of them
    restore       int64 [t]; where each token lies in the concatenation of the flattened rectangles' queries
    """

    position_ids: torch.Tensor = None  # type: ignore[assignment]
    rectangles: tuple[Rectangle, ...] = ()
    restore: torch.Tensor = None  # type: ignore[assignment]


def pack_sequences(
    lengths: list[int],
    device: torch.device,
    *,
    context_rank: int = 0,
    context_size: int = 1,
    layer_spec: str = "local",
) -> PackedSeqParams:
    """Describe sequences of these lengths laid end to end, of which context-parallel rank `context_rank` of `context_size`
    holds its zigzag part, for the layers of `layer_spec`: "local" or "transformer_engine".

    Lengths are those of the whole row, multiples of 2 x `context_size` where that is above 1.
    """
    sizes = torch.tensor(lengths, dtype=torch.int64)
    boundaries = F.pad(torch.cumsum(sizes, 0), (1, 0)).to(torch.int32).to(device)
    common: dict[str, Any] = {
        "cu_seqlens_q": boundaries,
        "cu_seqlens_kv": boundaries,
        "max_seqlen_q": max(lengths),
        "max_seqlen_kv": max(lengths),
    }
    if layer_spec == "transformer_engine":
        # As megatron.core.utils.get_thd_batch_on_this_cp_rank fills it; Megatron's RoPE and TransformerEngine's kernels find
        # this rank's chunks by themselves. The padding at a sequence's end counts as tokens of it: nothing before it
        # attends to it, and what is computed there stays finite.
        return PackedSeqParams(
            qkv_format="thd", cu_seqlens_q_padded=boundaries, cu_seqlens_kv_padded=boundaries, **common
        )
    row_positions = torch.arange(int(sizes.sum())) - torch.repeat_interleave(torch.cumsum(sizes, 0) - sizes, sizes)
    held = [torch.from_numpy(zigzag_rows(lengths, rank, context_size)) for rank in range(context_size)]
    gathered_place = torch.empty_like(row_positions)
    gathered_place[torch.cat(held)] = torch.arange(len(row_positions))
    position_ids = row_positions[held[context_rank]].to(device)
    rectangles, restore, offset = [], torch.empty(len(position_ids), dtype=torch.int64), 0
    for members in _similar_lengths(lengths):
        index = torch.tensor(members)
        queries, inside = _lines(sizes // context_size, index)
        restore[queries[inside]] = offset + torch.arange(queries.numel()).view_as(queries)[inside]
        offset += queries.numel()
        queries = queries.to(device)
        if context_size == 1:
            rectangles.append(Rectangle(queries))
            continue
        keys, _ = _lines(sizes, index)
        allowed = torch.arange(keys.size(1), device=device) <= position_ids[queries][:, None, :, None]
        rectangles.append(Rectangle(queries, gathered_place[keys].to(device), allowed))
    return PackedSequences(
        qkv_format="packed",  # not "thd": tokens keep Megatron's [t, 1, n, h] shape, and RoPE is given a row per token
        position_ids=position_ids,
        rectangles=tuple(rectangles),
        restore=restore.to(device),
        **common,
    )


def _lines(sizes: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Row numbers [b, longest of them] of the sequences `index`, where sequences of `sizes` lie end to end, the last of a
    short one repeated, and which of the numbers are no repetition."""
    starts = torch.cumsum(sizes, 0) - sizes
    columns = torch.arange(int(sizes[index].max()))
    rows = starts[index, None] + torch.minimum(columns, sizes[index, None] - 1)
    return rows, columns < sizes[index, None]


def _similar_lengths(lengths: list[int]) -> list[list[int]]:
    """Group sequence numbers, longest first, so that no group's padding exceeds the allowed waste."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    groups: list[list[int]] = []
    width = tokens = 0
    for i in order:
        if groups and width * (len(groups[-1]) + 1) <= _WASTE * (tokens + lengths[i]):
            groups[-1].append(i)
            tokens += lengths[i]
        else:
            groups.append([i])
            width = tokens = lengths[i]
    return groups


class PackedRotaryEmbedding(RotaryEmbedding):
    """RoPE angles by token instead of by position, so that a packed row needs no loop over its sequences.

    GPTModel asks `get_rotary_seq_len` how many positions to prepare and hands the answer to `forward`; for a packed row
    the answer is the description of the row itself.
    """

    def get_rotary_seq_len(  # type: ignore[override]
        self,
        inference_context: Any,
        transformer: Any,
        transformer_input: Any,
        transformer_config: Any,
        packed_seq_params: PackedSeqParams | None = None,
        **kwargs: Any,
    ) -> Any:
        if isinstance(packed_seq_params, PackedSequences):
            return packed_seq_params
        return super().get_rotary_seq_len(
            inference_context, transformer, transformer_input, transformer_config, packed_seq_params, **kwargs
        )

    def forward(self, max_seq_len: Any, *args: Any, **kwargs: Any) -> torch.Tensor:  # type: ignore[override]
        if not isinstance(max_seq_len, PackedSequences):
            return super().forward(max_seq_len, *args, **kwargs)
        longest = 1 << (int(max_seq_len.max_seqlen_q) - 1).bit_length()  # few distinct sizes: the parent caches by size
        angles: torch.Tensor = self.get_emb(longest)
        return angles.index_select(0, max_seq_len.position_ids)


class PackedAttention(MegatronModule):
    """core_attention of the local spec: [t, 1, n, h] queries, [t, 1, g, h] keys and values -> [t, 1, n*h]."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        *args: Any,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        **kwargs: Any,
    ):
        super().__init__(config=config)
        self.scale = softmax_scale if softmax_scale is not None else config.kv_channels**-0.5
        self.context_group = (
            pg_collection.cp if pg_collection is not None else parallel_state.get_context_parallel_group(False)
        )

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        if not isinstance(packed_seq_params, PackedSequences):
            raise ValueError("PackedAttention takes packed rows only; describe the row with pack_sequences()")
        if self.context_group is not None and self.context_group.size() > 1:
            key, value = self._gather_over_context(key, value)
        outputs = []
        for rectangle in packed_seq_params.rectangles:
            key_rows = rectangle.queries if rectangle.keys is None else rectangle.keys
            q, k, v = _take(query, rectangle.queries), _take(key, key_rows), _take(value, key_rows)
            out = F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=rectangle.allowed,
                is_causal=rectangle.allowed is None,
                scale=self.scale,
                enable_gqa=q.size(1) != k.size(1),
            )
            outputs.append(out.transpose(1, 2).reshape(rectangle.queries.numel(), -1))  # [b*s/CP, n*h]
        packed = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return packed.index_select(0, packed_seq_params.restore).unsqueeze(1)

    def _gather_over_context(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[t, 1, g, h] each -> [t x CP, 1, g, h] each, rank after rank; backward sums the ranks' gradients."""
        both = gather_from_sequence_parallel_region(
            torch.cat([key, value], dim=-1), tensor_parallel_output_grad=True, group=self.context_group
        )
        key, value = both.split([key.size(-1), value.size(-1)], dim=-1)
        return key, value


def _take(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """[t, 1, n, h] -> [b, n, s, h]"""
    b, s = rows.shape
    return x.squeeze(1).index_select(0, rows.flatten()).view(b, s, x.size(2), x.size(3)).transpose(1, 2)
