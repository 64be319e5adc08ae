"""Bringing engines up: embedded ones as child processes of the controller, SGLang servers by their URLs."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

from m2po_megatron.rollout.client import EngineClient, EngineError
from m2po_megatron.rollout.engines import Engine, stop_process
from m2po_megatron.rollout.errors import RolloutError
from m2po_megatron.rollout.settings import RolloutJob, RolloutSettings
from m2po_megatron.rollout.staleness import weight_version

logger = logging.getLogger(__name__)

PORT_TRIES = 3
PORT_IN_USE_EXIT_CODE = 2
HEALTH_POLL_S = 0.2
HEALTH_TIMEOUT_S = 5.0

ClientFactory = Callable[[str], EngineClient]


async def start_engines(settings: RolloutSettings, job: RolloutJob, client_factory: ClientFactory) -> list[Engine]:
    """Every engine of the run, healthy, at the start version; RolloutError names the one that is not, and its log.

    If one fails, or this call is cancelled, those already started are ended.
    """
    if settings.rollout_engine == "sglang":
        starts = [
            _attach(f"sglang-{i}", url, settings, job, client_factory) for i, url in enumerate(settings.sglang_urls)
        ]
    else:
        starts = [_start_embedded(i, settings, job, client_factory) for i in range(settings.embedded_engines)]
    tasks = [asyncio.ensure_future(start) for start in starts]
    try:
        await asyncio.gather(*tasks, return_exceptions=True)
        return [task.result() for task in tasks]
    except BaseException:
        await asyncio.gather(
            *(end_engine(task.result()) for task in tasks if not task.cancelled() and not task.exception())
        )
        raise


async def end_engine(engine: Engine) -> None:
    """End its process, if it is ours, and its client."""
    if engine.process is not None:
        await stop_process(engine.process)
    await engine.client.aclose()


async def _start_embedded(
    index: int, settings: RolloutSettings, job: RolloutJob, client_factory: ClientFactory
) -> Engine:
    name = f"engine-{index}"
    log_path = job.log_dir / f"{name}.log"
    label = weight_version(job.incarnation, job.start_version)
    deadline = time.monotonic() + settings.engine_start_timeout_s
    for _ in range(PORT_TRIES):
        port = free_port()
        process = await _spawn(index, port, settings, job, log_path)
        client = client_factory(f"http://127.0.0.1:{port}")
        try:
            await _wait_healthy(name, client, process, log_path, deadline, label)
        except BaseException as error:
            await stop_process(process)
            await client.aclose()
            if isinstance(error, RolloutError) and process.returncode == PORT_IN_USE_EXIT_CODE:
                logger.warning("%s: port %d was taken meanwhile, trying another", name, port)
                continue
            raise
        logger.info("%s is up on port %d (pid %d)", name, port, process.pid)
        return Engine(name, client, job.start_version, process, log_path)
    raise RolloutError(f"{name} found no free port in {PORT_TRIES} tries; log: {log_path}\n{log_tail(log_path)}")


async def _spawn(
    index: int, port: int, settings: RolloutSettings, job: RolloutJob, log_path: Path
) -> asyncio.subprocess.Process:
    command = [sys.executable, "-m", "m2po_megatron.rollout.embedded", "--model-path", job.model_path]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", settings.embedded_dtype, "--device", settings.embedded_device]
    command += ["--max-running-requests", str(settings.embedded_max_running_requests)]
    command += ["--weight-version", weight_version(job.incarnation, job.start_version)]
    # A resumed engine must not repeat the random numbers of the run's beginning.
    command += ["--seed", str(settings.seed + 1000 * job.incarnation + index), "--parent-pid", str(os.getpid())]
    with log_path.open("ab") as log:
        return await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            # More threads than one make small models slower on a shared machine, never faster.
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )


async def _wait_healthy(
    name: str, client: EngineClient, process: asyncio.subprocess.Process, log_path: Path, deadline: float, label: str
) -> None:
    """Until `process` serves weights called `label`; RolloutError, with its log, if it ends or the deadline passes."""
    while True:
        if process.returncode is not None:
            raise RolloutError(
                f"{name} ended at start with exit code {process.returncode}; log: {log_path}\n{log_tail(log_path)}"
            )
        try:
            # Its label too: if the port was taken meanwhile, somebody else's server may be the one that is healthy.
            if await asyncio.wait_for(_serves(client, label), HEALTH_TIMEOUT_S):
                return
        except (EngineError, TimeoutError) as error:
            logger.debug("%s is not up yet: %s", name, error)
        if time.monotonic() > deadline:
            raise RolloutError(f"{name} did not become healthy in time; log: {log_path}\n{log_tail(log_path)}")
        await asyncio.sleep(HEALTH_POLL_S)


async def _serves(client: EngineClient, label: str) -> bool:
    return await client.health() and (await client.model_info()).weight_version == label


async def _attach(
    name: str, url: str, settings: RolloutSettings, job: RolloutJob, client_factory: ClientFactory
) -> Engine:
    """An SGLang server that runs already. Its weights are whatever it has: the controller publishes before it admits."""
    client = client_factory(url)
    try:
        info = await asyncio.wait_for(client.model_info(), settings.engine_control_timeout_s)
    except (EngineError, TimeoutError) as error:
        await client.aclose()
        raise RolloutError(
            f"SGLang server {url} cannot be reached: {error or 'timeout'}; check --sglang-urls"
        ) from error
    logger.info("%s: %s serves %s at version %s", name, url, info.model_path, info.weight_version)
    return Engine(name, client, job.start_version)


def free_port() -> int:
    """A loopback port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def log_tail(path: Path, lines: int = 15) -> str:
    """The last lines of a log, indented, for an error text."""
    if not path.exists():
        return "    (not written)"
    return "\n".join(f"    {line}" for line in path.read_text(errors="replace").splitlines()[-lines:])
