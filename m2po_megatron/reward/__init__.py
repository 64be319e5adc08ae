"""Rewards: by name, and scored without holding up whoever asks."""

from m2po_megatron.reward.pool import RewardError, RewardPool, Scoring
from m2po_megatron.reward.registry import BUILT_IN, RewardFunction, reward_function

__all__ = ["BUILT_IN", "RewardError", "RewardFunction", "RewardPool", "Scoring", "reward_function"]
