"""Continuous batching: values against transformers' full forward, whatever joins, leaves or breaks meanwhile."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from m2po_megatron.rollout.embedded_model import EngineModel, load_model
from m2po_megatron.rollout.embedded_protocol import GenerateProtocol
from m2po_megatron.rollout.embedded_scheduler import Scheduler
from m2po_megatron.rollout.embedded_sequence import Job, RequestError, Sequence
from m2po_megatron.rollout.embedded_weights import load_weights
from tests.rollout.embedded_support import ARITHMETIC_MODEL, gap, plain_model, reference_logprobs

MakeModel = Callable[..., Path]
STEP_LIMIT = 2000


class Bench:
    """A scheduler on a model directory, driven step by step."""

    def __init__(self, path: Path, max_running: int = 64, seed: int = 0) -> None:
        self.engine = EngineModel(load_model(path, torch.float32), seed)
        self.scheduler = Scheduler(self.engine, max_running, "0.0")
        self.protocol = GenerateProtocol(self.engine.vocab_size, self.engine.context_length, (), None)

    def submit(self, ids: list[int] | list[list[int]], rid: str = "r", **sampling: Any) -> Job:
        fields = {name: sampling.pop(name) for name in ("logprob_start_len",) if name in sampling}
        body = {"rid": rid, "input_ids": ids, "sampling_params": sampling, "return_logprob": True, **fields}
        job = self.protocol.job(body)
        self.scheduler.submit(job)
        return job

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.scheduler.step()

    def finish(self) -> list[Job]:
        for _ in range(STEP_LIMIT):
            if not self.scheduler.has_work:
                return self.scheduler.take_finished()
            self.scheduler.step()
        raise AssertionError("the scheduler does not come to an end")

    def load(self, path: Path, label: str) -> None:
        self.scheduler.load_weights(lambda: load_weights(self.engine.model, path), label)


def prompts(count: int, seed: int = 0, longest: int = 12) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, 20) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def worst_gap(path: Path, sequences: list[Sequence]) -> float:
    model = plain_model(path)
    assert [sequence.job.error for sequence in sequences if sequence.job.error] == []
    return max(
        gap(s.logprobs, reference_logprobs(model, s.prompt.ids, s.output_ids, s.temperature or 1.0)) for s in sequences
    )


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "qwen3_moe"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_a_full_forward_pass_also_for_requests_that_join(
    tiny_model: MakeModel, kind: str, temperature: float
) -> None:
    path = tiny_model(kind)
    bench = Bench(path, max_running=6)
    jobs = []
    # They come while others run, end at different times, and are more than fit: every row changes hands.
    for index, ids in enumerate(prompts(14)):
        jobs.append(bench.submit(ids, f"r{index}", max_new_tokens=3 + 5 * (index % 4), temperature=temperature))
        bench.steps(2)
        assert len(bench.scheduler.running) <= 6
    finished = bench.finish()
    assert {job.rid for job in finished} == {job.rid for job in jobs}
    sequences = [sequence for job in jobs for sequence in job.sequences]
    assert [len(s.output_ids) for s in sequences] == [3 + 5 * (index % 4) for index in range(14)]
    assert worst_gap(path, sequences) <= 1e-5


def test_temperatures_mix_in_one_batch(tiny_model: MakeModel) -> None:
    bench = Bench(tiny_model("llama"))
    jobs = [bench.submit([5, 6, 7], f"r{t}", max_new_tokens=20, temperature=t) for t in (1.0, 0.7, 0.0, 1.3)]
    bench.finish()
    assert worst_gap(tiny_model("llama"), [job.sequences[0] for job in jobs]) <= 1e-5


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampling_frequencies_match_the_probabilities(tiny_model: MakeModel, temperature: float) -> None:
    path, samples = tiny_model("qwen3"), 4096
    bench = Bench(path, max_running=samples)
    job = bench.submit([4, 9, 11], max_new_tokens=2, n=samples, temperature=temperature)
    bench.finish()
    model = plain_model(path)
    with torch.no_grad():
        first = (model(torch.tensor([[4, 9, 11]])).logits[0, -1].double() / temperature).softmax(-1)
        every = torch.tensor([[4, 9, 11, token] for token in range(32)])
        second = (model(every).logits[:, -1].double() / temperature).softmax(-1)
    expected = (first[:, None] * second).flatten()
    counts = torch.zeros(32 * 32, dtype=torch.float64)
    for sequence in job.sequences:
        counts[sequence.output_ids[0] * 32 + sequence.output_ids[1]] += 1
    marginal = counts.view(32, 32).sum(1)
    # Pearson's statistic; its mean is the degrees of freedom, its variance twice that. Rare pairs are pooled.
    for observed, p in ((marginal, first), (counts, expected)):
        common = p * samples >= 5
        o = torch.cat([observed[common], observed[~common].sum()[None]])
        e = torch.cat([p[common], p[~common].sum()[None]]) * samples
        o, e = o[e > 0], e[e > 0]
        statistic, freedom = float(((o - e) ** 2 / e).sum()), len(o) - 1
        assert abs(statistic - freedom) < 4.5 * (2 * freedom) ** 0.5


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_greedy_is_what_transformers_generates(tiny_model: MakeModel, kind: str) -> None:
    path = tiny_model(kind, seed=3)
    bench = Bench(path, max_running=4)
    jobs = [bench.submit(ids, f"r{i}", max_new_tokens=24, temperature=0) for i, ids in enumerate(prompts(6, seed=1))]
    bench.finish()
    model = plain_model(path)
    for job in jobs:
        ids = torch.tensor([job.sequences[0].prompt.ids])
        mask = torch.ones_like(ids)
        made = model.generate(ids, attention_mask=mask, max_new_tokens=24, do_sample=False, eos_token_id=[])
        assert job.sequences[0].output_ids == made[0, ids.shape[1] :].tolist()
    assert worst_gap(path, [job.sequences[0] for job in jobs]) <= 1e-5


def test_the_same_seed_gives_the_same_samples_and_another_seed_others(tiny_model: MakeModel) -> None:
    outputs = []
    for seed in (1, 1, 2):
        bench = Bench(tiny_model("llama"), seed=seed)
        job = bench.submit([5, 6], max_new_tokens=16, n=4)
        bench.finish()
        outputs.append([sequence.output_ids for sequence in job.sequences])
    assert outputs[0] == outputs[1] != outputs[2]
    assert len({tuple(ids) for ids in outputs[0]}) == 4


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_retracted_sequences_keep_their_tokens_and_go_on_under_new_weights(tiny_model: MakeModel, kind: str) -> None:
    old, new = tiny_model(kind), tiny_model(kind, seed=1)
    bench = Bench(old, max_running=3)
    jobs = [bench.submit(ids, f"r{i}", max_new_tokens=12, temperature=0.7) for i, ids in enumerate(prompts(5))]
    bench.steps(4)
    kept = [(list(job.sequences[0].output_ids), list(job.sequences[0].logprobs)) for job in jobs]
    assert [len(ids) for ids, _ in kept] == [5, 5, 5, 0, 0]
    bench.scheduler.pause("retract")
    bench.steps(3)
    assert [len(job.sequences[0].output_ids) for job in jobs] == [5, 5, 5, 0, 0], "nothing is sampled while paused"
    assert [sequence.job.rid for sequence in bench.scheduler.waiting] == ["r0", "r1", "r2", "r3", "r4"]
    bench.load(new, "0.1")
    bench.scheduler.resume()
    bench.finish()

    old_model, new_model = plain_model(old), plain_model(new)
    for job, (ids, logprobs) in zip(jobs, kept, strict=True):
        sequence = job.sequences[0]
        cut = len(ids)
        assert sequence.output_ids[:cut] == ids and sequence.logprobs[:cut] == logprobs
        spans = [{"version": "0.0", "start": 0, "end": 5}] if cut else []
        assert sequence.version_spans() == [*spans, {"version": "0.1", "start": cut, "end": 12}]
        assert sequence.retractions == (1 if cut else 0) and sequence.weight_version == "0.1"
        under_new = reference_logprobs(new_model, sequence.prompt.ids, sequence.output_ids, 0.7)
        assert gap(sequence.logprobs[cut:], under_new[cut:]) <= 1e-5
        if cut:
            under_old = reference_logprobs(old_model, sequence.prompt.ids, sequence.output_ids[:cut], 0.7)
            assert gap(sequence.logprobs[:cut], under_old) <= 1e-5
            assert gap(sequence.logprobs[:cut], under_new[:cut]) > 0.1, (
                "the two models must differ for this to mean much"
            )


def test_two_retractions_under_the_same_weights_make_one_span(tiny_model: MakeModel) -> None:
    bench = Bench(tiny_model("qwen2"))
    job = bench.submit([5, 6, 7], max_new_tokens=20, n=3)
    for _ in range(2):
        bench.steps(5)
        bench.scheduler.pause("retract")
        bench.scheduler.resume()
    bench.finish()
    for sequence in job.sequences:
        assert sequence.version_spans() == [{"version": "0.0", "start": 0, "end": 20}]
        assert sequence.retractions == 2
    assert worst_gap(tiny_model("qwen2"), job.sequences) <= 1e-5


def test_the_samples_of_a_prompt_share_its_prefill(tiny_model: MakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(tiny_model("llama"), max_running=6)
    prefill, passes = bench.engine.prefill, []

    def recording(batch: list[list[int]], rows: list[int], sources: list[int]) -> torch.Tensor:
        passes.append((batch, rows, sources))
        return prefill(batch, rows, sources)

    monkeypatch.setattr(bench.engine, "prefill", recording)
    job = bench.submit([[5, 6, 7], [8, 9]], max_new_tokens=4, n=4)
    bench.finish()
    # Six fit at once; the other two samples of the second prompt come when rows are free.
    assert passes == [([[5, 6, 7], [8, 9]], [0, 1, 2, 3, 4, 5], [0, 0, 0, 0, 1, 1]), ([[8, 9]], [0, 1], [0, 0])]
    assert [s.prompt.ids for s in job.sequences] == [[5, 6, 7]] * 4 + [[8, 9]] * 4
    assert worst_gap(tiny_model("llama"), job.sequences) <= 1e-5


def test_prefill_passes_stay_within_their_budget(tiny_model: MakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("m2po_megatron.rollout.embedded_scheduler.PREFILL_TOKENS", 20)
    bench = Bench(tiny_model("llama"))
    lengths = [4, 6, 8, 30, 5]
    jobs = [bench.submit([5 + i] * length, f"r{i}", max_new_tokens=9) for i, length in enumerate(lengths)]
    running = []
    for _ in range(4):
        bench.steps(1)
        running.append(len(bench.scheduler.running))
    assert running == [2, 3, 4, 5], "4 and 6 fit 20 padded tokens together; 8, 30 and 5 go alone"
    bench.finish()
    assert worst_gap(tiny_model("llama"), [job.sequences[0] for job in jobs]) <= 1e-5


def test_stop_tokens_end_a_sample_and_are_its_last(tiny_model: MakeModel) -> None:
    bench = Bench(tiny_model("llama"))
    job = bench.submit([5, 6], max_new_tokens=40, n=64, stop_token_ids=[9, 12])
    bench.finish()
    reasons = {"stop": 0, "length": 0}
    for sequence in job.sequences:
        ids, reason = sequence.output_ids, sequence.finish_reason
        assert reason is not None
        reasons[reason["type"]] += 1
        assert not {9, 12} & set(ids[:-1])
        if reason["type"] == "stop":
            assert reason["matched"] == ids[-1] in (9, 12)
        else:
            assert reason == {"type": "length", "length": 40} and len(ids) == 40
    assert reasons["stop"] > 30 and reasons["length"] > 0
    assert worst_gap(tiny_model("llama"), job.sequences) <= 1e-5


def test_abort_ends_one_request_with_what_it_has_and_leaves_the_others_right(tiny_model: MakeModel) -> None:
    bench = Bench(tiny_model("llama"), max_running=3)
    jobs = [bench.submit(ids, f"r{i}", max_new_tokens=15) for i, ids in enumerate(prompts(4))]
    bench.steps(3)
    assert bench.scheduler.abort(lambda sequence: sequence.job.rid == "nobody", "gone") == 0
    assert bench.scheduler.abort(lambda sequence: sequence.job.rid in ("r0", "r3"), "gone") == 2
    assert [job.rid for job in bench.scheduler.take_finished()] == ["r0", "r3"]
    assert [len(jobs[i].sequences[0].output_ids) for i in (0, 3)] == [4, 0]
    assert jobs[0].sequences[0].finish_reason == {"type": "abort", "message": "gone"}
    bench.finish()
    assert [len(jobs[i].sequences[0].output_ids) for i in (1, 2)] == [15, 15]
    assert worst_gap(tiny_model("llama"), [jobs[i].sequences[0] for i in (0, 1, 2)]) <= 1e-5


def test_pausing_in_mode_abort_ends_everything_and_holds_what_comes_later(tiny_model: MakeModel) -> None:
    bench = Bench(tiny_model("llama"), max_running=2)
    jobs = [bench.submit(ids, f"r{i}", max_new_tokens=15) for i, ids in enumerate(prompts(3))]
    bench.steps(2)
    bench.scheduler.pause("abort")
    assert {job.rid for job in bench.scheduler.take_finished()} == {"r0", "r1", "r2"}
    assert [len(job.sequences[0].output_ids) for job in jobs] == [3, 3, 0]
    answers = [bench.protocol.answer(job)["meta_info"] for job in jobs]
    assert [answer["finish_reason"]["type"] for answer in answers] == ["abort"] * 3
    assert [answer["weight_versions"] for answer in answers] == [[{"version": "0.0", "start": 0, "end": 3}]] * 2 + [[]]
    later = bench.submit([5], "later", max_new_tokens=2)
    bench.steps(3)
    assert later.unfinished == 1 and later.sequences[0].output_ids == []
    bench.scheduler.resume()
    assert bench.finish() == [later]
    with pytest.raises(RequestError, match="abort, retract, got 'in_place'"):
        bench.scheduler.pause("in_place")


def test_weights_and_cache_are_not_touched_under_running_sequences(tiny_model: MakeModel) -> None:
    bench = Bench(tiny_model("llama"))
    job = bench.submit([5, 6], max_new_tokens=10)
    bench.steps(2)
    with pytest.raises(RuntimeError, match="1 sequences are running"):
        bench.load(tiny_model("llama", seed=1), "0.1")
    with pytest.raises(RequestError, match="cannot flush the cache: 1 sequences are running"):
        bench.scheduler.flush_cache()
    bench.finish()
    assert job.sequences[0].version_spans() == [{"version": "0.0", "start": 0, "end": 10}]
    assert worst_gap(tiny_model("llama"), job.sequences) <= 1e-5
    bench.scheduler.flush_cache()


def test_input_logprobs_are_at_temperature_1_from_the_start_asked_for(tiny_model: MakeModel) -> None:
    path = tiny_model("qwen3")
    bench = Bench(path)
    ids = [5, 9, 7, 12, 3, 8]
    jobs = {s: bench.submit(ids, f"r{s}", max_new_tokens=2, temperature=0.7, logprob_start_len=s) for s in (0, 3, 5)}
    none = bench.submit(ids, "none", max_new_tokens=0, logprob_start_len=0)
    bench.finish()
    reference = reference_logprobs(plain_model(path), ids[:1], ids[1:], 1.0)
    for start, job in {**jobs, 0: none}.items():
        answer = bench.protocol.answer(job)
        entries = answer["meta_info"]["input_token_logprobs"]
        assert [token for _, token, _ in entries] == ids[start:] and entries[0][0] is None
        if start < 5:
            assert gap([value for value, _, _ in entries[1:]], reference[start:]) <= 1e-5
    assert none.sequences[0].output_ids == none.sequences[0].logprobs == []
    assert none.sequences[0].finish_reason == {"type": "length", "length": 0}


def test_broken_weights_fail_requests_by_their_version_and_leave_no_trace(tiny_model: MakeModel) -> None:
    good = tiny_model("llama")
    bench = Bench(good, max_running=4)
    bench.submit(prompts(1, longest=30)[0] * 3, "warm", max_new_tokens=30, n=4)
    bench.finish()
    with torch.no_grad():
        bench.engine.model.model.layers[0].self_attn.v_proj.weight[0, 0] = float("nan")
    bench.scheduler.load_weights(lambda: None, "0.7")
    broken = bench.submit([5, 6, 7] * 8, "broken", max_new_tokens=30, n=6)
    assert bench.finish() == [broken], "once, also with samples still waiting"
    assert broken.error is not None and broken.error.status == 500
    assert "request broken: the logits are not finite under weight version 0.7" in broken.error.message
    bench.load(good, "0.8")
    # Short ones in the rows where the NaN lay: next to a long one, its old positions are masked, not overwritten.
    jobs = [bench.submit([5 + i] * (1 + 39 * (i == 3)), f"r{i}", max_new_tokens=10) for i in range(4)]
    bench.finish()
    assert worst_gap(good, [job.sequences[0] for job in jobs]) <= 1e-5


def test_a_prompt_that_breaks_fails_alone(tiny_model: MakeModel) -> None:
    path = tiny_model("llama")
    bench = Bench(path)
    with torch.no_grad():
        bench.engine.model.model.embed_tokens.weight[31] = float("inf")
    innocent = [bench.submit([5 + i, 6], f"r{i}", max_new_tokens=12, temperature=0) for i in range(3)]
    bench.steps(2)
    broken = bench.submit([[31, 5, 6, 7, 8], [4]], "broken", max_new_tokens=12)
    bench.steps(2)
    assert broken.error is not None and bench.scheduler.take_finished() == [broken]
    innocent.append(bench.submit([8], "after", max_new_tokens=3, temperature=0))
    assert {job.rid for job in bench.finish()} == {"r0", "r1", "r2", "after"}
    assert all(31 not in job.sequences[0].output_ids for job in innocent), "the case needs outputs without that token"
    assert worst_gap(path, [job.sequences[0] for job in innocent]) <= 1e-5


def test_giving_everything_up_fails_each_job_once_and_then_serves_again(tiny_model: MakeModel) -> None:
    bench = Bench(tiny_model("llama"), max_running=2)
    jobs = [bench.submit([5, 6], f"r{i}", max_new_tokens=9, n=2) for i in range(2)]
    bench.steps(2)
    bench.scheduler.fail_all(RequestError(500, "out of memory"))
    assert bench.scheduler.take_finished() == jobs
    assert [job.error.message for job in jobs if job.error] == ["out of memory"] * 2
    again = bench.submit([5, 6], "again", max_new_tokens=9)
    assert bench.finish() == [again]
    assert worst_gap(tiny_model("llama"), again.sequences) <= 1e-5


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_bundled_model_and_its_answers(temperature: float) -> None:
    bench = Bench(ARITHMETIC_MODEL, max_running=16)
    sampling = {"max_new_tokens": 8, "n": 8, "stop_token_ids": [1], "temperature": temperature}
    jobs = [bench.submit([3 + a, 13, 3 + b, 16], f"{a}+{b}", **sampling) for a in range(4) for b in range(4)]
    bench.finish()
    sequences = [sequence for job in jobs for sequence in job.sequences]
    assert sum(sequence.output_ids[-1] == 1 for sequence in sequences) > 100
    assert worst_gap(ARITHMETIC_MODEL, sequences) <= 1e-5
