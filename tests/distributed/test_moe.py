"""Models of experts: the update against the single-process reference, and the auxiliary loss against plain torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from m2po_megatron import cpu
from m2po_megatron.data.packing import PackingLayout, pack, zigzag_rows
from tests.distributed.harness import leave_layout, run_ranks
from tests.distributed.reference_policy import ReferenceUpdate, reference_update
from tests.distributed.test_update import check, compare_logprobs, updates
from tests.distributed.workers import Layout, build, one_update, rows_of
from tests.tiny_models import make_tiny_model

COEFFICIENT = 0.3
"""The auxiliary loss then moves the routers' gradients by as much as the policy loss does."""

ONE_RANK = [Layout("whole"), Layout("split", micro_batch_size=3), Layout("recompute", recompute="full", micro_batch_size=5)]
TWO_RANKS = [
    Layout("ep2", expert=2),
    Layout("ep2-split", expert=2, micro_batch_size=3),
    Layout("ep2-overlap", expert=2, overlap=True, micro_batch_size=4),
    Layout("tp2-sp", tensor=2, sequence_parallel=True, micro_batch_size=7),
    Layout("tp2-sp-ep2", tensor=2, sequence_parallel=True, expert=2, expert_tensor=1),
    Layout("pp2", pipeline=2, micro_batch_size=5),
    Layout("pp2-vpp2", pipeline=2, virtual=2, micro_batch_size=4),
    Layout("cp2-ep2", context=2, expert=2, micro_batch_size=6),
]
FOUR_RANKS = [
    Layout("pp2-ep2", pipeline=2, expert=2, micro_batch_size=4),
    Layout("tp2-sp-ep2-etp2", tensor=2, sequence_parallel=True, expert=2),
    Layout("ep2-twice", expert=2, micro_batch_size=3),  # each expert on two ranks, whose gradients are added
]
BALANCED = {
    1: [Layout("whole"), Layout("split", micro_batch_size=3), Layout("recompute", recompute="full", micro_batch_size=5)],
    2: [
        Layout("dp2-split", micro_batch_size=3),
        Layout("ep2-split", expert=2, micro_batch_size=4),
        Layout("tp2-sp", tensor=2, sequence_parallel=True, micro_batch_size=7),
        Layout("cp2", context=2, micro_batch_size=6),
        Layout("pp2", pipeline=2, micro_batch_size=5),
    ],
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("experts"), kind="qwen3_moe", num_hidden_layers=4)


@pytest.fixture(scope="module")
def reference(path: Path) -> ReferenceUpdate:
    update = reference_update(str(path))
    return replace(update, gradients=by_stored_name(update.gradients))


def by_stored_name(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """transformers' one tensor for a layer's experts, as the matrices that files hold."""
    stored = {}
    for name, tensor in tensors.items():
        layer, _, kind = name.rpartition(".experts.")
        if not layer:
            stored[name] = tensor
            continue
        for number, expert in enumerate(tensor):
            parts = zip(("gate", "up"), expert.chunk(2), strict=True) if kind == "gate_up_proj" else [("down", expert)]
            stored.update({f"{layer}.experts.{number}.{part}_proj.weight": matrix for part, matrix in parts})
    return stored


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "layouts"), [(1, ONE_RANK), (2, TWO_RANKS), (4, FOUR_RANKS)])
def test_the_update_equals_the_reference(
    path: Path, reference: ReferenceUpdate, tmp_path: Path, ranks: int, layouts: list[Layout]
) -> None:
    assert "model.layers.3.mlp.experts.2.up_proj.weight" in reference.gradients
    for name, results in updates(layouts, ranks, path, reference, tmp_path).items():
        check(results, reference)
        assert "loss/moe_aux" not in results[0]["metrics"]
        if name == "whole":
            compare_logprobs(results[0]["logprobs"], path, reference, 1.0)


