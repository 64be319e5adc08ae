"""The megatron-core model against transformers on the same weights, in packed rows; and what its options change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from m2po_megatron import cpu
from tests.distributed.harness import leave_layout, run_ranks
from tests.tiny_models import make_tiny_model

LENGTHS = [9, 1, 23, 4, 17, 2]


@dataclass(frozen=True)
class Variant:
    """A model of `kind` with these config fields, built with these settings of ours."""

    kind: str
    config: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)


HOT_ROPE = {"rope_type": "default", "rope_theta": 300.0}
VARIANTS = {
    "llama": Variant("llama"),
    "llama one kv head, tied": Variant("llama", {"num_key_value_heads": 1, "tie": True}),
    "llama ungrouped, rope": Variant("llama", {"num_key_value_heads": 4, "rope_parameters": HOT_ROPE}),
    "llama wide heads": Variant("llama", {"head_dim": 24}),
    "llama padded vocabulary": Variant("llama", {"vocab_size": 37}, {"make_vocab_size_divisible_by": 16}),
    "llama eps": Variant("llama", {"rms_norm_eps": 0.05}),
    "qwen2": Variant("qwen2"),
    "qwen2 tied, rope": Variant("qwen2", {"tie": True, "rope_parameters": HOT_ROPE}),
    "qwen3": Variant("qwen3"),
    "qwen3 wide heads, tied": Variant("qwen3", {"head_dim": 32, "tie": True}),
    "qwen3 narrow heads, rope": Variant("qwen3", {"head_dim": 8, "rope_parameters": HOT_ROPE}),
    "experts, weights that sum to 1": Variant("qwen3_moe"),
    "experts, plain probabilities": Variant("qwen3_moe", {"norm_topk_prob": False}),
    "experts, one a token": Variant("qwen3_moe", {"norm_topk_prob": False, "num_experts_per_tok": 1, "tie": True}),
    "experts, 3 of 6": Variant("qwen3_moe", {"num_experts": 6, "num_experts_per_tok": 3}),
}
RECOMPUTE = ("full", "selective")


def token_ids(seed: int) -> torch.Tensor:
    return torch.randint(0, 32, (sum(LENGTHS),), generator=torch.Generator().manual_seed(seed))


def build(path: str, **settings: Any) -> Any:
    from m2po_megatron.initialize import initialize
    from m2po_megatron.policy.forward import build_policy
    from m2po_megatron.policy.settings import ModelSettings, OptimizerSettings, ParallelSettings
    from m2po_megatron.weights.hf_io import load_hf

    world = initialize(ParallelSettings(), seed=0)
    return build_policy(
        ModelSettings(hf_path=path, **settings),
        ParallelSettings(),
        OptimizerSettings(),
        train_iters=1,
        device=world.device,
        load_weights=lambda chunks, arch: load_hf(chunks, arch, path),
    )


def logits_of(policy: Any, ids: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """Logits [t, V] of one packed row."""
    from m2po_megatron.policy.attention import pack_sequences
    from m2po_megatron.policy.model import output_weight

    row = pack_sequences(lengths, ids.device)
    hidden = policy.models[0](ids[None], None, None, packed_seq_params=row)[0]
    return (hidden.float() @ output_weight(policy.gpt).float().t())[:, : policy.architecture.vocab_size]


def gradients(policy: Any) -> tuple[int, dict[str, torch.Tensor]]:
    """(how often attention ran, gradient of each parameter)"""
    calls: list[int] = []
    for layer in policy.gpt.decoder.layers:
        layer.self_attention.core_attention.register_forward_hook(lambda *_: calls.append(1))
    policy.models[0].zero_grad_buffer()
    logits = logits_of(policy, token_ids(0), LENGTHS)
    (torch.log_softmax(logits, -1)[torch.arange(len(logits)), token_ids(5)].mean()).backward()
    return len(calls), {name: p.main_grad.clone() for name, p in policy.gpt.named_parameters()}


def on_one_rank(rank: int, paths: dict[str, str]) -> dict[str, Any]:
    """Everything the tests of this file compare, from one process."""
    cpu.install()

    out: dict[str, Any] = {"logits": {}, "gradients": {}}
    for name, path in paths.items():
        policy = build(path, **VARIANTS[name].settings)
        with torch.no_grad():
            out["logits"][name] = logits_of(policy, token_ids(0), LENGTHS)
            if name == "llama":
                out["neighbours"] = neighbours(policy)
        leave_layout()
    for granularity in (None, *RECOMPUTE):
        out["gradients"][granularity] = gradients(build(paths["llama"], recompute_granularity=granularity))
        leave_layout()
    policy = build(paths["llama"], bf16=True)
    out["dtypes"] = {p.dtype for p in policy.gpt.parameters()}, {p.main_grad.dtype for p in policy.gpt.parameters()}
    with torch.no_grad():
        out["bf16"] = logits_of(policy, token_ids(0), LENGTHS)
    leave_layout()
    return out


def neighbours(policy: Any) -> dict[str, torch.Tensor]:
    """Logits of the third sequence as it stands, with other neighbours, in another order, and alone."""
    start, n = sum(LENGTHS[:2]), LENGTHS[2]
    row, other = token_ids(0), token_ids(1)
    mine = row[start : start + n]
    other[start : start + n] = mine
    pieces = list(row.split(LENGTHS))
    order = [2, 5, 0, 4, 1, 3]
    moved = torch.cat([pieces[i] for i in order])
    return {
        "as it is": logits_of(policy, row, LENGTHS)[start : start + n],
        "other neighbours": logits_of(policy, other, LENGTHS)[start : start + n],
        "moved": logits_of(policy, moved, [LENGTHS[i] for i in order])[:n],
        "alone": logits_of(policy, mine, [n]),
    }


@pytest.fixture(scope="module")
def model_paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {
        name: str(make_tiny_model(tmp_path_factory.mktemp("model"), kind=variant.kind, **variant.config))
        for name, variant in VARIANTS.items()
    }


@pytest.fixture(scope="module")
def found(model_paths: dict[str, str]) -> dict[str, Any]:
    return run_ranks(on_one_rank, 1, model_paths)[0]


def transformers_logits(path: str | Path) -> torch.Tensor:
    """Each sequence by itself, without packing or padding."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        return torch.cat([model(ids[None]).logits[0] for ids in token_ids(0).split(LENGTHS)])


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_transformers(found: dict[str, Any], model_paths: dict[str, str], name: str) -> None:
    expected = transformers_logits(model_paths[name])
    assert found["logits"][name].shape == expected.shape
    assert expected.std() > 0.3
    assert (found["logits"][name] - expected).abs().max() <= 1e-5


