"""What a rollout engine must do, written against a URL: the embedded server's always, a real SGLang server's where
--sglang-python names an environment that has one.

A random model, since 1e-5 is asked of long samples: on the bundled one, far behind its answers' end, transformers' own
float32 log-probs are up to 5e-5 away from those in float64.
"""

from __future__ import annotations

import asyncio
import math
import shutil
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from m2po_megatron.rollout.client import EngineClient, EngineError, GeneratedSample, GenerateRequest, RequestRefused
from tests.rollout.embedded_support import gap, plain_model, reference_logprobs, running_engine
from tests.sglang_server import running_sglang

TEST_TIMEOUT_S = 60.0
STEP_DELAY_S = 0.03
"""Slow enough for a call to fall into a request."""
FIRST, SECOND = "0.0", "0.1"
PROMPTS = [[5, 13, 6, 16], [4, 3, 13, 5, 3, 16], [9, 13, 12, 16]]


@dataclass(frozen=True)
class Server:
    """A running engine; `model` is the directory it serves under the label FIRST, `other` one with other weights."""

    url: str
    model: Path
    other: Path
    plain: PreTrainedModel
    plain_other: PreTrainedModel


@pytest.fixture(scope="module")
def server(
    request: pytest.FixtureRequest, tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("contract")
    if request.param == "embedded":
        model = tiny_model("llama", seed=4)
        with running_engine(model, directory / "log", "--weight-version", FIRST, "--seed", "5") as (url, _):
            yield make_server(url, model, directory / "other")
        return
    model = tiny_model("llama", seed=4)
    with running_sglang(request.config.getoption("--sglang-python"), model, directory / "log") as url:
        served = make_server(url, model, directory / "other")
        name_weights(served)
        yield served


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The SGLang half exists only where a server is given: a test that cannot run is not collected."""
    if "server" in metafunc.fixturenames:
        kinds = ["embedded", "sglang"] if metafunc.config.getoption("--sglang-python") else ["embedded"]
        metafunc.parametrize("server", kinds, indirect=True, scope="module")


def make_server(url: str, model: Path, other: Path) -> Server:
    """`other`: the same architecture with weights far enough away to tell the two apart."""
    shutil.copytree(model, other)
    tensors = load_file(model / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name in sorted(tensors):
        noise = torch.randn(tensors[name].shape, generator=generator)
        tensors[name] = (tensors[name].float() + 0.3 * tensors[name].float().std(correction=0) * noise).contiguous()
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    return Server(url, model, other, plain_model(model), plain_model(other))


def name_weights(server: Server) -> None:
    """The served directory's own weights get the label FIRST; an SGLang server starts with one of its own."""
    body = {"model_path": str(server.model), "weight_version": FIRST}
    answer = httpx.post(f"{server.url}/update_weights_from_disk", json=body, timeout=60.0, trust_env=False)
    assert answer.status_code == 200 and answer.json()["success"] is True, answer.text


def run(server: Server, test: Callable[[EngineClient], Awaitable[None]]) -> None:
    """`test` within its time; then the server is left as it was found: not paused, not slow, nothing running, FIRST."""

    async def bounded() -> None:
        client = EngineClient(server.url, timeout_s=TEST_TIMEOUT_S, control_timeout_s=20.0)
        try:
            await asyncio.wait_for(test(client), TEST_TIMEOUT_S)
        finally:
            await raw(server, "continue_generation", {})
            await raw(server, "slow_down", {"forward_sleep_time": None})
            await raw(server, "abort_request", {"abort_all": True})
            if (await client.model_info()).weight_version != FIRST:
                await client.update_weights_from_disk(str(server.model), FIRST)
            await client.aclose()

    asyncio.run(bounded())


async def raw(server: Server, call: str, body: object) -> httpx.Response:
    async with httpx.AsyncClient(trust_env=False, timeout=30.0) as http:
        return await http.post(f"{server.url}/{call}", json=body)


def request(rid: str, prompt: list[int] = PROMPTS[0], tokens: int = 24, **fields: object) -> GenerateRequest:
    values = {"rid": rid, "input_ids": prompt, "max_new_tokens": tokens, "temperature": 1.0, **fields}
    return GenerateRequest(**values)  # type: ignore[arg-type]


async def in_flight(server: Server, *tasks: asyncio.Task[Any]) -> None:
    """Until a slowed-down engine runs something (it refuses to flush its cache) and has sampled a few tokens more."""
    while (await raw(server, "flush_cache", {})).status_code != 400:
        await nothing_ends(*tasks)
    await nothing_ends(*tasks, seconds=4 * STEP_DELAY_S)


async def nothing_ends(*tasks: asyncio.Task[Any], seconds: float = 0.005) -> None:
    done, _ = await asyncio.wait(tasks, timeout=seconds)
    assert not done, [task.result() for task in done]


def check(server: Server, prompt: list[int], sample: GeneratedSample, temperature: float = 1.0) -> None:
    """Every log-prob is its own version's."""
    references = {
        FIRST: reference_logprobs(server.plain, prompt, sample.output_ids, temperature),
        SECOND: reference_logprobs(server.plain_other, prompt, sample.output_ids, temperature),
    }
    expected = torch.stack([references[label][i] for i, label in enumerate(sample.weight_versions)])
    assert gap(sample.output_logprobs, expected) <= 1e-5


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_at_the_sampling_temperature_also_in_a_batch_that_others_join(
    server: Server, temperature: float
) -> None:
    async def test(client: EngineClient) -> None:
        tasks = []
        for i in range(12):
            prompt = PROMPTS[i % 3]
            asked = request(f"r{i}", prompt, 4 + 3 * (i % 5), temperature=temperature, n=1 + i % 3)
            tasks.append((prompt, asked, asyncio.create_task(client.generate(asked))))
            await asyncio.wait([tasks[-1][2]], timeout=0.005)
        for prompt, asked, task in tasks:
            samples = await task
            assert len(samples) == asked.n
            for sample in samples:
                assert sample.weight_versions == [FIRST] * len(sample.output_ids)
                assert len(sample.output_ids) == asked.max_new_tokens or sample.output_ids[-1] == 1
                check(server, prompt, sample, temperature)

    run(server, test)


def test_greedy_is_what_transformers_generates(server: Server) -> None:
    async def test(client: EngineClient) -> None:
        for i, prompt in enumerate(PROMPTS):
            (sample,) = await client.generate(request(f"greedy{i}", prompt, 12, temperature=0.0))
            ids = torch.tensor([prompt])
            made = server.plain.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, eos_token_id=1
            )
            assert sample.output_ids == made[0, len(prompt) :].tolist()
            assert sample.finish_reason == ("stop" if sample.output_ids[-1] == 1 else "length")
            check(server, prompt, sample)

    run(server, test)


