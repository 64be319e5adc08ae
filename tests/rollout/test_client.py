"""The client: what it sends, and what it makes of every kind of answer. Over loopback, from a server that answers as
it is told; the same client meets real engines in test_engine_contract.py."""

from __future__ import annotations

import asyncio
import math
import socket
from typing import Any

import pytest

from m2po_megatron.rollout.client import (
    EngineClient,
    EngineError,
    GeneratedSample,
    GenerateRequest,
    ModelInfo,
    RequestRefused,
)
from tests.rollout.scripted_server import CUT, DROP, REQUEST, Reply, Server, run, sample, span


def generate(answer: Any, request: GenerateRequest = REQUEST) -> list[GeneratedSample]:
    samples: list[GeneratedSample] = run(
        Server(generate=Reply(200, json=answer)), lambda client: client.generate(request)
    )
    return samples


def test_a_group_of_samples_with_versions_per_token() -> None:
    retracted = sample(
        [5, 6, 1], [-0.5, -0.25, -2], weight_versions=[span("0.3", 0, 2), span("0.4", 2, 3)], num_retractions=1
    )
    truncated = sample([8], [-1.5], finish="length", rid="r7_1", weight_versions=[span("0.4", 0, 1)])
    server = Server(generate=Reply(200, json=[retracted, truncated]))
    samples = run(server, lambda client: client.generate(REQUEST))
    assert samples == [
        GeneratedSample("r7_0", [5, 6, 1], [-0.5, -0.25, -2.0], ["0.3", "0.3", "0.4"], "stop"),
        GeneratedSample("r7_1", [8], [-1.5], ["0.4"], "length"),
    ]
    ((method, path, body),) = server.asked
    assert (method, path) == ("POST", "/generate")
    assert body == {
        "rid": "r7",
        "input_ids": [3, 4],
        "return_logprob": True,
        "stream": False,
        "sampling_params": {
            "max_new_tokens": 5,
            "temperature": 0.7,
            "n": 2,
            "stop_token_ids": [1, 9],
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
        },
    }


def test_a_single_sample_comes_without_a_list_and_the_old_way_to_say_versions() -> None:
    request = GenerateRequest("r7", [3], max_new_tokens=2, temperature=1.0)
    assert generate(sample([5, 6], [-0.5, -1], weight_version="0.2"), request) == [
        GeneratedSample("r7_0", [5, 6], [-0.5, -1.0], ["0.2", "0.2"], "stop")
    ]


def test_what_the_workflow_judges_is_passed_on_as_it_is() -> None:
    """Missing log-probs, numbers that are none, versions of too few tokens, aborted samples: refused there, by their id."""
    without, null, short, aborted = generate(
        [
            sample([5, 6], None),
            sample([5, 6], [-0.5, None]),
            sample([5, 6], [-0.5, -1], weight_versions=[span("0.3", 0, 1)]),
            sample([], None, finish="abort", weight_versions=[]),
        ]
    )
    assert (without.output_ids, without.output_logprobs) == ([5, 6], [])
    assert null.output_logprobs[0] == -0.5 and math.isnan(null.output_logprobs[1])
    assert (short.output_ids, short.weight_versions) == ([5, 6], ["0.3"])
    assert (aborted.finish_reason, aborted.output_ids, aborted.weight_versions) == ("abort", [], [])


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ({"text": "hello"}, "unreadable sample of request r7: KeyError: 'meta_info'"),
        ([[1]], "unreadable sample of request r7: TypeError"),
        (sample([5], [-1], weight_versions=[span("0.3", 1, 2)]), "spans .* do not follow each other"),
        (sample([5], [-1], weight_versions=[span("0.3", 0, 1), span("0.4", 0, 1)]), "do not follow each other"),
        (
            {**sample([5, 6], [-1, -1]), "output_ids": [5, 7]},
            "log-probs of sample r7_0 are of other tokens than its own",
        ),
    ],
)
def test_answers_that_are_not_of_the_protocol(answer: Any, reason: str) -> None:
    with pytest.raises(EngineError, match=f"engine http://127.0.0.1:[0-9]+: generate: .*{reason}"):
        generate(answer)


@pytest.mark.parametrize(
    ("answer", "kind", "reason"),
    [
        (Reply(500, text="Internal Server Error"), EngineError, "HTTP 500: Internal Server Error"),
        (
            Reply(400, json={"error": {"message": "prompt too long"}}),
            RequestRefused,
            "HTTP 400: prompt too long",
        ),
        (Reply(422, json={"detail": [{"msg": "bad"}]}), RequestRefused, 'HTTP 422: [{"msg": "bad"}]'),
        (Reply(200, text="<html>"), EngineError, "the answer is not JSON: '<html>'"),
        (
            Reply(307, text="elsewhere", headers=(("Location", "/model_info"),)),
            EngineError,
            "HTTP 307: elsewhere",
        ),
        (DROP, EngineError, "ServerDisconnectedError: Server disconnected"),
        (CUT, EngineError, "ClientPayloadError: Response payload is not completed"),
    ],
)
def test_failures_name_engine_call_and_reason(answer: Any, kind: type[EngineError], reason: str) -> None:
    server = Server(generate=answer)
    with pytest.raises(EngineError) as caught:
        run(server, lambda client: client.generate(REQUEST))
    assert str(caught.value).startswith(f"engine {server.url}: generate: {reason}")
    assert type(caught.value) is kind
    assert (caught.value.url, caught.value.call) == (server.url, "generate")
    assert len(server.asked) == 1  # tried once: to try again is for the pool to decide


