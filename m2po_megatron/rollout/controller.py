"""The rollout controller: a process of its own beside the trainer, so that training never delays generation.

Started by rollout/connection.py as `python -m m2po_megatron.rollout.controller --settings FILE --parent-pid PID`; writes
RUN_DIR/controller.json with its port, or with the error that ended it. It ends, engines included, on SIGTERM and when its
parent dies; SIGINT is ignored, since a terminal's Ctrl-C is the trainer's to act on.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import signal
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from aiohttp import web

from m2po_megatron.data.prompts import Cursor, PromptQueue, read_prompts
from m2po_megatron.parentage import ask_for_death_signal, watch_parent
from m2po_megatron.reward import RewardPool
from m2po_megatron.rollout.api import build_application
from m2po_megatron.rollout.changes import Changes
from m2po_megatron.rollout.client import EngineClient
from m2po_megatron.rollout.engines import EnginePool
from m2po_megatron.rollout.errors import RolloutError
from m2po_megatron.rollout.evaluation import Sideline
from m2po_megatron.rollout.launch import ClientFactory, start_engines
from m2po_megatron.rollout.producer import Producer
from m2po_megatron.rollout.publishing import Publisher
from m2po_megatron.rollout.settings import RolloutJob, RolloutSettings, read_settings
from m2po_megatron.rollout.store import RolloutStore
from m2po_megatron.rollout.workflow import ModelFacts, SingleTurn, encode_prompt, read_model_facts

logger = logging.getLogger(__name__)


@dataclass
class Parts:
    """What exists once the engines are up."""

    pool: EnginePool
    publisher: Publisher
    producer: Producer
    sideline: Sideline


class Controller:
    """Builds the parts, runs them, ends them."""

    def __init__(self, settings: RolloutSettings, job: RolloutJob, client_factory: ClientFactory | None = None) -> None:
        """`client_factory` makes an engine's client from its URL (tests put fakes in)."""
        self._settings = settings
        self._job = job
        self._client_factory = client_factory or self._default_client
        self._changes = Changes()
        self._prompts = read_prompts(settings.prompt_data)
        self._reward = RewardPool(settings.reward, workers=settings.reward_workers, timeout_s=settings.reward_timeout_s)
        self._store = RolloutStore(job.store_path, create=not job.resume)
        self._pool: EnginePool | None = None
        self._parts: Parts | None = None
        self._start_error: Exception | None = None
        self._tasks: list[asyncio.Task[None]] = []

    def _default_client(self, url: str) -> EngineClient:
        return EngineClient(
            url, timeout_s=self._settings.engine_timeout_s, control_timeout_s=self._settings.engine_control_timeout_s
        )

    async def start(self) -> None:
        """Bring everything up and begin to admit; what fails is told to whoever waits for readiness."""
        try:
            await self._start()
        except (RolloutError, ValueError, OSError) as error:
            logger.error("start failed: %s", error)
            self._start_error = error
        except Exception as error:
            logger.exception("start failed")
            self._start_error = RolloutError(f"the rollout controller failed at start: {type(error).__name__}: {error}")
        self._changes.notify()

    async def _start(self) -> None:
        settings, job, changes = self._settings, self._job, self._changes
        groups_consumed = job.consumed_batches * settings.groups_per_batch
        incarnation = self._store.begin_incarnation(job.incarnation, job.start_version, groups_consumed)
        self._job = job = replace(job, incarnation=incarnation)
        await self._reward.start()
        # Meanwhile: reading the tokenizer imports for seconds, and so do the engines, in their own processes.
        reading = asyncio.ensure_future(asyncio.to_thread(self._read_model))
        try:
            engines = await start_engines(settings, job, self._client_factory)
        except BaseException:
            await asyncio.gather(reading, return_exceptions=True)
            raise
        pool = self._pool = EnginePool(engines, job.incarnation, changes, settings.engine_control_timeout_s)
        model = await reading
        publisher = Publisher(pool, job.start_version, changes)
        workflow = SingleTurn(
            model,
            pool,
            self._reward,
            incarnation=job.incarnation,
            starts=self._store.starts,
            max_prompt_length=settings.max_prompt_length,
        )
        queue = PromptQueue(self._prompts, settings.seed, self._cursor(groups_consumed))
        producer = Producer(settings, job, self._store, queue, workflow, pool, changes)
        sideline = Sideline(
            workflow,
            publisher,
            self._prompts,
            changes,
            concurrency=settings.concurrency,
            retries=settings.group_retries,
            seed=settings.seed,
            probe_temperature=settings.temperature,
            probe_max_new_tokens=settings.max_response_length,
        )
        self._parts = Parts(pool, publisher, producer, sideline)
        if settings.rollout_engine == "sglang":
            # Servers that ran before us have whatever weights they have.
            await pool.load(job.model_path, job.start_version)
            if not pool.living():
                raise pool.no_engine_left()
        self._tasks = [asyncio.ensure_future(producer.run()), asyncio.ensure_future(publisher.run())]
        for task in self._tasks:
            task.add_done_callback(self._on_task_end)

    def _read_model(self) -> ModelFacts:
        """The model's facts, and every prompt tried on its tokenizer: one that does not fit is known at the start."""
        settings, model = self._settings, read_model_facts(self._job.model_path)
        for prompt in self._prompts:
            try:
                encode_prompt(
                    model,
                    prompt,
                    settings.max_response_length,
                    settings.max_prompt_length,
                    self._job.longest_sequence,
                )
            except RolloutError as error:
                raise RolloutError(f"{settings.prompt_data}: {error}") from error
        return model

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        """A loop that ends by an error is a defect: the trainer is told at its next call."""
        if not task.cancelled() and task.exception() is not None:
            logger.error("a loop of the controller ended", exc_info=task.exception())
            self._start_error = RolloutError(f"the rollout controller failed: {task.exception()}")
            if self._parts is not None and self._parts.producer.failure is None:
                self._parts.producer.failure = RolloutError(f"the rollout controller failed: {task.exception()}")
            self._changes.notify()

    def _cursor(self, groups_consumed: int) -> Cursor:
        """Where the prompt order goes on: as stored, or, for a store that is lost or behind, as the position says."""
        stored = self._store.cursor()
        if stored is not None and self._store.next_position() >= groups_consumed:
            return stored
        epoch, index = divmod(groups_consumed, len(self._prompts))
        return Cursor(epoch, index)

    def parts(self) -> Parts:
        """The parts; RolloutError while they are not up, or because they did not come up."""
        if self._start_error is not None:
            raise RolloutError(str(self._start_error)) from self._start_error
        if self._parts is None:
            raise RolloutError("the rollout engines are not up yet")
        return self._parts

    async def wait_ready(self, wait_s: float) -> bool:
        await self._changes.wait_until(lambda: bool(self._tasks) or self._start_error is not None, wait_s)
        if self._start_error is not None:
            self.parts()
        return bool(self._tasks)

    async def wait_loaded(self, version: int, wait_s: float) -> int:
        """The loaded version, once it is at least `version` or after `wait_s`; RolloutError when no engine is left."""
        pool = self.parts().pool

        def reached() -> bool:
            loaded = pool.loaded_version()
            return loaded is None or loaded >= version

        await self._changes.wait_until(reached, wait_s)
        loaded = pool.loaded_version()
        if loaded is None:
            raise pool.no_engine_left()
        return loaded

    def status(self) -> dict[str, Any]:
        """What `/status` says: the producer's queues, the engines, the versions, the counters."""
        parts = self.parts()
        engines = [engine.describe() for engine in parts.pool.engines]
        return {
            **parts.producer.status(),
            "loaded_version": parts.pool.loaded_version(),
            "pending_versions": parts.publisher.pending,
            "engines": engines,
            "generated_tokens": sum(engine["generated_tokens"] for engine in engines),
            "reward_failures": dict(self._reward.failures),
            "incarnation": self._job.incarnation,
        }

    def lease_info(self) -> dict[str, Any]:
        """What goes with every lease (small: it travels in a header)."""
        status = self.status()
        keys = (
            "dropped",
            "ready_in_batch",
            "running_trajectories",
            "loaded_version",
            "generated_tokens",
            "reward_failures",
        )
        return {"max_staleness": self._settings.max_staleness, **{key: status[key] for key in keys}}

    async def close(self) -> None:
        """End loops, engines, reward workers and store."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._parts is not None:
            await self._parts.sideline.close()
            await self._parts.producer.close()
        if self._pool is not None:
            await self._pool.close()
        await self._reward.close()
        self._store.close()


async def serve(settings: RolloutSettings, job: RolloutJob, parent_pid: int | None) -> None:
    """Run a controller until SIGTERM or the parent's end."""
    controller = Controller(settings, job)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    loop.add_signal_handler(signal.SIGINT, lambda: None)
    runner = web.AppRunner(build_application(controller), access_log=None, shutdown_timeout=1.0)
    background = [asyncio.ensure_future(controller.start())]
    if parent_pid is not None:
        background.append(asyncio.ensure_future(watch_parent(parent_pid, stop.set)))
    try:
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        write_address(job.address_path, {"port": runner.addresses[0][1], "pid": os.getpid()})
        await stop.wait()
        logger.info("ending")
    finally:
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)
        await controller.close()
        await runner.cleanup()


def write_address(path: Path, content: dict[str, Any]) -> None:
    """Write aside and rename: a reader sees nothing or everything."""
    aside = path.with_suffix(".tmp")
    aside.write_text(json.dumps(content))
    aside.replace(path)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m m2po_megatron.rollout.controller", description=__doc__)
    parser.add_argument("--settings", required=True, type=Path, help="JSON file with settings and job")
    parser.add_argument("--parent-pid", type=int, default=None, help="end when this process is not the parent any more")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    logging.getLogger("aiohttp").setLevel(logging.WARNING)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # a scheduler's warning to the whole job; children inherit it
    if arguments.parent_pid is not None:
        ask_for_death_signal()
    settings, job = read_settings(arguments.settings)
    try:
        settings.validate()
        job.validate(settings)
        asyncio.run(serve(settings, job, arguments.parent_pid))
    except (RolloutError, ValueError, OSError) as error:
        logger.error("%s", error)
        write_address(job.address_path, {"error": str(error)})
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
