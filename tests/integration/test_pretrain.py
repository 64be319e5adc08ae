"""The main job as a user starts it: torchrun, real megatron-core ranks, a real controller and a real engine."""

from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from m2po_megatron.metrics import read_metrics

ROOT = Path(__file__).parents[2]
TASK = ROOT / "examples" / "arithmetic"
METRICS = {
    *("iteration", "version", "reward/mean", "loss/policy", "grad_norm", "lr", "entropy", "kl/behavior"),
    *("m2/before", "m2/after", "m2/masked_fraction", "m2/trust_region_fraction", "m2/cutoff", "m2/engine_floor"),
    *("staleness/mean", "staleness/max", "staleness/min", "tokens", "tokens/balance", "tokens_per_second"),
    *("time/wait", "time/logprob", "time/mask", "time/train", "time/publish"),
    *("rollout/length_mean", "rollout/truncated_fraction", "rollout/dropped", "rollout/reward_failures"),
}

pytestmark = [pytest.mark.slow, pytest.mark.integration]


class Job:
    """One start of the main job in a directory; two updates a batch of 16 trajectories."""

    def __init__(self, folder: Path) -> None:
        self.run_dir, self.save = folder / "run", folder / "save"
        self.heldout = folder / "heldout.jsonl"
        self.heldout.write_text("".join((TASK / "heldout.jsonl").read_text().splitlines(keepends=True)[:8]))
        self.output = folder / "output.txt"
        self.process: subprocess.Popen[bytes] | None = None

    def command(self, *flags: str, ranks: int = 2) -> list[str]:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
        return [
            *launcher,
            *("--nproc-per-node", str(ranks), "pretrain_rl.py"),
            *("--hf-path", str(TASK / "model"), "--prompt-data", str(TASK / "train.jsonl")),
            *("--eval-data", str(self.heldout), "--eval-samples-per-prompt", "2"),
            *("--group-size", "4", "--rollout-batch-size", "16", "--global-batch-size", "8"),
            *("--max-response-length", "8", "--max-staleness", "4", "--lr", "1e-4", "--engine-floor-interval", "2"),
            *("--run-dir", str(self.run_dir), "--save", str(self.save)),
            *flags,
        ]

    def start(self, *flags: str, ranks: int = 2) -> None:
        # A session of its own, as a terminal's job has: a signal may be sent to all of it.
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                self.command(*flags, ranks=ranks),
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def wait(self, timeout_s: float = 150.0) -> int:
        assert self.process is not None
        return self.process.wait(timeout_s)

    def run(self, *flags: str, ranks: int = 2) -> str:
        """Run to its end, which must be a good one; what it printed."""
        self.start(*flags, ranks=ranks)
        code = self.wait()
        assert code == 0, self.text()
        return self.text()

    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def until_update(self, number: int, timeout_s: float = 120.0) -> None:
        """Wait until the metrics of this update are written."""
        assert self.process is not None

        def written() -> bool:
            file = self.run_dir / "metrics.jsonl"
            return file.is_file() and any(r["iteration"] >= number for r in read_metrics(self.run_dir)[0])

        wait_until(lambda: written() or self.process.poll() is not None, timeout_s)
        assert self.process.poll() is None, self.text()

    def family(self) -> list[psutil.Process]:
        """Every process of the job: launcher, ranks, controller, engine."""
        assert self.process is not None
        launcher = psutil.Process(self.process.pid)
        return [launcher, *launcher.children(recursive=True)]

    def ranks(self) -> list[psutil.Process]:
        assert self.process is not None
        return [p for p in psutil.Process(self.process.pid).children() if "pretrain_rl.py" in " ".join(p.cmdline())]

    def engine(self) -> psutil.Process:
        return next(p for p in self.family() if "m2po_megatron.rollout.embedded" in p.cmdline())

    def kill_rest(self) -> None:
        if self.process is not None and self.process.poll() is None:
            for process in self.family():
                process.kill()


