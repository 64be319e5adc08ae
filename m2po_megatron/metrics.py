"""Numbers of a run: RUN_DIR/metrics.jsonl, TensorBoard, and a progress bar.

metrics.jsonl holds two kinds of lines, told apart by one key:
  an update       {"iteration": 7, "version": 7, "reward/mean": ..., ...}   version = the weights after it (= iteration)
  an evaluation   {"version": 7, "eval/accuracy": ..., "eval/samples": ..., ...}   no "iteration"; version 0 comes first
An evaluation is a line of its own, after the update whose weights it judges, so that an update's line is complete the
moment it is written. A number that is not finite is null. A resumed run drops what lies beyond its checkpoint and
appends; where it judges a version once more, `read_metrics` returns the later judgement.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TextIO

import numpy as np
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from m2po_megatron.data.trajectory import Trajectory

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

FILE_NAME = "metrics.jsonl"
PLAIN_LINE_INTERVAL = 10
"""Updates between two progress lines where stderr is not a terminal."""

Record = dict[str, Any]


def rollout_metrics(mini_batch: Sequence[Trajectory], batch_version: int) -> dict[str, float | None]:
    """What one update's trajectories say of the rollouts.

    batch_version: the version at which the batch's FIRST update starts, which staleness is counted from.
    `tokens` counts prompt and response tokens; lengths are of responses, in tokens.
    """
    if not mini_batch:
        raise ValueError("an update needs at least one trajectory")
    staleness = batch_version - np.array([t.oldest_version for t in mini_batch])
    return {
        "reward/mean": float(np.mean([t.reward if t.reward is not None else math.nan for t in mini_batch])),
        "staleness/mean": float(staleness.mean()),
        "staleness/max": float(staleness.max()),
        "staleness/min": float(staleness.min()),
        "rollout/length_mean": float(np.mean([t.response_length for t in mini_batch])),
        "rollout/truncated_fraction": float(np.mean([t.finish_reason == "length" for t in mini_batch])),
        "tokens": float(sum(len(t.token_ids) for t in mini_batch)),
    }


def read_metrics(run_dir: Path | str) -> tuple[list[Record], list[Record]]:
    """(updates, evaluations) of a run, each in order of version. A last line cut short by a kill is left out.

    Raises ValueError naming the file (and the line) that is missing or is no metrics file.
    """
    path = Path(run_dir) / FILE_NAME
    if not path.is_file():
        raise ValueError(f"{path}: no such file; RUN_DIR must be the --run-dir of a run that has begun")
    updates: dict[int, Record] = {}
    evaluations: dict[int, Record] = {}
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            known = updates if "iteration" in record else evaluations
            known[int(record["version"])] = record
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines) and not line.endswith("\n"):
                break
            raise ValueError(f"{path}:{number}: not a line of metrics: {error!r}") from error
    return [updates[v] for v in sorted(updates)], [evaluations[v] for v in sorted(evaluations)]


class MetricsWriter:
    """Writes a run's numbers while it is entered; with enabled=False every method does nothing.

    start_iteration: the version the run starts at; lines beyond it, left by an abandoned attempt, are dropped.
    """

    def __init__(
        self,
        run_dir: Path | str,
        tensorboard_dir: Path | str,
        *,
        start_iteration: int,
        total_iterations: int,
        enabled: bool,
    ) -> None:
        self.path = Path(run_dir) / FILE_NAME
        self.tensorboard_dir = Path(tensorboard_dir)
        self.start_iteration = start_iteration
        self.total_iterations = total_iterations
        self.enabled = enabled
        self._resources = contextlib.ExitStack()
        self._file: TextIO | None = None
        self._tensorboard: SummaryWriter | None = None
        self._bar: tqdm[Any] | None = None
        self._last_event = 0.0
        self._accuracy: float | None = None

    def __enter__(self) -> Self:
        if self.enabled:
            with contextlib.ExitStack() as opening:  # a failure half-way closes what is open
                self._open(opening)
                self._resources = opening.pop_all()
        return self

    def _open(self, opening: contextlib.ExitStack) -> None:
        from torch.utils.tensorboard import SummaryWriter  # slow to import, and only one rank writes

        self.path.parent.mkdir(parents=True, exist_ok=True)
        _drop_beyond(self.path, self.start_iteration)
        self._file = opening.enter_context(self.path.open("a", encoding="utf-8", buffering=1))
        purge = self.start_iteration + 1 if self.start_iteration else None
        self._tensorboard = SummaryWriter(str(self.tensorboard_dir), purge_step=purge)
        opening.callback(self._tensorboard.close)
        if sys.stderr.isatty():
            self._bar = tqdm(
                total=self.total_iterations,
                initial=self.start_iteration,
                unit="update",
                dynamic_ncols=True,
                smoothing=0.1,
            )
            opening.callback(self._bar.close)
            opening.enter_context(logging_redirect_tqdm())
        self._last_event = time.monotonic()

    def __exit__(self, *error: object) -> None:
        self._resources.close()
        self._file = self._tensorboard = self._bar = None

    def write_update(self, iteration: int, metrics: Mapping[str, float | None]) -> None:
        """One update's numbers; `iteration` is the version it made.

        Adds tokens_per_second: `tokens` over the wall time since the previous update (an evaluation between them is not
        counted), so it is the pace of the whole run, waiting for rollouts included.
        """
        if not self.enabled:
            return
        seconds = self._seconds_since_last_event()
        tokens = metrics.get("tokens")
        pace = tokens / seconds if tokens is not None and seconds > 0 else None
        self._write(iteration, {"iteration": iteration, "version": iteration, **metrics, "tokens_per_second": pace})
        self._show(iteration, {**metrics, "tokens_per_second": pace})

    def write_evaluation(self, version: int, metrics: Mapping[str, float | None]) -> None:
        """One evaluation's numbers, of the weights of `version`; {} (none was made) writes nothing."""
        if not self.enabled:
            return
        self._seconds_since_last_event()
        if not metrics:
            return
        self._write(version, {"version": version, **metrics})
        self._accuracy = metrics.get("eval/accuracy")
        samples = metrics.get("eval/samples")
        accuracy = _number(self._accuracy, ".4f")
        self._say(f"version {version}: held-out accuracy {accuracy} over {_number(samples, '.0f')} samples")

    def _seconds_since_last_event(self) -> float:
        now = time.monotonic()
        seconds, self._last_event = now - self._last_event, now
        return seconds

    def _write(self, step: int, record: Record) -> None:
        finite = {key: value if _is_finite(value) else None for key, value in record.items()}
        assert self._file is not None and self._tensorboard is not None, "write only between __enter__ and __exit__"
        self._file.write(json.dumps(finite, allow_nan=False) + "\n")
        for key, value in finite.items():
            if value is not None and key not in ("iteration", "version"):
                self._tensorboard.add_scalar(key, value, step)

    def _show(self, iteration: int, metrics: Mapping[str, float | None]) -> None:
        text = progress_text(metrics, self._accuracy)
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update(iteration - self._bar.n)
        elif iteration % PLAIN_LINE_INTERVAL == 0 or iteration in (self.start_iteration + 1, self.total_iterations):
            self._say(f"update {iteration}/{self.total_iterations}: {text}")

    def _say(self, text: str) -> None:
        if self._bar is not None:
            self._bar.write(text, file=sys.stderr)
        else:
            sys.stderr.write(text + "\n")
            sys.stderr.flush()


