"""The embedded engine's one thread that computes: it owns the scheduler, so that the event loop only talks."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from m2po_megatron.rollout.embedded_scheduler import Scheduler
from m2po_megatron.rollout.embedded_sequence import Job, RequestError

logger = logging.getLogger(__name__)

Call = tuple[Callable[[], Any], "Future[Any]"]
STOP_TIMEOUT_S = 2.0
"""What a step in progress has to end when the worker is stopped; a daemon thread cannot hold the process longer."""


class Worker:
    """Runs scheduler steps while there is work, and calls from other threads between them."""

    def __init__(self, scheduler: Scheduler, deliver: Callable[[list[Job]], None]) -> None:
        """`deliver` is called on the worker's thread with the jobs that finished in a step or a call."""
        self._scheduler = scheduler
        self._deliver = deliver
        self._inbox: queue.SimpleQueue[Call] = queue.SimpleQueue()
        self._when_idle: deque[Call] = deque()
        self._step_delay_s = 0.0
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="embedded-engine", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def call(self, function: Callable[[], Any]) -> Future[Any]:
        """Run `function` on the worker's thread before the next step; the future has its result or its exception."""
        future: Future[Any] = Future()
        self._inbox.put((function, future))
        return future

    def call_when_idle(self, function: Callable[[], Any]) -> Future[Any]:
        """Run it when no sequence is running: at once while paused, else when those running now have ended. Until then
        none joins, so that this comes."""
        future: Future[Any] = Future()
        self._inbox.put((lambda: self._when_idle.append((function, future)), Future()))
        return future

    def set_step_delay(self, seconds: float) -> None:
        """Wait this long after every step (`/slow_down`: tests that must catch requests in flight)."""
        self._step_delay_s = seconds

    def stop(self) -> None:
        """End the thread after the step in progress; what is unfinished is aborted."""
        self._inbox.put((self._stop, Future()))
        self._thread.join(STOP_TIMEOUT_S)

    def _stop(self) -> None:
        self._stopping = True
        self._scheduler.pause("abort")

    def _run(self) -> None:
        while not self._stopping:
            self._take_calls()
            if self._scheduler.has_work:
                try:
                    self._scheduler.step(admit=not self._when_idle)
                except Exception as error:
                    logger.exception("a step failed; all requests are given up")
                    text = f"the engine failed in a step: {type(error).__name__}: {error}"
                    self._scheduler.fail_all(RequestError(500, text))
            while self._when_idle and not self._scheduler.running:
                _answer(*self._when_idle.popleft())
            finished = self._scheduler.take_finished()
            if finished:
                self._deliver(finished)

    def _take_calls(self) -> None:
        """Run what is in the inbox; wait for it where there is nothing else to do."""
        deadline = time.monotonic() + self._step_delay_s
        while True:
            try:
                if not self._scheduler.has_work:
                    call = self._inbox.get()
                elif self._step_delay_s and (left := deadline - time.monotonic()) > 0:
                    call = self._inbox.get(timeout=left)
                else:
                    call = self._inbox.get_nowait()
            except queue.Empty:
                return
            _answer(*call)
            if not self._scheduler.has_work:
                return


def _answer(function: Callable[[], Any], future: Future[Any]) -> None:
    """Give `future` what `function` returns or raises."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = function()
    except Exception as error:  # noqa: BLE001 - it belongs to whoever asked
        future.set_exception(error)
    else:
        future.set_result(result)
