"""Draws the pictures of docs/architecture.md.

    python docs/draw.py          (writes docs/images/architecture.png and docs/images/staleness.png)
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch

IMAGES = Path(__file__).parent / "images"
TRAINER, ROLLOUT, STORE, INK = "#cfe2f3", "#d9ead3", "#fff2cc", "#333333"


def box(axes: Axes, x: float, y: float, width: float, height: float, text: str, colour: str, size: float = 9) -> None:
    """A rounded box with its text in the middle; coordinates of its lower left corner."""
    shape = FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0.04", facecolor=colour, edgecolor=INK, linewidth=1)
    axes.add_patch(shape)
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=size, color=INK)


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], text: str, place: tuple[float, float]) -> None:
    axes.annotate("", xy=end, xytext=start, arrowprops={"arrowstyle": "-|>", "color": INK, "linewidth": 1.2})
    axes.text(*place, text, fontsize=8, color=INK, ha="center", va="center", backgroundcolor="white")


def draw_architecture(path: Path) -> None:
    """Who runs where, and what travels between them."""
    figure, axes = plt.subplots(figsize=(10.5, 5.6), constrained_layout=True)
    axes.set(xlim=(0, 10.5), ylim=(0, 5.6))
    axes.axis("off")
    box(axes, 0.2, 0.3, 3.6, 4.9, "", "#f7fafd")
    axes.text(2.0, 4.8, "trainer: one process a rank (torchrun)", ha="center", fontsize=9.5, weight="bold")
    steps = (
        "pass A: log-probs of every micro-batch",
        "mask: second moment, exact over all ranks",
        "pass B: forward and backward, mask frozen",
        "clip, optimizer step, version + 1",
        "publish the weights",
    )
    for index, text in enumerate(steps):
        top = 3.95 - 0.84 * index
        box(axes, 0.45, top, 3.1, 0.55, text, TRAINER)
        if index:
            axes.annotate("", xy=(2.0, top + 0.6), xytext=(2.0, top + 0.79), arrowprops={"arrowstyle": "-|>", "color": INK})
    box(axes, 5.0, 1.9, 1.9, 1.9, "controller\n(child of rank 0)\n\nadmission by age,\ngroups, rewards", ROLLOUT)
    box(axes, 5.0, 0.75, 1.9, 0.7, "store (SQLite)\nand reward workers", STORE)
    box(axes, 8.3, 3.35, 1.9, 0.8, "engine 0\nembedded or SGLang", ROLLOUT)
    box(axes, 8.3, 1.85, 1.9, 0.8, "engine n", ROLLOUT)
    arrow(axes, (5.0, 3.4), (3.8, 3.4), "batch of groups\n(loopback)", (4.4, 3.9))
    arrow(axes, (3.8, 2.3), (5.0, 2.3), "trained,\npublished", (4.4, 1.85))
    arrow(axes, (6.9, 3.5), (8.3, 3.8), "generate, pause,\nload weights (HTTP)", (7.6, 4.3))
    arrow(axes, (8.3, 2.3), (6.9, 2.6), "tokens, log-probs,\nversion of each token", (7.6, 1.95))
    arrow(axes, (5.95, 1.88), (5.95, 1.48), "", (5.95, 1.6))
    axes.annotate(
        "",
        xy=(9.25, 1.83),
        xytext=(3.8, 0.42),
        arrowprops={"arrowstyle": "-|>", "color": INK, "linestyle": "--", "connectionstyle": "angle,angleA=0,angleB=90"},
    )
    axes.text(7.9, 0.2, "weights as a Hugging Face directory in RUN_DIR/publish", fontsize=8, ha="center")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_staleness(path: Path) -> None:
    """A trajectory sampled across publications, and what its staleness is."""
    figure, axes = plt.subplots(figsize=(10.5, 3.4), constrained_layout=True)
    axes.set(xlim=(-0.6, 9.4), ylim=(0, 3.3))
    axes.axis("off")
    axes.annotate("", xy=(9.3, 0.6), xytext=(-0.5, 0.6), arrowprops={"arrowstyle": "-|>", "color": INK})
    axes.text(9.3, 0.3, "version", ha="right", fontsize=9)
    for version in range(9):
        axes.plot([version, version], [0.53, 0.67], color=INK)
        axes.text(version, 0.3, str(version), ha="center", fontsize=9)
    shades = ("#6aa84f", "#93c47d", "#b6d7a8")
    for index, (version, words) in enumerate(((2, "tokens of version 2"), (3, "of version 3"), (4, "of version 4"))):
        box(axes, version + 0.04, 1.15, 0.92, 0.42, words, shades[index], size=7)
    axes.text(2.06, 1.82, "one trajectory: generation goes on while new weights are published", fontsize=9)
    box(axes, 7.04, 1.15, 0.92, 0.42, "its batch's\nfirst update", TRAINER, size=7)
    axes.annotate("", xy=(7, 2.5), xytext=(2, 2.5), arrowprops={"arrowstyle": "<|-|>", "color": "#d55e00"})
    axes.text(4.5, 2.72, "staleness = 7 - 2 = 5, at most --max-staleness", ha="center", color="#d55e00", fontsize=10)
    for version in (2, 7):
        axes.plot([version, version], [0.67, 2.55], color="#d55e00", linestyle=":", linewidth=1)
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    IMAGES.mkdir(exist_ok=True)
    draw_architecture(IMAGES / "architecture.png")
    draw_staleness(IMAGES / "staleness.png")
    print(IMAGES)
