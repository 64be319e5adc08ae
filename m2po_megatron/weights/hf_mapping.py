"""ONE table: Hugging Face name <-> Megatron name, the transform between them, and how tensor parallelism cuts it.

The same rows load a model, export it, publish it to engines, and name tensors in errors. A row's names hold `{layer}`
where they repeat per layer, and `{expert}` where they repeat per expert too: in Hugging Face's names the expert's number
in its layer, in Megatron's its number on the rank that holds it. A transform knows two directions:

    shard(hf tensors, rank, size)  -> this tensor-parallel (of an expert: expert-tensor-parallel) rank's Megatron tensor
    merge(all ranks' shards)       -> the hf tensors

Letters: V vocabulary, H hidden, F feed-forward, N heads, G key/value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from m2po_megatron.policy.architecture import Architecture


class Transform(Protocol):
    def shard(self, tensors: Sequence[Tensor], rank: int, size: int, arch: Architecture, rows: int) -> Tensor:
        """`rows` is the length of dimension 0 of the shard (the vocabulary may be padded)."""

    def merge(self, shards: Sequence[Tensor], arch: Architecture) -> list[Tensor]: ...


class Replicated:
    """The same on every rank (norms, routers)."""

    def shard(self, tensors: Sequence[Tensor], rank: int, size: int, arch: Architecture, rows: int) -> Tensor:
        return tensors[0]

    def merge(self, shards: Sequence[Tensor], arch: Architecture) -> list[Tensor]:
        return [shards[0]]


class InputSplit:
    """Cut along dimension 1: the layer's input is already divided (attention's and the feed-forward's output)."""

    def shard(self, tensors: Sequence[Tensor], rank: int, size: int, arch: Architecture, rows: int) -> Tensor:
        return tensors[0].chunk(size, dim=1)[rank]

    def merge(self, shards: Sequence[Tensor], arch: Architecture) -> list[Tensor]:
        return [torch.cat(list(shards), dim=1)]


class Vocabulary:
    """[V, H] cut along dimension 0, with empty rows at the end so that all shards are of one size."""

    def shard(self, tensors: Sequence[Tensor], rank: int, size: int, arch: Architecture, rows: int) -> Tensor:
        full = tensors[0]
        piece = full[rank * rows : (rank + 1) * rows]
        missing = rows - piece.size(0)
        return torch.cat([piece, full.new_zeros(missing, full.size(1))]) if missing else piece

    def merge(self, shards: Sequence[Tensor], arch: Architecture) -> list[Tensor]:
        return [torch.cat(list(shards))[: arch.vocab_size]]


class GateUp:
    """gate [F, H], up [F, H] -> [gate's piece; up's piece] on each rank."""

    def shard(self, tensors: Sequence[Tensor], rank: int, size: int, arch: Architecture, rows: int) -> Tensor:
        return torch.cat([t.chunk(size)[rank] for t in tensors])

    def merge(self, shards: Sequence[Tensor], arch: Architecture) -> list[Tensor]:
        halves = [s.chunk(2) for s in shards]
        return [torch.cat([h[0] for h in halves]), torch.cat([h[1] for h in halves])]


class QKV:
    """q [N*D, ...], k [G*D, ...], v [G*D, ...] -> per key/value head: its query heads, its key, its value."""

    def shard(self, tensors: Sequence[Tensor], rank: int, size: int, arch: Architecture, rows: int) -> Tensor:
        g, d = arch.num_key_value_heads, arch.head_dim
        q, k, v = (t.reshape(g, -1, d, *t.shape[1:]) for t in tensors)
        grouped = torch.cat([q, k, v], dim=1)  # [G, N/G + 2, D, ...]
        return grouped.chunk(size)[rank].flatten(0, 2)

    def merge(self, shards: Sequence[Tensor], arch: Architecture) -> list[Tensor]:
        g, d = arch.num_key_value_heads, arch.head_dim
        full = torch.cat(list(shards))
        grouped = full.reshape(g, -1, d, *full.shape[1:])
        queries = grouped.size(1) - 2
        return [part.flatten(0, 2) for part in grouped.split([queries, 1, 1], dim=1)]


@dataclass(frozen=True)
class Row:
    """One Megatron tensor and the Hugging Face tensors it is made of, with their shapes. `te`: its name in
    TransformerEngine's layer spec, where that differs (there a norm is fused into the linear layer behind it)."""

    hf: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    megatron: str
    transform: Transform
    te: str = ""

    @property
    def per_layer(self) -> bool:
        return "{layer}" in self.megatron

    @property
    def per_expert(self) -> bool:
        return "{expert}" in self.megatron

    def hf_names(self, layer: int, expert: int = 0) -> list[str]:
        """Hugging Face's names of one layer's (and expert's) tensors."""
        return [name.format(layer=layer, expert=expert) for name in self.hf]


