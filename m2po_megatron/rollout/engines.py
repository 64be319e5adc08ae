"""The pool of engines: spreads requests, loads new weights everywhere, fences an engine that fails.

A fenced engine is out for the rest of the run: nothing is sent to it, what it still says is not listened to, its requests
go to others under the same ids. An engine that this job started is also killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

from m2po_megatron.rollout.changes import Changes
from m2po_megatron.rollout.client import EngineClient, EngineError, GeneratedSample, GenerateRequest, RequestRefused
from m2po_megatron.rollout.errors import RolloutError
from m2po_megatron.rollout.staleness import weight_version

logger = logging.getLogger(__name__)

FAILURES_BEFORE_FENCE = 3
"""Failed requests in a row after which an engine is fenced although it still answers control calls."""
PROBE_TIMEOUT_S = 10.0
"""What a suspected engine has to answer whether it is alive."""
EXIT_NOTICE_S = 1.0
"""From a dying engine's first broken connection to when its end is known; then the exit code is the reason given."""
PROCESS_STOP_TIMEOUT_S = 5.0
"""What an embedded engine has to end after SIGTERM before it is killed."""


class Engine:
    """One engine and what the pool knows about it."""

    def __init__(
        self,
        name: str,
        client: EngineClient,
        version: int,
        process: asyncio.subprocess.Process | None = None,
        log_path: Path | None = None,
    ) -> None:
        self.name = name
        self.client = client
        self.version = version
        self.process = process
        self.log_path = log_path
        self.in_flight = 0
        self.failures_in_a_row = 0
        self.generated_tokens = 0
        self.fenced_because: str | None = None
        self.fenced = asyncio.Event()

    @property
    def alive(self) -> bool:
        return self.fenced_because is None

    @property
    def url(self) -> str:
        return self.client.url

    def describe(self) -> dict[str, Any]:
        """The engine's line in `/status`."""
        return {
            "name": self.name,
            "url": self.url,
            "alive": self.alive,
            "fenced_because": self.fenced_because,
            "version": self.version,
            "in_flight": self.in_flight,
            "generated_tokens": self.generated_tokens,
            "pid": self.process.pid if self.process else None,
            "log": str(self.log_path) if self.log_path else None,
        }