@pytest.mark.slow
def test_packed_sequences_do_not_see_each_other(found: dict[str, Any]) -> None:
    logits = found["neighbours"]
    assert torch.equal(logits["other neighbours"], logits["as it is"])
    for name in ("moved", "alone"):
        torch.testing.assert_close(logits[name], logits["as it is"], rtol=0, atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("granularity", RECOMPUTE)
def test_recomputation_changes_no_gradient(found: dict[str, Any], granularity: str) -> None:
    (once, plain), (twice, recomputed) = found["gradients"][None], found["gradients"][granularity]
    assert twice == 2 * once > 0
    assert plain.keys() == recomputed.keys()
    for name, gradient in plain.items():
        assert gradient.abs().max() > 0
        torch.testing.assert_close(recomputed[name], gradient, rtol=1e-6, atol=1e-8)


@pytest.mark.slow
def test_bf16_holds_weights_in_bf16_and_gradients_in_float32(found: dict[str, Any]) -> None:
    assert found["dtypes"] == ({torch.bfloat16}, {torch.float32})
    error = (found["bf16"] - found["logits"]["llama"]).abs().max()
    assert 1e-4 < error < 0.2


@pytest.mark.slow
def test_the_two_kinds_of_expert_weights_differ(found: dict[str, Any], model_paths: dict[str, str]) -> None:
    """The same tensors, so that a field that is not read would show in the comparison with transformers."""
    summed, plain = (found["logits"][f"experts, {kind}"] for kind in ("weights that sum to 1", "plain probabilities"))
    assert (summed - plain).abs().max() > 0.1


WRONG = {
    "--expert-model-parallel-size 2: LlamaForCausalLM has no experts": ("llama", {}, {"expert_model_parallel_size": 2}),
    "--expert-tensor-parallel-size 2: LlamaForCausalLM has no experts": ("llama", {}, {"expert_tensor_parallel_size": 2}),
    "--moe-router-load-balancing-type aux_loss: LlamaForCausalLM has no experts": (
        "llama",
        {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1},
        {},
    ),
    "--moe-aux-loss-coeff 0.1: needs --moe-router-load-balancing-type aux_loss": ("experts", {"moe_aux_loss_coeff": 0.1}, {}),
    "--moe-aux-loss-coeff -0.1: must be a number that is not negative": (
        "experts",
        {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": -0.1},
        {},
    ),
    "--expert-model-parallel-size 3: the model's 4 experts do not divide by it": (
        "experts",
        {},
        {"expert_model_parallel_size": 3},
    ),
    "--expert-tensor-parallel-size 5: the width of the model's experts (48) does not divide by it": (
        "experts",
        {},
        {"expert_tensor_parallel_size": 5},
    ),
    "--expert-tensor-parallel-size 2: other than --tensor-model-parallel-size 1 it needs --expert-model-parallel-size above "
    "1": (
        "experts",
        {},
        {"expert_tensor_parallel_size": 2},
    ),
    "--tensor-model-parallel-size 2: a model with experts needs --sequence-parallel beside it": (
        "experts",
        {},
        {"tensor_model_parallel_size": 2},
    ),
}


@pytest.mark.parametrize("said", WRONG)
def test_what_does_not_fit_the_experts_names_the_flag(tiny_model: Callable[..., Path], said: str) -> None:
    from m2po_megatron.policy.architecture import read_architecture
    from m2po_megatron.policy.model import check_experts
    from m2po_megatron.policy.settings import ModelSettings, ParallelSettings

    kind, model, parallel = WRONG[said]
    arch = read_architecture(tiny_model("qwen3_moe" if kind == "experts" else kind))
    with pytest.raises(ValueError) as error:
        check_experts(arch, ModelSettings(**model), ParallelSettings(**parallel))
    assert str(error.value) == said