def test_an_engine_that_is_not_there_is_an_error() -> None:
    async def call(url: str) -> None:
        client = EngineClient(url, timeout_s=5, control_timeout_s=5)
        try:
            await client.generate(REQUEST)
        finally:
            await client.aclose()

    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # and does not listen: connections are refused
        port = silent.getsockname()[1]
        refused = (
            f"engine http://127.0.0.1:{port}: generate: ClientConnectorError: Cannot connect to host 127.0.0.1:{port} "
        )
        with pytest.raises(EngineError, match=refused) as caught:
            asyncio.run(call(f"http://127.0.0.1:{port}"))
    assert type(caught.value) is EngineError


def test_a_long_error_answer_is_shortened() -> None:
    with pytest.raises(EngineError) as caught:
        run(Server(generate=Reply(500, text="x" * 100_000)), lambda client: client.generate(REQUEST))
    assert len(str(caught.value)) < 700


def test_control_calls_say_what_the_protocol_asks() -> None:
    success = Reply(200, json={"success": True, "message": "Succeeded"})
    server = Server(
        update_weights_from_disk=success,
        pause_generation=Reply(200, json={"status": "ok"}),
        continue_generation=Reply(200),
        abort_request=Reply(200),
        flush_cache=Reply(200, text="Cache flushed.\n"),
        model_info=Reply(200, json={"model_path": "/w/v3", "weight_version": "1.3", "is_generation": True}),
        health=Reply(200),
        ready=Reply(503),
    )

    async def calls(client: EngineClient) -> list[Any]:
        await client.pause_generation()
        await client.pause_generation("abort")
        await client.flush_cache()
        await client.update_weights_from_disk("/w/v3", "1.3")
        await client.continue_generation()
        await client.abort_request("r7")
        return [await client.model_info(), await client.health(), await client.ready()]

    assert run(server, calls) == [ModelInfo("/w/v3", "1.3"), True, False]
    assert server.asked == [
        ("POST", "/pause_generation", {"mode": "retract"}),
        ("POST", "/pause_generation", {"mode": "abort"}),
        ("POST", "/flush_cache", {}),
        (
            "POST",
            "/update_weights_from_disk",
            {"model_path": "/w/v3", "weight_version": "1.3", "flush_cache": True, "abort_all_requests": False},
        ),
        ("POST", "/continue_generation", {}),
        ("POST", "/abort_request", {"rid": "r7"}),
        ("GET", "/model_info", None),
        ("GET", "/health", None),
        ("GET", "/ready", None),
    ]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (Reply(200, json={"success": False, "message": "no such file"}), "no success: no such file"),
        (Reply(400, json={"success": False, "message": "no such file"}), "HTTP 400: no such file"),
        (Reply(404, json={"detail": "Not Found"}), "HTTP 404: Not Found"),
        (DROP, "ServerDisconnectedError"),
    ],
)
def test_an_update_that_did_not_succeed_is_an_error(answer: Any, reason: str) -> None:
    server = Server(update_weights_from_disk=answer)
    with pytest.raises(EngineError, match=f"update_weights_from_disk: {reason}"):
        run(server, lambda client: client.update_weights_from_disk("/absent", "0.1"))


def test_a_server_without_versions_is_refused_with_the_version_that_has_them() -> None:
    with pytest.raises(EngineError, match=r"model_info: says no weight_version .SGLang from 0\.5\.19"):
        run(Server(model_info=Reply(200, json={"model_path": "x"})), lambda client: client.model_info())


def test_health_that_is_neither_yes_nor_no_is_an_error() -> None:
    with pytest.raises(EngineError, match="health: HTTP 404"):
        run(Server(health=Reply(404)), lambda client: client.health())
    assert run(Server(health=Reply(503)), lambda client: client.health()) is False


def test_an_api_key_is_sent_and_never_said() -> None:
    server = Server(model_info=Reply(401, json={"error": "Unauthorized"}))
    with pytest.raises(EngineError, match="HTTP 401: Unauthorized") as caught:
        run(server, lambda client: client.model_info(), api_key="s3cret")
    assert server.headers[0]["authorization"] == "Bearer s3cret"
    assert "s3cret" not in str(caught.value)