def progress_text(metrics: Mapping[str, float | None], accuracy: float | None = None) -> str:
    """The progress bar's numbers in words; `-` stands for one that is missing."""

    def show(key: str, form: str) -> str:
        return _number(metrics.get(key), form)

    parts = [
        f"reward {show('reward/mean', '.3f')}",
        f"staleness {show('staleness/mean', '.1f')}",
        f"M2 {show('m2/before', '.2g')} -> {show('m2/after', '.2g')}",
        f"masked {show('m2/masked_fraction', '.2%')}",
        f"{show('tokens_per_second', ',.0f')} tokens/s",
    ]
    if accuracy is not None:
        parts.append(f"held-out {accuracy:.3f}")
    return ", ".join(parts)


def _number(value: float | None, form: str) -> str:
    return format(value, form) if _is_finite(value) else "-"


def _is_finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _drop_beyond(path: Path, version: int) -> None:
    """Rewrite the file without the lines of later versions and without a line cut short; aside, then renamed."""
    if not path.is_file():
        return
    updates, evaluations = read_metrics(path.parent)
    kept = sorted(
        (record for record in (*updates, *evaluations) if record["version"] <= version),
        key=lambda record: (record["version"], "iteration" not in record),
    )
    aside = path.with_suffix(".tmp")
    aside.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")
    aside.replace(path)
