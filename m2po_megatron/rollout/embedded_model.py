"""The embedded engine's arithmetic: prefill, decode step, sampling, log-probs; everything over the whole batch at once.

Log-probs come from the same function that the trainer uses (kernels.logprob), at the sampling temperature.

Letters: B = running sequences, P = prompts of a prefill, L = longest of them, E = hidden size, V = vocabulary, N = rows
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from m2po_megatron.kernels.logprob import vocab_parallel_logprob
from m2po_megatron.rollout.embedded_cache import SlotCache

logger = logging.getLogger(__name__)

SUPPORTED_MODELS = ("llama", "qwen2", "qwen3", "qwen3_moe")
LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
"""Rotary scalings that depend on the longest sequence of a batch: a token's log-prob would depend on its neighbours."""
SAMPLING_CHUNK = 1 << 22
"""Float64 numbers that sampling may hold at once (32 MiB): rows are sampled in chunks of this many / V."""
PAD_ID = 0
"""Fills prefill rows on the right, out of sight of every real token."""


class ModelError(ValueError):
    """The model directory cannot be served; the text names the directory and why."""


def load_model(path: str | Path, dtype: torch.dtype) -> PreTrainedModel:
    """The causal LM of a Hugging Face directory, in eval mode. ModelError where it is unusable."""
    directory = Path(path)
    if not (directory / "config.json").is_file():
        raise ModelError(f"--model-path {directory} has no config.json; it must be a Hugging Face model directory")
    try:
        # Before the weights are read: for an unknown model these would be reported one by one.
        _check_supported(AutoConfig.from_pretrained(directory, local_files_only=True), directory)
        model, info = AutoModelForCausalLM.from_pretrained(
            directory, dtype=dtype, output_loading_info=True, local_files_only=True, attn_implementation="sdpa"
        )
    except ModelError:
        raise
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"--model-path {directory} cannot be loaded: {error}") from error
    for what in ("missing_keys", "mismatched_keys"):
        if info.get(what):
            raise ModelError(f"--model-path {directory}: {what.replace('_', ' ')}: {sorted(map(str, info[what]))[:5]}")
    model.requires_grad_(False)
    return model.eval()


def _check_supported(config: Any, directory: Path) -> None:
    if config.model_type not in SUPPORTED_MODELS:
        kind, supported = config.model_type, ", ".join(SUPPORTED_MODELS)
        raise ModelError(f"{directory}: the embedded engine does not support model type {kind!r} (only {supported})")
    if "sliding_attention" in (getattr(config, "layer_types", None) or []):
        raise ModelError(f"{directory}: the embedded engine does not support sliding-window attention; use SGLang")
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in LENGTH_DEPENDENT_ROPE:
        kind = rope["rope_type"]
        raise ModelError(f"{directory}: the embedded engine does not support rope type {kind!r}; use SGLang")


