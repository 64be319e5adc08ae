"""What a Hugging Face config says about a decoder, dense or of experts, checked: every field mapped, or refused by name.

A field that is silently ignored (a rope scaling, a sliding window) gives a model that trains and is wrong; so what this
version does not build is an error that names the field and its value.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

SUPPORTED = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM")


@dataclass(frozen=True)
class Architecture:
    """The numbers of one model, in Hugging Face's words. The last four are 0 and None in a dense model; in one of experts
    every layer has them, and `ffn_hidden_size` belongs to no layer."""

    name: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    norm_eps: float
    rope_theta: float
    tied_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    num_experts: int = 0
    experts_per_token: int = 0
    moe_ffn_hidden_size: int = 0
    norm_topk_prob: bool | None = None  # the chosen experts' weights are made to sum to 1


def read_architecture(hf_path: str | Path) -> Architecture:
    """Read `config.json` of a Hugging Face directory.

    Raises ValueError that names the directory, the field and what is supported.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    if not (Path(hf_path) / "config.json").is_file():
        raise ValueError(f"--hf-path {hf_path}: no config.json there; give a Hugging Face model directory")
    try:
        config = AutoConfig.from_pretrained(str(hf_path), local_files_only=True, trust_remote_code=False)
    except (ValueError, OSError, KeyError, TypeError, ArithmeticError, StrictDataclassError) as error:
        raise ValueError(f"--hf-path {hf_path}: config.json cannot be read: {error}") from error
    # A configuration without `architectures` is read as its kind's causal model, as transformers itself does.
    names = getattr(config, "architectures", None) or [type(config).__name__.replace("Config", "ForCausalLM")]
    if names[0] not in SUPPORTED:
        raise ValueError(
            f"--hf-path {hf_path}: architecture {names[0]} is not supported; supported are {', '.join(SUPPORTED)}"
        )
    _refuse_unmapped(hf_path, config)
    heads = config.num_attention_heads
    architecture = Architecture(
        name=names[0],
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.intermediate_size,
        num_heads=heads,
        num_key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        vocab_size=config.vocab_size,
        max_positions=config.max_position_embeddings,
        norm_eps=config.rms_norm_eps,
        rope_theta=_rope_theta(config),
        tied_embeddings=bool(config.tie_word_embeddings),
        qkv_bias=names[0] == "Qwen2ForCausalLM",
        qk_norm=names[0] in ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM"),
        **_experts(names[0], config),
    )
    _check_numbers(hf_path, architecture)
    return architecture


def _experts(name: str, config: Any) -> dict[str, Any]:
    if name != "Qwen3MoeForCausalLM":
        return {}
    return {
        "num_experts": config.num_experts,
        "experts_per_token": config.num_experts_per_tok,
        "moe_ffn_hidden_size": config.moe_intermediate_size,
        "norm_topk_prob": bool(config.norm_topk_prob),
    }


def _check_numbers(hf_path: str | Path, architecture: Architecture) -> None:
    numbers = {
        "num_hidden_layers": architecture.num_layers,
        "hidden_size": architecture.hidden_size,
        "intermediate_size": architecture.ffn_hidden_size,
        "num_attention_heads": architecture.num_heads,
        "num_key_value_heads": architecture.num_key_value_heads,
        "head_dim": architecture.head_dim,
        "vocab_size": architecture.vocab_size,
        "max_position_embeddings": architecture.max_positions,
    }
    if architecture.norm_topk_prob is not None:
        numbers["num_experts"] = architecture.num_experts
        numbers["num_experts_per_tok"] = architecture.experts_per_token
        numbers["moe_intermediate_size"] = architecture.moe_ffn_hidden_size
        del numbers["intermediate_size"]
    for name, value in numbers.items():
        if value < 1:
            raise ValueError(f"--hf-path {hf_path}: {name} = {value} in config.json; it must be at least 1")
    if architecture.num_heads % architecture.num_key_value_heads:
        raise ValueError(
            f"--hf-path {hf_path}: num_attention_heads = {architecture.num_heads} in config.json is not a multiple of "
            f"num_key_value_heads = {architecture.num_key_value_heads}"
        )
    if architecture.experts_per_token > architecture.num_experts:
        raise ValueError(
            f"--hf-path {hf_path}: num_experts_per_tok = {architecture.experts_per_token} in config.json is more than "
            f"num_experts = {architecture.num_experts}"
        )
    if architecture.experts_per_token == 1 and architecture.norm_topk_prob:
        raise ValueError(
            f"--hf-path {hf_path}: num_experts_per_tok = 1 in config.json with norm_topk_prob = True: the one weight is "
            "always 1, and the router could not be trained"
        )


def _rope_theta(config: Any) -> float:
    """transformers 5 keeps it in `rope_parameters`, 4 in `rope_theta`."""
    parameters = getattr(config, "rope_parameters", None) or {}
    return float(parameters.get("rope_theta") or getattr(config, "rope_theta", None) or 10000.0)


def _refuse_unmapped(hf_path: str | Path, config: Any) -> None:
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    layers = getattr(config, "layer_types", None) or []
    unmapped = {
        "rope_type": kind if kind != "default" else None,
        "partial_rotary_factor": rope.get("partial_rotary_factor") if rope.get("partial_rotary_factor", 1.0) != 1.0 else None,
        "attention_bias": getattr(config, "attention_bias", False) or None,
        "mlp_bias": getattr(config, "mlp_bias", False) or None,
        "use_sliding_window": getattr(config, "use_sliding_window", False) or None,
        "layer_types": next((kind for kind in layers if kind != "full_attention"), None),
        "quantization_config": "present" if getattr(config, "quantization_config", None) else None,
        "decoder_sparse_step": step if (step := getattr(config, "decoder_sparse_step", 1)) != 1 else None,
        "mlp_only_layers": getattr(config, "mlp_only_layers", None) or None,
        "hidden_act": config.hidden_act if config.hidden_act != "silu" else None,
    }
    for name, value in unmapped.items():
        if value is not None:
            raise ValueError(f"--hf-path {hf_path}: {name} = {value} is not supported yet by this version")
