"""Trajectories and prompts for tests of the rollout room (not a test module)."""

from __future__ import annotations

from typing import Any

import numpy as np

from m2po_megatron.data.trajectory import PROMPT_VERSION, Prompt, Trajectory


def make_trajectory(
    group_id: str = "g0",
    sample: int = 0,
    prompt: int = 3,
    response: int = 4,
    versions: Any = 0,
    reward: float | None = 1.0,
) -> Trajectory:
    """`versions`: one number for all response tokens, or one per token."""
    rng = np.random.default_rng(sample)
    mask = np.array([False] * prompt + [True] * response)
    stamped = np.full(prompt + response, PROMPT_VERSION, np.int64)
    stamped[prompt:] = versions
    logprobs = np.zeros(prompt + response, np.float32)
    logprobs[prompt:] = -rng.random(response, dtype=np.float32)
    return Trajectory(
        id=f"{group_id}.{sample}",
        group_id=group_id,
        token_ids=rng.integers(0, 150_000, prompt + response).astype(np.int64),
        loss_mask=mask,
        behaviour_logprobs=logprobs,
        versions=stamped,
        finish_reason="stop",
        reward=reward,
    )


def make_prompt(index: int = 0) -> Prompt:
    return Prompt(id=f"p{index}", text=f"{index}+1=", answer=str(index + 1))


def assert_same(left: Trajectory, right: Trajectory) -> None:
    """Equal in every field and type."""
    for name in ("id", "group_id", "finish_reason", "reward"):
        assert getattr(left, name) == getattr(right, name)
    for name in ("token_ids", "loss_mask", "behaviour_logprobs", "versions"):
        a, b = getattr(left, name), getattr(right, name)
        assert a.dtype == b.dtype, name
        np.testing.assert_array_equal(a, b, err_msg=name)
