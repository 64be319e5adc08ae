"""The tools that read a finished run: the picture of its curves and the verdict on its gain."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib import pyplot as plt
from matplotlib.image import imread

from m2po_megatron.metrics import MetricsWriter
from tools import check_gain, plot_run


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Six updates between an accuracy of 0.25 and one of 0.5 over 64 samples."""
    with MetricsWriter(tmp_path, tmp_path / "tb", start_iteration=0, total_iterations=6, enabled=True) as out:
        out.write_evaluation(0, {"eval/accuracy": 0.25, "eval/samples": 64.0})
        for iteration in range(1, 7):
            out.write_update(
                iteration,
                {
                    "reward/mean": iteration / 10,
                    "staleness/mean": 1.5,
                    "staleness/min": 1.0,
                    "staleness/max": float(iteration),
                    "m2/before": 0.08,
                    "m2/after": 0.03,
                    "m2/threshold": 0.04,
                    "m2/engine_floor": 1e-9 if iteration == 3 else None,
                    "time/train": 0.5,
                    "tokens": 100.0,
                },
            )
        out.write_evaluation(6, {"eval/accuracy": 0.5, "eval/samples": 64.0})
    return tmp_path


def test_the_picture_is_written_and_its_path_printed(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plot_run.main([str(run_dir)]) == 0
    picture = Path(capsys.readouterr().out.strip())
    assert picture == (run_dir / "curves.png").resolve()
    pixels = imread(picture)
    assert pixels.shape[0] > 800
    assert pixels.shape[1] > 800
    assert (pixels[..., :3] < 0.9).any(axis=-1).mean() > 0.01  # something is drawn on the white


def test_the_picture_goes_where_it_is_told(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plot_run.main([str(run_dir), "-o", str(tmp_path / "new" / "a.png")]) == 0
    assert (tmp_path / "new" / "a.png").is_file()
    capsys.readouterr()


def test_curves_carry_the_runs_numbers(run_dir: Path) -> None:
    updates, evaluations = plot_run.read_metrics(run_dir)
    figure, (reward, staleness, moment) = plt.subplots(1, 3)
    plot_run.plot_reward(reward, updates, evaluations)
    plot_run.plot_staleness(staleness, updates)
    plot_run.plot_second_moment(moment, updates, 0.04)
    drawn = {line.get_label(): line.get_xydata() for line in reward.lines + moment.lines}
    np.testing.assert_allclose(drawn["training reward"], [[i, i / 10] for i in range(1, 7)])
    np.testing.assert_allclose(drawn["held-out accuracy"], [[0, 0.25], [6, 0.5]])
    np.testing.assert_allclose(drawn["before the mask"][:, 1], 0.08)
    np.testing.assert_allclose(drawn["after the mask"][:, 1], 0.03)
    np.testing.assert_allclose(drawn["engine floor (median 1e-09)"], [[3, 1e-9]])
    np.testing.assert_allclose(drawn["threshold 0.04"][:, 1], 0.04)
    assert moment.get_yscale() == "log"
    band = staleness.collections[0].get_datalim(staleness.transData)
    assert (band.y0, band.y1) == (1.0, 6.0)
    plt.close(figure)


def test_a_directory_without_a_run_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for tool in (plot_run, check_gain):
        assert tool.main([str(tmp_path)]) == 1
        assert f"{tmp_path}/metrics.jsonl: no such file" in capsys.readouterr().err


def test_a_gain_that_suffices(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check_gain.main([str(run_dir), "--at-least", "0.25", "--samples", "64", "--updates", "6"]) == 0
    shown = capsys.readouterr().out
    assert "version 0 held-out accuracy 0.2500 +- 0.0541 (64 samples)" in shown
    assert "version 6 held-out accuracy 0.5000 +- 0.0625 (64 samples): gain +0.2500" in shown


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--at-least", "0.26"], "gain +0.2500, below the +0.2600 asked for"),
        (["--samples", "65"], "the evaluation of version 0 has 64 samples, 65 were asked for"),
        (["--updates", "7"], "the run made 6 updates, 7 were asked for"),
    ],
)
def test_a_condition_that_is_not_met(
    run_dir: Path, flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check_gain.main([str(run_dir), *flags]) == 1
    shown = capsys.readouterr()
    assert words in shown.err
    assert shown.out == ""


def test_a_run_that_did_not_reach_its_last_evaluation(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run_dir / "metrics.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    assert check_gain.main([str(run_dir), "--at-least", "0.1"]) == 1
    assert "1 evaluations with an accuracy, at least 2 are needed" in capsys.readouterr().err


def test_an_accuracy_that_fell_is_no_gain() -> None:
    evaluations: list[dict[str, Any]] = [
        {"version": 0, "eval/accuracy": 0.5, "eval/samples": 10},
        {"version": 9, "eval/accuracy": 0.25, "eval/samples": 10},
    ]
    with pytest.raises(ValueError, match=r"gain -0\.2500, below the \+0\.0000"):
        check_gain.judge([], evaluations, at_least=0.0, samples=0, least_updates=0)
