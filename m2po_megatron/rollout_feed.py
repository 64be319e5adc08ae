"""How rollouts reach every rank: global rank 0 talks to the controller, everybody hears.

At least every few seconds all ranks meet in one small all-reduce over gloo: rank 0 says wait, ready or failed, and any
rank may say stop (a signal reached it). Then the payload is broadcast as raw bytes. So no rank sits in a collective while
a long rollout is awaited, and a signal acts at one place, the same on every rank.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from m2po_megatron.data.trajectory import Batch, Group, Prompt, Trajectory
from m2po_megatron.initialize import World
from m2po_megatron.parentage import ask_for_death_signal
from m2po_megatron.rollout.codec import decode_batch, encode_batch
from m2po_megatron.rollout.connection import ControllerConnection
from m2po_megatron.rollout.errors import RolloutError

logger = logging.getLogger(__name__)
POLL_SECONDS = 2.0
SAME_SIGNAL_SECONDS = 3.0
_WAIT, _READY, _FAILED = 0, 1, 2


class StopSignal:
    """Ctrl-C, SIGTERM or SIGUSR1 asks for a clean stop at the next meeting.

    Seconds later another Ctrl-C ends the process at once; not earlier, since one may arrive twice: from the terminal and
    from the launcher. A scheduler's signals repeat the request and no more: a warning is followed by SIGTERM, and the
    batch may last from one to the other. While a checkpoint is written (`held`) nothing ends the process.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self._since = 0.0
        self._held = False
        if "TORCHELASTIC_RUN_ID" in os.environ:
            # Ranks must not outlive a torchrun that was killed. Other parents, such as a shell, may end before the run.
            ask_for_death_signal()

    @property
    def requested(self) -> bool:
        return self.number is not None

    def install(self) -> None:
        """From now on signals ask; before, at start-up, when there is nothing to save, they end the process."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self.requested:
            self.number, self._since = number, now
        elif number == signal.SIGINT and now - self._since > SAME_SIGNAL_SECONDS and not self._held:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Around the writing of a checkpoint: no signal ends the process till it is done."""
        self._held = True
        try:
            yield
        finally:
            self._held = False


class RolloutFeed:
    """The same batches, evaluations and probes on every rank. All methods but `close` are collective."""

    def __init__(self, world: World, connection: ControllerConnection | None, stop: StopSignal) -> None:
        if world.is_main and connection is None:
            raise ValueError("global rank 0 needs the connection to the rollout controller")
        self.world = world
        self.connection = connection
        self.stop = stop
        self.stopping = False
        self.stop_number: int | None = None  # the signal, on every rank, whichever of them received it
        self.failure: str | None = None
        self.while_waiting: Callable[[], None] = lambda: None  # called now and then, on all ranks alike
        self._told_of_failures = False

    def wait_for(self, poll: Callable[[ControllerConnection], bytes | None]) -> bytes | None:
        """Rank 0 polls (each call at most a few seconds) until there is an answer; every rank gets it.

        None: the run is stopping (a signal, or rollouts failed: then `failure` says why on every rank).
        """
        while True:
            code, payload = _WAIT, b""
            if self.connection is not None and not self.stop.requested:
                try:
                    answer = poll(self.connection)
                    if answer is not None:
                        code, payload = _READY, answer
                except RolloutError as error:
                    if not self.stop.requested:  # else it is the signal that ended the rollouts too
                        code, payload = _FAILED, (str(error) or repr(error)).encode(errors="replace")
            control = torch.tensor([code, len(payload), self.stop.number or 0])
            dist.all_reduce(control, op=dist.ReduceOp.MAX, group=self.world.control_group)
            code, size, stop = control.tolist()
            if code != _WAIT:
                payload = self._broadcast(payload, size)
            if stop or code == _FAILED:
                self.stopping = True
                self.stop_number = stop or None
                self.failure = payload.decode() if code == _FAILED else None
                return None
            if code == _READY:
                return payload
            self.while_waiting()

    def fail(self, reason: str) -> None:
        """Stop the run for a reason that every rank has found by itself."""
        self.failure = reason
        self.stopping = True

    def _broadcast(self, payload: bytes, size: int) -> bytes:
        buffer = torch.empty(size, dtype=torch.uint8)
        if self.world.is_main and size:
            buffer.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
        if size:
            dist.broadcast(buffer, src=0, group=self.world.control_group)
        return buffer.numpy().tobytes()

    def next_batch(self, version: int) -> Batch | None:
        """The next batch, its staleness checked against `version`; None when the run is stopping."""

        def lease(connection: ControllerConnection) -> bytes | None:
            batch = connection.lease(version, POLL_SECONDS)
            return None if batch is None else encode_batch(batch)

        payload = self.wait_for(lease)
        return None if payload is None else decode_batch(payload)

    def evaluate(self, request: dict[str, Any]) -> dict[str, Any] | None:
        """Run an evaluation on the engines under `request["version"]`'s weights; None when the run is stopping."""
        jobs: list[str] = []

        def result(connection: ControllerConnection) -> bytes | None:
            if not jobs:
                jobs.append(connection.evaluate_start(**request))
            answer = connection.evaluate_result(jobs[0], POLL_SECONDS)
            return None if answer is None else json.dumps(answer).encode()

        payload = self.wait_for(result)
        return None if payload is None else json.loads(payload)

    def probe(self, version: int, samples: int) -> list[Trajectory]:
        """Trajectories sampled by exactly `version`, to measure the engine against the trainer; [] when stopping."""

        def sample(connection: ControllerConnection) -> bytes | None:
            trajectories = connection.probe(samples, POLL_SECONDS, version=version)
            if trajectories is None:
                return None
            return encode_batch(Batch(id=0, groups=[Group("probe", Prompt("probe", ""), trajectories)]))

        payload = self.wait_for(sample)
        return [] if payload is None else decode_batch(payload).trajectories

    def publish(self, path: str, version: int) -> None:
        """Tell the controller of new weights; it does not wait for the engines."""
        self._tell(lambda connection: connection.publish(path, version))

    def trained(self, batch_id: int, version: int) -> None:
        """The batch is consumed: the weights are now at `version`."""
        self._tell(lambda connection: connection.trained(batch_id, version))

    def _tell(self, call: Callable[[ControllerConnection], None]) -> None:
        if self.connection is None:
            return
        try:
            call(self.connection)
        except RolloutError as error:  # every rank hears of it at the next meeting, where rank 0's poll fails too
            logger.debug("%s", error)

    @property
    def loaded_version(self) -> int:
        """The oldest version over the engines at the last lease, as rank 0 knows it; 0 on other ranks, and when no engine
        was left (batches that were complete are still trained)."""
        return int(self.connection.last_lease_info.get("loaded_version") or 0) if self.connection is not None else 0

    def counters(self) -> dict[str, float]:
        """Since the run's start (rank 0; {} elsewhere): `rollout/dropped`, groups dropped for any reason, and
        `rollout/reward_failures`, scores that failed and count as 0."""
        if self.connection is None:
            return {}
        info = self.connection.last_lease_info
        failures = info.get("reward_failures", {})
        if failures and not self._told_of_failures:
            self._told_of_failures = True
            logger.warning("rewards failed and count as 0: %s; see logs/controller.log in the run's directory", failures)
        return {
            "rollout/dropped": float(sum(info.get("dropped", {}).values())),
            "rollout/reward_failures": float(sum(failures.values())),
        }

    def __enter__(self) -> RolloutFeed:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the controller and its engines (rank 0); safe to call twice."""
        if self.connection is not None:
            self.connection.close()
