"""Trajectories -> micro-batches of packed rows, the same number on every data-parallel rank.

Letters: t = tokens of one micro-batch, all its sequences end to end. Per-token tensors are aligned with the PREDICTING
position: entry i speaks of the token at i + 1 of the same sequence, so that no shift is left to anyone downstream.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from m2po_megatron.data.trajectory import Trajectory

IGNORED = -100
"""Target of a position whose next token was not sampled by the policy."""


@dataclass
class MicroBatch:
    """One packed row, on the training device.

    token_ids           int64 [t]
    targets             int64 [t]; the next token where the policy sampled it, else IGNORED
    loss_mask           bool [t]; True where `targets` is a sampled token
    behaviour_logprobs  float32 [t]; the engine's, 0 where loss_mask is False
    advantages          float32 [t]; the trajectory's, on each of its tokens
    versions            int64 [t]; the policy version that sampled the target, -1 where loss_mask is False
    mask_ids            int64 [t]; sequence index << 32 | position, unique over the mini-batch (ties in the mask)
    lengths             tokens of each sequence, alignment padding included, in order
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
    lengths: Sequence[int], data_parallel_size: int, *, micro_batch_size: int | None, max_tokens: int | None
) -> list[list[int]]:
    """Divide sequences into bins: a multiple of `data_parallel_size` of them, balanced by tokens.

    A bin holds at most `micro_batch_size` sequences or `max_tokens` tokens, whichever is given. Longest first into the
    lightest bin that may take it; when one does not fit, more bins. Bins may stay empty (fewer sequences than ranks).
    Deterministic. Raises ValueError when one sequence alone exceeds `max_tokens`.
    """
    if max_tokens is not None and len(lengths) and max(lengths) > max_tokens:
        raise ValueError(
            f"--max-tokens-per-micro-batch {max_tokens}: a sequence has {max(lengths)} tokens; raise it, or lower "
            "--max-response-length or --max-prompt-length"
        )
    least = -(-len(lengths) // micro_batch_size) if micro_batch_size else -(-sum(lengths) // max_tokens) if max_tokens else 1
    count = -(-max(least, 1) // data_parallel_size) * data_parallel_size
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    while True:
        bins = _fill(order, lengths, count, micro_batch_size, max_tokens)
        if bins is not None:
            return [sorted(b) for b in bins]
        count += data_parallel_size


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


def pack(
    trajectories: Sequence[Trajectory],
    advantages: np.ndarray,
    *,
    data_parallel_rank: int,
    data_parallel_size: int,
    micro_batch_size: int | None,
    max_tokens: int | None,
    alignment: int = 1,
    device: torch.device | None = None,
) -> list[MicroBatch]:
    """This rank's micro-batches of one mini-batch.

    trajectories, advantages [N]: the whole mini-batch, the same on every rank; a trajectory's place in it is its global
    index. alignment: every row's length becomes a multiple of it (tensor-parallel ranks share rows under sequence
    parallelism). A bin without sequences becomes one dummy sequence without any loss token: its rank still takes part.
    """
    lengths = [len(t.token_ids) for t in trajectories]
    bins = plan_micro_batches(lengths, data_parallel_size, micro_batch_size=micro_batch_size, max_tokens=max_tokens)
    return [
        _pack_row([(i, trajectories[i], float(advantages[i])) for i in members], alignment, device or torch.device("cpu"))
        for members in bins[data_parallel_rank::data_parallel_size]
    ]


def _pack_row(members: list[tuple[int, Trajectory, float]], alignment: int, device: torch.device) -> MicroBatch:
    lengths = [len(t.token_ids) for _, t, _ in members]
    used = sum(lengths)
    padding = max(1, -(-used // alignment)) * alignment - used
    if padding:
        lengths.append(padding)  # a sequence of its own that attends to nothing else and teaches nothing
    size = used + padding
    row = {
        "token_ids": np.zeros(size, np.int64),
        "targets": np.full(size, IGNORED, np.int64),
        "loss_mask": np.zeros(size, np.bool_),
        "behaviour_logprobs": np.zeros(size, np.float32),
        "advantages": np.zeros(size, np.float32),
        "versions": np.full(size, -1, np.int64),
        "mask_ids": np.zeros(size, np.int64),
    }
    start = 0
    for index, trajectory, advantage in members:
        n = len(trajectory.token_ids)
        here, predicts = slice(start, start + n), slice(start, start + n - 1)
        sampled = np.asarray(trajectory.loss_mask[1:], np.bool_)
        row["token_ids"][here] = trajectory.token_ids
        row["targets"][predicts] = np.where(sampled, trajectory.token_ids[1:], IGNORED)
        row["loss_mask"][predicts] = sampled
        row["behaviour_logprobs"][predicts] = np.where(sampled, trajectory.behaviour_logprobs[1:], 0)
        row["versions"][predicts] = np.where(sampled, trajectory.versions[1:], -1)
        row["advantages"][here] = advantage
        row["mask_ids"][here] = (index << 32) + np.arange(n)
        start += n
    row["mask_ids"][used:] = (1 << 62) + np.arange(padding)
    return MicroBatch(**{k: torch.from_numpy(v).to(device) for k, v in row.items()}, lengths=lengths)  # type: ignore[arg-type]
