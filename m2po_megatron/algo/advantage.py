"""Advantages of trajectories relative to their group."""

from __future__ import annotations

import torch
from torch import Tensor

STD_EPSILON = 1e-6


def group_advantages(rewards: Tensor, group_index: Tensor) -> Tensor:
    """(R - mean) / (population std + 1e-6) within each group (GRPO, arXiv 2402.03300, as M2PO uses it).

    Args:
        rewards: float [N], one per trajectory.
        group_index: int64 [N], the group of each trajectory, 0 .. G-1.

    Returns:
        float32 [N]; exactly 0 in a group whose rewards are all equal, so that rounding cannot give it a gradient.

    Raises:
        ValueError: shapes differ, or a reward is not finite.
    """
    if rewards.shape != group_index.shape or rewards.dim() != 1:
        raise ValueError(f"rewards {tuple(rewards.shape)} and group_index {tuple(group_index.shape)} must both be [N]")
    if not bool(torch.isfinite(rewards).all()):
        bad = int(torch.nonzero(~torch.isfinite(rewards))[0])
        raise ValueError(f"the reward of trajectory {bad} of the batch is {float(rewards[bad])}; rewards must be finite")
    if rewards.numel() == 0:
        return rewards.float()
    values = rewards.double()
    groups = int(group_index.max()) + 1
    size = values.new_zeros(groups).index_add_(0, group_index, torch.ones_like(values))
    mean = values.new_zeros(groups).index_add_(0, group_index, values) / size
    centred = values - mean[group_index]
    variance = values.new_zeros(groups).index_add_(0, group_index, centred.square()) / size
    lowest = values.new_full((groups,), torch.inf).scatter_reduce_(0, group_index, values, "amin")
    highest = values.new_full((groups,), -torch.inf).scatter_reduce_(0, group_index, values, "amax")
    advantages = centred / (variance.sqrt()[group_index] + STD_EPSILON)
    return torch.where((lowest == highest)[group_index], 0.0, advantages).float()
