"""The computing thread: calls between steps, updates between sequences, and a step that fails."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from m2po_megatron.rollout.embedded_model import EngineModel, load_model
from m2po_megatron.rollout.embedded_protocol import GenerateProtocol
from m2po_megatron.rollout.embedded_scheduler import Scheduler
from m2po_megatron.rollout.embedded_sequence import Job
from m2po_megatron.rollout.embedded_worker import Worker

MakeModel = Callable[..., Path]
TIMEOUT_S = 30.0


class Setting:
    def __init__(self, path: Path) -> None:
        self.engine = EngineModel(load_model(path, torch.float32), 0)
        self.scheduler = Scheduler(self.engine, 2, "0.0")
        self.finished: queue.Queue[Job] = queue.Queue()
        self.worker = Worker(self.scheduler, self._deliver)
        self.protocol = GenerateProtocol(self.engine.vocab_size, self.engine.context_length, (), None)

    def _deliver(self, jobs: list[Job]) -> None:
        for job in jobs:
            self.finished.put(job)

    def submit(self, rid: str, tokens: int) -> Job:
        body = {"rid": rid, "input_ids": [5, 6], "sampling_params": {"max_new_tokens": tokens}, "return_logprob": True}
        job = self.protocol.job(body)
        self.worker.call(lambda: self.scheduler.submit(job)).result(TIMEOUT_S)
        return job


@pytest.fixture
def setting(tiny_model: MakeModel) -> Iterator[Setting]:
    made = Setting(tiny_model("llama"))
    yield made
    made.worker.stop()
    assert not made.worker.alive


def test_a_call_gets_its_result_or_its_exception_and_the_thread_lives_on(setting: Setting) -> None:
    assert setting.worker.call(lambda: 7).result(TIMEOUT_S) == 7
    with pytest.raises(ZeroDivisionError):
        setting.worker.call(lambda: 1 // 0).result(TIMEOUT_S)
    job = setting.submit("a", 5)
    assert setting.finished.get(timeout=TIMEOUT_S) is job and len(job.sequences[0].output_ids) == 5


def test_a_call_when_idle_waits_for_the_running_and_goes_before_the_waiting(setting: Setting) -> None:
    setting.worker.set_step_delay(0.01)
    jobs = [setting.submit(rid, 100) for rid in ("a", "b", "c")]
    while setting.worker.call(lambda: len(setting.scheduler.running)).result(TIMEOUT_S) < 2:
        assert setting.finished.empty()

    def relabel() -> list[int]:
        setting.scheduler.load_weights(lambda: None, "0.1")
        return [len(job.sequences[0].output_ids) for job in jobs]

    assert setting.worker.call_when_idle(relabel).result(TIMEOUT_S) == [100, 100, 0]
    assert [setting.finished.get(timeout=TIMEOUT_S).rid for _ in jobs] == ["a", "b", "c"]
    assert [job.sequences[0].version_spans()[0]["version"] for job in jobs] == ["0.0", "0.0", "0.1"]


def test_a_call_when_idle_comes_at_once_while_paused(setting: Setting) -> None:
    setting.worker.call(lambda: setting.scheduler.pause("retract")).result(TIMEOUT_S)
    job = setting.submit("held", 3)
    assert setting.worker.call_when_idle(lambda: len(job.sequences[0].output_ids)).result(TIMEOUT_S) == 0
    assert setting.finished.empty()
    setting.worker.call(setting.scheduler.resume).result(TIMEOUT_S)
    assert setting.finished.get(timeout=TIMEOUT_S) is job


def test_a_step_that_raises_fails_the_requests_with_its_text_and_serving_goes_on(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    def decode(*_: object) -> torch.Tensor:
        raise MemoryError("no room for the cache")

    monkeypatch.setattr(setting.engine, "decode", decode)
    broken = setting.submit("broken", 5)
    assert setting.finished.get(timeout=TIMEOUT_S) is broken
    assert broken.error is not None and broken.error.status == 500
    assert broken.error.message == "the engine failed in a step: MemoryError: no room for the cache"
    monkeypatch.undo()
    job = setting.submit("after", 5)
    assert setting.finished.get(timeout=TIMEOUT_S) is job and job.error is None
    assert len(job.sequences[0].output_ids) == 5
