"""The errors that cross from the rollout side to the trainer."""

from __future__ import annotations


class RolloutError(RuntimeError):
    """Rollouts cannot go on (no engine left, the controller died, a sample is unusable); the text says what to look at."""


class StoreError(RolloutError):
    """The rollout store in the run directory cannot be used as it is."""
