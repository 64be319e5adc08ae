"""Rollouts reach every rank alike, stop together, and a signal acts where it should. Two gloo ranks, a scripted controller."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from m2po_megatron.data.trajectory import Batch, Group, Prompt
from m2po_megatron.rollout.codec import encode_batch
from m2po_megatron.rollout.errors import RolloutError
from m2po_megatron.rollout_feed import SAME_SIGNAL_SECONDS, RolloutFeed, StopSignal
from tests.distributed.harness import run_ranks
from tests.rollout.samples import make_trajectory

ROOT = Path(__file__).parents[2]
LONG = "no engine is left: " + "ä" * 5000
EVALUATION = {"name": "eval", "accuracy": 0.1 + 0.2, "samples": 1024, "version": 3, "seconds": 1.5}
REQUEST = {"name": "eval", "prompts_file": "f", "samples_per_prompt": 4, "temperature": 1.0, "max_new_tokens": 8, "version": 3}


def make_batch() -> Batch:
    groups = []
    for number in range(3):
        samples = [make_trajectory(f"g{number}", s, prompt=2 + s, response=3 + number, reward=0.1 * s) for s in range(4)]
        samples[1].finish_reason = "length"
        groups.append(Group(f"g{number}", Prompt(f"ü{number}", "1+1=", "2"), samples))
    return Batch(id=7, groups=groups)


class ScriptedConnection:
    """Answers each call with the next of its answers, the last one for ever; an exception is raised."""

    def __init__(self, **answers: list[Any]) -> None:
        self.answers = answers
        self.calls: list[tuple[Any, ...]] = []
        self.last_lease_info = {
            "loaded_version": 5,
            "dropped": {"stale": 2, "equal rewards": 3},
            "reward_failures": {"timeout": 1, "error": 2},
        }

    def _next(self, *call: Any) -> Any:
        self.calls.append(call)
        answers = self.answers[call[0]]
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def lease(self, version: int, wait_s: float) -> Any:
        return self._next("lease", version, wait_s)

    def evaluate_start(self, **request: Any) -> Any:
        return self._next("evaluate_start", request)

    def evaluate_result(self, job: str, wait_s: float) -> Any:
        return self._next("evaluate_result", job, wait_s)

    def probe(self, samples: int, wait_s: float, version: int) -> Any:
        return self._next("probe", samples, wait_s, version)

    def publish(self, path: str, version: int) -> Any:
        return self._next("publish", path, version)

    def trained(self, batch_id: int, version: int) -> Any:
        return self._next("trained", batch_id, version)

    def close(self) -> None:
        self.calls.append(("close",))


def make_feed(rank: int, **answers: list[Any]) -> RolloutFeed:
    from m2po_megatron.initialize import World

    group = torch.distributed.group.WORLD
    assert group is not None
    world = World(rank, 2, torch.device("cpu"), group)
    return RolloutFeed(world, ScriptedConnection(**answers) if rank == 0 else None, StopSignal())  # type: ignore[arg-type]


def outcome(feed: RolloutFeed, value: Any) -> dict[str, Any]:
    calls = feed.connection.calls if feed.connection is not None else []  # type: ignore[attr-defined]
    found = {"value": value, "stopping": feed.stopping, "stop_number": feed.stop_number, "failure": feed.failure}
    return {**found, "calls": calls}


def scenes(rank: int) -> dict[str, dict[str, Any]]:
    """Every scene on this rank, one after the other."""
    out: dict[str, dict[str, Any]] = {}

    def lease(
        name: str, waits: list[int] | None = None, stop_on: int | None = None, **answers: list[Any]
    ) -> RolloutFeed:
        feed = make_feed(rank, **answers)
        if waits is not None:
            feed.while_waiting = lambda: waits.append(1)
        feed.stop.number = signal.SIGUSR1 if rank == stop_on else None
        batch = feed.next_batch(4)
        out[name] = outcome(feed, None if batch is None else encode_batch(batch))
        return feed

    waits: list[int] = []
    lease("a batch", waits, lease=[None, None, make_batch()])
    out["waited"] = len(waits)  # type: ignore[assignment]
    lease("stop on rank 1 while waiting", stop_on=1, lease=[None])
    lease("stop on rank 1 as a batch comes", stop_on=1, lease=[make_batch()])
    lease("stop on rank 0", stop_on=0, lease=[make_batch()])
    feed = lease("a failure", lease=[None, RolloutError(LONG)])
    out["after the failure"] = outcome(feed, feed.next_batch(4))
    lease("a failure without words", lease=[RolloutError()])
    lease("a failure and a stop", stop_on=1, lease=[RolloutError("engine-0 died")])
    out["a failure by the stop's signal"] = a_failure_by_the_signal(rank)
    out["a signal on rank 1"] = a_signal(rank)
    out["others"] = other_calls(rank)
    return out


def a_failure_by_the_signal(rank: int) -> dict[str, Any]:
    """The same signal ends the rollouts, while rank 0 asks for a batch."""
    feed = make_feed(rank)

    def ended(*_: Any) -> None:
        feed.stop.number = signal.SIGTERM
        raise RolloutError("the rollout controller is gone")

    if feed.connection is not None:
        feed.connection.lease = ended  # type: ignore[method-assign]
    return outcome(feed, feed.next_batch(4))


def a_signal(rank: int) -> dict[str, Any]:
    """SIGTERM reaches rank 1 alone, after the first meeting at which there was nothing."""
    feed = make_feed(rank, lease=[None])
    feed.stop.install()
    meetings = []
    real = torch.distributed.all_reduce

    def counted(*args: Any, **kwargs: Any) -> Any:
        meetings.append(1)
        if rank == 1 and len(meetings) == 2:
            signal.raise_signal(signal.SIGTERM)
        return real(*args, **kwargs)

    torch.distributed.all_reduce = counted
    try:
        result = outcome(feed, feed.next_batch(0))
    finally:
        torch.distributed.all_reduce = real
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, signal.SIG_DFL)
    return {**result, "meetings": len(meetings)}


def other_calls(rank: int) -> dict[str, Any]:
    group = make_batch().groups[1].trajectories
    feed = make_feed(
        rank,
        evaluate_start=["job 1"],
        evaluate_result=[None, EVALUATION],
        probe=[None, group],
        publish=[None, RolloutError("gone")],
        trained=[None],
    )
    with feed:
        evaluation = feed.evaluate(REQUEST)
        probe = feed.probe(3, 16)
        feed.publish("/run/v3", 3)
        feed.publish("/run/v4", 4)  # said by rank 0's log and at the next meeting, not raised on one rank alone
        feed.trained(7, 4)
    found = outcome(feed, {"evaluation": evaluation, "probe": encode_batch(Batch(0, [Group("x", Prompt("x", ""), probe)]))})
    return {**found, "counters": feed.counters(), "loaded": feed.loaded_version}


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, dict[str, Any]]]:
    return run_ranks(scenes, 2, timeout_s=60)


def both(ranks: list[dict[str, dict[str, Any]]], scene: str) -> dict[str, Any]:
    """What happened on rank 0, after having seen that the same happened on rank 1."""
    first, second = (rank[scene] for rank in ranks)
    for key in ("value", "stopping", "stop_number", "failure"):
        assert first[key] == second[key], key
    assert second["calls"] == []
    return first


@pytest.mark.slow
def test_a_batch_reaches_both_ranks_bit_for_bit(ranks: list[dict[str, dict[str, Any]]]) -> None:
    found = both(ranks, "a batch")
    assert found["value"] == encode_batch(make_batch())
    assert (found["stopping"], found["failure"]) == (False, None)
    assert [call[:2] for call in found["calls"]] == [("lease", 4)] * 3
    assert all(0 < wait_s <= 10 for _, _, wait_s in found["calls"])  # every rank is met at least that often


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scene", "leases"),
    [("stop on rank 1 while waiting", 1), ("stop on rank 1 as a batch comes", 1), ("stop on rank 0", 0)],
)
def test_a_stop_request_on_one_rank_stops_both(
    ranks: list[dict[str, dict[str, Any]]], scene: str, leases: int
) -> None:
    found = both(ranks, scene)
    assert (found["value"], found["stopping"], found["failure"]) == (None, True, None)
    assert found["stop_number"] == signal.SIGUSR1
    assert len(found["calls"]) == leases


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scene", "said"),
    [
        ("a failure", LONG),
        ("after the failure", LONG),
        ("a failure without words", "RolloutError()"),
        ("a failure and a stop", "engine-0 died"),
    ],
)
def test_a_failure_on_rank_0_is_known_on_both(ranks: list[dict[str, dict[str, Any]]], scene: str, said: str) -> None:
    found = both(ranks, scene)
    assert (found["value"], found["stopping"], found["failure"]) == (None, True, said)


@pytest.mark.slow
def test_rollouts_that_end_by_the_same_signal_have_not_failed(ranks: list[dict[str, dict[str, Any]]]) -> None:
    found = both(ranks, "a failure by the stop's signal")
    assert (found["value"], found["failure"], found["stop_number"]) == (None, None, signal.SIGTERM)


@pytest.mark.slow
def test_while_a_batch_is_awaited_both_ranks_are_called_alike(ranks: list[dict[str, dict[str, Any]]]) -> None:
    assert [rank["waited"] for rank in ranks] == [2, 2]


@pytest.mark.slow
def test_a_signal_on_rank_1_stops_both_at_the_next_meeting(ranks: list[dict[str, dict[str, Any]]]) -> None:
    found = both(ranks, "a signal on rank 1")
    assert (found["value"], found["stopping"], found["failure"]) == (None, True, None)
    assert found["stop_number"] == signal.SIGTERM
    # The handler runs within the second meeting, after its control numbers were taken: the third one stops.
    assert [rank["a signal on rank 1"]["meetings"] for rank in ranks] == [3, 3]


@pytest.mark.slow
def test_evaluations_and_probes_reach_both_and_rank_0_alone_speaks(ranks: list[dict[str, dict[str, Any]]]) -> None:
    found = both(ranks, "others")
    assert found["value"]["evaluation"] == EVALUATION
    group = make_batch().groups[1].trajectories
    assert found["value"]["probe"] == encode_batch(Batch(0, [Group("x", Prompt("x", ""), group)]))
    names = [call[0] for call in found["calls"]]
    started, twice = ["evaluate_start"], ["evaluate_result"] * 2
    assert names == [*started, *twice, "probe", "probe", "publish", "publish", "trained", "close"]
    assert found["calls"][0][1] == REQUEST
    assert found["calls"][1][1] == "job 1"
    assert found["calls"][3][1:] == (16, found["calls"][3][2], 3)
    assert found["calls"][5:8] == [("publish", "/run/v3", 3), ("publish", "/run/v4", 4), ("trained", 7, 4)]
    assert [rank["others"]["counters"] for rank in ranks] == [{"rollout/dropped": 5.0, "rollout/reward_failures": 3.0}, {}]
    assert [rank["others"]["loaded"] for rank in ranks] == [5, 0]


def test_rank_0_cannot_do_without_a_connection() -> None:
    from m2po_megatron.initialize import World

    world = World(0, 1, torch.device("cpu"), None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="global rank 0 needs the connection"):
        RolloutFeed(world, None, StopSignal())


SIGNALS = """
import signal, sys
import m2po_megatron.rollout_feed as feed

