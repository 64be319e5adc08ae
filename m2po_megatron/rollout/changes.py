"""Waiting for "something changed": one object shared by the controller's parts, all on one event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


class Changes:
    """Whoever changes state calls `notify`; whoever waits gives the condition it waits for."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        """Have every waiter look again."""
        self._event.set()
        self._event = asyncio.Event()

    async def wait_until(self, condition: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Return True once `condition()` holds, False if it does not within `timeout_s` (None = no limit)."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not condition():
            event = self._event  # taken without an await after the check: no notification can fall in between
            remaining = None if deadline is None else deadline - time.monotonic()
            if remaining is not None and remaining <= 0:
                return False
            try:
                await asyncio.wait_for(event.wait(), remaining)
            except TimeoutError:
                return condition()
        return True
