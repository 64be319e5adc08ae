"""From a prompt to scored trajectories: the single-turn workflow (one request per group)."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from m2po_megatron.data.trajectory import PROMPT_VERSION, Prompt, Trajectory
from m2po_megatron.reward import RewardPool, Scoring
from m2po_megatron.rollout.client import GeneratedSample, GenerateRequest
from m2po_megatron.rollout.errors import RolloutError
from m2po_megatron.rollout.staleness import effective_version, parse_weight_version

logger = logging.getLogger(__name__)


class UnusableSample(ValueError):
    """An engine's sample that must not be trained on; the text carries its id."""


class Generator(Protocol):
    """Whoever samples: the engine pool."""

    async def generate(self, request: GenerateRequest) -> list[GeneratedSample]: ...


class Tokenizer(Protocol):
    """The two calls used of a transformers tokenizer."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...


@dataclass(frozen=True)
class ModelFacts:
    """What the model's directory says: its tokenizer, its end tokens, how many positions it has (0 = not stated)."""

    tokenizer: Tokenizer
    eos_token_ids: tuple[int, ...]
    positions: int


def read_model_facts(model_path: str) -> ModelFacts:
    """Read them from a Hugging Face directory; RolloutError where its tokenizer cannot be loaded or has no end token."""
    from transformers import AutoTokenizer  # here, since it takes a second and only the controller process needs it

    path = Path(model_path)
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError) as error:
        raise RolloutError(f"cannot load the tokenizer of {path}: {error}") from error
    config = _read_json(path / "config.json")
    generation = _read_json(path / "generation_config.json")
    eos = generation.get("eos_token_id", config.get("eos_token_id"))
    if eos is None:
        eos = tokenizer.eos_token_id
    if eos is None:
        raise RolloutError(
            f"{path} names no eos_token_id: neither generation_config.json, config.json nor its tokenizer"
        )
    ids = eos if isinstance(eos, list) else [eos]
    if not ids or not all(type(token) is int for token in ids):
        raise RolloutError(f"{path}: eos_token_id must be a token id or a list of them, got {eos!r}")
    return ModelFacts(tokenizer, tuple(ids), int(config.get("max_position_embeddings") or 0))


def _read_json(path: Path) -> dict[str, Any]:
    """The object in the file, {} where there is no file; RolloutError, naming the file, for anything else."""
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise RolloutError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise RolloutError(f"{path} must hold a JSON object, not {type(content).__name__}")
    return content


@dataclass(frozen=True)
class SampleRequest:
    """`samples` responses to one prompt. `id` names the group, and through "<id>.<n>" its samples."""

    id: str
    prompt: Prompt
    samples: int
    temperature: float
    max_new_tokens: int


def encode_prompt(
    model: ModelFacts, prompt: Prompt, max_new_tokens: int, max_prompt_length: int, longest_sequence: int = 0
) -> list[int]:
    """The prompt's token ids, no special tokens added; RolloutError, naming the prompt, for one that does not fit.

    The limit, in tokens, is `max_prompt_length`, or if that is 0 what the model's positions leave beside the response; and
    what `longest_sequence` (0: no such limit), the trainer's for prompt and response together, leaves beside the response.
    """
    ids = [int(token) for token in model.tokenizer.encode(prompt.text, add_special_tokens=False)]
    if not ids:
        raise RolloutError(f"prompt {prompt.id!r} has no tokens")
    beside = f"less {max_new_tokens} response tokens"
    limits = []
    if max_prompt_length:
        limits.append((max_prompt_length, "--max-prompt-length"))
    elif model.positions:
        limits.append((model.positions - max_new_tokens, f"the model's {model.positions} positions {beside}"))
    if longest_sequence:
        rule = f"the {longest_sequence} tokens that --max-tokens-per-micro-batch leaves a sequence {beside}"
        limits.append((longest_sequence - max_new_tokens, rule))
    limit, rule = min(limits, default=(len(ids), ""))
    if len(ids) > limit:
        raise RolloutError(
            f"prompt {prompt.id!r} has {len(ids)} tokens, more than {max(0, limit)} ({rule}): remove or shorten it"
        )
    return ids


