"""What the rollout side can be told: flags (`RolloutSettings`) and facts about this start of the run (`RolloutJob`)."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from m2po_megatron.rollout.staleness import Schedule


@dataclass
class RolloutSettings:
    """Flags of the rollout side; `validate` is called before anything is started."""

    prompt_data: str = field(
        default="", metadata={"help": 'JSONL of prompts: {"prompt": str, "answer": str, "id"?: str}'}
    )
    reward: str = field(
        default="arithmetic", metadata={"help": "reward: a built-in name (arithmetic, exact) or module:function"}
    )
    rollout_engine: str = field(
        default="embedded",
        metadata={
            "help": "who generates: engines this job starts, or SGLang servers",
            "choices": ["embedded", "sglang"],
        },
    )
    sglang_urls: list[str] = field(default_factory=list, metadata={"help": "base URLs of running SGLang servers"})
    embedded_engines: int = field(default=1, metadata={"help": "embedded engines to start on this machine"})
    embedded_dtype: str = field(
        default="float32",
        metadata={"help": "weights' type in the embedded engines", "choices": ["float32", "bfloat16"]},
    )
    embedded_device: str = field(
        default="cpu", metadata={"help": "where the embedded engines run", "choices": ["cpu", "cuda"]}
    )
    embedded_max_running_requests: int = field(
        default=256, metadata={"help": "samples an embedded engine decodes at once"}
    )
    group_size: int = field(default=8, metadata={"help": "samples per prompt, compared with each other"})
    rollout_batch_size: int = field(default=2048, metadata={"help": "trajectories the trainer leases at once"})
    global_batch_size: int = field(default=512, metadata={"help": "trajectories consumed by one optimizer update"})
    max_staleness: int = field(
        default=1,
        metadata={"help": "most updates a token may be older than the weights when its batch's first update starts"},
    )
    staleness_mode: str = field(
        default="bounded", metadata={"help": "bounded: any age up to --max-staleness", "choices": ["bounded"]}
    )
    pipeline_depth: int = field(default=1, metadata={"help": "batches generated ahead of the one being trained"})
    max_concurrent_rollouts: int = field(
        default=0, metadata={"help": "trajectories in flight at once; 0 = --rollout-batch-size"}
    )
    max_response_length: int = field(default=64, metadata={"help": "most tokens sampled per response"})
    max_prompt_length: int = field(
        default=0, metadata={"help": "longest prompt in tokens; 0 = the model's positions less --max-response-length"}
    )
    temperature: float = field(default=1.0, metadata={"help": "sampling temperature of training rollouts"})
    publish_interval: int = field(default=1, metadata={"help": "updates between two publications of the weights"})
    seed: int = field(default=0, metadata={"help": "seed of everything random: prompt order, engines, ranks"})
    group_retries: int = field(
        default=3, metadata={"help": "times a group is sampled anew after an unusable sample before the run stops"}
    )
    reward_workers: int = field(default=1, metadata={"help": "processes that score with a module:function reward"})
    reward_timeout_s: float = field(
        default=30.0, metadata={"help": "seconds one score may take; then it is 0 and counted"}
    )
    engine_start_timeout_s: float = field(
        default=300.0, metadata={"help": "seconds the engines have to become healthy"}
    )
    engine_timeout_s: float = field(default=600.0, metadata={"help": "seconds one generation may take"})
    engine_control_timeout_s: float = field(
        default=60.0, metadata={"help": "seconds one control call to an engine may take"}
    )

    @property
    def groups_per_batch(self) -> int:
        return self.rollout_batch_size // self.group_size

    @property
    def updates_per_batch(self) -> int:
        return self.rollout_batch_size // self.global_batch_size

    @property
    def concurrency(self) -> int:
        """`max_concurrent_rollouts` with its 0 resolved."""
        return self.max_concurrent_rollouts or self.rollout_batch_size

    def schedule(self) -> Schedule:
        """The numbers of the admission rule."""
        return Schedule(
            groups_per_batch=self.groups_per_batch,
            updates_per_batch=self.updates_per_batch,
            publish_interval=self.publish_interval,
            max_staleness=self.max_staleness,
            pipeline_depth=self.pipeline_depth,
            group_size=self.group_size,
            max_concurrent=self.concurrency,
        )

    def validate(self) -> None:
        """Raise ValueError, naming the flag, unless the settings can work together."""
        for name in _AT_LEAST_ONE:
            if getattr(self, name) < 1:
                raise ValueError(f"{_flag(name)} must be at least 1, got {getattr(self, name)}")
        for name in (
            "max_staleness",
            "pipeline_depth",
            "max_concurrent_rollouts",
            "max_prompt_length",
            "group_retries",
        ):
            if getattr(self, name) < 0:
                raise ValueError(f"{_flag(name)} must not be negative, got {getattr(self, name)}")
        for setting in fields(self):
            choices = setting.metadata.get("choices")
            if choices and getattr(self, setting.name) not in choices:
                raise ValueError(
                    f"{_flag(setting.name)} must be one of {', '.join(choices)}, got {getattr(self, setting.name)!r}"
                )
        for name in _ABOVE_ZERO:
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{_flag(name)} must be above 0 and finite, got {getattr(self, name)}")
        if self.rollout_batch_size % self.group_size:
            raise ValueError(
                f"--rollout-batch-size {self.rollout_batch_size} is not a multiple of --group-size {self.group_size}"
            )
        if self.rollout_batch_size % self.global_batch_size:
            raise ValueError(
                f"--rollout-batch-size {self.rollout_batch_size} is not a multiple of "
                f"--global-batch-size {self.global_batch_size}"
            )
        if self.rollout_engine == "sglang" and not self.sglang_urls:
            raise ValueError("--rollout-engine sglang needs --sglang-urls")
        if self.rollout_engine != "sglang" and self.sglang_urls:
            raise ValueError("--sglang-urls is given, but --rollout-engine is not sglang")
        for url in self.sglang_urls:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"--sglang-urls {url!r} is not a base URL such as http://host:30000")
        if len(set(self.sglang_urls)) != len(self.sglang_urls):
            raise ValueError(f"--sglang-urls names a server twice: {' '.join(self.sglang_urls)}")
        if not self.prompt_data:
            raise ValueError("--prompt-data is missing: the JSONL file of training prompts")
        self.schedule().validate()


_AT_LEAST_ONE = (
    "embedded_engines",
    "embedded_max_running_requests",
    "group_size",
    "rollout_batch_size",
    "global_batch_size",
    "max_response_length",
    "publish_interval",
    "reward_workers",
)


_ABOVE_ZERO = (
    "temperature",
    "reward_timeout_s",
    "engine_start_timeout_s",
    "engine_timeout_s",
    "engine_control_timeout_s",
)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


@dataclass
class RolloutJob:
    """This start of the run; not flags.

    run_dir           store, logs, controller.json
    model_path        HF directory with tokenizer, config and the weights of `start_version`
    incarnation       0 for a fresh run, more at every resume (the store raises it further if it was used up already)
    start_version     updates the weights at `model_path` have had
    consumed_batches  batches trained up to `start_version` (start_version = consumed_batches * updates per batch)
    resume            continue the store found in run_dir; without it a store found there is refused
    longest_sequence  most tokens of a prompt and its response that the trainer's micro-batches can hold; 0 = no limit
    """

    run_dir: str
    model_path: str
    incarnation: int = 0
    start_version: int = 0
    consumed_batches: int = 0
    resume: bool = False
    longest_sequence: int = 0

    @property
    def store_path(self) -> Path:
        return Path(self.run_dir) / "rollouts.sqlite"

    @property
    def address_path(self) -> Path:
        """Where the controller says how it is reached: {"port", "pid"} or {"error"}."""
        return Path(self.run_dir) / "controller.json"

    @property
    def log_dir(self) -> Path:
        return Path(self.run_dir) / "logs"

    @property
    def controller_log(self) -> Path:
        return self.log_dir / "controller.log"

    def validate(self, settings: RolloutSettings) -> None:
        """Raise ValueError unless the position fits the settings."""
        expected = self.consumed_batches * settings.updates_per_batch
        if self.start_version != expected:
            raise ValueError(
                f"the checkpoint's version {self.start_version} is not {self.consumed_batches} batches of "
                f"{settings.updates_per_batch} updates: --rollout-batch-size or --global-batch-size differ from the run resumed"
            )


def write_settings(path: Path, settings: RolloutSettings, job: RolloutJob) -> None:
    """Write both for the controller process, aside and renamed."""
    aside = path.with_suffix(".tmp")
    aside.write_text(json.dumps({"settings": asdict(settings), "job": asdict(job)}, indent=1))
    aside.replace(path)


def read_settings(path: Path) -> tuple[RolloutSettings, RolloutJob]:
    """Read what `write_settings` wrote."""
    content: dict[str, Any] = json.loads(path.read_text())
    return RolloutSettings(**content["settings"]), RolloutJob(**content["job"])
