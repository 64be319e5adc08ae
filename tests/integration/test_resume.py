"""Killed at any moment and started again with the same command, a run is the run that nobody killed, bit for bit."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from m2po_megatron.checkpoint_files import is_whole, latest_checkpoint, read_position

ROOT = Path(__file__).parents[2]
MARK = "M2PO_TEST_OF_RESUMING"
UPDATES, INTERVAL = 40, 4

pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.timeout(600)]


class Run:
    """One command, started as often as it takes; its processes carry a mark, so that whatever is left of them is found."""

    def __init__(self, folder: Path, model: Path, *flags: str, ranks: int = 1) -> None:
        self.folder, self.ranks = folder, ranks
        shutil.copytree(model, folder / "model")
        self.save, self.curve = folder / "save", folder / "curve.jsonl"
        self.command = [sys.executable, "-W", "ignore", "-m", "tests.integration.resume_run", str(folder)]
        self.command += ["--updates", str(UPDATES), "--save-interval", str(INTERVAL), *flags]
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        self.processes = []
        for rank in range(self.ranks):
            places = {"RANK": str(rank), "WORLD_SIZE": str(self.ranks), "LOCAL_RANK": str(rank)}
            places |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
            with (self.folder / f"output.{rank}").open("ab") as output:
                self.processes.append(
                    subprocess.Popen(
                        self.command,
                        cwd=ROOT,
                        env={**os.environ, **places, "OMP_NUM_THREADS": "1", MARK: str(self.folder)},
                        stdout=output,
                        stderr=output,
                    )
                )

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait(20)

    def until_killed(self, rank: int = 0) -> None:
        """The rank kills itself where it was told to; the others would go with it under a launcher."""
        code = self.processes[rank].wait(120)
        assert code == -signal.SIGKILL, self.output()
        self.kill()

    def until_update(self, number: int) -> None:
        wait_until(lambda: len(self.records()) >= number or self.processes[0].poll() is not None, 120.0)
        assert self.processes[0].poll() is None, self.output()

    def finish(self) -> None:
        self.start()
        codes = [process.wait(120) for process in self.processes]
        assert codes == [0] * self.ranks, self.output()

    def output(self) -> str:
        return "".join((self.folder / f"output.{rank}").read_text(errors="replace")[-3000:] for rank in range(self.ranks))

    def records(self) -> list[str]:
        """Whole lines of the curve."""
        return self.curve.read_text().split("\n")[:-1] if self.curve.is_file() else []

    def end(self) -> dict[str, Any]:
        end: dict[str, Any] = json.loads((self.folder / "end.json").read_text())
        return end

    def left(self) -> list[psutil.Process]:
        """Processes of this run: ranks, writers, whatever they started."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == str(self.folder) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found


def wait_until(condition: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:.0f} s"
        time.sleep(0.005)


@pytest.fixture
def run_in(tmp_path: Path, tiny_model: Callable[..., Path]) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def make(*flags: str, ranks: int = 1) -> Run:
        folder = tmp_path / str(len(runs))
        folder.mkdir()
        runs.append(Run(folder, tiny_model("llama"), *flags, ranks=ranks))
        return runs[-1]

    yield make
    for run in runs:
        for process in run.left():
            process.kill()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, tiny_model: Callable[..., Path]) -> dict[int, Run]:
    """Runs that nobody kills, by their number of ranks."""
    runs = {}
    for ranks in (1, 2):
        flags = ["--tensor-model-parallel-size", str(ranks)]
        runs[ranks] = Run(tmp_path_factory.mktemp(f"undisturbed{ranks}-"), tiny_model("llama"), *flags, ranks=ranks)
        runs[ranks].finish()
    return runs


def check_between_lives(run: Run) -> int:
    """Nobody is left to write, and what `latest` names is whole; the version that it is of."""
    wait_until(lambda: not run.left(), 20.0)
    path = latest_checkpoint(run.save)
    return 0 if path is None else read_position(path).version


def check_against(run: Run, undisturbed: Run) -> None:
    expected = {json.loads(line)["version"]: line for line in undisturbed.records()}
    assert sorted(expected) == list(range(1, UPDATES + 1))
    seen = [(json.loads(line)["version"], line) for line in run.records()]
    assert {version for version, _ in seen} == set(expected)
    assert len(seen) > len(expected)  # something was done twice, so there was a resume from before the kill
    for version, line in seen:
        assert line == expected[version]  # numbers as they are: Python prints floats exactly
    assert run.end()["digest"] == undisturbed.end()["digest"]
    assert run.end()["failure"] is None
    losses = [json.loads(line)["loss/policy"] for line in expected.values()]
    assert len(set(losses)) == UPDATES
    names = sorted(path.name for path in run.save.iterdir())
    assert names[-3:] == [f"iter_{UPDATES - INTERVAL:07d}", f"iter_{UPDATES:07d}", "latest"]
    assert all(is_whole(run.save / name) for name in names[:-1])  # no leftovers; those it was resumed from may remain
    wait_until(lambda: not run.left(), 20.0)  # what a rank started notices the rank's end a moment after it


@pytest.mark.parametrize(
    ("flags", "before"),
    [([], ("begun", "writing", "written", "renamed")), (["--async-save"], ("writing", "renamed"))],
    ids=["at-once", "in-background"],
)
def test_killed_at_every_point_of_a_save(
    run_in: Callable[..., Run], undisturbed: dict[int, Run], flags: list[str], before: tuple[str, ...]
) -> None:
    run = run_in(*flags)
    resumed_from = []
    for number, point in enumerate((*before, "pointed")):
        version = INTERVAL * (number + 1)
        (run.folder / "die_at.0").write_text(f"{point} {version}")
        run.start()
        run.until_killed()
        resumed_from.append(check_between_lives(run))
    # A save that was killed before its end counts for nothing; each life completes those before its own.
    *early, last = resumed_from
    assert early == [INTERVAL * number for number in range(len(before))]
    assert last == INTERVAL * len(resumed_from)
    run.finish()
    check_against(run, undisturbed[1])


@pytest.mark.parametrize("seed", [0, 1])
def test_killed_at_random_moments(run_in: Callable[..., Run], undisturbed: dict[int, Run], seed: int) -> None:
    rng = random.Random(seed)
    run = run_in(*(["--async-save"] if seed % 2 else []))
    reached = 0
    for _ in range(2):
        lines = len(run.records())
        run.start()
        run.until_update(lines + rng.randrange(1, INTERVAL * 3))
        time.sleep(rng.random() * 0.05)
        run.kill()
        version = check_between_lives(run)
        assert version >= reached  # a checkpoint that was complete stays
        reached = version
    run.finish()
    check_against(run, undisturbed[1])


def test_two_ranks_of_which_one_is_killed_while_it_writes(
    run_in: Callable[..., Run], undisturbed: dict[int, Run]
) -> None:
    run = run_in("--async-save", "--tensor-model-parallel-size", "2", ranks=2)
    (run.folder / "die_at.1").write_text(f"writing {2 * INTERVAL}")
    run.start()
    run.until_killed(rank=1)
    assert check_between_lives(run) == INTERVAL
    run.start()
    run.until_update(len(run.records()) + INTERVAL + 2)
    run.kill()
    check_between_lives(run)
    run.finish()
    check_against(run, undisturbed[2])
