"""What is read from a Hugging Face config, and what is refused by name rather than ignored."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from m2po_megatron.policy.architecture import read_architecture


@pytest.fixture
def edited(tiny_model: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """Factory: edited(kind, field=value, ...) -> a directory whose config.json differs in these fields; None removes one."""

    def edit(kind: str = "llama", **fields: Any) -> Path:
        path = tmp_path / "edited"
        path.mkdir(exist_ok=True)
        shutil.copy(tiny_model(kind) / "config.json", path)
        config = json.loads((path / "config.json").read_text())
        config.update(fields)
        (path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
        return path

    return edit


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_every_number_comes_from_the_config(tiny_model: Callable[..., Path], kind: str) -> None:
    path = tiny_model(
        kind,
        tie=kind == "qwen2",
        vocab_size=41,
        num_hidden_layers=3,
        hidden_size=48,
        intermediate_size=80,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=12 if kind == "qwen3" else 8,
        max_position_embeddings=77,
        rms_norm_eps=3e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 54321.0},
    )
    arch = read_architecture(path)
    assert arch.name == {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}[kind]
    assert (arch.num_layers, arch.hidden_size, arch.ffn_hidden_size) == (3, 48, 80)
    assert (arch.num_heads, arch.num_key_value_heads, arch.head_dim) == (6, 3, 12 if kind == "qwen3" else 8)
    assert (arch.vocab_size, arch.max_positions, arch.norm_eps, arch.rope_theta) == (41, 77, 3e-5, 54321.0)
    assert (arch.tied_embeddings, arch.qkv_bias, arch.qk_norm) == (kind == "qwen2", kind == "qwen2", kind == "qwen3")


def test_a_dense_model_has_no_experts(tiny_model: Callable[..., Path]) -> None:
    arch = read_architecture(tiny_model("qwen3"))
    assert (arch.num_experts, arch.experts_per_token, arch.moe_ffn_hidden_size, arch.norm_topk_prob) == (0, 0, 0, None)


@pytest.mark.parametrize("renormalised", [False, True])
@pytest.mark.parametrize("spelling", ["num_experts", "num_local_experts"])
def test_experts_come_from_the_config(edited: Callable[..., Path], renormalised: bool, spelling: str) -> None:
    fields = {"num_experts_per_tok": 3, "moe_intermediate_size": 40, "norm_topk_prob": renormalised}
    arch = read_architecture(edited("qwen3_moe", **{"num_local_experts": None, spelling: 6}, **fields))
    assert (arch.name, arch.qk_norm, arch.qkv_bias) == ("Qwen3MoeForCausalLM", True, False)
    assert (arch.num_experts, arch.experts_per_token, arch.moe_ffn_hidden_size) == (6, 3, 40)
    assert arch.norm_topk_prob is renormalised


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"num_local_experts": 0}, "num_experts = 0 in config.json; it must be at least 1"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok = 0 in config.json; it must be at least 1"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size = 0 in config.json; it must be at least 1"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok = 5 in config.json is more than num_experts = 4"),
        ({"num_experts_per_tok": 1}, "num_experts_per_tok = 1 in config.json with norm_topk_prob = True"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_experts_that_make_no_model_name_the_field(
    edited: Callable[..., Path], fields: dict[str, Any], said: str
) -> None:
    path = edited("qwen3_moe", **fields)
    with pytest.raises(ValueError) as error:
        read_architecture(path)
    assert str(error.value).startswith(f"--hf-path {path}: {said}")


def test_one_expert_a_token_is_read_where_its_weight_is_its_probability(edited: Callable[..., Path]) -> None:
    arch = read_architecture(edited("qwen3_moe", num_experts_per_tok=1, norm_topk_prob=False, intermediate_size=0))
    assert arch.experts_per_token == 1


def test_the_spelling_of_transformers_4_is_read(edited: Callable[..., Path]) -> None:
    old = edited(rope_parameters=None, rope_theta=77777.0, rope_scaling=None, torch_dtype="bfloat16", dtype=None)
    assert read_architecture(old).rope_theta == 77777.0


def test_defaults_where_the_config_is_silent(edited: Callable[..., Path]) -> None:
    arch = read_architecture(edited(head_dim=None, num_key_value_heads=None, architectures=None))
    assert (arch.name, arch.head_dim, arch.num_key_value_heads) == ("LlamaForCausalLM", 16, 4)


@pytest.mark.parametrize(
    ("kind", "fields", "said"),
    [
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_parameters": None}, "rope_type = linear"),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "rope_parameters": None}, "rope_type = dynamic"),
        ("qwen3", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4}}, "rope_type = yarn"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ("llama", {"attention_bias": True}, "attention_bias = True"),
        ("qwen3", {"attention_bias": True}, "attention_bias = True"),
        ("llama", {"mlp_bias": True}, "mlp_bias = True"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 16}, "use_sliding_window = True"),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types = sliding_attention"),
        ("qwen2", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config = present"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act = gelu"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step = 2"),
        ("qwen3_moe", {"mlp_only_layers": [1]}, "mlp_only_layers = [1]"),
        ("qwen3_moe", {"hidden_act": "gelu"}, "hidden_act = gelu"),
    ],
)
def test_what_is_not_built_is_refused_by_name(
    edited: Callable[..., Path], kind: str, fields: dict[str, Any], said: str
) -> None:
    path = edited(kind, **fields)
    with pytest.raises(ValueError) as error:
        read_architecture(path)
    assert str(error.value) == f"--hf-path {path}: {said} is not supported yet by this version"


@pytest.mark.parametrize(
    "architecture", ["GPT2LMHeadModel", "MistralForCausalLM", "Qwen2MoeForCausalLM", "LlamaForSequenceClassification"]
)
def test_an_unsupported_architecture_is_named_with_the_supported_ones(
    edited: Callable[..., Path], architecture: str
) -> None:
    path = edited(architectures=[architecture])
    with pytest.raises(ValueError) as error:
        read_architecture(path)
    assert str(error.value) == (
        f"--hf-path {path}: architecture {architecture} is not supported; supported are "
        "LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM, Qwen3MoeForCausalLM"
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"hidden_size": "64"},
        {"hidden_size": 0},
        {"vocab_size": 0},
        {"num_hidden_layers": 0},
        {"num_key_value_heads": 3},
        {"head_dim": 15},
    ],
    ids=lambda fields: "-".join(map(str, *fields.items())),
)
def test_numbers_that_make_no_model_name_the_field(edited: Callable[..., Path], fields: dict[str, Any]) -> None:
    path = edited(**fields)
    with pytest.raises(ValueError, match=rf"^--hf-path {path}: (?s:.)*{next(iter(fields))}") as error:
        read_architecture(path)
    assert "config.json" in str(error.value)
    with pytest.raises(ValueError, match=f"^--hf-path {path}: config.json cannot be read"):
        read_architecture(edited(num_attention_heads=0))  # transformers itself stumbles


@pytest.mark.parametrize("content", ["", "{", "[1]", "{}", '{"model_type": "nobody"}', '"llama"'])
def test_a_config_that_cannot_be_read_names_the_directory(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=f"^--hf-path {tmp_path}: config.json cannot be read"):
        read_architecture(tmp_path)


def test_a_directory_without_config_is_said(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "gone"):
        with pytest.raises(ValueError, match=f"^--hf-path {path}: no config.json there"):
            read_architecture(path)
