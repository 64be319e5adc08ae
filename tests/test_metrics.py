"""metrics.jsonl, TensorBoard and the progress bar: what is written, when, and what a resume keeps."""

from __future__ import annotations

import io
import json
import logging
import math
import sys
from pathlib import Path

import numpy as np
import pytest

from m2po_megatron import metrics
from m2po_megatron.data.trajectory import Trajectory
from m2po_megatron.metrics import MetricsWriter, progress_text, read_metrics, rollout_metrics


def trajectory(prompt: int, versions: list[int], reward: float, finish_reason: str = "stop") -> Trajectory:
    length = prompt + len(versions)
    return Trajectory(
        id=f"t{prompt}-{versions}",
        group_id="g",
        token_ids=np.arange(length),
        loss_mask=np.arange(length) >= prompt,
        behaviour_logprobs=np.zeros(length, dtype=np.float32),
        versions=np.array([-1] * prompt + versions),
        finish_reason=finish_reason,
        reward=reward,
    )


def writer(directory: Path, start: int = 0, enabled: bool = True) -> MetricsWriter:
    return MetricsWriter(directory, directory / "tb", start_iteration=start, total_iterations=30, enabled=enabled)


def lines(directory: Path) -> list[dict[str, float | None]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def test_rollout_metrics_count_from_the_batches_first_update_and_the_oldest_token() -> None:
    found = rollout_metrics(
        [trajectory(3, [7, 8], 1.0), trajectory(4, [9], 0.0, "length"), trajectory(2, [5, 5, 6], 0.25)],
        batch_version=10,
    )
    assert found == {
        "reward/mean": pytest.approx(1.25 / 3),
        "staleness/mean": pytest.approx((3 + 1 + 5) / 3),
        "staleness/max": 5.0,
        "staleness/min": 1.0,
        "rollout/length_mean": 2.0,
        "rollout/truncated_fraction": pytest.approx(1 / 3),
        "tokens": 15.0,
    }


def test_rollout_metrics_refuse_an_empty_update() -> None:
    with pytest.raises(ValueError, match="at least one trajectory"):
        rollout_metrics([], batch_version=0)


def test_every_line_is_on_disk_at_once_and_says_what_it_is(tmp_path: Path) -> None:
    with writer(tmp_path) as out:
        out.write_evaluation(0, {"eval/accuracy": 0.5, "eval/samples": 8.0})
        assert lines(tmp_path) == [{"version": 0, "eval/accuracy": 0.5, "eval/samples": 8.0}]
        out.write_update(1, {"reward/mean": 0.25, "loss/policy": math.nan, "m2/cutoff": None, "grad_norm": math.inf})
        written = lines(tmp_path)[1]
    assert written == {
        "iteration": 1,
        "version": 1,
        "reward/mean": 0.25,
        "loss/policy": None,
        "m2/cutoff": None,
        "grad_norm": None,
        "tokens_per_second": None,
    }


def test_tokens_per_second_is_over_the_time_since_the_previous_update_without_evaluations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([100.0, 102.0, 112.0, 116.0])  # entered, update 1, evaluation done, update 2
    monkeypatch.setattr(metrics.time, "monotonic", lambda: next(clock))
    with writer(tmp_path) as out:
        out.write_update(1, {"tokens": 600.0})
        out.write_evaluation(1, {"eval/accuracy": 0.5})
        out.write_update(2, {"tokens": 600.0})
    updates, _ = read_metrics(tmp_path)
    assert [u["tokens_per_second"] for u in updates] == [300.0, 150.0]


def test_a_resume_drops_what_its_checkpoint_has_not_seen(tmp_path: Path) -> None:
    with writer(tmp_path) as out:
        out.write_evaluation(0, {"eval/accuracy": 0.1})
        for iteration in range(1, 8):
            out.write_update(iteration, {"reward/mean": float(iteration)})
            if iteration in (4, 6):
                out.write_evaluation(iteration, {"eval/accuracy": iteration / 10})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 8, "ver')  # a kill in the middle of a line
    with writer(tmp_path, start=4) as out:
        out.write_evaluation(4, {"eval/accuracy": 0.45})
        out.write_update(5, {"reward/mean": 50.0})
    updates, evaluations = read_metrics(tmp_path)
    assert [(u["iteration"], u["reward/mean"]) for u in updates] == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0), (5, 50.0)]
    assert [(e["version"], e["eval/accuracy"]) for e in evaluations] == [(0, 0.1), (4, 0.45)]


def test_tensorboard_has_one_scalar_a_key_and_a_resume_purges_it(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with writer(tmp_path) as out:
        for iteration in (1, 2, 3):
            out.write_update(iteration, {"reward/mean": iteration / 4, "m2/cutoff": None})
    with writer(tmp_path, start=2) as out:
        out.write_update(3, {"reward/mean": 0.875})
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    assert events.Tags()["scalars"] == ["reward/mean"]
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [(1, 0.25), (2, 0.5), (3, 0.875)]


def test_ranks_that_do_not_write_leave_no_trace(tmp_path: Path) -> None:
    with writer(tmp_path / "run", enabled=False) as out:
        out.write_update(1, {"reward/mean": 0.5})
        out.write_evaluation(1, {"eval/accuracy": 0.5})
    assert not (tmp_path / "run").exists()


def test_an_evaluation_that_was_not_made_writes_nothing(tmp_path: Path) -> None:
    with writer(tmp_path) as out:
        out.write_evaluation(0, {})
    assert lines(tmp_path) == []


def test_a_broken_line_in_the_middle_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"iteration": 1, "version": 1}\nnonsense\n{"iteration": 2, "version": 2}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2: not a line of metrics"):
        read_metrics(tmp_path)
    with pytest.raises(ValueError, match=r"missing.metrics\.jsonl: no such file"):
        read_metrics(tmp_path / "missing")


def test_progress_text_shows_the_five_numbers() -> None:
    shown = progress_text(
        {
            "reward/mean": 0.4125,
            "staleness/mean": 2.25,
            "m2/before": 0.0519,
            "m2/after": 0.04,
            "m2/masked_fraction": 0.0123,
            "tokens_per_second": 12345.6,
        },
        accuracy=0.39,
    )
    assert shown == "reward 0.412, staleness 2.2, M2 0.052 -> 0.04, masked 1.23%, 12,346 tokens/s, held-out 0.390"
    assert progress_text({"m2/before": None, "m2/after": math.nan}).startswith(
        "reward -, staleness -, M2 - -> -, masked -"
    )


def test_without_a_terminal_a_plain_line_now_and_then(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with writer(tmp_path) as out:
        for iteration in range(1, 31):
            out.write_update(iteration, {"reward/mean": 0.5})
    shown = capsys.readouterr()
    assert [line.split(":")[0] for line in shown.err.splitlines()] == [f"update {n}/30" for n in (1, 10, 20, 30)]
    assert shown.out == ""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_a_bar_that_logging_does_not_break(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    handler = logging.StreamHandler(terminal)
    handler.setFormatter(logging.Formatter("%(message)s"))
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [handler])
    with writer(tmp_path, start=10) as out:
        out.write_update(11, {"reward/mean": 0.75})
        logging.getLogger("engine").warning("engine-0 left")
        out.write_update(12, {"reward/mean": 0.75})
    assert root.handlers == [handler]
    shown = terminal.getvalue()
    assert "12/30" in shown
    assert "reward 0.750" in shown
    # The bar's line is cleared before the message and drawn again after it: the message has a line of its own.
    assert "engine-0 left" in [part.strip() for part in shown.replace("\r", "\n").splitlines()]
