"""Micro-batches through megatron-core's forward-backward function; log-probs on the last pipeline stage.

Letters: t = tokens of a micro-batch, V/TP = this tensor-parallel rank's part of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from m2po_megatron.data.packing import MicroBatch
from m2po_megatron.kernels.logprob import linear_logprob
from m2po_megatron.policy.architecture import Architecture, read_architecture
from m2po_megatron.policy.attention import pack_sequences
from m2po_megatron.policy.model import build_model, layer_spec_name, output_weight, virtual_stages, wrap_model
from m2po_megatron.policy.optimizer import build_optimizer
from m2po_megatron.policy.settings import ModelSettings, OptimizerSettings, ParallelSettings

LogprobConsumer = Callable[[int, MicroBatch, Tensor, Tensor | None], tuple[Tensor, dict[str, Tensor]]]
"""(micro-batch number, micro-batch, log-probs [t], entropy [t] or None) -> (this micro-batch's loss, sums to report)."""


@dataclass
class Policy:
    """This rank's part of the model in training, with everything that moves it."""

    architecture: Architecture
    settings: ModelSettings
    chunks: list[GPTModel]  # one, or one for each virtual pipeline stage
    models: list[DistributedDataParallel]  # the same, as trained
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    device: torch.device

    @property
    def gpt(self) -> GPTModel:
        """The piece with the highest layers, which on the last stage ends in the hidden states."""
        return self.chunks[-1]

    @property
    def is_last_stage(self) -> bool:
        return bool(self.gpt.post_process)

    @property
    def keep_precision(self) -> dict[str, bool]:
        """Megatron's bfloat16 wrapper turns the last stage's output into float32 unless told not to."""
        return {"fp32_output": False} if self.gpt.config.bf16 else {}


def build_policy(
    model: ModelSettings,
    parallel: ParallelSettings,
    optimizer: OptimizerSettings,
    *,
    train_iters: int,
    device: torch.device,
    load_weights: Callable[[list[GPTModel], Architecture], None],
) -> Policy:
    """Build, fill with `load_weights(chunks, architecture)`, wrap. Weights come before the optimizer, which copies them."""
    architecture = read_architecture(model.hf_path)
    _check_divisible(architecture, parallel)
    chunks = build_model(architecture, model, parallel, device)
    load_weights(chunks, architecture)
    wrapped = wrap_model(chunks, optimizer)
    chunks[0].config.finalize_model_grads_func = _finalize_without_scaling
    adam, scheduler = build_optimizer(wrapped, optimizer, train_iters)
    return Policy(architecture, model, chunks, wrapped, adam, scheduler, device)


def _check_divisible(architecture: Architecture, parallel: ParallelSettings) -> None:
    size = parallel.tensor_model_parallel_size
    for what, number in (
        ("attention heads", architecture.num_heads),
        ("key/value heads", architecture.num_key_value_heads),
        ("feed-forward width", 0 if architecture.num_experts else architecture.ffn_hidden_size),
    ):
        if number % size:
            raise ValueError(f"--tensor-model-parallel-size {size}: the model's {what} ({number}) do not divide by it")
    pipeline, pieces = parallel.pipeline_model_parallel_size, virtual_stages(parallel) or 1
    if architecture.num_layers % (pipeline * pieces):
        virtual = f" x --num-virtual-stages-per-pipeline-rank {pieces}" if pieces > 1 else ""
        raise ValueError(
            f"--pipeline-model-parallel-size {pipeline}{virtual}: the model's {architecture.num_layers} layers do not "
            "divide by it"
        )


def _finalize_without_scaling(model: Any, num_tokens: Tensor | None = None, *args: Any, **kwargs: Any) -> None:
    """Megatron divides by the token count here; our loss already carries the global denominator."""
    finalize_model_grads(model, None, *args, **kwargs)


def run_micro_batches(
    policy: Policy,
    micro_batches: Sequence[MicroBatch],
    consume: LogprobConsumer,
    *,
    temperature: float,
    entropy: str = "none",
    forward_only: bool = False,
) -> list[dict[str, Tensor]]:
    """Forward every micro-batch, and backward unless `forward_only`. Collective over the model-parallel ranks.

    `consume` is called on the last pipeline stage only, once a micro-batch; its loss is summed as it is, neither
    averaged over micro-batches nor over ranks. Returns its reports, in order ([] on other stages). Gradients are reduced
    over data-parallel ranks when this returns.
    """

    def forward_step(batches: Iterator[tuple[int, MicroBatch]], model: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
        number, micro_batch = next(batches)
        hidden = model(
            micro_batch.token_ids[None],
            None,
            None,
            packed_seq_params=pack_sequences(
                micro_batch.lengths,
                micro_batch.token_ids.device,
                context_rank=parallel_state.get_context_parallel_rank(),
                context_size=parallel_state.get_context_parallel_world_size(),
                layer_spec=layer_spec_name(),
            ),
            **policy.keep_precision,
        )

        def loss(hidden: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            logprobs, entropies = _logprobs(policy, hidden, micro_batch, temperature, entropy)
            value, report = consume(number, micro_batch, logprobs, entropies)
            return value, torch.zeros((), dtype=torch.int), report

        return hidden, loss

    iterators = [enumerate(micro_batches) for _ in policy.models]  # each virtual stage goes through all of them
    with torch.set_grad_enabled(not forward_only):
        reports: list[dict[str, Tensor]] = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=policy.models if len(policy.models) > 1 else policy.models[0],
            num_microbatches=len(micro_batches),
            seq_length=int(micro_batches[0].token_ids.numel()),  # real lengths travel with the tensors
            micro_batch_size=1,
            forward_only=forward_only,
        )
    return reports


def _logprobs(
    policy: Policy, hidden: Tensor, micro_batch: MicroBatch, temperature: float, entropy: str
) -> tuple[Tensor, Tensor | None]:
    """(log-probs [t], entropies [t] or None) from the last stage's hidden states [1, t, H] ([1, t/TP, H] under SP)."""
    config = policy.gpt.config
    return linear_logprob(
        hidden[0],
        output_weight(policy.gpt),
        micro_batch.targets,
        mode=policy.settings.logprob_mode,  # type: ignore[arg-type]
        temperature=temperature,
        entropy=entropy,  # type: ignore[arg-type]
        tp_group=parallel_state.get_tensor_model_parallel_group(),
        sequence_parallel=config.sequence_parallel,
        vocab_size=policy.architecture.vocab_size,
        logits_dtype=torch.float32 if policy.settings.logits_dtype == "fp32" else config.params_dtype,
        chunk_tokens=policy.settings.logprob_chunk_tokens,
    )


def compute_logprobs(policy: Policy, micro_batches: Sequence[MicroBatch], *, temperature: float) -> list[Tensor]:
    """Pass A: log-probs [t] of every micro-batch under the current weights, no gradient. [] but on the last stage."""
    logprobs: list[Tensor] = []

    def keep(number: int, batch: MicroBatch, value: Tensor, _: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
        logprobs.append(value)
        return value.new_zeros(()), {}

    run_micro_batches(policy, micro_batches, keep, temperature=temperature, forward_only=True)
    return logprobs
