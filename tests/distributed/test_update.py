"""The update against a single-process reference, for every layout and split: log-probs, mask bits, gradients."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.distributed.harness import run_ranks
from tests.distributed.reference_policy import ReferenceUpdate, reference_update, sample_logprobs
from tests.distributed.workers import Layout, run_updates
from tests.tiny_models import make_tiny_model

ONE_RANK = [
    Layout("whole"),
    Layout("split", micro_batch_size=3),
    Layout("budget", max_tokens=40),
    Layout("cold", temperature=0.7, micro_batch_size=7),
    Layout("recompute", logprob_mode="recompute"),
]
TWO_RANKS = [
    Layout("tp2", tensor=2),
    Layout("tp2-split-sp", tensor=2, sequence_parallel=True, micro_batch_size=4),
    Layout("tp2-recompute", tensor=2, logprob_mode="recompute", micro_batch_size=9),
    Layout("tp2-recompute-sp", tensor=2, sequence_parallel=True, logprob_mode="recompute"),
    Layout("dp2"),
    Layout("dp2-split", micro_batch_size=3),
    Layout("dp2-budget", max_tokens=30),
    Layout("pp2-split", pipeline=2, micro_batch_size=5),
    Layout("pp2-vpp2", pipeline=2, virtual=2, micro_batch_size=4),
    Layout("cp2", context=2),
    Layout("cp2-split", context=2, micro_batch_size=4),
]
LAYERS = {"num_hidden_layers": 4}  # two pieces on each of two pipeline ranks


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def reference(request, tmp_path_factory) -> tuple[Path, dict[float, ReferenceUpdate]]:
    path = make_tiny_model(tmp_path_factory.mktemp(request.param), kind=request.param, tie=request.param == "llama", **LAYERS)
    return path, {t: reference_update(str(path), temperature=t) for t in (1.0, 0.7)}


def updates(layouts: list[Layout], ranks: int, path: Path, reference: ReferenceUpdate, tmp_path: Path) -> dict[str, list]:
    torch.save(reference, tmp_path / "reference.pt")
    run_ranks(run_updates, ranks, layouts, str(path), str(tmp_path / "reference.pt"), str(tmp_path), timeout_s=240)
    return {
        layout.name: [torch.load(tmp_path / f"{layout.name}.{r}.pt", weights_only=False) for r in range(ranks)]
        for layout in layouts
    }


def check(results: list[dict], reference: ReferenceUpdate) -> None:
    mask: dict = {}
    gradients: dict = {}
    for result in results:
        mask.update(result["mask"])
        gradients.update(result["gradients"])
        assert result["metrics"] == results[0]["metrics"] or _same(result["metrics"], results[0]["metrics"])
    assert mask == reference.mask
    assert gradients.keys() == reference.gradients.keys()
    for name, expected in reference.gradients.items():
        error = (gradients[name] - expected).abs().max() / expected.abs().max()
        assert error <= 1e-5, f"{name}: {error:.2e}"
    metrics = results[0]["metrics"]
    assert metrics["loss/policy"] == pytest.approx(reference.loss, rel=1e-4, abs=1e-6)
    assert metrics["m2/masked_fraction"] == reference.masked / len(reference.mask)
    assert metrics["m2/after"] <= reference.threshold < metrics["m2/before"]


def _same(a: dict, b: dict) -> bool:
    timed = lambda k: k.startswith("time/")  # noqa: E731
    return {k: v for k, v in a.items() if not timed(k)} == {k: v for k, v in b.items() if not timed(k)}


@pytest.mark.slow
def test_one_rank_equals_the_reference_under_any_split(reference, tmp_path) -> None:
    path, by_temperature = reference
    for temperature in (1.0, 0.7):
        expected = by_temperature[temperature]
        layouts = [layout for layout in ONE_RANK if layout.temperature == temperature]
        (tmp_path / str(temperature)).mkdir()
        for name, results in updates(layouts, 1, path, expected, tmp_path / str(temperature)).items():
            check(results, expected)
            if name in ("split", "budget", "cold"):
                assert results[0]["micro_batches"] > 1
            compare_logprobs(results[0]["logprobs"], path, expected, temperature)


def compare_logprobs(scored: dict, path: Path, expected: ReferenceUpdate, temperature: float) -> None:
    """Pass A against transformers on the same weights."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    assert scored.keys() == expected.mask.keys()
    with torch.no_grad():
        reference = [sample_logprobs(model, t, temperature) for t in expected.trajectories]
    assert max(abs(value - float(reference[i][p])) for (i, p), value in scored.items()) <= 1e-5


@pytest.mark.slow
def test_two_ranks_equal_the_reference_under_any_layout(reference, tmp_path) -> None:
    path, by_temperature = reference
    for results in updates(TWO_RANKS, 2, path, by_temperature[1.0], tmp_path).values():
        check(results, by_temperature[1.0])
