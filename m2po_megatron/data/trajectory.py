"""The nouns: what a prompt, a trajectory and a group are, and what makes one of them valid.

Letters: L = tokens of one trajectory (prompt and response together). Imports nothing of the project, so that every
room may speak these words: the controller (which has neither torch nor megatron-core) and the trainer alike.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

PROMPT_VERSION = -1
"""The `versions` entry of a token that no policy sampled (prompt and tool tokens)."""


@dataclass(frozen=True)
class Prompt:
    """One row of the prompt file. `text` is what the model sees (chat templates are applied before this)."""

    id: str
    text: str
    answer: str = ""


@dataclass
class Trajectory:
    """One sampled response with everything the trainer needs to learn from it.

    token_ids           int64 [L]; prompt, then what the model (and tools) said
    loss_mask           bool [L]; True = sampled by the policy
    behaviour_logprobs  float32 [L]; the engine's log-prob at the sampling temperature, 0 where loss_mask is False
    versions            int64 [L]; the policy version that sampled each token, PROMPT_VERSION where loss_mask is False
    """

    id: str
    group_id: str
    token_ids: np.ndarray
    loss_mask: np.ndarray
    behaviour_logprobs: np.ndarray
    versions: np.ndarray
    finish_reason: str = "stop"  # "stop" | "length" (truncated) | "abort"
    reward: float | None = None

    def validate(self) -> None:
        """Raise ValueError, naming the trajectory, unless every array fits the tokens and every value is usable."""
        length = len(self.token_ids)
        for name in ("loss_mask", "behaviour_logprobs", "versions"):
            value = getattr(self, name)
            if value is None:
                raise ValueError(f"trajectory {self.id}: has no {name}; the engine must return log-probs and versions")
            if len(value) != length:
                raise ValueError(f"trajectory {self.id}: {name} has {len(value)} entries for {length} tokens")
        if not self.loss_mask.any():
            raise ValueError(f"trajectory {self.id}: has no response token")
        if self.loss_mask[0]:
            raise ValueError(f"trajectory {self.id}: its first token is a response token; there is nothing to predict it from")
        sampled = self.behaviour_logprobs[self.loss_mask]
        if not np.isfinite(sampled).all() or (sampled > 1e-4).any():
            raise ValueError(f"trajectory {self.id}: behaviour log-probs must be finite and at most 0")
        if (self.versions[self.loss_mask] < 0).any():
            raise ValueError(f"trajectory {self.id}: a response token carries no policy version")

    @property
    def oldest_version(self) -> int:
        """The version of the oldest response token: the one the staleness bound is checked on."""
        return int(self.versions[self.loss_mask].min())

    @property
    def response_length(self) -> int:
        return int(self.loss_mask.sum())


@dataclass
class Group:
    """The `--group-size` trajectories of one prompt; their rewards are compared with each other."""

    id: str
    prompt: Prompt
    trajectories: list[Trajectory] = field(default_factory=list)

    @property
    def oldest_version(self) -> int:
        return min(t.oldest_version for t in self.trajectories)


@dataclass
class Batch:
    """What the trainer leases at once: whole groups, in order of admission."""

    id: int
    groups: list[Group]

    @property
    def trajectories(self) -> list[Trajectory]:
        return [t for g in self.groups for t in g.trajectories]