def wait_until(condition: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:.0f} s"
        time.sleep(0.1)


def gone(processes: list[psutil.Process], timeout_s: float = 20.0) -> None:
    alive = psutil.wait_procs(processes, timeout=timeout_s)[1]
    assert not [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE], alive


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job = Job(tmp_path)
    yield job
    job.kill_rest()


def rows(job: Job, query: str) -> list[tuple[Any, ...]]:
    connection = sqlite3.connect(f"file:{job.run_dir / 'rollouts.sqlite'}?mode=ro", uri=True)
    try:
        return connection.execute(query).fetchall()
    finally:
        connection.close()


@pytest.mark.timeout(400)
@pytest.mark.parametrize("layout", ["dp2", "tp2"])
def test_a_run_and_its_resume(job: Job, layout: str) -> None:
    flags = ["--tensor-model-parallel-size", "2" if layout == "tp2" else "1"]
    printed = job.run(*flags, "--train-iters", "4")
    assert "LlamaForCausalLM" in printed
    assert "4/4" in printed
    assert (job.save / "latest").read_text().strip() == "iter_0000004"
    if layout == "tp2":  # in other sizes the place in the prompts would be another
        other = ["--rollout-batch-size", "32", "--global-batch-size", "16"]
        job.start(*flags, *other, "--train-iters", "8", "--load", str(job.save))
        assert job.wait() != 0
        assert "--rollout-batch-size 16 (now 32), --global-batch-size 8 (now 16): resume with the same" in job.text()
    resumed = job.run(*flags, "--train-iters", "8", "--load", str(job.save), "--save-interval", "2")
    assert "version 4, incarnation 1" in resumed
    assert (job.save / "latest").read_text().strip() == "iter_0000008"
    updates, evaluations = read_metrics(job.run_dir)
    assert [r["iteration"] for r in updates] == list(range(1, 9))
    assert [r["version"] for r in evaluations] == [0, 4, 8]
    assert all(r["eval/samples"] == 16 for r in evaluations)
    for record in updates:
        assert record.keys() >= METRICS
        assert 0 <= record["staleness/min"] <= record["staleness/max"] <= 4
        assert record["m2/after"] <= 0.04
        assert record["tokens"] > 0
    assert updates[0]["m2/before"] < 1e-10  # sampled by the very weights that are trained
    assert updates[3]["m2/engine_floor"] < 1e-10
    # Every position was trained exactly once, in order, across both lives of the run.
    trained = rows(job, "SELECT position FROM groups WHERE state = 'trained' ORDER BY position")
    assert trained == [(position,) for position in range(16)]
    published = sorted(path.name for path in (job.run_dir / "publish").glob("v*"))
    assert published[-1] == "v00000008"
    assert list((job.run_dir / "tensorboard").glob("events*"))


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("number", "target"), [(signal.SIGTERM, "launcher"), (signal.SIGINT, "everybody")])
def test_a_signal_saves_and_leaves_no_process(job: Job, number: signal.Signals, target: str) -> None:
    job.start("--train-iters", "2000")
    job.until_update(2)
    family = job.family()
    assert len(family) == 5  # launcher, two ranks, controller, engine
    for process in family[:1] if target == "launcher" else family:
        process.send_signal(number)
    job.wait(60)
    gone(family)
    latest = (job.save / "latest").read_text().strip()
    position = json.loads((job.save / latest / "run.json").read_text())
    assert position["version"] == 2 * position["consumed_batches"] >= 2
    assert position["version"] == read_metrics(job.run_dir)[0][-1]["version"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("depth", ["1", "6"])
def test_a_dead_engine_is_named_and_the_run_can_be_resumed(job: Job, depth: str) -> None:
    # With batches generated ahead, complete ones are still trained when no engine is left.
    job.start("--train-iters", "2000", "--pipeline-depth", depth, "--max-staleness", "12")
    job.until_update(1)
    family = job.family()
    job.engine().kill()
    assert job.wait(90) != 0
    gone(family)
    assert "Traceback" not in job.text().split("error: ")[0]
    text = job.text()
    assert "engine-0" in text
    assert str(job.run_dir / "logs" / "engine-0.log") in text
    version = json.loads((job.save / (job.save / "latest").read_text().strip() / "run.json").read_text())["version"]
    if depth == "1":
        return  # the resume is the same
    target = str(version + 2)
    assert f"{target}/{target}" in job.run("--train-iters", target, "--load", str(job.save))
    assert [r["iteration"] for r in read_metrics(job.run_dir)[0]] == list(range(1, version + 3))


@pytest.mark.timeout(300)
def test_another_engine_takes_over(job: Job) -> None:
    job.start("--train-iters", "12", "--embedded-engines", "2")
    job.until_update(1)
    job.engine().kill()
    assert job.wait(120) == 0, job.text()
    assert len(read_metrics(job.run_dir)[0]) == 12
    assert "is out" in (job.run_dir / "logs" / "controller.log").read_text()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("victim", ["launcher", "rank 0", "rank 1"])
def test_whoever_is_killed_nobody_is_left(job: Job, victim: str) -> None:
    job.start("--train-iters", "2000")
    job.until_update(1)
    family = job.family()
    by_rank = {int(p.environ()["RANK"]): p for p in job.ranks()}
    (family[0] if victim == "launcher" else by_rank[int(victim[-1])]).kill()
    assert job.wait(90) != 0
    gone(family, 60.0)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--tensor-model-parallel-size", "2"], r"1 ranks cannot be divided by --tensor-model-parallel-size"),
        (["--hf-path", "{folder}/gpt2"], r"gpt2: architecture GPT2LMHeadModel is not supported; supported are LlamaFor"),
        (["--prompt-data", "{folder}/bad.jsonl"], r"bad\.jsonl, line 2: "),
        (["--m2-treshold", "0.04"], r"unknown flag --m2-treshold; did you mean --m2-threshold\?"),
        (["--reward", "nobody"], r"--reward .*nobody"),
        (["--load", "{folder}/typo"], r"--load .*typo: there is no checkpoint"),
        (["--save", "/proc/nowhere"], r"--save /proc/nowhere: cannot be written"),
        (["--group-size", "1"], r"--group-size 1"),
        (["--distributed-backend", "nccl"], r"--distributed-backend nccl: there is no CUDA"),
    ],
    ids=["layout", "architecture", "prompts", "flag", "reward", "load", "save", "group", "nccl"],
)
def test_bad_input_is_said_in_one_line(job: Job, tmp_path: Path, flags: list[str], said: str) -> None:
    (tmp_path / "gpt2").mkdir()
    config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}
    (tmp_path / "gpt2" / "config.json").write_text(json.dumps(config))
    (tmp_path / "bad.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": "1+1="\n')
    command = job.command("--train-iters", "2", *(f.format(folder=tmp_path) for f in flags), ranks=1)
    alone = [sys.executable, *command[command.index("pretrain_rl.py") :]]
    result = subprocess.run(alone, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert result.returncode == 2
    lines = [line for line in result.stderr.splitlines() if line.startswith("pretrain_rl.py: error: ")]
    assert len(lines) == 1
    assert re.search(said, lines[0]), lines[0]
    assert "Traceback" not in result.stderr


@pytest.mark.timeout(120)
def test_a_micro_batch_too_small_for_a_sequence_is_refused_at_the_start(job: Job) -> None:
    job.start("--train-iters", "4", "--max-tokens-per-micro-batch", "7")
    assert job.wait(90) != 0
    assert "error: " in job.text()
    assert "--max-tokens-per-micro-batch" in job.text()
    assert "Traceback" not in job.text().split("error: ")[0]  # the launcher adds one of its own
    assert not (job.save / "latest").exists()  # known before anything is generated