class EngineModel:
    """A model with its cache. Rows of the cache are the caller's (the scheduler's) to give out."""

    def __init__(self, model: PreTrainedModel, seed: int) -> None:
        config = model.config
        self.model = model
        self.device = model.device
        self.vocab_size = int(model.get_output_embeddings().weight.shape[0])
        self.context_length = int(config.max_position_embeddings)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.cache = SlotCache(config.num_hidden_layers, config.num_key_value_heads, head_dim, model.dtype, self.device)
        self._generator = torch.Generator(device=self.device).manual_seed(seed)

    def prefill(self, prompts: list[list[int]], rows: list[int], sources: list[int]) -> torch.Tensor:
        """Runs P token lists, right-padded together; cache row rows[i] gets list sources[i]. Gives hidden [P, L, E]."""
        lengths = [len(ids) for ids in prompts]
        longest = max(lengths)
        padded = [ids + [PAD_ID] * (longest - length) for ids, length in zip(prompts, lengths, strict=True)]
        self.cache.place_prefill(self._ids(rows), self._ids(sources))
        # Causal attention alone keeps the padding, on the right, out of sight: no mask, and positions count from 0.
        return self._hidden(self._ids(padded), torch.arange(longest, device=self.device).unsqueeze(0), None)

    def decode(self, tokens: torch.Tensor, positions: torch.Tensor, longest: int) -> torch.Tensor:
        """One step of rows 0..B-1: int64 [B] tokens at int64 [B] positions, the largest longest - 1. Logits [B, V]."""
        self.cache.place_decode(positions, longest)
        seen = torch.arange(longest, device=self.device) <= positions.unsqueeze(1)
        hidden = self._hidden(tokens.unsqueeze(1), positions.unsqueeze(1), seen[:, None, None, :])
        return self.logits(hidden[:, 0])

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 logits [N, V] of hidden states [N, E]."""
        logits: torch.Tensor = self.model.get_output_embeddings()(hidden)
        return logits.float()

    def prompt_logprobs(self, hidden: torch.Tensor, ids: list[int], start: int) -> list[float | None]:
        """Temperature-1 log-probs of ids[start:] from hidden [L, E]; entry 0 is None (SGLang's convention)."""
        if start >= len(ids) - 1:
            return [None] * (len(ids) - start)
        logits = self.logits(hidden[start : len(ids) - 1])
        values, _ = vocab_parallel_logprob(logits, self._ids(ids[start + 1 :]), temperature=1.0, entropy="none")
        return [None, *values.tolist()]

    def sample(self, logits: torch.Tensor, temperatures: list[float]) -> tuple[torch.Tensor, torch.Tensor]:
        """Next tokens int64 [N] and their log-probs float32 [N] at each row's temperature, from float32 logits [N, V].

        Temperature 0 takes the most likely token and reports its log-prob at temperature 1. A row whose logits are not
        finite gets a log-prob that is not finite either: the caller refuses it.
        """
        if len(distinct := set(temperatures)) == 1:
            return self._sample_at(logits, distinct.pop())
        tokens = torch.empty(len(temperatures), dtype=torch.int64, device=self.device)
        logprobs = torch.empty(len(temperatures), dtype=torch.float32, device=self.device)
        for temperature in sorted(distinct):
            rows = self._ids([row for row, value in enumerate(temperatures) if value == temperature])
            tokens[rows], logprobs[rows] = self._sample_at(logits.index_select(0, rows), temperature)
        return tokens, logprobs

    def _sample_at(self, logits: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        if temperature == 0.0:
            tokens = logits.argmax(-1)
            temperature = 1.0
        else:
            size = max(1, SAMPLING_CHUNK // logits.shape[1])
            tokens = torch.cat([self._draw(chunk / temperature) for chunk in logits.split(size)])
        logprobs, _ = vocab_parallel_logprob(logits, tokens, temperature=temperature, entropy="none")
        return tokens, logprobs

    def _draw(self, logits: torch.Tensor) -> torch.Tensor:
        """int64 [N] drawn from softmax(logits [N, V]) by inverting the cumulative distribution.

        In float64: in float32 no token of probability below 6e-8 behind the likely ones would ever be drawn. The first
        index whose sum exceeds the draw is taken, so a token of probability 0 never is.
        """
        sums = logits.softmax(-1).double().cumsum(-1)
        draws = torch.rand(logits.shape[0], 1, dtype=torch.float64, device=self.device, generator=self._generator)
        return torch.searchsorted(sums, draws * sums[:, -1:], right=True).squeeze(1).clamp_(max=logits.shape[1] - 1)

    def _hidden(self, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """The decoder without its output layer: ids [N, L] -> [N, L, E]."""
        output = self.model.base_model(
            input_ids=ids, position_ids=positions, attention_mask=mask, cache=self.cache, use_cache=True
        )
        hidden: torch.Tensor = output.last_hidden_state
        return hidden

    def _ids(self, values: list[Any]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)
