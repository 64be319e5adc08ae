"""The pool: spreading, fencing, retries, loading weights in the order that survives."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from m2po_megatron.rollout import engines
from m2po_megatron.rollout.changes import Changes
from m2po_megatron.rollout.client import GenerateRequest
from m2po_megatron.rollout.engines import EnginePool
from m2po_megatron.rollout.errors import RolloutError
from tests.rollout.fake_engine import fake_engine, make_pool, run_bounded


def request(rid: str, n: int = 2) -> GenerateRequest:
    return GenerateRequest(rid=rid, input_ids=[3], max_new_tokens=3, temperature=1.0, n=n)


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop run until `condition` holds (the test as a whole is bounded)."""
    while not condition():
        await asyncio.sleep(0)


def test_requests_go_to_the_engine_with_fewest_in_flight() -> None:
    async def test() -> None:
        pool, clients, _ = make_pool(2)
        for client in clients:
            client.gate.clear()
        tasks = [asyncio.ensure_future(pool.generate(request(f"r{i}", n=4 if i == 0 else 1))) for i in range(5)]
        await until(lambda: sum(len(c.rids) for c in clients) == 5)
        assert [c.rids for c in clients] == [["r0"], ["r1", "r2", "r3", "r4"]]
        assert [e.in_flight for e in pool.engines] == [4, 4]
        for client in clients:
            client.gate.set()
        await asyncio.gather(*tasks)
        assert [e.in_flight for e in pool.engines] == [0, 0]
        assert [e.generated_tokens for e in pool.engines] == [12, 12]

    run_bounded(test)


def test_a_failed_engine_is_fenced_and_its_requests_go_on_elsewhere_under_the_same_ids() -> None:
    async def test() -> None:
        pool, clients, _ = make_pool(2)
        clients[0].failing = {"generate", "model_info"}
        samples = await pool.generate(request("r0"))
        assert len(samples) == 2
        assert [c.rids for c in clients] == [["r0"], ["r0"]]
        assert [e.alive for e in pool.engines] == [False, True]
        await pool.generate(request("r1"))
        assert clients[0].rids == ["r0"]  # nothing more is sent to it
        assert [e.generated_tokens for e in pool.engines] == [0, 12]

    run_bounded(test)


def test_fencing_gives_up_hanging_requests_at_once() -> None:
    async def test() -> None:
        pool, clients, _ = make_pool(2)
        clients[0].gate.clear()
        task = asyncio.ensure_future(pool.generate(request("r0")))
        await until(lambda: clients[0].rids == ["r0"])
        pool.fence(pool.engines[0], "a test")
        await task
        assert clients[0].answered == {}
        assert clients[1].answered == {"r0": 1}

    run_bounded(test)


def test_one_failed_request_of_a_healthy_engine_does_not_cost_the_engine() -> None:
    async def test() -> None:
        pool, clients, _ = make_pool(2)
        clients[0].failing = {"generate"}
        await pool.generate(request("r0"))
        assert [e.alive for e in pool.engines] == [True, True]
        clients[0].failing = set()
        clients[1].gate.clear()
        blocked = asyncio.ensure_future(pool.generate(request("r1")))
        await until(lambda: "r1" in clients[1].rids)
        await pool.generate(request("r2"))
        assert clients[0].answered == {"r2": 1}
        blocked.cancel()
        await asyncio.gather(blocked, return_exceptions=True)
        assert pool.engines[1].in_flight == 0

    run_bounded(test)


def test_a_request_that_the_engine_refuses_costs_no_engine() -> None:
    async def test() -> None:
        pool, clients, _ = make_pool(2)
        clients[0].refusing = True
        with pytest.raises(RolloutError, match="request r0 was refused: engine http://fake-0: generate: HTTP 400"):
            await pool.generate(request("r0"))
        assert [e.alive for e in pool.engines] == [True, True]
        assert clients[1].rids == []  # it would say the same

    run_bounded(test)


def test_no_engine_left_names_each_and_its_log() -> None:
    async def test() -> None:
        pool, clients, _ = make_pool(2)
        pool.engines[1].log_path = Path("/run/logs/engine-1.log")
        for client in clients:
            client.failing = {"generate", "model_info"}
        with pytest.raises(
            RolloutError, match=r"(?s)no rollout engine is left.*engine-0.*engine-1.*/run/logs/engine-1\.log"
        ):
            await pool.generate(request("r0"))
        assert pool.loaded_version() is None

    run_bounded(test)