ahead = 0.0
real = feed.time.monotonic
feed.time.monotonic = lambda: real() + ahead
stop = feed.StopSignal()
stop.install()
print("ready", flush=True)
def listen():
    global ahead
    for line in sys.stdin:  # a read that a signal interrupts goes on
        if line == "release\\n":
            break
        if line == "hold\\n":
            with stop.held():
                print("held", flush=True)
                listen()
            line = "0"
        ahead += float(line)
        print(stop.requested, flush=True)
listen()
"""


class Child:
    """A process with a StopSignal whose clock this test moves; each `say` is answered by whether a stop is requested."""

    def __init__(self, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", SIGNALS],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.line() == "ready"

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def requested(self, seconds_later: float = 0.0) -> bool:
        """Move the clock on; an answer means that the process lives and has handled what it was sent."""
        self.say(str(seconds_later))
        return {"True": True, "False": False}[self.line()]

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self) -> int:
        return self.process.wait(timeout=10)


@pytest.fixture
def child() -> Iterator[Child]:
    child = Child()
    yield child
    child.process.kill()
    child.process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGUSR1])
def test_a_second_signal_at_once_is_the_same_one_and_a_later_one_ends(child: Child, first: signal.Signals) -> None:
    assert child.requested() is False
    child.send(first)
    assert child.requested() is True
    child.send(signal.SIGINT)
    child.send(signal.SIGTERM)
    assert child.requested(SAME_SIGNAL_SECONDS - 1.0) is True
    child.send(signal.SIGINT)
    assert child.requested(1.5) is True
    for number in (signal.SIGUSR1, signal.SIGTERM):  # a scheduler's signals ask and ask again
        child.send(number)
        assert child.requested(10.0) is True
    child.send(signal.SIGINT)
    assert child.end() == -signal.SIGINT


@pytest.mark.slow
def test_nothing_ends_the_process_while_a_checkpoint_is_written(child: Child) -> None:
    child.send(signal.SIGTERM)
    assert child.requested(10.0) is True
    child.say("hold")
    assert child.line() == "held"
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        child.send(number)
        assert child.requested(10.0) is True
    child.say("release")
    assert child.line() == "True"
    child.send(signal.SIGINT)
    assert child.end() == -signal.SIGINT


@pytest.mark.slow
def test_only_under_torchrun_the_rank_dies_with_its_parent() -> None:
    code = "import m2po_megatron.rollout_feed as f, ctypes; f.StopSignal().install(); n = ctypes.c_int();"
    code += "ctypes.CDLL(None).prctl(2, ctypes.byref(n), 0, 0, 0); print(n.value)"
    for environment, expected in (({}, 0), ({"TORCHELASTIC_RUN_ID": "job"}, int(signal.SIGTERM))):
        clean = {key: value for key, value in os.environ.items() if key != "TORCHELASTIC_RUN_ID"}
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code],
            cwd=ROOT,
            env={**clean, "OMP_NUM_THREADS": "1", **environment},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.stdout.strip() == str(expected), done.stderr