class EnginePool:
    """The engines of a run, all on one event loop."""

    def __init__(
        self, engines: list[Engine], incarnation: int, changes: Changes, control_timeout_s: float = 60.0
    ) -> None:
        self.engines = engines
        self._incarnation = incarnation
        self._changes = changes
        self._control_timeout_s = control_timeout_s
        self._closing = False
        self._tasks: set[asyncio.Task[None]] = set()
        for engine in engines:
            if engine.process is not None:
                self._spawn(self._watch(engine, engine.process))

    def living(self) -> list[Engine]:
        return [engine for engine in self.engines if engine.alive]

    def loaded_version(self) -> int | None:
        """The oldest version over the living engines; None when none lives."""
        return min((engine.version for engine in self.living()), default=None)

    def no_engine_left(self) -> RolloutError:
        """The error that names every engine, why it is out and where its log is."""
        lines = [
            f"  {e.name} ({e.url}): {e.fenced_because}; log: {e.log_path or 'where it was started'}"
            for e in self.engines
        ]
        return RolloutError("no rollout engine is left:\n" + "\n".join(lines))

    def fence(self, engine: Engine, reason: str) -> None:
        """Take `engine` out; its requests in flight are given up at once (and retried on others by `generate`)."""
        if not engine.alive:
            return
        engine.fenced_because = reason
        engine.fenced.set()
        logger.error("engine %s (%s) is out: %s", engine.name, engine.url, reason)
        if engine.process is not None and engine.process.returncode is None:
            engine.process.kill()
        self._changes.notify()

    async def generate(self, request: GenerateRequest) -> list[GeneratedSample]:
        """Sample on the living engine with the fewest requests in flight; RolloutError when no engine is left, when several
        living ones failed on this request, or when one says that the request itself is wrong."""
        last: EngineError | None = None
        for _ in range(FAILURES_BEFORE_FENCE * len(self.engines) + 1):
            living = self.living()
            if not living:
                raise self.no_engine_left()
            engine = min(living, key=lambda e: (e.in_flight, e.failures_in_a_row))
            try:
                samples = await self._generate_on(engine, request)
            except RequestRefused as error:
                # Other engines would say the same, and none of them is to blame.
                raise RolloutError(f"request {request.rid} was refused: {error}") from error
            except EngineError as error:
                last = error
                await self._judge(engine, error)
                continue
            engine.failures_in_a_row = 0
            engine.generated_tokens += sum(len(sample.output_ids) for sample in samples)
            return samples
        raise RolloutError(f"request {request.rid} failed on every try; the last: {last}")

    async def _generate_on(self, engine: Engine, request: GenerateRequest) -> list[GeneratedSample]:
        engine.in_flight += request.n
        answer = asyncio.ensure_future(engine.client.generate(request))
        fenced = asyncio.ensure_future(engine.fenced.wait())
        try:
            await asyncio.wait({answer, fenced}, return_when=asyncio.FIRST_COMPLETED)
            if engine.alive and answer.done():
                return answer.result()
            # What a fenced engine says is not listened to, even if it came at the same moment.
            raise EngineError(engine.url, "generate", f"fenced: {engine.fenced_because}")
        finally:
            engine.in_flight -= request.n
            fenced.cancel()
            answer.cancel()
            await asyncio.gather(answer, fenced, return_exceptions=True)

    async def _judge(self, engine: Engine, error: EngineError) -> None:
        """Decide whether a failed request means a failed engine."""
        if not engine.alive:
            return
        engine.failures_in_a_row += 1
        logger.warning("engine %s failed a request: %s", engine.name, error)
        if engine.failures_in_a_row >= FAILURES_BEFORE_FENCE:
            await self._fence_for(engine, f"{engine.failures_in_a_row} requests failed in a row, the last: {error}")
            return
        try:
            # /model_info answers also while generation is paused.
            await asyncio.wait_for(engine.client.model_info(), PROBE_TIMEOUT_S)
        except (EngineError, TimeoutError) as silence:
            await self._fence_for(engine, f"{error}; and then did not answer /model_info ({silence or 'timeout'})")

    async def _fence_for(self, engine: Engine, symptom: str) -> None:
        """Fence for what a request met, or for its cause: a process that dies breaks its connections before its end shows."""
        if engine.process is not None:
            with contextlib.suppress(TimeoutError):
                code = await asyncio.wait_for(engine.process.wait(), EXIT_NOTICE_S)
                symptom = f"its process {engine.process.pid} ended with exit code {code}"
        self.fence(engine, symptom)

    async def load(self, path: str, version: int) -> None:
        """Have every living engine load the HF directory `path` as `version`; one that fails is fenced. Bounded."""
        await asyncio.gather(*(self._load_on(engine, path, version) for engine in self.living()))
        self._changes.notify()

    async def _load_on(self, engine: Engine, path: str, version: int) -> None:
        label = weight_version(self._incarnation, version)
        client = engine.client
        try:
            await self._bounded(client.pause_generation("retract"))
            await self._bounded(client.flush_cache())
            await self._bounded(client.update_weights_from_disk(path, label))
            info = await self._bounded(client.model_info())
            # Fenced before it may continue: it must never serve weights that are not known.
            if info.weight_version != label:
                self.fence(engine, f"model_info says version {info.weight_version!r} after loading {label!r}")
        except (EngineError, TimeoutError) as error:
            await self._fence_for(engine, f"did not load version {version}: {error or 'timeout'}")
        try:
            await self._bounded(client.continue_generation())
        except (EngineError, TimeoutError) as error:
            self.fence(engine, f"stayed paused after loading version {version}: {error or 'timeout'}")
        if engine.alive:
            engine.version = version

    async def _bounded(self, call: Awaitable[Any]) -> Any:
        return await asyncio.wait_for(call, self._control_timeout_s)

    async def _watch(self, engine: Engine, process: asyncio.subprocess.Process) -> None:
        code = await process.wait()
        if not self._closing:
            self.fence(engine, f"its process {process.pid} ended with exit code {code}")

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """End the engines this job started: SIGTERM, a bounded wait, SIGKILL. Others' engines are left as they are."""
        self._closing = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*(stop_process(engine.process) for engine in self.engines if engine.process is not None))
        await asyncio.gather(*(engine.client.aclose() for engine in self.engines))


async def stop_process(process: asyncio.subprocess.Process) -> None:
    """SIGTERM, a bounded wait, SIGKILL, for a child of ours."""
    if process.returncode is not None:
        return
    process.terminate()
    try:
        await asyncio.wait_for(process.wait(), PROCESS_STOP_TIMEOUT_S)
    except TimeoutError:
        process.kill()
        await process.wait()
