"""Keeps the engines busy: admits groups, has them sampled and scored, hands finished ones over in order of admission."""

from __future__ import annotations

import asyncio
import heapq
import logging
import time
from typing import Any

from m2po_megatron.data.prompts import PromptQueue
from m2po_megatron.data.trajectory import Batch
from m2po_megatron.reward import RewardError
from m2po_megatron.rollout.changes import Changes
from m2po_megatron.rollout.engines import EnginePool
from m2po_megatron.rollout.errors import RolloutError
from m2po_megatron.rollout.schema import GroupRecord
from m2po_megatron.rollout.settings import RolloutJob, RolloutSettings
from m2po_megatron.rollout.staleness import refusal, within_bound
from m2po_megatron.rollout.store import RolloutStore
from m2po_megatron.rollout.workflow import SampleRequest, SingleTurn, UnusableSample

logger = logging.getLogger(__name__)


class Producer:
    """The groups of a run in memory; the store follows every move. All on one event loop."""

    def __init__(
        self,
        settings: RolloutSettings,
        job: RolloutJob,
        store: RolloutStore,
        prompts: PromptQueue,
        workflow: SingleTurn,
        pool: EnginePool,
        changes: Changes,
    ) -> None:
        self._settings = settings
        self._job = job
        self._schedule = settings.schedule()
        self._store = store
        self._prompts = prompts
        self._workflow = workflow
        self._pool = pool
        self._changes = changes
        self.current_batch = job.consumed_batches
        self.failure: RolloutError | None = None
        self._next_position = max(store.next_position(), job.consumed_batches * settings.groups_per_batch)
        self._pending: list[tuple[int, GroupRecord]] = []
        self._running: dict[int, float] = {}
        self._ready: dict[int, GroupRecord] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._leasing = asyncio.Lock()
        self._restore()

    def _restore(self) -> None:
        """Take over what a resumed run left: pending and ready groups, less those that would be too old."""
        for record in self._store.records(("pending",)):
            heapq.heappush(self._pending, (record.position, record))
        kept = self._store.records(("ready",))
        abandoned = [r for r in kept if r.oldest_version is not None and r.oldest_version < 0]
        self._regenerate(abandoned, "timeline")
        for record in kept:
            if record not in abandoned:
                self._ready[record.position] = record
        self._drop_stale(list(self._ready))

    async def run(self) -> None:
        """Admit groups for ever, as the rule allows."""
        while True:
            await self._changes.wait_until(lambda: self.failure is None and self.refusal() is None)
            record = self._admit()
            self._running[record.position] = time.monotonic()
            task = asyncio.ensure_future(self._produce(record))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            self._changes.notify()
            await asyncio.sleep(0)  # a whole batch may be admitted in a row: let answers in between

    def refusal(self) -> str | None:
        """Why the next group may not start now ("staleness", "depth", "concurrency", "engines"); None = it may."""
        loaded = self._pool.loaded_version()
        if loaded is None:
            return "engines"
        position = self._pending[0][0] if self._pending else self._next_position
        return refusal(
            self._schedule,
            position,
            loaded_version=loaded,
            current_batch=self.current_batch,
            running_trajectories=len(self._running) * self._schedule.group_size,
        )

    def _admit(self) -> GroupRecord:
        loaded = self._pool.loaded_version()
        assert loaded is not None, "refusal() allowed a group without an engine"
        if self._pending:
            return self._store.run(heapq.heappop(self._pending)[1], loaded)
        prompt, place = self._prompts.take()
        record = GroupRecord(self._next_position, 0, "running", prompt, place)
        self._next_position += 1
        return self._store.admit(record, self._prompts.cursor, loaded)

    async def _produce(self, record: GroupRecord) -> None:
        """Sample, score and store one group; what cannot be helped becomes `failure`, which the trainer is told."""
        try:
            finished = await self._sample(record)
        except RolloutError as error:
            self._fail(error)
        except RewardError as error:
            self._fail(RolloutError(str(error)))
        except Exception as error:  # a defect here must reach the trainer as an error, not as an endless wait
            logger.exception("group %s failed", record.group_id)
            self._fail(RolloutError(f"group {record.group_id} failed: {type(error).__name__}: {error}"))
        else:
            self._ready[record.position] = finished
        finally:
            self._running.pop(record.position, None)
            self._changes.notify()

    async def _sample(self, record: GroupRecord) -> GroupRecord:
        request = SampleRequest(
            record.group_id,
            record.prompt,
            self._settings.group_size,
            self._settings.temperature,
            self._settings.max_response_length,
        )
        for again in range(self._settings.group_retries + 1):
            rid = f"{self._job.incarnation}-{record.group_id}" + (f"-{again}" if again else "")
            try:
                trajectories = await self._workflow.sample(request, rid)
            except UnusableSample as error:
                last = error
                logger.warning("%s; the group is sampled anew", error)
                continue
            await self._workflow.score(record.prompt, trajectories)
            return self._store.finish(record, trajectories, self._job.incarnation)
        raise RolloutError(
            f"{last}. Group {record.group_id} was sampled {self._settings.group_retries + 1} times without a usable result"
        )

    def _fail(self, error: RolloutError) -> None:
        logger.error("%s", error)
        if self.failure is None:
            self.failure = error
            self._changes.notify()

    async def lease(self, version: int, wait_s: float) -> Batch | None:
        """The current batch once all its groups are ready, at most `wait_s` from now; the same again until `trained`."""
        expected = self._schedule.first_version(self.current_batch)
        if version != expected:
            raise RolloutError(
                f"the trainer is at version {version}, but batch {self.current_batch} starts at {expected}"
            )
        deadline = time.monotonic() + wait_s
        async with self._leasing:
            while await self._changes.wait_until(self._decided, max(0.0, deadline - time.monotonic())):
                if not self._complete():
                    raise self.failure or self._pool.no_engine_left()
                if not self._drop_stale(self._positions()):
                    return await self._take()
        return None

    def _positions(self) -> list[int]:
        first = self.current_batch * self._schedule.groups_per_batch
        return list(range(first, first + self._schedule.groups_per_batch))

    def _complete(self) -> bool:
        return all(position in self._ready for position in self._positions())

    def _decided(self) -> bool:
        return self._complete() or self.failure is not None or not self._pool.living()

    async def _take(self) -> Batch:
        records = [self._ready[position] for position in self._positions()]
        # In a thread: reading a large batch must not hold up the engines' answers.
        groups = await asyncio.to_thread(self._store.lease, records)
        for record in records:
            self._ready[record.position] = record.in_state("leased")
        return Batch(id=self.current_batch, groups=groups)

    def _drop_stale(self, positions: list[int]) -> bool:
        """Drop and regenerate the ready groups at `positions` that are over the bound; whether there were any."""
        stale = []
        for position in positions:
            record = self._ready[position]
            assert record.oldest_version is not None, f"ready group {record.group_id} has no version"
            if not within_bound(self._schedule, position, record.oldest_version):
                stale.append(record)
        self._regenerate(stale, "stale")
        return bool(stale)

    def _regenerate(self, records: list[GroupRecord], reason: str) -> None:
        if not records:
            return
        logger.warning("%d groups dropped (%s), to be sampled again: %s", len(records), reason, records[0].group_id)
        for record in self._store.drop(records, reason):
            self._ready.pop(record.position, None)
            heapq.heappush(self._pending, (record.position, record))
        self._changes.notify()

    async def trained(self, batch_id: int, version: int) -> None:
        """The current batch is consumed; `version` is the weights' now. Saying it twice is fine."""
        if batch_id == self.current_batch - 1 and version == self._schedule.first_version(self.current_batch):
            return
        if batch_id != self.current_batch or version != self._schedule.first_version(batch_id + 1):
            raise RolloutError(
                f"the trainer says batch {batch_id} is trained at version {version}; expected batch {self.current_batch} at "
                f"version {self._schedule.first_version(self.current_batch + 1)}"
            )
        positions = self._positions()
        if any(p not in self._ready or self._ready[p].state != "leased" for p in positions):
            raise RolloutError(f"batch {batch_id} was never leased, so it cannot be trained")
        await asyncio.to_thread(self._store.trained, positions[0], positions[-1] + 1)
        for position in positions:
            del self._ready[position]
        self.current_batch += 1
        self._changes.notify()

    def status(self) -> dict[str, Any]:
        """Queue depths and what holds the next group up."""
        now = time.monotonic()
        oldest = min(self._running, key=lambda position: self._running[position], default=None)
        return {
            "groups": self._store.counts(),
            "dropped": self._store.dropped_by_reason(),
            "current_batch": self.current_batch,
            "ready_in_batch": sum(position in self._ready for position in self._positions()),
            "next_position": self._next_position,
            "running_trajectories": len(self._running) * self._schedule.group_size,
            "oldest_running": None
            if oldest is None
            else {"group": oldest, "seconds": round(now - self._running[oldest], 3)},
            "wait_reason": self.refusal(),
            "prompt_cursor": [self._prompts.cursor.epoch, self._prompts.cursor.index],
            "failure": None if self.failure is None else str(self.failure),
        }

    async def close(self) -> None:
        """Give up the groups in flight (the store has them as running: pending at a resume)."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
