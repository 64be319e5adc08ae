"""The embedded engine as a process: how it starts, what it refuses, how it ends; what SGLang need not do alike."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from m2po_megatron.rollout.launch import free_port
from tests.rollout.embedded_support import (
    ARITHMETIC_MODEL,
    END_TIMEOUT_S,
    ROOT,
    engine_command,
    engine_environment,
    running_engine,
    wait_gone,
)

MakeModel = Callable[..., Path]


@pytest.fixture(scope="module")
def model(tiny_model: MakeModel) -> Path:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def url(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("engine") / "log"
    with running_engine(model, log, "--weight-version", "0.0", "--max-running-requests", "4") as (address, _):
        yield address


def post(url: str, call: str, body: Any = None, timeout: float = 30.0) -> httpx.Response:
    return httpx.post(f"{url}/{call}", json=body, timeout=timeout, trust_env=False)


def get(url: str, call: str) -> httpx.Response:
    return httpx.get(f"{url}/{call}", timeout=10.0, trust_env=False)


def generate_body(rid: str = "r", **sampling: Any) -> dict[str, Any]:
    return {"rid": rid, "input_ids": [5, 6, 7], "sampling_params": sampling, "return_logprob": True}


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"sampling_params": {"top_p": 0.9}}, "sampling_params.top_p = 0.9"),
        ({"sampling_params": {"top_k": 5}}, "sampling_params.top_k = 5"),
        ({"sampling_params": {"min_p": 0.1}}, "sampling_params.min_p = 0.1"),
        ({"sampling_params": {"frequency_penalty": 0.5}}, "sampling_params.frequency_penalty"),
        ({"sampling_params": {"presence_penalty": 0.5}}, "sampling_params.presence_penalty"),
        ({"sampling_params": {"repetition_penalty": 1.1}}, "sampling_params.repetition_penalty"),
        ({"sampling_params": {"stop": ["x"]}}, "sampling_params.stop = "),
        ({"sampling_params": {"topp": 1}}, "sampling_params.topp is not known"),
        ({"sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        ({"sampling_params": {"max_new_tokens": 2.5}}, "sampling_params.max_new_tokens"),
        ({"sampling_params": {"n": 0}}, "sampling_params.n"),
        ({"sampling_params": {"stop_token_ids": [1, "x"]}}, "sampling_params.stop_token_ids"),
        ({"sampling_params": {"ignore_eos": 1}}, "ignore_eos must be true or false"),
        ({"sampling_params": []}, "sampling_params must be an object"),
        ({"stream": True}, "stream = True"),
        ({"top_logprobs_num": 3}, "top_logprobs_num = 3"),
        ({"input_ids": []}, "input_ids must be a non-empty list"),
        ({"input_ids": [[3], []]}, "every prompt must be a non-empty list"),
        ({"input_ids": [3, 32]}, "32 is not a token id (0 to 31)"),
        ({"input_ids": [3, True]}, "True is not a token id"),
        ({"input_ids": [3] * 512}, "a prompt of 512 tokens is too long"),
        ({"text": "1+1="}, "give either input_ids or text"),
        ({"rid": ""}, "rid must be a non-empty string"),
        ({"rid": ["a", "b"]}, "rid: a list must hold one non-empty string for each of the 1 prompts"),
        ({"logprob_start_len": -2}, "logprob_start_len"),
        ({"logprob_start_len": 2}, "logprob_start_len = 2 is beyond a prompt of 2 tokens"),
        ({"sampling_params": {"temperature": 10**400}}, "sampling_params.temperature must be a number"),
        ({"sampling_params": {"n": 4096}, "input_ids": [[3], [4]]}, "2 prompts times sampling_params.n = 4096"),
        ({"sampling_parms": {}}, "sampling_parms is not known to the embedded engine"),
    ],
)
def test_a_wrong_request_is_refused_by_the_name_of_its_field(url: str, body: dict[str, Any], text: str) -> None:
    response = post(url, "generate", {"input_ids": [3, 4], "return_logprob": True, **body})
    assert response.status_code == 400
    assert text in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("call", "body", "status", "text"),
    [
        ("pause_generation", {"mode": "in_place"}, 400, "must be one of abort, retract, got 'in_place'"),
        ("abort_request", {}, 400, "needs an rid or abort_all"),
        ("slow_down", {"forward_sleep_time": -1}, 400, "forward_sleep_time must be 0 to 10 seconds"),
        ("slow_down", [1], 400, "the body must be a JSON object"),
        ("nothing", {}, 404, "POST /nothing: Not Found"),
    ],
)
def test_a_wrong_control_call_is_refused(url: str, call: str, body: Any, status: int, text: str) -> None:
    response = post(url, call, body)
    assert response.status_code == status
    assert text in response.json()["error"]["message"]
    assert get(url, "ready").status_code == 200


def test_a_body_that_is_not_json_is_refused(url: str) -> None:
    response = httpx.post(f"{url}/generate", content=b"{", timeout=10.0, trust_env=False)
    assert response.status_code == 400 and "/generate: the body is not JSON" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("content", "charset", "text"),
    [
        (b'{"rid": "\xff"}', "utf-8", "the body is not utf-8: invalid start byte at byte 9"),
        (b"{}", "no-such-charset", "the charset of the body is not known"),
        (b"[" * 100_000, "utf-8", "the body is nested too deeply"),
    ],
)
def test_a_body_that_cannot_be_read_is_refused(url: str, content: bytes, charset: str, text: str) -> None:
    headers = {"Content-Type": f"application/json; charset={charset}"}
    response = httpx.post(f"{url}/generate", content=content, headers=headers, timeout=10.0, trust_env=False)
    assert response.status_code == 400 and text in response.json()["error"]["message"]


@pytest.mark.parametrize("content", ["{", "[1]", '{"eos_token_id": "x"}'])
def test_a_broken_generation_config_is_one_clear_line(model: Path, tmp_path: Path, content: str) -> None:
    shutil.copytree(model, tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text(content)
    command = engine_command(tmp_path / "model", free_port())
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=engine_environment(), cwd=ROOT, check=False
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert str(tmp_path / "model" / "generation_config.json") in done.stderr.splitlines()[-1]


def test_neutral_values_are_accepted(url: str) -> None:
    neutral: dict[str, Any] = {
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "stop": None,
        "max_new_tokens": 3,
    }
    response = post(url, "generate", generate_body(ignore_eos=True, **neutral))
    assert response.status_code == 200 and len(response.json()["output_ids"]) == 3


def test_a_sequence_ends_where_the_positions_end(url: str) -> None:
    body = {"input_ids": [5] * 500, "sampling_params": {"max_new_tokens": 100, "ignore_eos": True}}
    answer = post(url, "generate", body).json()
    assert len(answer["output_ids"]) == 12 and answer["meta_info"]["finish_reason"]["type"] == "length"


@pytest.mark.parametrize("broken", ["missing", "other shapes"])
def test_a_bad_directory_leaves_weights_and_label(url: str, tmp_path: Path, tiny_model: MakeModel, broken: str) -> None:
    greedy = generate_body(max_new_tokens=8, temperature=0, ignore_eos=True)
    before = post(url, "generate", greedy).json()
    path = tmp_path / "nowhere" if broken == "missing" else tiny_model("llama", hidden_size=32)
    response = post(url, "update_weights_from_disk", {"model_path": str(path), "weight_version": "0.9"})
    assert response.status_code == 400
    assert response.json()["success"] is False and str(path) in response.json()["message"]
    assert get(url, "model_info").json()["weight_version"] == "0.0"
    after = post(url, "generate", greedy).json()
    assert after["meta_info"] == before["meta_info"] and after["output_ids"] == before["output_ids"]


def test_an_update_without_a_pause_waits_for_what_runs(model: Path, tiny_model: MakeModel, tmp_path: Path) -> None:
    new = tiny_model("llama", seed=1)
    with (
        running_engine(model, tmp_path / "log", "--max-running-requests", "1") as (url, _),
        ThreadPoolExecutor(3) as pool,
    ):
        post(url, "slow_down", {"forward_sleep_time": 0.02})
        first = pool.submit(post, url, "generate", generate_body("first", max_new_tokens=50, ignore_eos=True))
        wait_running(url, first)
        update = pool.submit(post, url, "update_weights_from_disk", {"model_path": str(new), "weight_version": "0.1"})
        # It runs one at a time: the second can only start after the first, and so after the update.
        second = pool.submit(post, url, "generate", generate_body("second", max_new_tokens=5, ignore_eos=True))
        assert update.result().json()["success"] is True
        assert first.result().json()["meta_info"]["weight_versions"] == [{"version": "0.0", "start": 0, "end": 50}]
        spans = second.result().json()["meta_info"]["weight_versions"]
        assert spans == [{"version": "0.1", "start": 0, "end": 5}]
        assert get(url, "model_info").json() == {
            "model_path": str(new),
            "tokenizer_path": str(model),
            "is_generation": True,
            "weight_version": "0.1",
        }


def wait_running(url: str, answer: Future[httpx.Response]) -> None:
    """Until a sequence runs: then, and only then, the cache may not be flushed."""
    deadline = time.monotonic() + 10
    while post(url, "flush_cache").status_code != 400:
        assert time.monotonic() < deadline and not answer.done()


def test_a_client_that_hangs_up_frees_its_place(url: str) -> None:
    post(url, "slow_down", {"forward_sleep_time": 0.05})
    try:
        with ThreadPoolExecutor(1) as pool:
            body = generate_body("long", max_new_tokens=400, ignore_eos=True)
            gone = pool.submit(post, url, "generate", body, 0.7)
            wait_running(url, gone)
            with pytest.raises(httpx.ReadTimeout):
                gone.result()
        deadline = time.monotonic() + 8  # the 400 tokens would take 20 s
        while post(url, "flush_cache").status_code != 200:
            assert time.monotonic() < deadline, "the request of a client that is gone still runs"
    finally:
        post(url, "slow_down", {"forward_sleep_time": None})


def test_control_calls_are_answered_while_it_computes(url: str) -> None:
    with ThreadPoolExecutor(1) as pool:
        body = {"input_ids": [[5, 6]] * 64, "sampling_params": {"max_new_tokens": 100, "ignore_eos": True}}
        answer = pool.submit(post, url, "generate", body)
        wait_running(url, answer)
        assert get(url, "model_info").status_code == 200 and get(url, "health").status_code == 200
        assert not answer.done()
        post(url, "abort_request", {"abort_all": True})
        answers = answer.result().json()
    assert len(answers) == 64
    assert all(one["meta_info"]["finish_reason"]["type"] == "abort" for one in answers[4:]), "four run at once"


def test_the_bundled_model_speaks_text(tmp_path: Path) -> None:
    with running_engine(ARITHMETIC_MODEL, tmp_path / "log") as (url, _):
        body: dict[str, Any] = {"text": ["2+3=", "10+20="], "sampling_params": {"temperature": 0, "max_new_tokens": 8}}
        texts = post(url, "generate", body).json()
        ids = post(url, "generate", {**body, "text": None, "input_ids": [[5, 13, 6, 16], [4, 3, 13, 5, 3, 16]]}).json()
    for text, by_ids in zip(texts, ids, strict=True):
        assert text["output_ids"] == by_ids["output_ids"] and text["output_ids"][-1] == 1
        assert text["meta_info"]["finish_reason"] == {"type": "stop", "matched": 1}
        assert text["text"] == "".join("0123456789"[token - 3] for token in text["output_ids"][:-1])


def test_a_port_in_use_is_one_clear_line_and_exit_code_2(model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = subprocess.run(
            engine_command(model, port), capture_output=True, text=True, timeout=60, env=engine_environment(), cwd=ROOT
        )
    assert done.returncode == 2
    assert done.stderr == f"--port {port} on 127.0.0.1 is already in use; choose another\n"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--port", "70000"], "--port must be 1 to 65535, got 70000"),
        (["--port", "x"], "argument --port: invalid int value: 'x'"),
        (["--dtype", "float16"], "argument --dtype: invalid choice"),
        (["--max-running-requests", "0"], "--max-running-requests must be at least 1, got 0"),
        (["--model-path", "/nowhere"], "--model-path /nowhere has no config.json"),
    ],
)
def test_a_wrong_command_line_names_the_flag_and_ends_with_1(model: Path, options: list[str], text: str) -> None:
    command = [*engine_command(model, free_port()), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=engine_environment(), cwd=ROOT)
    assert done.returncode == 1
    assert text in done.stderr.splitlines()[-1] and "Traceback" not in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_cleanly_also_with_requests_in_flight(model: Path, tmp_path: Path, number: int) -> None:
    log = tmp_path / "log"
    with running_engine(model, log) as (url, process), ThreadPoolExecutor(1) as pool:
        post(url, "slow_down", {"forward_sleep_time": 0.05})
        answer = pool.submit(post, url, "generate", generate_body(max_new_tokens=400, ignore_eos=True))
        wait_running(url, answer)
        process.send_signal(number)
        assert process.wait(END_TIMEOUT_S) == 0
        response = answer.result()
        assert response.status_code == 503 and response.json()["error"]["message"] == "the engine is shutting down"
    assert "Traceback" not in log.read_text()


def test_it_ends_when_its_parent_is_killed(model: Path, tmp_path: Path) -> None:
    port = free_port()
    # A parent that dies without a word; it prints its child's pid once.
    code = (
        "import os, subprocess, sys\n"
        "child = subprocess.Popen([*sys.argv[1:], '--parent-pid', str(os.getpid())], stdout=2, stderr=2)\n"
        "print(child.pid, flush=True)\n"
        "child.wait()\n"
    )
    with (tmp_path / "log").open("wb") as log:
        parent = subprocess.Popen(
            [sys.executable, "-c", code, *engine_command(model, port)],
            stdout=subprocess.PIPE,
            stderr=log,
            env=engine_environment(),
            cwd=ROOT,
        )
    watchdog = threading.Timer(150, parent.kill)
    watchdog.start()
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    try:
        deadline = time.monotonic() + 120
        while not answers_health(port):
            assert time.monotonic() < deadline and parent.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.1)
        assert os.getpgid(child), "it lives as long as its parent does"
        parent.kill()
        parent.wait()
        assert wait_gone(child, 10.0), "the engine outlives its parent"
    finally:
        watchdog.cancel()
        parent.kill()
        parent.stdout.close()
        if not wait_gone(child, 0.0):
            os.kill(child, signal.SIGKILL)


def answers_health(port: int) -> bool:
    try:
        return get(f"http://127.0.0.1:{port}", "health").status_code == 200
    except httpx.HTTPError:
        return False


def test_a_parent_that_is_not_the_parent_ends_it_at_once(model: Path) -> None:
    command = engine_command(model, free_port(), "--parent-pid", "1")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=engine_environment(), cwd=ROOT)
    assert done.returncode == 0 and "the parent process 1 is gone" in done.stderr


def test_it_serves_a_model_without_a_tokenizer(model: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(model, bare, ignore=shutil.ignore_patterns("tokenizer*"))
    with running_engine(bare, tmp_path / "log", "--dtype", "bfloat16") as (url, _):
        answer = post(url, "generate", generate_body(max_new_tokens=4, ignore_eos=True)).json()
        assert len(answer["output_ids"]) == 4 and answer["text"] == ""
        refused = post(url, "generate", {"text": "1+1="})
    assert refused.status_code == 400 and "text needs a tokenizer" in refused.json()["error"]["message"]