def test_loading_pauses_flushes_updates_verifies_and_continues() -> None:
    async def test() -> None:
        pool, clients, _ = make_pool(2)
        await pool.load("/weights", 5)
        order = ["pause_generation", "flush_cache", "update_weights_from_disk", "model_info", "continue_generation"]
        assert [c.calls for c in clients] == [order, order]
        assert [c.label for c in clients] == ["0.5", "0.5"]
        assert pool.loaded_version() == 5

    run_bounded(test)


@pytest.mark.parametrize(
    "call", ["pause_generation", "flush_cache", "update_weights_from_disk", "model_info", "continue_generation"]
)
@pytest.mark.parametrize("how", ["failing", "hanging"])
def test_an_engine_that_fails_to_load_is_fenced_and_never_left_paused(call: str, how: str) -> None:
    async def test() -> None:
        pool, clients, _ = make_pool(2, control_timeout_s=0.05)
        getattr(clients[0], how).add(call)
        await pool.load("/weights", 5)
        assert [e.alive for e in pool.engines] == [False, True]
        assert pool.loaded_version() == 5
        assert clients[0].calls[-1] == "continue_generation"

    run_bounded(test)


def test_an_engine_that_says_another_version_than_it_was_given_is_fenced() -> None:
    async def test() -> None:
        pool, clients, _ = make_pool(2)
        clients[1].said_version = "0.4"
        await pool.load("/weights", 5)
        assert [e.alive for e in pool.engines] == [True, False]
        assert "says version '0.4' after loading '0.5'" in str(pool.engines[1].fenced_because)

    run_bounded(test)


def test_loaded_version_is_the_oldest_over_the_living() -> None:
    async def test() -> None:
        pool, _, _ = make_pool(3)
        for engine, version in zip(pool.engines, (4, 2, 3), strict=True):
            engine.version = version
        assert pool.loaded_version() == 2
        pool.fence(pool.engines[1], "a test")
        assert pool.loaded_version() == 3

    run_bounded(test)


def test_a_process_that_ends_is_noticed() -> None:
    async def test() -> None:
        changes = Changes()
        engine, _ = fake_engine()
        engine.process = await asyncio.create_subprocess_exec(sys.executable, "-c", "raise SystemExit(7)")
        pool = EnginePool([engine], 0, changes)
        assert await changes.wait_until(lambda: not engine.alive, 15)
        assert "ended with exit code 7" in str(engine.fenced_because)
        await pool.close()

    run_bounded(test)


@pytest.mark.parametrize("call", ["generate", "pause_generation"])
def test_a_connection_that_breaks_because_the_process_ends_is_put_down_to_its_end(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "EXIT_NOTICE_S", 10.0)  # no machine is too busy

    async def test() -> None:
        engine, client = fake_engine()
        waits = "import os, sys; sys.stdin.read(); os._exit(7)"
        engine.process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", waits, stdin=asyncio.subprocess.PIPE
        )
        pool = EnginePool([engine], 0, Changes())
        client.failing = {call, "model_info"}
        acting = asyncio.ensure_future(
            pool.load("/weights", 5) if call == "pause_generation" else pool.generate(request("r0"))
        )
        await until(lambda: call in client.calls or client.rids == ["r0"])  # broken, and only then the process ends
        engine.process.stdin.close()  # type: ignore[union-attr]
        await asyncio.wait({acting})
        assert f"its process {engine.process.pid} ended with exit code 7" == engine.fenced_because
        if call == "generate":
            assert "exit code 7" in str(acting.exception())
        await pool.close()

    run_bounded(test)


def test_close_ends_processes_and_clients() -> None:
    async def test() -> None:
        engine, client = fake_engine()
        engine.process = await asyncio.create_subprocess_exec(sys.executable, "-c", "import time; time.sleep(100)")
        pool = EnginePool([engine], 0, Changes())
        await pool.close()
        assert engine.process.returncode == -15
        assert engine.alive and client.closed

    run_bounded(test)
