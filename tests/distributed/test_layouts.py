"""Combinations of layouts on four ranks, and the optimizers on two: one update, the same answer everywhere."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from m2po_megatron import cpu
from tests.distributed.harness import leave_layout, run_ranks
from tests.distributed.reference_policy import ReferenceUpdate, reference_update
from tests.distributed.test_update import LAYERS, check, updates
from tests.distributed.workers import Layout, build, rows_of
from tests.tiny_models import make_tiny_model

pytestmark = pytest.mark.slow

FOUR_RANKS = [
    Layout("tp2-pp2", tensor=2, pipeline=2, micro_batch_size=6),
    Layout("tp2-pp2-vpp2-sp-full", tensor=2, pipeline=2, virtual=2, sequence_parallel=True, recompute="full", max_tokens=90),
    Layout("cp2-tp2-sp", context=2, tensor=2, sequence_parallel=True, micro_batch_size=8),
    Layout("cp2-pp2-vpp2", context=2, pipeline=2, virtual=2, micro_batch_size=4),
    Layout("cp2-dp2-budget-overlap", context=2, max_tokens=40, overlap=True),
    Layout("cp4-selective", context=4, recompute="selective"),
    Layout("dp2-pp2-vpp2-overlap", pipeline=2, virtual=2, micro_batch_size=3, overlap=True),
]
# The step is large, so that what a parameter moves by is not lost in its rounding. With an epsilon of 1 AdamW's first step
# is nearly proportional to the gradient, so that an error of the one is an error of the other; with the usual 1e-8 it would
# be the gradient's sign.
STEP = {"lr": 100.0, "adam_eps": 1.0, "clip_grad": 0.5, "weight_decay": 0.1}
OPTIMIZERS = [
    Layout("dp2", optimizer=STEP),
    Layout("dp2-overlap", optimizer=STEP, overlap=True, micro_batch_size=4),
    Layout("dp2-distributed", optimizer=STEP, distributed_optimizer=True),
    Layout("dp2-distributed-overlap", optimizer=STEP, distributed_optimizer=True, overlap=True, micro_batch_size=4),
    Layout("cp2-distributed-overlap", context=2, optimizer=STEP, distributed_optimizer=True, overlap=True),
    Layout("tp2", tensor=2, optimizer=STEP),
    Layout("pp2", pipeline=2, optimizer=STEP, micro_batch_size=5),
]


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> tuple[Path, ReferenceUpdate]:
    path = make_tiny_model(tmp_path_factory.mktemp("model"), kind="qwen3", tie=True, **LAYERS)
    return path, reference_update(str(path))


def test_four_ranks_equal_the_reference(reference, tmp_path) -> None:
    path, expected = reference
    for results in updates(FOUR_RANKS, 4, path, expected, tmp_path).values():
        check(results, expected)


def stepped(rank: int, layouts: list[Layout], model_path: str, reference_path: str) -> dict[str, dict]:
    """After one update in each layout: what every Hugging Face tensor moved by, and the gradient's norm before clipping."""
    cpu.install()

    from m2po_megatron.algo.losses import LossSettings
    from m2po_megatron.trainer import train_update
    from m2po_megatron.weights.hf_io import export_hf

    expected = torch.load(reference_path, weights_only=False)
    found = {}
    for layout in layouts:
        world, policy = build(layout, model_path)
        before = {name: tensor.clone() for name, tensor in export_hf(policy.chunks, policy.architecture)}
        rows = rows_of(layout, world, expected.trajectories, expected.advantages)
        report = train_update(policy, rows, LossSettings(m2_threshold=expected.threshold), temperature=1.0, version=0)
        after = dict(export_hf(policy.chunks, policy.architecture))
        moved = {name: after[name].float() - before[name].float() for name in before}
        found[layout.name] = {"moved": moved, "grad_norm": report.metrics["grad_norm"]}
        leave_layout()
    return found


def test_optimizers_take_the_same_step(reference, tmp_path) -> None:
    path, expected = reference
    torch.save(expected, tmp_path / "reference.pt")
    arguments = (str(path), str(tmp_path / "reference.pt"))
    alone = run_ranks(stepped, 1, [Layout("one", optimizer=STEP)], *arguments)[0]["one"]
    assert alone["grad_norm"] > STEP["clip_grad"]  # or clipping would not be tried
    for name, results in _by_layout(run_ranks(stepped, 2, OPTIMIZERS, *arguments, timeout_s=240)).items():
        moved = {key: tensor for result in results for key, tensor in result["moved"].items()}
        assert moved.keys() == alone["moved"].keys()
        for key, tensor in alone["moved"].items():
            error = (moved[key] - tensor).abs().max() / tensor.abs().max()
            assert error <= 2e-5, f"{name}: {key}: {error:.2e}"
        for result in results:
            assert result["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-5)


def test_bfloat16_stays_near_float32(reference, tmp_path) -> None:
    """bfloat16 weights and activations, float32 main gradients: layouts differ by their rounding, about 2 percent."""
    path, expected = reference
    layouts = [Layout("dp2-bf16", bf16=True), Layout("tp2-bf16-sp", bf16=True, tensor=2, sequence_parallel=True)]
    for results in updates(layouts, 2, path, expected, tmp_path).values():
        gradients = {name: tensor for result in results for name, tensor in result["gradients"].items()}
        assert gradients.keys() == expected.gradients.keys()
        for name, tensor in expected.gradients.items():
            found = gradients[name]
            assert found.dtype == torch.float32
            cosine = torch.nn.functional.cosine_similarity(found.flatten(), tensor.flatten(), dim=0)
            assert cosine > 0.98, f"{name}: {cosine:.4f}"


def _by_layout(results: list[dict[str, dict]]) -> dict[str, list[dict]]:
    return {name: [result[name] for result in results] for name in results[0]}