_LAYER = "decoder.layers.{layer}."
_HF = "model.layers.{layer}."
_QKV_NAMES = tuple(f"{_HF}self_attn.{p}_proj." for p in "qkv")
_QKV = _LAYER + "self_attention.linear_qkv."
_FC1 = _LAYER + "mlp.linear_fc1."
_EXPERTS = _LAYER + "mlp.experts."
_EXPERT = _EXPERTS + "local_experts.{expert}."


def table(arch: Architecture) -> tuple[Row, ...]:
    """The rows of this architecture. The output layer has none where it is tied to the embedding."""
    h, d = arch.hidden_size, arch.head_dim
    q, kv, vocabulary = arch.num_heads * d, arch.num_key_value_heads * d, ((arch.vocab_size, h),)
    norm = ((h,),)
    attention_norm = (_HF + "input_layernorm.weight",)
    rows = [
        Row(("model.embed_tokens.weight",), vocabulary, "embedding.word_embeddings.weight", Vocabulary()),
        Row(attention_norm, norm, _LAYER + "input_layernorm.weight", Replicated(), _QKV + "layer_norm_weight"),
        Row(tuple(n + "weight" for n in _QKV_NAMES), ((q, h), (kv, h), (kv, h)), _QKV + "weight", QKV()),
        Row((_HF + "self_attn.o_proj.weight",), ((h, q),), _LAYER + "self_attention.linear_proj.weight", InputSplit()),
        *_feed_forward(arch),
        Row(("model.norm.weight",), norm, "decoder.final_layernorm.weight", Replicated()),
    ]
    if arch.qkv_bias:
        rows.append(Row(tuple(n + "bias" for n in _QKV_NAMES), ((q,), (kv,), (kv,)), _QKV + "bias", QKV()))
    if arch.qk_norm:
        for p in "qk":
            name = f"self_attention.{p}_layernorm.weight"
            rows.append(Row((f"{_HF}self_attn.{p}_norm.weight",), ((d,),), _LAYER + name, Replicated()))
    if not arch.tied_embeddings:
        rows.append(Row(("lm_head.weight",), vocabulary, "output_layer.weight", Vocabulary()))
    return tuple(rows)


def _feed_forward(arch: Architecture) -> list[Row]:
    """The rows behind attention: one feed-forward network, or a router and its experts."""
    h, f = arch.hidden_size, arch.moe_ffn_hidden_size if arch.num_experts else arch.ffn_hidden_size
    mlp = _HF + ("mlp.experts.{expert}." if arch.num_experts else "mlp.")
    gate_up, down = (mlp + "gate_proj.weight", mlp + "up_proj.weight"), (mlp + "down_proj.weight",)
    wide, narrow = ((f, h), (f, h)), ((h, f),)
    norm, norm_name = ((_HF + "post_attention_layernorm.weight",), ((h,),)), _LAYER + "pre_mlp_layernorm.weight"
    if not arch.num_experts:
        return [
            Row(*norm, norm_name, Replicated(), _FC1 + "layer_norm_weight"),
            Row(gate_up, wide, _FC1 + "weight", GateUp()),
            Row(down, narrow, _LAYER + "mlp.linear_fc2.weight", InputSplit()),
        ]
    router = ((_HF + "mlp.gate.weight",), ((arch.num_experts, h),))
    return [
        Row(*norm, norm_name, Replicated()),
        Row(*router, _LAYER + "mlp.router.weight", Replicated()),
        Row(gate_up, wide, _EXPERT + "linear_fc1.weight", GateUp(), _EXPERTS + "linear_fc1.weight{expert}"),
        Row(down, narrow, _EXPERT + "linear_fc2.weight", InputSplit(), _EXPERTS + "linear_fc2.weight{expert}"),
    ]


def hf_shapes(arch: Architecture) -> dict[str, tuple[int, ...]]:
    """Every Hugging Face tensor that a checkpoint of this architecture must hold, with its shape."""
    shapes: dict[str, tuple[int, ...]] = {}
    for row in table(arch):
        for layer in range(arch.num_layers) if row.per_layer else range(1):
            for expert in range(arch.num_experts) if row.per_expert else range(1):
                shapes.update(zip(row.hf_names(layer, expert), row.shapes, strict=True))
    return shapes
