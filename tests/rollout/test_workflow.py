"""From an engine's samples to trajectories: masks, versions, refusals, prompt lengths."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from m2po_megatron.data.trajectory import Prompt, Trajectory
from m2po_megatron.reward import RewardPool
from m2po_megatron.rollout.client import GeneratedSample, GenerateRequest
from m2po_megatron.rollout.errors import RolloutError
from m2po_megatron.rollout.workflow import (
    ModelFacts,
    SampleRequest,
    SingleTurn,
    UnusableSample,
    encode_prompt,
    read_model_facts,
)

EOS = 1


class Letters:
    """A tokenizer: one token per character; 1 is the end, 2 another special token."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [ord(c) for c in text]

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return "".join(chr(t) for t in token_ids if t != 2)


class Scripted:
    """A generator that answers with what the test says."""

    def __init__(self, *samples: GeneratedSample) -> None:
        self.samples = list(samples)
        self.requests: list[GenerateRequest] = []

    async def generate(self, request: GenerateRequest) -> list[GeneratedSample]:
        self.requests.append(request)
        return self.samples


def sample(**changes: Any) -> GeneratedSample:
    fields: dict[str, Any] = {
        "rid": "r",
        "output_ids": [50, EOS],
        "output_logprobs": [-0.5, -0.25],
        "weight_versions": ["1.7", "1.8"],
        "finish_reason": "stop",
    }
    return GeneratedSample(**{**fields, **changes})


def workflow(generator: Scripted) -> SingleTurn:
    facts = ModelFacts(Letters(), (EOS,), 16)
    starts = {0: 0, 1: 6}
    return SingleTurn(
        facts, generator, RewardPool("arithmetic"), incarnation=1, starts=starts, max_prompt_length=0
    )


def run(generator: Scripted, n: int = 1) -> list[Trajectory]:
    request = SampleRequest("g4", Prompt("p", "1+1=", "2"), n, 0.7, 8)
    return asyncio.run(workflow(generator).sample(request, "rid-4"))


def test_one_request_per_group_and_what_becomes_of_it() -> None:
    generator = Scripted(sample(), sample(finish_reason="length", output_ids=[51, 52]))
    first, second = run(generator, n=2)
    assert generator.requests == [
        GenerateRequest(
            rid="rid-4",
            input_ids=[ord(c) for c in "1+1="],
            max_new_tokens=8,
            temperature=0.7,
            n=2,
            stop_token_ids=(EOS,),
        )
    ]
    assert (first.id, second.id, first.group_id) == ("g4.0", "g4.1", "g4")
    assert first.token_ids.tolist() == [49, 43, 49, 61, 50, EOS]
    assert first.loss_mask.tolist() == [False] * 4 + [True] * 2
    assert first.behaviour_logprobs.tolist() == [0, 0, 0, 0, -0.5, -0.25]
    assert first.versions.tolist() == [-1, -1, -1, -1, 7, 8]
    assert (first.finish_reason, second.finish_reason) == ("stop", "length")


def test_tokens_of_an_abandoned_timeline_are_aged() -> None:
    (trajectory,) = run(Scripted(sample(weight_versions=["0.8", "1.6"])))
    assert trajectory.versions[-2:].tolist() == [4, 6]  # 0.8 lies 2 beyond the fork at 6


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"output_logprobs": []}, r"g4\.0: 2 tokens came with 0 log-probs and 2 versions"),
        ({"weight_versions": ["1.7"]}, r"g4\.0: 2 tokens came with 2 log-probs and 1 versions"),
        ({"output_ids": [], "output_logprobs": [], "weight_versions": []}, r"g4\.0: has no response token"),
        ({"output_logprobs": [-0.5, float("nan")]}, r"g4\.0: behaviour log-probs must be finite"),
        ({"weight_versions": ["default", "1.7"]}, r"g4\.0: weight version 'default' is not of the form"),
        ({"weight_versions": ["2.7", "1.7"]}, r"g4\.0: weight version '2.7' is of another, later run"),
        ({"weight_versions": ["0.14", "1.7"]}, r"g4\.0: a response token carries no policy version"),
        ({"finish_reason": "abort"}, r"g4\.0: was aborted"),
    ],
)
def test_unusable_samples_are_refused_by_id(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnusableSample, match=reason):
        run(Scripted(sample(**changes)))


def test_a_missing_sample_is_refused() -> None:
    with pytest.raises(UnusableSample, match="group g4: the engine returned 1 of 2 samples"):
        run(Scripted(sample()), n=2)


def test_scores_see_the_text_without_special_tokens() -> None:
    said = sample(output_ids=[50, 2, EOS], output_logprobs=[-0.1] * 3, weight_versions=["1.7"] * 3)
    wrong = sample(output_ids=[50, 50], finish_reason="length")
    flow = workflow(Scripted(said, wrong))
    prompt = Prompt("p", "1+1=", "2")

    async def scored() -> list[float | None]:
        trajectories = await flow.sample(SampleRequest("g4", prompt, 2, 1.0, 8), "r")
        assert [t.reward for t in trajectories] == [None, None]
        await flow.score(prompt, trajectories)
        return [t.reward for t in trajectories]

    assert asyncio.run(scored()) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("max_prompt_length", "positions", "longest", "fits", "rule"),
    [
        (0, 16, 0, 8, "the model's 16 positions less 8 response tokens"),
        (5, 16, 0, 5, "--max-prompt-length"),
        (0, 8, 0, 0, "the model's 8 positions"),
        (0, 16, 14, 6, "the 14 tokens that --max-tokens-per-micro-batch leaves a sequence less 8 response tokens"),
        (9, 0, 12, 4, "the 12 tokens that --max-tokens-per-micro-batch"),
        (5, 16, 14, 5, "--max-prompt-length"),
    ],
)
def test_a_prompt_that_does_not_fit_is_named(
    max_prompt_length: int, positions: int, longest: int, fits: int, rule: str
) -> None:
    model = ModelFacts(Letters(), (EOS,), positions)
    if fits:
        assert len(encode_prompt(model, Prompt("p", "x" * fits), 8, max_prompt_length, longest)) == fits
    with pytest.raises(RolloutError, match=f"prompt 'long' has {fits + 1} tokens, more than {fits} .{rule}"):
        encode_prompt(model, Prompt("long", "x" * (fits + 1)), 8, max_prompt_length, longest)


def test_model_facts_of_a_real_directory(tiny_model: Callable[..., Path]) -> None:
    facts = read_model_facts(str(tiny_model()))
    assert (facts.eos_token_ids, facts.positions) == ((EOS,), 512)
    ids = facts.tokenizer.encode("12+34=", add_special_tokens=False)
    assert len(ids) == 6
    assert facts.tokenizer.decode([*ids, EOS], skip_special_tokens=True) == "12+34="


def test_model_facts_prefer_the_generation_config(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    for file in tiny_model().iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 5]}))
    assert read_model_facts(str(tmp_path)).eos_token_ids == (1, 5)


def test_a_directory_without_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(RolloutError, match="cannot load the tokenizer of"):
        read_model_facts(str(tmp_path))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "cannot be read as JSON"),
        ("[1]", "must hold a JSON object, not list"),
        ('{"eos_token_id": "</s>"}', "eos_token_id must be a token id or a list of them, got '</s>'"),
    ],
)
def test_a_broken_generation_config_is_named(
    tiny_model: Callable[..., Path], tmp_path: Path, content: str, reason: str
) -> None:
    for file in tiny_model().iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(RolloutError, match=reason) as caught:
        read_model_facts(str(tmp_path))
    assert str(tmp_path) in str(caught.value)
