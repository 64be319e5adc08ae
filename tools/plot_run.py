"""Draws a run's curves from its metrics.jsonl into one PNG and prints the picture's path.

    python tools/plot_run.py RUN_DIR [-o FILE.png]          (default: RUN_DIR/curves.png)

Six panels over updates: reward and held-out accuracy; staleness; M2 before and after the mask with its threshold and the
engine's own share; masked and trust-region fractions; gradient norm and entropy; tokens per second and where time goes.
A number that a run did not report leaves its curve out.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from m2po_megatron.metrics import read_metrics

Record = dict[str, Any]
PARTS = ("wait", "logprob", "mask", "train", "publish")
M2_RANGE = 1e-3
"""The lowest M2 drawn, as a share of the threshold."""
SMOOTHED_UPDATES = 10
"""The pace alternates with waiting for a batch: one update's says little."""
BLUE, ORANGE, GREEN, GREY = "#0072b2", "#d55e00", "#009e73", "#999999"


def series(records: list[Record], key: str) -> tuple[np.ndarray, np.ndarray]:
    """(versions, values), both float64 [n], of the records that have a number under `key`."""
    known = [record for record in records if record.get(key) is not None]
    return np.array([r["version"] for r in known], dtype=np.float64), np.array(
        [r[key] for r in known], dtype=np.float64
    )


def curve(axes: Axes, records: list[Record], key: str, label: str, **style: Any) -> bool:
    """Draw one key; False where there is nothing to draw."""
    versions, values = series(records, key)
    if len(versions):
        axes.plot(versions, values, label=label, **{"linewidth": 1.2, **style})
    return bool(len(versions))


def plot_reward(axes: Axes, updates: list[Record], evaluations: list[Record]) -> None:
    curve(axes, updates, "reward/mean", "training reward", color=BLUE, alpha=0.8)
    curve(axes, evaluations, "eval/accuracy", "held-out accuracy", color=ORANGE, marker="o")
    finish(axes, "Reward and held-out accuracy", "mean of a sample")


def plot_staleness(axes: Axes, updates: list[Record]) -> None:
    low, high = series(updates, "staleness/min"), series(updates, "staleness/max")
    if len(low[0]) and np.array_equal(low[0], high[0]):
        axes.fill_between(low[0], low[1], high[1], color=BLUE, alpha=0.2, linewidth=0, label="min to max")
    curve(axes, updates, "staleness/mean", "mean", color=BLUE)
    axes.set_ylim(bottom=0)
    finish(axes, "Staleness of the trajectories", "updates")


def plot_second_moment(axes: Axes, updates: list[Record], threshold: float | None) -> None:
    curve(axes, updates, "m2/before", "before the mask", color=ORANGE)
    curve(axes, updates, "m2/after", "after the mask", color=BLUE)
    floors = series(updates, "m2/engine_floor")[1]
    median = f" (median {np.median(floors):.1g})" if len(floors) else ""
    curve(axes, updates, "m2/engine_floor", "engine floor" + median, color=GREY, marker=".", linestyle="none")
    if threshold is not None:
        axes.axhline(threshold, color="black", linestyle="--", linewidth=1, label=f"threshold {threshold:g}")
    axes.set_yscale("log", nonpositive="mask")
    if threshold:
        # Data as fresh as the weights have an M2 of rounding alone, which would squeeze all the rest into a line.
        axes.set_ylim(bottom=threshold * M2_RANGE)
    finish(axes, "M2 of the trust region", r"mean $(\log r)^2$")


def plot_fractions(axes: Axes, updates: list[Record]) -> None:
    curve(axes, updates, "m2/trust_region_fraction", "in the trust region", color=BLUE)
    axes.set_ylim(bottom=0)
    other = axes.twinx()  # masked tokens are few: on the same scale they would not be seen
    curve(other, updates, "m2/masked_fraction", "masked (right scale)", color=ORANGE)
    other.set_ylim(bottom=0)
    other.set_ylabel("masked", color=ORANGE)
    finish(axes, "Share of the response tokens", "in the trust region", other)


def plot_optimizer(axes: Axes, updates: list[Record]) -> None:
    curve(axes, updates, "grad_norm", "gradient norm", color=BLUE)
    axes.set_ylim(bottom=0)
    other = axes.twinx()
    curve(other, updates, "entropy", "entropy", color=GREEN)
    other.set_ylim(bottom=0)
    other.set_ylabel("nats a token", color=GREEN)
    finish(axes, "Gradient norm and entropy", "norm before clipping", other)


def plot_time(axes: Axes, updates: list[Record]) -> None:
    versions = np.array([record["version"] for record in updates], dtype=np.float64)
    parts = [[record.get(f"time/{part}") or 0.0 for record in updates] for part in PARTS]
    axes.stackplot(versions, parts, labels=PARTS, alpha=0.5, linewidth=0)
    axes.set_ylim(0, 1.5 * axes.get_ylim()[1])  # room for the legend
    other = axes.twinx()
    versions, pace = series(updates, "tokens_per_second")
    width = min(SMOOTHED_UPDATES, len(pace))
    if width:
        smooth = width / np.convolve(1 / pace, np.ones(width), mode="valid")  # all their tokens over all their time
        other.plot(
            versions[width - 1 :], smooth, color="black", linewidth=1.2, label=f"tokens/s, mean of {width} updates"
        )
    other.set_ylim(0, 1.5 * other.get_ylim()[1])
    other.set_ylabel("tokens/s (line)")
    finish(axes, "Time of an update and pace", "seconds (areas)", other, loc="upper left", ncols=3)


def finish(axes: Axes, title: str, unit: str, twin: Axes | None = None, **legend: Any) -> None:
    axes.set_title(title, fontsize=11)
    axes.set_xlabel("update")
    axes.set_ylabel(unit)
    axes.grid(alpha=0.25)
    handles, labels = axes.get_legend_handles_labels()
    if twin is not None:
        more = twin.get_legend_handles_labels()
        handles, labels = handles + more[0], labels + more[1]
    if handles:
        (twin or axes).legend(handles, labels, fontsize=8, framealpha=0.8, **legend)


def draw(
    updates: list[Record], evaluations: list[Record], output: Path, *, threshold: float | None, title: str
) -> None:
    """Write the picture. Raises ValueError where there is no update to draw."""
    if not updates:
        raise ValueError("no update has been made yet; there is nothing to draw")
    figure, panels = plt.subplots(3, 2, figsize=(12, 11), constrained_layout=True)
    figure.suptitle(title)
    plot_reward(panels[0, 0], updates, evaluations)
    plot_staleness(panels[0, 1], updates)
    plot_second_moment(panels[1, 0], updates, threshold)
    plot_fractions(panels[1, 1], updates)
    plot_optimizer(panels[2, 0], updates)
    plot_time(panels[2, 1], updates)
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=110)
    plt.close(figure)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Draw a run's curves.")
    parser.add_argument("run_dir", type=Path, help="the run's --run-dir")
    parser.add_argument("-o", "--output", type=Path, help="default: RUN_DIR/curves.png")
    arguments = parser.parse_args(argv)
    output = arguments.output or arguments.run_dir / "curves.png"
    try:
        updates, evaluations = read_metrics(arguments.run_dir)
        thresholds = series(updates, "m2/threshold")[1]
        threshold = float(thresholds[-1]) if len(thresholds) else None
        draw(updates, evaluations, output, threshold=threshold, title=arguments.run_dir.resolve().name)
    except (ValueError, OSError) as error:
        print(f"plot_run.py: {error}", file=sys.stderr)
        return 1
    print(output.resolve())
    return 0


if __name__ == "__main__":
    sys.exit(main())
