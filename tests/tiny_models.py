"""Tiny random Hugging Face models for tests: a safetensors directory with a character-level tokenizer, seeded.

Not a test module. The `tiny_model` fixture of conftest.py hands out directories made here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

PAD_ID, EOS_ID, UNK_ID = 0, 1, 2
CHARACTERS = "0123456789+-*=() "
MIN_VOCAB_SIZE = 3 + len(CHARACTERS)

KINDS: dict[str, tuple[type, type]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}


def make_tiny_model(
    path: str | Path, kind: str = "llama", tie: bool = False, vocab_size: int = 32, seed: int = 0, **overrides: Any
) -> Path:
    """Saves a random model of `kind` (llama, qwen2, qwen3 or qwen3_moe) under `path` and returns it as a Path.

    float32, 2 layers, hidden 64, 4 heads, 2 KV heads (grouped), head size 16, and of qwen3_moe 4 experts of width 48, 2 of
    them for a token; `overrides` go to the config and win. Norm
    weights and biases are random too, so that a forgotten one shows, and the logits are spread enough (standard
    deviation about 1) for log-probs to differ between seeds and between temperatures.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        raise ValueError(f"vocab_size must be at least {MIN_VOCAB_SIZE} for the character tokenizer, got {vocab_size}")
    model = tiny_network(kind=kind, tie=tie, vocab_size=vocab_size, seed=seed, **overrides)
    model.save_pretrained(path)
    tiny_tokenizer(vocab_size).save_pretrained(path)
    return Path(path)


def tiny_network(
    kind: str = "llama", tie: bool = False, vocab_size: int = 32, seed: int = 0, **overrides: Any
) -> PreTrainedModel:
    """The same model in memory, in eval mode; the global generator of torch is left as it was."""
    config_class, model_class = KINDS[kind]
    settings: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tie,
        "bos_token_id": None,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
        "dtype": "float32",
    }
    settings.update(EXPERTS if kind == "qwen3_moe" else {})
    settings.update(overrides)
    config = config_class(**settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = model_class(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("norm.weight"):
                    parameter.normal_(1.0, 0.1)
                elif parameter.dim() == 1:
                    parameter.normal_(0.0, 0.1)
                elif name in ("lm_head.weight", "model.embed_tokens.weight"):
                    parameter.normal_(0.0, config.hidden_size**-0.5)
                else:
                    parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
    model.generation_config.eos_token_id = EOS_ID
    model.generation_config.pad_token_id = PAD_ID
    return model.eval()


def tiny_tokenizer(vocab_size: int = 32) -> PreTrainedTokenizerFast:
    """One token a character of CHARACTERS; 0 pad, 1 end of sequence, 2 unknown; ids without a use are <rN>."""
    tokens = ["<pad>", "<eos>", "<unk>", *CHARACTERS]
    tokens += [f"<r{index}>" for index in range(len(tokens), vocab_size)]
    tokenizer = Tokenizer(models.WordLevel({token: index for index, token in enumerate(tokens)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", clean_up_tokenization_spaces=False
    )
