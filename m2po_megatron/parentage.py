"""Ending when the parent ends: a killed trainer must not leave a controller, nor a killed controller its engines or
reward workers."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
import sys
from collections.abc import Callable

logger = logging.getLogger(__name__)

POLL_S = 0.5
_PR_SET_PDEATHSIG = 1


def ask_for_death_signal(number: signal.Signals = signal.SIGTERM) -> None:
    """Have Linux send this process signal `number` when its parent dies; elsewhere, and if refused, polling must do.

    A parent that died before this call sends nothing: compare os.getppid() with the expected parent afterwards.
    """
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
        logger.warning("prctl(PR_SET_PDEATHSIG) failed with errno %d; polling the parent instead", ctypes.get_errno())


def leave_signals_to_parent() -> None:
    """For a process that serves one rank: it does not end by a signal to the whole job, but when its rank does."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    ask_for_death_signal(signal.SIGKILL)


async def watch_parent(parent_pid: int, on_death: Callable[[], None]) -> None:
    """Call `on_death` once this process's parent is not `parent_pid` any more (it died before or while we look)."""
    while os.getppid() == parent_pid:
        await asyncio.sleep(POLL_S)
    logger.warning("the parent process %d is gone", parent_pid)
    on_death()
