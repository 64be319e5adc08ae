"""The single-process reference of one update: plain transformers, autograd, and Algorithm 1 run literally.

Used by the gradient tests: everything here is written from the paper, nothing is taken from the code under test.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from m2po_megatron.data.trajectory import Trajectory
from tests.algo.oracle import Case, literal_mask


@dataclass
class ReferenceUpdate:
    trajectories: list[Trajectory]
    advantages: np.ndarray  # float32 [N]
    threshold: float
    mask: dict[tuple[int, int], bool]  # (trajectory, position of the predicting token) -> contributes
    gradients: dict[str, torch.Tensor]  # by Hugging Face name
    loss: float
    masked: int


def threshold_between(log_ratios: list[float], advantages: list[float], near: float) -> float:
    """A threshold that some tokens exceed, as far as possible from every prefix mean, the nearest ones around `near`."""
    squares = sorted(x * x for x, a in zip(log_ratios, advantages, strict=True) if (a > 0 < x) or (a < 0 > x))
    means = np.cumsum(squares) / np.arange(1, len(squares) + 1)
    k = int(np.searchsorted(means, near)) - 1
    assert 0 < k < len(means) - 1
    gaps = np.diff(means[max(0, k - 4) : k + 5])
    k = max(0, k - 4) + int(gaps.argmax())
    assert means[k + 1] - means[k] > 1e-3 * near
    return float((means[k] + means[k + 1]) / 2)


def sample_logprobs(model: torch.nn.Module, trajectory: Trajectory, temperature: float) -> torch.Tensor:
    """Log-probs [L - 1] of each next token."""
    ids = torch.from_numpy(trajectory.token_ids)
    logits = model(ids[None]).logits[0, :-1].float() / temperature
    return torch.log_softmax(logits, -1).gather(1, ids[1:, None])[:, 0]


def make_trajectories(model: torch.nn.Module, count: int, seed: int, temperature: float) -> list[Trajectory]:
    """Random responses whose behaviour log-probs differ from the model's by 0.02 to 0.6 in either direction."""
    rng = np.random.default_rng(seed)
    vocabulary = model.config.vocab_size
    out = []
    for i in range(count):
        prompt, response = int(rng.integers(1, 7)), int(rng.integers(1, 12))
        length = prompt + response
        mask = np.arange(length) >= prompt
        trajectory = Trajectory(
            id=f"t{i}",
            group_id=f"g{i // 4}",
            token_ids=rng.integers(0, vocabulary, length),
            loss_mask=mask,
            behaviour_logprobs=np.zeros(length, np.float32),
            versions=np.where(mask, 0, -1),
            reward=0.0,
        )
        with torch.no_grad():
            current = sample_logprobs(model, trajectory, temperature).numpy()
        shift = rng.choice([-1.0, 1.0], length - 1) * rng.uniform(0.02, 0.6, length - 1)
        behaviour = np.minimum(current + shift, -1e-3)
        trajectory.behaviour_logprobs[1:] = np.where(mask[1:], behaviour, 0)
        trajectory.validate()
        out.append(trajectory)
    return out


def reference_update(path: str, *, count: int = 20, seed: int = 0, temperature: float = 1.0) -> ReferenceUpdate:
    """One M2PO update's mask and gradient, and the data it came from, with a clear margin at the cut."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    # The random responses hold every id; transformers would withhold the gradient of the padding token's embedding.
    model.get_input_embeddings().padding_idx = None
    trajectories = make_trajectories(model, count, seed, temperature)
    advantages = np.random.default_rng(seed + 1).normal(size=count).astype(np.float32)
    advantages[3] = 0.0
    logprobs = [sample_logprobs(model, t, temperature) for t in trajectories]
    keys, ratios, signs = [], [], []
    for i, (t, lp) in enumerate(zip(trajectories, logprobs, strict=True)):
        for p in np.flatnonzero(t.loss_mask[1:]):
            keys.append((i, int(p)))
            ratios.append(float(lp[p].detach()) - float(t.behaviour_logprobs[p + 1]))
            signs.append(float(advantages[i]))
    assert min(abs(x) for x in ratios) > 1e-3
    threshold = threshold_between(ratios, signs, near=0.05)
    case = Case(np.float32(ratios), np.float32(signs), np.ones(len(ratios), bool), np.arange(len(ratios)), threshold)
    keep = literal_mask(case).mask
    contributes = dict(zip(keys, keep, strict=True))
    loss = torch.zeros(())
    for (i, p), kept in contributes.items():
        if kept:
            ratio = torch.exp(logprobs[i][p] - float(trajectories[i].behaviour_logprobs[p + 1]))
            loss = loss - ratio * float(advantages[i])
    loss = loss / len(keys)
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return ReferenceUpdate(
        trajectories, advantages, threshold, contributes, gradients, float(loss.detach()), keep.count(False)
    )
