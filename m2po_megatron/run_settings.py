"""Settings of the run itself, which no other room owns."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class RunSettings:
    """The run itself: how long, where it writes, when it evaluates."""

    train_iters: int = field(default=100, metadata={"help": "optimizer updates in all (the last version)"})
    run_dir: str | None = field(
        default=None, metadata={"help": "metrics, store, published weights, logs (default: SAVE/run, or runs/run)"}
    )
    save: str | None = field(default=None, metadata={"help": "directory of checkpoints"})
    load: str | None = field(default=None, metadata={"help": "directory to resume from (its latest checkpoint, if any)"})
    save_interval: int = field(default=0, metadata={"help": "updates between checkpoints; 0 = at the end only"})
    async_save: bool = field(default=False, metadata={"help": "write checkpoints while training goes on"})
    keep_last: int = field(default=0, metadata={"help": "complete checkpoints that stay in --save; 0 = all"})
    tensorboard_dir: str | None = field(default=None, metadata={"help": "default: RUN_DIR/tensorboard"})
    seed: int = field(default=0, metadata={"help": "of everything random"})
    eval_data: str | None = field(default=None, metadata={"help": "held-out prompts (JSONL): evaluated at start and end"})
    eval_interval: int = field(default=0, metadata={"help": "updates between evaluations; 0 = start and end only"})
    eval_samples_per_prompt: int = field(default=4, metadata={"help": "samples of each held-out prompt"})
    eval_temperature: float = field(default=1.0, metadata={"help": "sampling temperature of an evaluation"})
    engine_floor_interval: int = field(
        default=50, metadata={"help": "updates between probes of the engine's own log-prob error; 0 = never"}
    )
    engine_floor_samples: int = field(default=32, metadata={"help": "trajectories in such a probe"})

    @property
    def directory(self) -> Path:
        """--run-dir with its default resolved."""
        return Path(self.run_dir or (Path(self.save) / "run" if self.save else Path("runs") / "run"))
