"""Trajectories -> micro-batches of packed rows, the same number on every data-parallel rank.

Letters: t = tokens of one micro-batch on this context-parallel rank, of all its sequences end to end; CP = the
context-parallel size. Per-token tensors are aligned with the PREDICTING position: entry i speaks of the token at i + 1 of
the same sequence, so that no shift is left to anyone downstream, and a row may be cut between any two tokens.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from m2po_megatron.data.trajectory import Trajectory

IGNORED = -100
"""Target of a position whose next token was not sampled by the policy."""


@dataclass(frozen=True)
class PackingLayout:
    """What the parallel layout asks of rows, and this rank's place in it.

    alignment       this rank's part of every row becomes a multiple of it (the tensor-parallel size under sequence
                    parallelism, whose ranks share the row)
    count_multiple  the micro-batches of a rank are a multiple of it (the pipeline size under virtual stages)
    """

    data_parallel_rank: int = 0
    data_parallel_size: int = 1
    context_parallel_rank: int = 0
    context_parallel_size: int = 1
    alignment: int = 1
    count_multiple: int = 1

    @property
    def sequence_multiple(self) -> int:
        """Every sequence's length becomes a multiple of it: 2 x CP equal chunks, or 1 where rows are whole."""
        return 2 * self.context_parallel_size if self.context_parallel_size > 1 else 1

    @property
    def row_multiple(self) -> int:
        """A whole row's length becomes a multiple of it."""
        return math.lcm(self.sequence_multiple, self.context_parallel_size * self.alignment)

    def padded(self, length: int) -> int:
        """Tokens a sequence of `length` takes in a row."""
        return -(-length // self.sequence_multiple) * self.sequence_multiple

    def row_tokens(self, lengths: Sequence[int]) -> int:
        """Tokens of the whole row that holds these sequences, all padding included; an empty row has some too."""
        used = sum(self.padded(n) for n in lengths)
        return max(1, -(-used // self.row_multiple)) * self.row_multiple

    def longest_sequence(self, max_tokens: int) -> int:
        """The longest sequence that fits a row of `max_tokens` a context-parallel rank."""
        return max_tokens * self.context_parallel_size // self.row_multiple * self.row_multiple


@dataclass(frozen=True)
class PackingPlan:
    """Which sequences share a row: the same plan on every rank.

    rows     [rank][micro-batch] -> indices of its sequences, ascending; equally many rows for each data-parallel rank
    balance  padded tokens of the data-parallel rank with the most, over the mean of all of them
    """

    rows: list[list[list[int]]]
    balance: float


@dataclass
class MicroBatch:
    """This context-parallel rank's part of one packed row, on the training device.

    token_ids           int64 [t]
    targets             int64 [t]; the next token where the policy sampled it, else IGNORED
    loss_mask           bool [t]; True where `targets` is a sampled token
    behaviour_logprobs  float32 [t]; the engine's, 0 where loss_mask is False
    advantages          float32 [t]; the trajectory's, on each of its tokens
    versions            int64 [t]; the policy version that sampled the target, -1 where loss_mask is False
    mask_ids            int64 [t]; sequence index << 32 | position, unique over the mini-batch (ties in the mask)
    lengths             tokens of each sequence of the WHOLE row, padding included, in order; their sum is t x CP
    """

    token_ids: torch.Tensor
    targets: torch.Tensor
    loss_mask: torch.Tensor
    behaviour_logprobs: torch.Tensor
    advantages: torch.Tensor
    versions: torch.Tensor
    mask_ids: torch.Tensor
    lengths: list[int]


def plan_micro_batches(
    lengths: Sequence[int], layout: PackingLayout, *, micro_batch_size: int | None, max_tokens: int | None
) -> PackingPlan:
    """Divide sequences into rows, balanced by tokens, equally many for each data-parallel rank.

    A row holds at most `micro_batch_size` sequences, or `max_tokens` tokens on a context-parallel rank (so `max_tokens`
    x CP in all, padding included), whichever is given. Longest first into the lightest row that may take it; when one
    does not fit, more rows. Rows may stay empty (fewer sequences than ranks). Deterministic. Raises ValueError when one
    sequence alone exceeds `max_tokens`.
    """
    budget = None if max_tokens is None else layout.longest_sequence(max_tokens)
    if budget is not None and max(lengths, default=0) > budget:
        share = f" x --context-parallel-size {layout.context_parallel_size}" if layout.context_parallel_size > 1 else ""
        raise ValueError(
            f"--max-tokens-per-micro-batch {max_tokens}{share}: a sequence has {max(lengths)} tokens, and at most {budget} "
            "fit; raise it, or lower --max-response-length or --max-prompt-length"
        )
    padded = [layout.padded(n) for n in lengths]
    least = -(-len(padded) // micro_batch_size) if micro_batch_size else -(-sum(padded) // budget) if budget else 1
    multiple = layout.data_parallel_size * layout.count_multiple
    count = -(-max(least, 1) // multiple) * multiple
    order = sorted(range(len(padded)), key=lambda i: (-padded[i], i))
    while (bins := _fill(order, padded, count, micro_batch_size, budget)) is None:
        count += multiple
    rows = _deal([sorted(b) for b in bins], padded, layout.data_parallel_size)
    loads = [sum(layout.row_tokens([lengths[i] for i in row]) for row in rank_rows) for rank_rows in rows]
    return PackingPlan(rows, max(loads) * len(loads) / sum(loads))


def _fill(
    order: list[int], lengths: Sequence[int], count: int, micro_batch_size: int | None, max_tokens: int | None
) -> list[list[int]] | None:
    """`count` bins, or None when a sequence fits none of them."""
    bins: list[list[int]] = [[] for _ in range(count)]
    heap = [(0, i) for i in range(count)]  # (tokens, bin); a full bin leaves the heap
    for i in order:
        if not heap:
            return None
        tokens, b = heapq.heappop(heap)
        tokens += lengths[i]
        if max_tokens is not None and tokens > max_tokens:
            return None  # the lightest bin cannot take it, so none can
        bins[b].append(i)
        if micro_batch_size is None or len(bins[b]) < micro_batch_size:
            heapq.heappush(heap, (tokens, b))
    return bins


def _deal(bins: list[list[int]], lengths: Sequence[int], ranks: int) -> list[list[list[int]]]:
    """Bins to ranks, heaviest first; every other round backwards, so that no rank is always served first."""
    order = sorted(range(len(bins)), key=lambda b: (-sum(lengths[i] for i in bins[b]), b))
    rows: list[list[list[int]]] = [[] for _ in range(ranks)]
    for place, b in enumerate(order):
        turn, rank = divmod(place, ranks)
        rows[rank if turn % 2 == 0 else ranks - 1 - rank].append(bins[b])
    return rows


def pack(
    trajectories: Sequence[Trajectory],
    advantages: np.ndarray,
    layout: PackingLayout,
    *,
    micro_batch_size: int | None = None,
    max_tokens: int | None = None,
    device: torch.device | None = None,
) -> list[MicroBatch]:
    """Plan, and pack this rank's rows: `plan_micro_batches` and `pack_rows` in one. ValueError as in the former."""
    lengths = [len(t.token_ids) for t in trajectories]
    plan = plan_micro_batches(lengths, layout, micro_batch_size=micro_batch_size, max_tokens=max_tokens)
    return pack_rows(trajectories, advantages, plan, layout, device=device)


def pack_rows(
    trajectories: Sequence[Trajectory],
    advantages: np.ndarray,
    plan: PackingPlan,
    layout: PackingLayout,
    *,
    device: torch.device | None = None,
) -> list[MicroBatch]:
    """This rank's micro-batches of one mini-batch.

    trajectories, advantages [N]: the whole mini-batch, the same on every rank; a trajectory's place in it is its global
    index. A row without sequences becomes one dummy sequence without any loss token: its rank still takes part.
    """
    micro_batches = []
    for number, members in enumerate(plan.rows[layout.data_parallel_rank]):
        row, lengths = _whole_row([(i, trajectories[i], float(advantages[i])) for i in members], layout)
        unused = row["mask_ids"] < 0
        place = layout.data_parallel_rank + layout.data_parallel_size * number
        row["mask_ids"][unused] = (1 << 62) + (place << 32) + np.arange(int(unused.sum()))
        part = zigzag_rows(lengths, layout.context_parallel_rank, layout.context_parallel_size)
        tensors = {name: torch.from_numpy(values[part]).to(device or "cpu") for name, values in row.items()}
        micro_batches.append(MicroBatch(**tensors, lengths=lengths))  # type: ignore[arg-type]
    return micro_batches


def _whole_row(
    members: list[tuple[int, Trajectory, float]], layout: PackingLayout
) -> tuple[dict[str, np.ndarray], list[int]]:
    """The row before it is divided, and its sequences' padded lengths; mask_ids -1 where no sequence is."""
    lengths = [layout.padded(len(t.token_ids)) for _, t, _ in members]
    size = layout.row_tokens(lengths)
    if size > sum(lengths):
        lengths.append(size - sum(lengths))  # a sequence of its own that attends to nothing else and teaches nothing
    row = {
        "token_ids": np.zeros(size, np.int64),
        "targets": np.full(size, IGNORED, np.int64),
        "loss_mask": np.zeros(size, np.bool_),
        "behaviour_logprobs": np.zeros(size, np.float32),
        "advantages": np.zeros(size, np.float32),
        "versions": np.full(size, -1, np.int64),
        "mask_ids": np.full(size, -1, np.int64),
    }
    start = 0
    for (index, trajectory, advantage), padded in zip(members, lengths, strict=False):
        n = len(trajectory.token_ids)
        here, predicts = slice(start, start + n), slice(start, start + n - 1)
        sampled = np.asarray(trajectory.loss_mask[1:], np.bool_)
        row["token_ids"][here] = trajectory.token_ids
        row["targets"][predicts] = np.where(sampled, trajectory.token_ids[1:], IGNORED)
        row["loss_mask"][predicts] = sampled
        row["behaviour_logprobs"][predicts] = np.where(sampled, trajectory.behaviour_logprobs[1:], 0)
        row["versions"][predicts] = np.where(sampled, trajectory.versions[1:], -1)
        row["advantages"][here] = advantage
        row["mask_ids"][start : start + padded] = (index << 32) + np.arange(padded)
        start += padded
    return row, lengths


def zigzag_rows(lengths: Sequence[int], rank: int, size: int) -> np.ndarray:
    """int64 [t]: which tokens of a whole row context-parallel rank `rank` of `size` holds, in its order.

    Of the 2 x size equal chunks of every sequence it holds number `rank` and number 2 x size - 1 - `rank`: with causal
    attention every rank then has the same work.
    """
    if size == 1:
        return np.arange(sum(lengths))
    parts, start = [], 0
    for length in lengths:
        chunk = length // (2 * size)
        for number in (rank, 2 * size - 1 - rank):
            parts.append(np.arange(start + number * chunk, start + (number + 1) * chunk))
        start += length
    return np.concatenate(parts)