@pytest.mark.slow
def test_experts_whose_weights_do_not_sum_to_1_are_trained_too(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", kind="qwen3_moe", norm_topk_prob=False, tie=True)
    update = reference_update(str(model))
    update = replace(update, gradients=by_stored_name(update.gradients))
    for results in updates([Layout("ep2-split", expert=2, micro_batch_size=5)], 2, model, update, tmp_path).values():
        check(results, update)


def whole_rows(reference: ReferenceUpdate, layout: Layout, ranks: int) -> list[tuple[torch.Tensor, list[int]]]:
    """(token ids of a whole micro-batch, lengths of its sequences), padding included, of every rank's micro-batches."""
    copies = ranks // (layout.tensor * layout.pipeline * layout.context)
    alignment = layout.tensor if layout.sequence_parallel else 1
    rows = []
    for rank in range(copies):
        place = PackingLayout(rank, copies, 0, layout.context, alignment)
        parts = [
            pack(
                reference.trajectories,
                reference.advantages,
                replace(place, context_parallel_rank=part),
                micro_batch_size=layout.micro_batch_size,
            )
            for part in range(layout.context)
        ]
        for same_row in zip(*parts, strict=True):
            lengths = same_row[0].lengths
            ids = torch.zeros(sum(lengths), dtype=torch.int64)
            for part, batch in enumerate(same_row):
                ids[zigzag_rows(lengths, part, layout.context)] = batch.token_ids
            rows.append((ids, lengths))
    return rows


def plain_aux_loss(path: Path, rows: list[tuple[torch.Tensor, list[int]]]) -> tuple[dict[str, torch.Tensor], float]:
    """(gradients of the auxiliary loss by stored name, its mean over layers and rows), written from its formula:
    E sum_e f_e P_e of each micro-batch and layer, weighed by the micro-batch's tokens, over all tokens."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    model.get_input_embeddings().padding_idx = None
    experts, chosen = model.config.num_experts, model.config.num_experts_per_tok
    total, values = torch.zeros(()), []
    for ids, lengths in rows:
        logits = [model(s[None], output_router_logits=True).router_logits for s in ids.split(lengths)]
        for layer in zip(*logits, strict=True):
            probabilities = torch.softmax(torch.cat(layer), -1)
            choices = torch.zeros_like(probabilities).scatter(1, probabilities.topk(chosen).indices, 1.0)
            value = experts * (choices.mean(0) / chosen * probabilities.mean(0)).sum()
            total = total + value * len(ids)
            values.append(float(value.detach()))
    (total / sum(len(ids) for ids, _ in rows)).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return by_stored_name(gradients), sum(values) / len(values)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", BALANCED)
def test_the_auxiliary_loss_is_the_mean_over_the_mini_batchs_tokens(
    path: Path, reference: ReferenceUpdate, tmp_path: Path, ranks: int
) -> None:
    layouts = [replace(layout, aux_loss=COEFFICIENT) for layout in BALANCED[ranks]]
    for layout, results in zip(layouts, updates(layouts, ranks, path, reference, tmp_path).values(), strict=True):
        aux, mean = plain_aux_loss(path, whole_rows(reference, layout, ranks))
        both = {
            name: gradient + COEFFICIENT * aux[name] if name in aux else gradient
            for name, gradient in reference.gradients.items()
        }
        router = "model.layers.1.mlp.gate.weight"
        assert (COEFFICIENT * aux[router]).abs().max() > 0.1 * reference.gradients[router].abs().max()
        check(results, replace(reference, gradients=both))  # and the mask: pass A knows nothing of it
        for result in results:
            assert result["metrics"]["loss/moe_aux"] == pytest.approx(mean, rel=1e-5)
        assert mean > 1.01


def two_updates(rank: int, path: str, reference_path: str) -> list[float]:
    cpu.install()
    from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker

    from m2po_megatron.algo.losses import LossSettings
    from m2po_megatron.trainer import train_update

    reference = torch.load(reference_path, weights_only=False)
    layout = Layout("split", expert=2, aux_loss=COEFFICIENT, micro_batch_size=4)
    one_update(layout, path, reference)
    leave_layout()
    world, policy = build(layout, path)
    rows = rows_of(layout, world, reference.trajectories, reference.advantages)
    found = []
    for _ in range(3):
        report = train_update(policy, rows, LossSettings(m2_threshold=reference.threshold), temperature=1.0, version=0)
        found.append(report.metrics["loss/moe_aux"])
    assert not any(record["values"].any() for record in get_moe_layer_wise_logging_tracker().values())
    return found


@pytest.mark.slow
def test_the_auxiliary_loss_is_measured_for_each_update_alone(path: Path, reference: ReferenceUpdate, tmp_path: Path) -> None:
    torch.save(reference, tmp_path / "reference.pt")
    for found in run_ranks(two_updates, 2, str(path), str(tmp_path / "reference.pt")):
        assert found == pytest.approx([found[0]] * 3, rel=1e-5)  # at a learning rate of 1e-9 nothing else changes
        assert found[0] > 1.01
