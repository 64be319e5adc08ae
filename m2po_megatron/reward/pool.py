"""Scores without holding up the event loop: built-in rewards in a thread, a user's own in killable worker processes."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import signal
import sys
from collections import Counter
from dataclasses import dataclass
from typing import Any

from m2po_megatron.reward.registry import is_built_in, reward_function

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0
"""What importing a user's reward module may take."""
LINE_LIMIT = 64 * 2**20
"""Bytes of the longest answer line of a worker."""


FIRST_FAILURES = 32
"""When as many scorings have failed and none has ever succeeded, the reward itself is taken to be broken."""


class RewardError(ValueError):
    """The reward is broken: every scoring so far failed. The text names --reward, the count and the last failure."""


@dataclass(frozen=True)
class Scoring:
    """One response to be scored; `id` is the sample's, for the log."""

    id: str
    prompt: str
    response: str
    answer: str


class RewardPool:
    """Scores with the reward `name`. A reward that raises, is not finite or takes too long scores 0.0, is counted in
    `failures` by reason ("error", "timeout") and logged with the sample's id. Unless nothing else ever came: see `score`."""

    def __init__(self, name: str, *, workers: int = 1, timeout_s: float = 30.0) -> None:
        self._name = name
        self._timeout_s = timeout_s
        self._function = reward_function(name) if is_built_in(name) else None
        self._count = 0 if self._function else workers
        self._idle: asyncio.Queue[_Worker] = asyncio.Queue()
        self._workers: list[_Worker] = []
        self.failures: Counter[str] = Counter()
        self._ever_scored = False

    async def start(self) -> None:
        """Start the workers; ValueError, with the reason, for a reward that cannot be imported."""
        for _ in range(self._count):
            worker = _Worker(self._name)
            self._workers.append(worker)
            await worker.start()
            self._idle.put_nowait(worker)

    async def score(self, scorings: list[Scoring]) -> list[float]:
        """One reward per scoring, in order.

        RewardError once at least FIRST_FAILURES scorings were made and all of them failed: zeros alone teach nothing.
        """
        if self._function is not None:
            outcomes = await asyncio.to_thread(self._score_here, scorings)
        else:
            outcomes = await asyncio.gather(*(self._score_in_worker(scoring) for scoring in scorings))
        rewards = []
        text = ""
        for scoring, outcome in zip(scorings, outcomes, strict=True):
            if isinstance(outcome, float):
                rewards.append(outcome)
                self._ever_scored = True
                continue
            reason, text = outcome
            self.failures[reason] += 1
            logger.warning("reward %s of sample %s counts as 0: %s", self._name, scoring.id, text)
            rewards.append(0.0)
        failed = self.failures.total()
        if text and not self._ever_scored and failed >= FIRST_FAILURES:
            raise RewardError(
                f"--reward {self._name}: all of the first {failed} scorings failed, so the function is taken to be broken; "
                f"the last one: {text}"
            )
        return rewards

    async def close(self) -> None:
        """End the workers."""
        for worker in self._workers:
            await worker.stop()

    def _score_here(self, scorings: list[Scoring]) -> list[float | tuple[str, str]]:
        assert self._function is not None
        outcomes: list[float | tuple[str, str]] = []
        for scoring in scorings:
            try:
                reward = float(self._function(scoring.prompt, scoring.response, scoring.answer))
            except Exception as error:  # noqa: BLE001 - a reward may raise anything; one bad sample must not stop the run
                outcomes.append(("error", f"{type(error).__name__}: {error}"))
            else:
                outcomes.append(reward if math.isfinite(reward) else ("error", f"the reward is {reward}"))
        return outcomes

    async def _score_in_worker(self, scoring: Scoring) -> float | tuple[str, str]:
        worker = await self._idle.get()
        try:
            request = {"prompt": scoring.prompt, "response": scoring.response, "answer": scoring.answer}
            answer = await asyncio.wait_for(worker.ask(request), self._timeout_s)
        except TimeoutError:
            await worker.restart()
            return "timeout", f"took longer than {self._timeout_s} s; its process was killed"
        except (OSError, EOFError, ValueError) as error:
            await worker.restart()
            return "error", f"its process ended ({error or type(error).__name__})"
        finally:
            self._idle.put_nowait(worker)
        if "reward" in answer:
            return float(answer["reward"])
        return "error", str(answer["error"])


class _Worker:
    """One reward/worker.py process. It ends by itself when its stdin closes, and on Linux the system kills it with the
    controller, even in the middle of a score."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "m2po_megatron.reward.worker",
            self._name,
            str(os.getpid()),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=LINE_LIMIT,
        )
        try:
            greeting = await asyncio.wait_for(self._read(), START_TIMEOUT_S)
        except (TimeoutError, EOFError) as error:
            await self.stop()
            raise ValueError(f"--reward {self._name}: its process did not start ({type(error).__name__})") from error
        if "ready" not in greeting:
            await self.stop()
            raise ValueError(str(greeting.get("error")))

    async def ask(self, request: dict[str, str]) -> dict[str, Any]:
        if self._process is None or self._process.stdin is None:
            raise EOFError("not running")
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        await self._process.stdin.drain()
        return await self._read()

    async def restart(self) -> None:
        """Kill and start anew; a start that fails leaves the worker down, and every score of it an error."""
        await self.stop()
        try:
            await self.start()
        except (OSError, ValueError) as error:
            logger.error("reward worker could not be restarted: %s", error)

    async def stop(self) -> None:
        process, self._process = self._process, None
        if process is None or process.returncode is not None:
            return
        process.send_signal(signal.SIGKILL)
        await process.wait()

    async def _read(self) -> dict[str, Any]:
        assert self._process is not None and self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            raise EOFError("it ended")
        answer = json.loads(line)
        if not isinstance(answer, dict):
            raise ValueError(f"unreadable answer {line[:200]!r}")
        return answer