class SingleTurn:
    """Samples a whole group with one request, so that the engine computes the prompt once."""

    def __init__(
        self,
        model: ModelFacts,
        generator: Generator,
        reward: RewardPool,
        *,
        incarnation: int,
        starts: dict[int, int],
        max_prompt_length: int,
    ) -> None:
        """`starts`: every incarnation's start version; `max_prompt_length`: in tokens, 0 = the model's positions decide."""
        self._model = model
        self._generator = generator
        self._reward = reward
        self._incarnation = incarnation
        self._starts = starts
        self._max_prompt_length = max_prompt_length

    async def sample(self, request: SampleRequest, rid: str) -> list[Trajectory]:
        """Unscored trajectories; `rid` is the engine's request id. UnusableSample names a sample that is refused."""
        prompt_ids = encode_prompt(self._model, request.prompt, request.max_new_tokens, self._max_prompt_length)
        generate = GenerateRequest(
            rid=rid,
            input_ids=prompt_ids,
            max_new_tokens=request.max_new_tokens,
            temperature=request.temperature,
            n=request.samples,
            stop_token_ids=self._model.eos_token_ids,
        )
        samples = await self._generator.generate(generate)
        if len(samples) != request.samples:
            raise UnusableSample(f"group {request.id}: the engine returned {len(samples)} of {request.samples} samples")
        return [self._trajectory(request, index, prompt_ids, sample) for index, sample in enumerate(samples)]

    async def score(self, prompt: Prompt, trajectories: list[Trajectory]) -> None:
        """Set every trajectory's reward."""
        scorings = [Scoring(t.id, prompt.text, self.response_text(t), prompt.answer) for t in trajectories]
        for trajectory, reward in zip(trajectories, await self._reward.score(scorings), strict=True):
            trajectory.reward = reward

    def response_text(self, trajectory: Trajectory) -> str:
        """What the model said, without end and other special tokens."""
        ids = trajectory.token_ids[trajectory.loss_mask].tolist()
        if ids and ids[-1] in self._model.eos_token_ids:
            ids.pop()
        return self._model.tokenizer.decode(ids, skip_special_tokens=True)

    def _trajectory(
        self, request: SampleRequest, index: int, prompt_ids: list[int], sample: GeneratedSample
    ) -> Trajectory:
        identifier = f"{request.id}.{index}"
        said, logprobs, labels = sample.output_ids, sample.output_logprobs, sample.weight_versions
        if not len(said) == len(logprobs) == len(labels):
            raise UnusableSample(
                f"trajectory {identifier}: {len(said)} tokens came with {len(logprobs)} log-probs and {len(labels)} versions"
            )
        if sample.finish_reason == "abort":
            raise UnusableSample(f"trajectory {identifier}: was aborted by the engine")
        first, length = len(prompt_ids), len(prompt_ids) + len(said)
        trajectory = Trajectory(
            id=identifier,
            group_id=request.id,
            token_ids=np.array(prompt_ids + said, dtype=np.int64),
            loss_mask=np.arange(length) >= first,
            behaviour_logprobs=np.zeros(length, dtype=np.float32),
            versions=np.full(length, PROMPT_VERSION, dtype=np.int64),
            finish_reason=sample.finish_reason,
        )
        trajectory.behaviour_logprobs[first:] = logprobs
        trajectory.versions[first:] = self._versions(identifier, labels)
        try:
            trajectory.validate()
        except ValueError as error:
            raise UnusableSample(str(error)) from error
        return trajectory

    def _versions(self, identifier: str, labels: list[str]) -> int | list[int]:
        """Each token's version on the current timeline; one number where, as mostly, all have the same."""
        known: dict[str, int] = {}
        for label in set(labels):
            try:
                incarnation, version = parse_weight_version(label)
            except ValueError as error:
                raise UnusableSample(f"trajectory {identifier}: {error}") from error
            if incarnation > self._incarnation:
                raise UnusableSample(f"trajectory {identifier}: weight version {label!r} is of another, later run")
            known[label] = effective_version(version, incarnation, self._starts)
        if len(known) == 1:
            return known[labels[0]]
        return [known[label] for label in labels]