def test_sampling_frequencies_match_the_probabilities(server: Server) -> None:
    async def test(client: EngineClient) -> None:
        prompt, temperature = [9, 11], 1.5
        samples = []
        for i in range(4):
            samples += await client.generate(request(f"many{i}", prompt, 1, temperature=temperature, n=256))
        with torch.no_grad():
            logits = server.plain(torch.tensor([prompt])).logits[0, -1].double()
        probabilities = (logits / temperature).softmax(-1)
        counts = torch.bincount(torch.tensor([s.output_ids[0] for s in samples]), minlength=32).double()
        assert counts.sum() == 1024
        for token in range(32):
            p = float(probabilities[token])
            assert abs(float(counts[token]) - 1024 * p) <= 5 * math.sqrt(1024 * p * (1 - p)) + 1.5, token

    run(server, test)


def test_n_samples_come_in_order_under_their_own_ids_and_differ(server: Server) -> None:
    async def test(client: EngineClient) -> None:
        samples = await client.generate(request("many", tokens=16, temperature=2.0, n=8))
        assert len({tuple(sample.output_ids) for sample in samples}) > 4
        assert len({sample.rid for sample in samples}) == 8
        (one,) = await client.generate(request("single", tokens=2))
        assert one.rid == "single"

    run(server, test)


