"""A real controller process with real engine processes, from the trainer's side: what is sampled, and what is left behind
when somebody dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from m2po_megatron.data.trajectory import Trajectory
from m2po_megatron.rollout.connection import ControllerConnection
from m2po_megatron.rollout.errors import RolloutError
from m2po_megatron.rollout.settings import RolloutJob, RolloutSettings, write_settings
from tests.rollout.samples import assert_same
from tests.tiny_models import EOS_ID

WAIT_S = 60.0
TEMPERATURE = 0.7

pytestmark = [pytest.mark.slow, pytest.mark.integration]


@pytest.fixture
def settings(tmp_path: Path) -> RolloutSettings:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{i}+1=", "answer": str(i + 1)}) + "\n" for i in range(10)))
    return RolloutSettings(
        prompt_data=str(prompts),
        group_size=4,
        rollout_batch_size=16,
        global_batch_size=16,
        max_staleness=2,
        max_response_length=40,
        temperature=TEMPERATURE,
        engine_start_timeout_s=120,
    )


@pytest.fixture
def job(tmp_path: Path, tiny_model: Callable[..., Path]) -> RolloutJob:
    job = RolloutJob(run_dir=str(tmp_path / "run"), model_path=str(tiny_model()))
    job.log_dir.mkdir(parents=True)
    return job


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_gone(*pids: int, timeout_s: float = 15.0) -> None:
    deadline = time.monotonic() + timeout_s
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < deadline, f"still alive: {[pid for pid in pids if alive(pid)]}"
        time.sleep(0.05)


def processes(connection: ControllerConnection, job: RolloutJob) -> tuple[int, list[int]]:
    """The controller's pid and its engines'."""
    return json.loads(job.address_path.read_text())["pid"], [e["pid"] for e in connection.status()["engines"]]


def slow_down(connection: ControllerConnection, seconds: float) -> None:
    """Let every engine wait this long after every token, so that requests are in flight for as long as a test needs."""
    for engine in connection.status()["engines"]:
        httpx.post(f"{engine['url']}/slow_down", json={"forward_sleep_time": seconds}, timeout=10).raise_for_status()


def lease(connection: ControllerConnection, version: int) -> list[Trajectory]:
    batch = connection.lease(version, WAIT_S)
    assert batch is not None and batch.id == version
    return batch.trajectories


def train_on(connection: ControllerConnection, versions: range) -> None:
    """Lease and consume one batch per version, without a publication."""
    for version in versions:
        lease(connection, version)
        connection.trained(version, version + 1)


class Oracle:
    """What transformers says about the models that were version 0, 1, ... of a run."""

    def __init__(self, *paths: Path) -> None:
        self._models = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for path in paths]
        self._tokenizer = AutoTokenizer.from_pretrained(paths[0])

    @torch.no_grad()
    def check(self, trajectory: Trajectory) -> set[int]:
        """Every behaviour log-prob is its token's under the weights it is said to come from; the versions there are."""
        ids = torch.from_numpy(trajectory.token_ids)
        for version in set(trajectory.versions[trajectory.loss_mask].tolist()):
            logits = self._models[version](ids[None]).logits[0, :-1]
            expected = (logits / TEMPERATURE).log_softmax(-1).gather(1, ids[1:, None])[:, 0].numpy()
            here = trajectory.versions[1:] == version
            np.testing.assert_allclose(trajectory.behaviour_logprobs[1:][here], expected[here], atol=2e-5, rtol=0)
        return set(trajectory.versions[trajectory.loss_mask].tolist())

    @torch.no_grad()
    def greedy(self, version: int, prompt: str, max_new_tokens: int) -> str:
        """The most likely continuation, without the end token."""
        ids = self._tokenizer.encode(prompt, add_special_tokens=False)
        start = len(ids)
        while len(ids) < start + max_new_tokens:
            token = int(self._models[version](torch.tensor([ids])).logits[0, -1].argmax())
            if token == EOS_ID:
                break
            ids.append(token)
        return str(self._tokenizer.decode(ids[start:], skip_special_tokens=True))


def evaluate(connection: ControllerConnection, file: Path, version: int, tokens: int) -> dict[str, Any]:
    result = connection.evaluate_result(connection.evaluate_start("x", str(file), 1, 0.0, tokens, version), WAIT_S)
    assert result is not None
    return result


