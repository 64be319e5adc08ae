"""The trainer's side, against a controller in a thread whose engine is without a network (real processes:
test_controller_process.py)."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from aiohttp import web

from m2po_megatron.data.trajectory import Batch, Group
from m2po_megatron.rollout.api import build_application
from m2po_megatron.rollout.codec import encode_batch
from m2po_megatron.rollout.connection import ControllerConnection
from m2po_megatron.rollout.controller import Controller
from m2po_megatron.rollout.errors import RolloutError
from m2po_megatron.rollout.launch import ClientFactory
from m2po_megatron.rollout.settings import RolloutJob, RolloutSettings, read_settings, write_settings
from tests.rollout.fake_engine import FakeClient
from tests.rollout.samples import make_prompt, make_trajectory

WAIT_S = 20.0


@pytest.fixture
def settings(tmp_path: Path) -> RolloutSettings:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{i}+1=", "answer": str(i + 1)}) + "\n" for i in range(10)))
    return RolloutSettings(
        prompt_data=str(prompts),
        group_size=2,
        rollout_batch_size=8,
        global_batch_size=8,
        max_staleness=1,
        max_response_length=6,
        engine_start_timeout_s=120,
    )


@pytest.fixture
def job(tmp_path: Path, tiny_model: Callable[..., Path]) -> RolloutJob:
    job = RolloutJob(run_dir=str(tmp_path / "run"), model_path=str(tiny_model()))
    job.log_dir.mkdir(parents=True)
    return job


@contextmanager
def controller_in_a_thread(
    settings: RolloutSettings, job: RolloutJob
) -> Iterator[tuple[ControllerConnection, FakeClient]]:
    """The real application on a real port; one fake engine."""
    client = FakeClient("http://fake-0")
    address: list[Any] = []
    up = threading.Event()

    async def serve() -> None:
        attached = replace(settings, rollout_engine="sglang", sglang_urls=[client.url])
        controller = Controller(attached, job, cast("ClientFactory", lambda _: client))
        runner = web.AppRunner(build_application(controller), shutdown_timeout=0.1)
        stop = asyncio.Event()
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        address.extend([runner.addresses[0][1], asyncio.get_running_loop(), stop])
        await controller.start()
        up.set()
        await stop.wait()
        await controller.close()
        await runner.cleanup()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert up.wait(WAIT_S)
    connection = ControllerConnection(f"http://127.0.0.1:{address[0]}", None, job.controller_log)
    try:
        yield connection, client
    finally:
        connection.close()
        address[1].call_soon_threadsafe(address[2].set)
        thread.join(WAIT_S)
        assert not thread.is_alive()


def test_the_whole_interface(settings: RolloutSettings, job: RolloutJob, tmp_path: Path) -> None:
    with controller_in_a_thread(settings, job) as (connection, client):
        batch = connection.lease(0, WAIT_S)
        assert batch is not None and [g.id for g in batch.groups] == ["g0", "g1", "g2", "g3"]
        assert connection.last_lease_info["max_staleness"] == 1
        assert connection.last_lease_info["loaded_version"] == 0
        connection.trained(0, 1)
        weights = tmp_path / "weights"
        weights.mkdir()
        connection.publish(str(weights), 1)
        connection.wait_loaded(1, WAIT_S)
        assert connection.loaded_version() == 1
        assert client.label == "0.1"
        job_id = connection.evaluate_start("heldout", settings.prompt_data, 2, 0.0, 6, 1)
        result = connection.evaluate_result(job_id, WAIT_S)
        assert result is not None and (result["samples"], result["version"]) == (20, 1)
        trajectories = connection.probe(3, WAIT_S, version=1)
        assert trajectories is not None and len(trajectories) == 3
        assert all((t.versions[t.loss_mask] == 1).all() for t in trajectories)
        status = connection.status()
        assert status["groups"]["trained"] == 4
        assert [engine["alive"] for engine in status["engines"]] == [True]


def test_waiting_ends_without_a_batch(settings: RolloutSettings, job: RolloutJob) -> None:
    with controller_in_a_thread(settings, job) as (connection, client):
        assert connection.lease(0, WAIT_S) is not None
        client.gate.clear()
        connection.trained(0, 1)
        assert connection.lease(1, WAIT_S) is not None  # sampled ahead
        connection.trained(1, 2)
        started = time.monotonic()
        assert connection.lease(2, 0.2) is None
        assert 0.15 < time.monotonic() - started < 5
        assert connection.last_lease_info["wait_reason"] == "staleness"
        with pytest.raises(RolloutError, match="have not loaded version 2 within 0 s"):
            connection.wait_loaded(2, 0.1)


def test_errors_come_with_the_controllers_words(settings: RolloutSettings, job: RolloutJob, tmp_path: Path) -> None:
    with controller_in_a_thread(settings, job) as (connection, _):
        with pytest.raises(RolloutError, match="trainer is at version 7, but batch 0 starts at 0"):
            connection.lease(7, 1)
        with pytest.raises(RolloutError, match="absent .version 1. are not a directory"):
            connection.publish(str(tmp_path / "absent"), 1)
        (tmp_path / "bad.jsonl").write_text("{\n")
        with pytest.raises(RolloutError, match=r"bad\.jsonl, line 1"):
            connection.evaluate_start("x", str(tmp_path / "bad.jsonl"), 1, 0.0, 6, 0)
        for never in (
            lambda: connection.evaluate_start("x", settings.prompt_data, 1, 0.0, 6, 1),
            lambda: connection.probe(1, 1.0, version=1),
        ):
            with pytest.raises(RolloutError, match="version 1 is not published: the newest is 0"):
                never()
        with pytest.raises(RolloutError, match="no evaluation 'x-9'"):
            connection.evaluate_result("x-9", 0)


@pytest.mark.parametrize(("oldest", "refused"), [(1, False), (0, True)])
def test_a_batch_over_the_bound_is_never_handed_to_the_trainer(job: RolloutJob, oldest: int, refused: bool) -> None:
    """The controller's own check comes first; this is the trainer's, in case that one has a defect."""
    trajectory = make_trajectory("g8", 1, versions=[2, oldest, 2, 2])
    body = encode_batch(Batch(id=2, groups=[Group("g8", make_prompt(), [trajectory])]))

    def answer(request: httpx.Request) -> httpx.Response:
        assert request.url.path == "/lease" and request.url.params["version"] == "2"
        return httpx.Response(200, content=body, headers={"X-Lease-Info": '{"max_staleness": 1}'})

    connection = ControllerConnection("http://controller", None, job.controller_log)
    connection._client = httpx.Client(base_url="http://controller", transport=httpx.MockTransport(answer))
    if refused:
        with pytest.raises(RolloutError, match=r"trajectory g8\.1 of batch 2 is 2 updates old, over --max-staleness 1"):
            connection.lease(2, 1)
    else:
        assert connection.lease(2, 1) is not None
    connection.close()


def test_no_controller_there(job: RolloutJob) -> None:
    connection = ControllerConnection("http://127.0.0.1:9", None, job.controller_log)
    with pytest.raises(RolloutError, match=r"the rollout controller is not running.*controller\.log"):
        connection.status()
    connection.close()


def test_settings_file_round_trip(tmp_path: Path, settings: RolloutSettings, job: RolloutJob) -> None:
    write_settings(tmp_path / "s.json", settings, job)
    assert read_settings(tmp_path / "s.json") == (settings, job)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rollout_batch_size": 9}, "--rollout-batch-size 9 is not a multiple of --group-size 2"),
        ({"global_batch_size": 3}, "--rollout-batch-size 8 is not a multiple of --global-batch-size 3"),
        ({"group_size": 0}, "--group-size must be at least 1, got 0"),
        ({"max_staleness": -1}, "--max-staleness must not be negative"),
        ({"max_staleness": 0, "publish_interval": 2}, "--max-staleness 0 can never be met"),
        ({"group_retries": -1}, "--group-retries must not be negative, got -1"),
        ({"temperature": 0.0}, "--temperature must be above 0 and finite, got 0.0"),
        ({"temperature": float("nan")}, "--temperature must be above 0"),
        ({"temperature": float("inf")}, "--temperature must be above 0 and finite, got inf"),
        ({"engine_timeout_s": 0.0}, "--engine-timeout-s must be above 0"),
        ({"reward_timeout_s": -1.0}, "--reward-timeout-s must be above 0"),
        ({"staleness_mode": "drop"}, "--staleness-mode must be one of bounded, got 'drop'"),
        ({"rollout_engine": "sglang", "sglang_urls": ["host:30000"]}, "--sglang-urls 'host:30000' is not a base URL"),
        ({"rollout_engine": "sglang", "sglang_urls": ["http://x"] * 2}, "--sglang-urls names a server twice"),
        ({"rollout_engine": "vllm"}, "--rollout-engine must be one of embedded, sglang, got 'vllm'"),
        ({"rollout_engine": "sglang"}, "needs --sglang-urls"),
        ({"sglang_urls": ["http://x"]}, "--rollout-engine is not sglang"),
        ({"prompt_data": ""}, "--prompt-data is missing"),
        ({"max_concurrent_rollouts": 1}, "--max-concurrent-rollouts 1 is smaller than --group-size 2"),
    ],
)
def test_settings_that_cannot_work(settings: RolloutSettings, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        replace(settings, **changes).validate()


def test_a_position_that_does_not_fit_the_settings(settings: RolloutSettings, job: RolloutJob) -> None:
    with pytest.raises(ValueError, match="version 3 is not 2 batches of 1 updates"):
        replace(job, start_version=3, consumed_batches=2).validate(settings)
