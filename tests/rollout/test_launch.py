"""Starting engines: ports that somebody else takes first, engines that do not come up, and who is ended then."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from m2po_megatron.rollout import launch
from m2po_megatron.rollout.client import EngineClient
from m2po_megatron.rollout.engines import Engine
from m2po_megatron.rollout.errors import RolloutError
from m2po_megatron.rollout.launch import free_port, start_engines
from m2po_megatron.rollout.settings import RolloutJob, RolloutSettings


class Foreigner(BaseHTTPRequestHandler):
    """A server of somebody else that says yes to everything."""

    def do_GET(self) -> None:
        body = b'{"model_path": "theirs", "weight_version": "7.7"}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        """Quiet."""


@pytest.fixture
def taken_port() -> Iterator[int]:
    server = HTTPServer(("127.0.0.1", 0), Foreigner)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    thread.join(10)
    server.server_close()


@pytest.fixture
def job(tmp_path: Path, tiny_model: Callable[..., Path]) -> RolloutJob:
    job = RolloutJob(run_dir=str(tmp_path / "run"), model_path=str(tiny_model()))
    job.log_dir.mkdir(parents=True)
    return job


def client(url: str) -> EngineClient:
    return EngineClient(url, timeout_s=30, control_timeout_s=10)


def start(job: RolloutJob, check: Callable[[list[Engine]], None]) -> None:
    """Start engines, look at them, end them."""

    async def run() -> None:
        engines = await start_engines(RolloutSettings(engine_start_timeout_s=60), job, client)
        try:
            check(engines)
        finally:
            await asyncio.gather(*(launch.end_engine(engine) for engine in engines))

    asyncio.run(asyncio.wait_for(run(), 90))


@pytest.mark.slow
@pytest.mark.integration
def test_a_port_that_was_taken_meanwhile_costs_one_try(
    job: RolloutJob, taken_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = free_port()
    ports = [taken_port, good]
    monkeypatch.setattr(launch, "free_port", lambda: ports.pop(0))

    def check(engines: list[Engine]) -> None:
        (engine,) = engines
        assert engine.url == f"http://127.0.0.1:{good}"
        assert engine.process is not None and engine.process.returncode is None

    start(job, check)
    assert f"--port {taken_port} on 127.0.0.1 is already in use" in (job.log_dir / "engine-0.log").read_text()


@pytest.mark.integration
def test_no_free_port_names_the_engine_and_its_log(
    job: RolloutJob, taken_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "free_port", lambda: taken_port)
    with pytest.raises(
        RolloutError, match=r"(?s)engine-0 found no free port in 3 tries; log: .*engine-0\.log.*already in use"
    ):
        start(job, lambda _: None)


@pytest.mark.integration
@pytest.mark.parametrize("cancelled", [False, True])
def test_a_start_that_fails_or_is_cancelled_ends_the_engines_already_up(
    job: RolloutJob, cancelled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """engine-0 is up at once; engine-1 ends at once, or never comes up until the start is cancelled."""
    started: list[asyncio.subprocess.Process] = []

    async def spawn(index: int, *_: object) -> asyncio.subprocess.Process:
        seconds = "60" if index == 0 or cancelled else "0"
        started.append(await asyncio.create_subprocess_exec("sleep", seconds))
        return started[-1]

    async def healthy(name: str, *_: object) -> None:
        if name == "engine-1":
            await started[1].wait()
            raise RolloutError("engine-1 ended at start with exit code 0")

    monkeypatch.setattr(launch, "_spawn", spawn)
    monkeypatch.setattr(launch, "_wait_healthy", healthy)

    async def run() -> None:
        task = asyncio.ensure_future(start_engines(RolloutSettings(embedded_engines=2), job, client))
        if cancelled:
            while len(started) < 2:
                await asyncio.sleep(0.01)
            task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError if cancelled else RolloutError):
        asyncio.run(asyncio.wait_for(run(), 30))
    assert [process.returncode for process in started] == [-15, -15 if cancelled else 0]
