"""Packed attention for Megatron's local layer spec, which refuses packed batches, and the parts that go with it.

A micro-batch is one row of t tokens: sequences end to end, no padding between them. TransformerEngine has kernels for
that (thd); the local spec's attention has none, so here the packed tokens are regrouped into a few rectangles of
sequences of similar length, each attended causally by torch's scaled_dot_product_attention, and put back. Right padding
inside a rectangle needs no mask: a causal query never sees what comes after it, and padded queries are dropped.

Letters: t = packed tokens, b x s = one rectangle, n = heads, g = key/value heads, h = head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule

_WASTE = 1.5
"""A rectangle may hold at most this many times the tokens it carries; beyond that a new one is begun."""


@dataclass
class PackedSequences(PackedSeqParams):
    """How a row of t tokens divides into sequences, in the form both Megatron and our attention read.

    position_ids  int64 [t]; position of each token in its own sequence
    rectangles    int64 [b, s] each; row numbers of a rectangle's tokens (a short sequence repeats its last row)
    restore       int64 [t]; where each token lies in the concatenation of the flattened rectangles
    """

    position_ids: torch.Tensor = None  # type: ignore[assignment]
    rectangles: tuple[torch.Tensor, ...] = ()
    restore: torch.Tensor = None  # type: ignore[assignment]


def pack_sequences(lengths: list[int], device: torch.device) -> PackedSequences:
    """Describe sequences of these lengths laid end to end."""
    sizes = torch.tensor(lengths, dtype=torch.int64)
    starts = torch.cumsum(sizes, 0) - sizes
    position_ids = torch.arange(int(sizes.sum())) - torch.repeat_interleave(starts, sizes)
    rectangles, restore, offset = [], torch.empty_like(position_ids), 0
    for members in _similar_lengths(lengths):
        index = torch.tensor(members)
        width = int(sizes[index].max())
        columns = torch.arange(width)
        inside = columns < sizes[index, None]
        rows = starts[index, None] + torch.minimum(columns, sizes[index, None] - 1)
        restore[rows[inside]] = offset + torch.arange(rows.numel()).view_as(rows)[inside]
        rectangles.append(rows.to(device))
        offset += rows.numel()
    boundaries = F.pad(torch.cumsum(sizes, 0), (1, 0)).to(torch.int32).to(device)
    return PackedSequences(
        qkv_format="packed",  # not "thd": tokens keep Megatron's [t, 1, n, h] shape, and RoPE is given a row per token
        cu_seqlens_q=boundaries,
        cu_seqlens_kv=boundaries,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
        position_ids=position_ids.to(device),
        rectangles=tuple(rectangles),
        restore=restore.to(device),
    )


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

    def __init__(self, config: Any, layer_number: int, *args: Any, softmax_scale: float | None = None, **kwargs: Any):
        super().__init__(config=config)
        self.scale = softmax_scale if softmax_scale is not None else config.kv_channels**-0.5

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
        outputs = []
        for rows in packed_seq_params.rectangles:
            q, k, v = (self._gather(x, rows) for x in (query, key, value))
            out = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=self.scale, enable_gqa=q.size(1) != k.size(1)
            )
            outputs.append(out.transpose(1, 2).reshape(rows.numel(), -1))  # [b*s, n*h]
        packed = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return packed.index_select(0, packed_seq_params.restore).unsqueeze(1)

    @staticmethod
    def _gather(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """[t, 1, n, h] -> [b, n, s, h]"""
        b, s = rows.shape
        return x.squeeze(1).index_select(0, rows.flatten()).view(b, s, x.size(2), x.size(3)).transpose(1, 2)
