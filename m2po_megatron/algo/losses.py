"""Policy losses, by name.

Each is a function of one micro-batch's tokens that divides by the mini-batch's global denominator, so that summing over
micro-batches and ranks gives the mini-batch's loss, whatever the split. Letters: t = tokens of the micro-batch.

    m2po       -M r A              M = the second-moment mask (algo/m2.py); arXiv 2510.01161
    grpo       -min(r A, clip(r, 1 - eps, 1 + eps) A), token mean over the mini-batch; arXiv 2402.03300
    reinforce  -r A                no trust region: the importance-weighted policy gradient

r = pi_theta / pi_behaviour, A = the trajectory's advantage.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

MAX_LOG_RATIO = 80.0
"""exp of more overflows float32; only tokens that a loss keeps at such ratios (reinforce, or grpo with A < 0) see it."""


@dataclass
class LossSettings:
    """Which loss, and its parameters."""

    policy_loss: str = field(default="m2po", metadata={"help": "m2po, grpo or reinforce"})
    m2_threshold: float = field(
        default=0.04, metadata={"help": "largest mean (log r)^2 over the trust-region tokens that m2po keeps"}
    )
    eps_clip: float = field(default=0.2, metadata={"help": "grpo: ratios are clipped to [1 - eps, 1 + eps]"})


@dataclass(frozen=True)
class LossInputs:
    """One micro-batch.

    logprobs             float32 [t], with gradient: of the sampled tokens under the policy being trained
    behaviour_logprobs   float32 [t]: the engine's, when it sampled them
    advantages           float32 [t]
    loss_mask            bool [t]: the response tokens
    denominator          response tokens of the whole mini-batch, masked ones included
    trust_mask           bool [t], for losses that need the second-moment mask; None otherwise
    """

    logprobs: Tensor
    behaviour_logprobs: Tensor
    advantages: Tensor
    loss_mask: Tensor
    denominator: float
    trust_mask: Tensor | None = None


@dataclass(frozen=True)
class LossOutputs:
    """This micro-batch's part of the loss (a scalar with gradient), and sums over its tokens to report:

    `kl/behavior`  of r - 1 - log r, the k3 estimate of KL(pi_behaviour || pi_theta)
    `ratio`        of r
    `clipped`      tokens without gradient because of the trust region
    """

    loss: Tensor
    metrics: dict[str, Tensor]


@dataclass(frozen=True)
class PolicyLoss:
    """A loss of the table above, callable on a micro-batch."""

    name: str
    needs_second_moment_mask: bool
    per_token: Callable[[Tensor, LossInputs, LossSettings], tuple[Tensor, Tensor]]
    """(r [t] with gradient, inputs, settings) -> (loss of each token [t], bool [t]: has no gradient)"""

    def __call__(self, inputs: LossInputs, settings: LossSettings) -> LossOutputs:
        """The micro-batch's loss; ValueError when the second-moment mask is needed and missing."""
        counted = inputs.loss_mask
        if self.needs_second_moment_mask:
            if inputs.trust_mask is None:
                raise ValueError(f"--policy-loss {self.name} needs the second-moment mask of the mini-batch")
            counted = counted & inputs.trust_mask
        # Replaced before exp: what is not counted may be NaN or infinite, and 0 x NaN would poison the gradient.
        log_ratio = torch.where(counted, inputs.logprobs - inputs.behaviour_logprobs, 0.0).clamp(max=MAX_LOG_RATIO)
        ratio = log_ratio.exp()
        losses, stopped = self.per_token(ratio, inputs, settings)
        loss = torch.where(counted, losses, 0.0).sum() / inputs.denominator
        metrics = _ratio_sums(inputs)
        metrics["clipped"] = (inputs.loss_mask & (stopped | ~counted)).sum().float()
        return LossOutputs(loss, metrics)


@torch.no_grad()
def _ratio_sums(inputs: LossInputs) -> dict[str, Tensor]:
    """Over all response tokens with a finite log-ratio, masked ones included: how far the policy has moved."""
    log_ratio = inputs.logprobs - inputs.behaviour_logprobs
    log_ratio = torch.where(inputs.loss_mask & log_ratio.isfinite(), log_ratio, 0.0).clamp(max=MAX_LOG_RATIO)
    ratio = torch.where(inputs.loss_mask, log_ratio.exp(), 0.0)
    return {"kl/behavior": torch.where(inputs.loss_mask, ratio - 1 - log_ratio, 0.0).sum(), "ratio": ratio.sum()}


def _importance_weighted(ratio: Tensor, inputs: LossInputs, settings: LossSettings) -> tuple[Tensor, Tensor]:
    return -ratio * inputs.advantages, torch.zeros_like(inputs.loss_mask)


def _clipped(ratio: Tensor, inputs: LossInputs, settings: LossSettings) -> tuple[Tensor, Tensor]:
    low, high = 1 - settings.eps_clip, 1 + settings.eps_clip
    advantages = inputs.advantages
    losses = -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    stopped = ((advantages > 0) & (ratio > high)) | ((advantages < 0) & (ratio < low))
    return losses, stopped


_LOSSES = {
    loss.name: loss
    for loss in (
        PolicyLoss("m2po", True, _importance_weighted),
        PolicyLoss("grpo", False, _clipped),
        PolicyLoss("reinforce", False, _importance_weighted),
    )
}


def policy_loss(name: str) -> PolicyLoss:
    """The loss called `name`; ValueError names the known ones."""
    if name not in _LOSSES:
        raise ValueError(f"--policy-loss {name!r} is not known; known: {', '.join(_LOSSES)}")
    return _LOSSES[name]
