"""The embedded engine's KV cache: preallocated rows, each filled to its own length.

Running sequences always occupy the rows 0..B-1 (finished ones are replaced by the last), so a decode step reads plain
views instead of gathering, and a sequence may join at any time: its K/V are copied into the next free row.

Letters: R = rows allocated, B = running sequences, P = sequences of a prefill, H = KV heads, C = capacity in tokens,
L = longest length now, D = head size.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

CAPACITY_STEP = 64
"""Capacity and rows grow at least by doubling, and to a multiple of this."""


class Placement:
    """Where the next forward pass writes its K/V; one object shared by all layers.

    Prefill (`rows` given): int64 [N] rows to fill and int64 [N] `sources`, the index in the prefill batch that each row
    copies; the pass attends to its own K/V only. Decode (`rows` None): int64 [B] `positions`, where row i writes its
    new token; the pass attends to the first `longest` positions of rows 0..B-1.
    """

    def __init__(self) -> None:
        self.rows: torch.Tensor | None = None
        self.sources = torch.empty(0, dtype=torch.int64)
        self.positions = torch.empty(0, dtype=torch.int64)
        self.range = torch.empty(0, dtype=torch.int64)
        self.longest = 0


class SlotLayer(CacheLayerMixin):
    """K and V of one layer, each [R, H, C, D]."""

    is_sliding = False

    def __init__(
        self, placement: Placement, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self._placement = placement
        # Zeros, never uninitialised memory: a masked position has weight 0, and 0 x NaN would be NaN.
        self.keys = torch.zeros(0, kv_heads, 0, head_dim, dtype=dtype, device=device)
        self.values = torch.zeros_like(self.keys)
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: allocated by `SlotCache.reserve`."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores [P or B, H, L or 1, D] as the placement says; returns the K and V to attend to."""
        place = self._placement
        if place.rows is not None:
            length = key_states.shape[2]
            self.keys[place.rows, :, :length] = key_states.index_select(0, place.sources)
            self.values[place.rows, :, :length] = value_states.index_select(0, place.sources)
            return key_states, value_states
        self.keys[place.range, :, place.positions] = key_states[:, :, 0]
        self.values[place.range, :, place.positions] = value_states[:, :, 0]
        batch = key_states.shape[0]
        return self.keys[:batch, :, : place.longest], self.values[:batch, :, : place.longest]

    def grow(self, rows: int, capacity: int) -> None:
        """Reallocates to [rows, H, capacity, D], keeping what is stored."""
        old_rows, heads, old_capacity, head_dim = self.keys.shape
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = torch.zeros(rows, heads, capacity, head_dim, dtype=old.dtype, device=old.device)
            new[:old_rows, :, :old_capacity] = old
            setattr(self, name, new)

    def move(self, source: torch.Tensor, target: torch.Tensor, longest: int) -> None:
        """Copies the first `longest` positions of rows `source` to rows `target` (int64 [M] each, disjoint)."""
        self.keys[target, :, :longest] = self.keys[source, :, :longest]
        self.values[target, :, :longest] = self.values[source, :, :longest]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(KV length, offset) of a prefill, the only pass without an explicit mask: it sees its own tokens."""
        return query_length, 0

    def get_seq_length(self) -> int:
        """0: positions are always passed explicitly."""
        return 0

    def get_max_length(self) -> int:
        """-1: grows on demand."""
        return -1


class SlotCache(Cache):
    """The cache of all layers; see the module's docstring for its rule about rows."""

    def __init__(self, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self.placement = Placement()
        self.rows = 0
        self.capacity = 0
        self._slots = [SlotLayer(self.placement, kv_heads, head_dim, dtype, device) for _ in range(layers)]
        super().__init__(layers=list(self._slots))

    def reserve(self, rows: int, capacity: int) -> None:
        """Makes room for `rows` sequences of `capacity` tokens; doubles, so that growing costs little over time."""
        if rows <= self.rows and capacity <= self.capacity:
            return
        if rows > self.rows:
            self.rows = max(rows, 2 * self.rows)
        if capacity > self.capacity:
            wanted = max(capacity, 2 * self.capacity)
            self.capacity = -(-wanted // CAPACITY_STEP) * CAPACITY_STEP
        for layer in self._slots:
            layer.grow(self.rows, self.capacity)

    def place_prefill(self, rows: torch.Tensor, sources: torch.Tensor) -> None:
        """The next pass is a prefill: row rows[i] receives sequence sources[i] of its batch."""
        self.placement.rows = rows
        self.placement.sources = sources

    def place_decode(self, positions: torch.Tensor, longest: int) -> None:
        """The next pass is a decode step of rows 0..B-1: row i writes at positions[i] and attends up to `longest`."""
        self.placement.rows = None
        self.placement.positions = positions
        self.placement.longest = longest
        if self.placement.range.shape[0] != positions.shape[0]:
            self.placement.range = torch.arange(positions.shape[0], device=positions.device)

    def move(self, source: torch.Tensor, target: torch.Tensor, longest: int) -> None:
        """Moves rows, in every layer."""
        for layer in self._slots:
            layer.move(source, target, longest)

    def erase(self, rows: torch.Tensor) -> None:
        """Zeroes `rows` (int64 [M]): a NaN left there would reach the row's next owner through its masked positions."""
        for layer in self._slots:
            layer.keys[rows] = 0
            layer.values[rows] = 0

    def clear(self) -> None:
        """Zeroes everything."""
        for layer in self._slots:
            layer.keys.zero_()
            layer.values.zero_()