def test_a_run_from_the_first_lease_to_the_last_engine(
    settings: RolloutSettings, job: RolloutJob, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    newer = tiny_model(seed=1)
    oracle = Oracle(Path(job.model_path), newer)
    prompts = [f"{i}+2=" for i in range(4)]
    answers = [oracle.greedy(1, prompt, 6) for prompt in prompts]
    heldout = tmp_path / "heldout.jsonl"
    rows = [{"prompt": p, "answer": a if i else a + "0"} for i, (p, a) in enumerate(zip(prompts, answers, strict=True))]
    heldout.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with ControllerConnection.start(replace(settings, embedded_engines=2), job) as connection:
        controller, engines = processes(connection, job)
        first = lease(connection, 0)
        assert [oracle.check(t) for t in first] == [{0}] * 16
        assert [t.id for t in first[:5]] == ["g0.0", "g0.1", "g0.2", "g0.3", "g1.0"]
        assert {t.finish_reason for t in first} <= {"stop", "length"}
        assert all(t.token_ids[-1] == EOS_ID for t in first if t.finish_reason == "stop")
        assert {t.reward for t in first} <= {0.0, 1.0}

        # A publication that falls into requests in flight: batch 2 starts under version 0 and ends under version 1.
        lease_ready = connection.lease(0, WAIT_S)
        assert lease_ready is not None and [t.id for t in lease_ready.trajectories] == [t.id for t in first]
        deadline = time.monotonic() + WAIT_S
        while connection.status()["groups"]["ready"] < 4:  # batch 1, sampled ahead
            assert time.monotonic() < deadline
            time.sleep(0.05)
        slow_down(connection, 0.05)
        connection.trained(0, 1)
        evaluate(connection, heldout, 0, 3)  # as slow as they are: they have sampled 3 tokens, too
        assert connection.status()["running_trajectories"] == 16
        connection.publish(str(newer), 1)
        connection.wait_loaded(1, WAIT_S)
        slow_down(connection, 0)
        assert [oracle.check(t) for t in lease(connection, 1)] == [{0}] * 16
        connection.trained(1, 2)
        mixed = lease(connection, 2)
        seen = [oracle.check(t) for t in mixed]
        assert {0, 1} in seen and {1} not in seen
        assert all((np.diff(t.versions[t.loss_mask]) >= 0).all() for t in mixed)

        result = evaluate(connection, heldout, 1, 6)
        assert (result["accuracy"], result["samples"], result["version"]) == (0.75, 4, 1)
        probed = connection.probe(3, WAIT_S, version=1)
        assert probed is not None and [oracle.check(t) for t in probed] == [{1}] * 3

        # One engine is killed: the other goes on. Then the other, too: who died, and where its log is.
        os.kill(engines[0], signal.SIGKILL)
        connection.trained(2, 3)
        connection.publish(str(newer), 3)
        train_on(connection, range(3, 5))
        assert [e["alive"] for e in connection.status()["engines"]] == [False, True]
        os.kill(engines[1], signal.SIGKILL)
        expected = r"(?s)no rollout engine is left.*engine-0.*engine-0\.log.*engine-1.*exit code -9.*engine-1\.log"
        with pytest.raises(RolloutError, match=expected):
            train_on(connection, range(5, 9))
    wait_gone(controller, *engines)


def test_a_killed_controller_is_reported_its_engines_end_and_a_resume_loses_nothing(
    settings: RolloutSettings, job: RolloutJob
) -> None:
    with ControllerConnection.start(settings, job) as connection:
        controller, (engine,) = processes(connection, job)
        first = lease(connection, 0)
        os.kill(controller, signal.SIGINT)  # is ignored
        assert connection.status()["engines"][0]["alive"]
        os.kill(controller, signal.SIGKILL)
        for _ in range(2):
            with pytest.raises(RolloutError, match=r"died with exit code -9; log: .*controller\.log"):
                connection.lease(0, 1)
        wait_gone(engine)
    with pytest.raises(RolloutError, match="already holds rollouts of an earlier run"):
        ControllerConnection.start(settings, job)
    with ControllerConnection.start(settings, replace(job, incarnation=1, resume=True)) as connection:
        again = lease(connection, 0)
        assert [t.id for t in again] == [t.id for t in first]
        for one, other in zip(again, first, strict=True):
            assert_same(one, other)
        processes_then = processes(connection, job)
    wait_gone(processes_then[0], *processes_then[1])


def test_a_killed_trainer_leaves_nobody_behind(settings: RolloutSettings, job: RolloutJob, tmp_path: Path) -> None:
    write_settings(tmp_path / "given.json", settings, job)
    program = (
        "import sys, time\nfrom pathlib import Path\n"
        "from m2po_megatron.rollout.connection import ControllerConnection\n"
        "from m2po_megatron.rollout.settings import read_settings\n"
        "c = ControllerConnection.start(*read_settings(Path(sys.argv[1])))\n"
        "print(c.status()['engines'][0]['pid'], flush=True)\ntime.sleep(600)\n"
    )
    trainer = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "given.json")], stdout=subprocess.PIPE, text=True
    )
    try:
        assert trainer.stdout is not None
        engine = int(trainer.stdout.readline())
        controller = json.loads(job.address_path.read_text())["pid"]
        assert alive(engine) and alive(controller)
    finally:
        trainer.kill()
        trainer.communicate()
    wait_gone(engine, controller)


def test_engines_that_do_not_start_are_named_with_their_log(
    settings: RolloutSettings, job: RolloutJob, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for file in Path(job.model_path).iterdir():
        if file.suffix != ".safetensors":
            (model / file.name).write_bytes(file.read_bytes())
    with pytest.raises(RolloutError, match=r"(?s)engine-0 ended at start with exit code.*engine-0\.log"):
        ControllerConnection.start(settings, replace(job, model_path=str(model)))


def test_a_bad_prompt_file_stops_the_start_with_its_line(settings: RolloutSettings, job: RolloutJob) -> None:
    Path(settings.prompt_data).write_text('{"prompt": "1+1="}\n')
    with pytest.raises(RolloutError, match=r"prompts\.jsonl, line 1: has no \"answer\".*controller\.log"):
        ControllerConnection.start(settings, job)