def test_a_batch_of_prompts_is_answered_in_its_order(server: Server) -> None:
    async def test(client: EngineClient) -> None:
        sampling = {"max_new_tokens": 5, "temperature": 1.0, "ignore_eos": True}
        body = {"rid": "x", "input_ids": PROMPTS, "sampling_params": sampling, "return_logprob": True}
        answers = (await raw(server, "generate", body)).json()
        assert [answer["meta_info"]["prompt_tokens"] for answer in answers] == [4, 6, 4]
        assert [answer["meta_info"]["id"] for answer in answers] == ["x_0", "x_1", "x_2"]
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            meta = answer["meta_info"]
            assert meta["finish_reason"] == {"type": "length", "length": 5} and meta["completion_tokens"] == 5
            assert [token for _, token, _ in meta["output_token_logprobs"]] == answer["output_ids"]
            values = [value for value, _, _ in meta["output_token_logprobs"]]
            assert gap(values, reference_logprobs(server.plain, prompt, answer["output_ids"], 1.0)) <= 1e-5

    run(server, test)


def test_input_logprobs_on_request(server: Server) -> None:
    async def test(client: EngineClient) -> None:
        prompt = PROMPTS[1]
        body = {
            "input_ids": prompt,
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        answer = (await raw(server, "generate", body)).json()
        entries = answer["meta_info"]["input_token_logprobs"]
        assert [token for _, token, _ in entries] == prompt and entries[0][0] is None
        reference = reference_logprobs(server.plain, prompt[:1], prompt[1:], 1.0)
        assert gap([value for value, _, _ in entries[1:]], reference) <= 1e-5

    run(server, test)


def test_stop_tokens_end_a_sample_and_are_its_last(server: Server) -> None:
    async def test(client: EngineClient) -> None:
        (greedy,) = await client.generate(request("free", tokens=12, temperature=0.0))
        stop = greedy.output_ids[0]
        samples = await client.generate(request("stop", tokens=12, n=32, temperature=1.5, stop_token_ids=(stop,)))
        kinds = set()
        for sample in samples:
            kinds.add(sample.output_ids[-1])
            assert not {stop, 1} & set(sample.output_ids[:-1])
            if len(sample.output_ids) < 12:
                assert sample.output_ids[-1] in (stop, 1) and sample.finish_reason == "stop"
        assert stop in kinds

    run(server, test)


def test_a_retracted_request_goes_on_under_new_weights_with_every_token_labelled(server: Server) -> None:
    async def test(client: EngineClient) -> None:
        await raw(server, "slow_down", {"forward_sleep_time": STEP_DELAY_S})
        body = {
            "rid": "long",
            "input_ids": PROMPTS[1],
            "sampling_params": {"max_new_tokens": 48, "temperature": 0.7, "ignore_eos": True, "n": 3},
            "return_logprob": True,
        }
        task = asyncio.create_task(raw(server, "generate", body))
        await in_flight(server, task)
        await client.pause_generation("retract")
        assert not await client.ready()
        assert (await client.model_info()).weight_version == FIRST
        await client.flush_cache()
        await client.update_weights_from_disk(str(server.other), SECOND)
        info = await client.model_info()
        assert (info.weight_version, info.model_path) == (SECOND, str(server.other))
        await nothing_ends(task, seconds=10 * STEP_DELAY_S)
        await raw(server, "slow_down", {"forward_sleep_time": None})
        await client.continue_generation()
        assert await client.ready()
        for answer in (await task).json():
            meta = answer["meta_info"]
            first, second = meta["weight_versions"]
            cut = first["end"]
            assert 0 < cut < 48
            assert first == {"version": FIRST, "start": 0, "end": cut}
            assert second == {"version": SECOND, "start": cut, "end": 48}
            assert meta["num_retractions"] == 1 and meta["weight_version"] == SECOND
            values = [value for value, _, _ in meta["output_token_logprobs"]]
            labels = [FIRST] * cut + [SECOND] * (48 - cut)
            sample = GeneratedSample("long", answer["output_ids"], values, labels, "length")
            check(server, PROMPTS[1], sample, 0.7)
            swapped = reference_logprobs(server.plain_other, PROMPTS[1], answer["output_ids"], 0.7)
            assert gap(values[:cut], swapped[:cut]) > 1e-3, "the two models must differ for this to mean much"

    run(server, test)


def test_a_pause_in_mode_abort_returns_what_there_is_and_holds_what_comes(server: Server) -> None:
    async def test(client: EngineClient) -> None:
        await raw(server, "slow_down", {"forward_sleep_time": STEP_DELAY_S})
        partial = asyncio.create_task(client.generate(request("partial", [9, 11], 48, temperature=4.0, n=4)))
        await in_flight(server, partial)
        await client.pause_generation("abort")
        samples = await partial
        assert {sample.finish_reason for sample in samples} <= {"abort", "stop"}
        assert "abort" in {sample.finish_reason for sample in samples}
        for sample in samples:
            assert 0 < len(sample.output_ids) < 48
            check(server, [9, 11], sample, 4.0)
        held = asyncio.create_task(client.generate(request("held", tokens=2)))
        await nothing_ends(held, seconds=10 * STEP_DELAY_S)
        await client.continue_generation()
        assert len(await held) == 1

    run(server, test)


def test_abort_ends_the_request_of_that_id_alone(server: Server) -> None:
    async def test(client: EngineClient) -> None:
        await raw(server, "slow_down", {"forward_sleep_time": STEP_DELAY_S})
        bodies = [
            {
                "rid": rid,
                "input_ids": PROMPTS[0],
                "sampling_params": {"max_new_tokens": 48, "temperature": 1.0, "ignore_eos": True},
                "return_logprob": True,
            }
            for rid in ("first", "other")
        ]
        tasks = [asyncio.create_task(raw(server, "generate", body)) for body in bodies]
        await in_flight(server, *tasks)
        await client.abort_request("nobody")
        await client.abort_request("first")
        first = (await tasks[0]).json()
        assert first["meta_info"]["finish_reason"]["type"] == "abort"
        assert 0 < len(first["output_ids"]) < 48
        await raw(server, "slow_down", {"forward_sleep_time": None})
        other = (await tasks[1]).json()
        assert other["meta_info"]["finish_reason"] == {"type": "length", "length": 48}
        values = [value for value, _, _ in other["meta_info"]["output_token_logprobs"]]
        assert gap(values, reference_logprobs(server.plain, PROMPTS[0], other["output_ids"], 1.0)) <= 1e-5

    run(server, test)


def test_a_cancelled_generate_is_aborted_on_the_engine(server: Server) -> None:
    async def test(client: EngineClient) -> None:
        await raw(server, "slow_down", {"forward_sleep_time": STEP_DELAY_S})
        task = asyncio.create_task(client.generate(request("gone", [9, 11], 48, temperature=4.0, n=4)))
        await in_flight(server, task)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await raw(server, "slow_down", {"forward_sleep_time": None})
        (again,) = await client.generate(request("gone", tokens=2))
        assert again.rid == "gone"

    run(server, test)


def test_a_failed_update_is_an_error_and_leaves_the_label(server: Server, tmp_path: Path) -> None:
    async def test(client: EngineClient) -> None:
        with pytest.raises(EngineError, match="update_weights_from_disk"):
            await client.update_weights_from_disk(str(tmp_path / "nowhere"), SECOND)
        assert (await client.model_info()).weight_version == FIRST
        (sample,) = await client.generate(request("after", tokens=8))
        check(server, PROMPTS[0], sample)

    run(server, test)


def test_a_request_without_tokens_is_refused(server: Server) -> None:
    async def test(client: EngineClient) -> None:
        with pytest.raises(RequestRefused):
            await client.generate(request("empty", prompt=[]))
        assert await client.health() and await client.ready()

    run(server, test)
