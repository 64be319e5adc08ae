"""The policy in training: a megatron-core GPTModel built from a Hugging Face config.

TransformerEngine's layer spec is used where it is installed and there is a GPU; otherwise Megatron's local spec with our
norm and packed attention.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig

from m2po_megatron.policy.architecture import Architecture
from m2po_megatron.policy.attention import PackedAttention, PackedRotaryEmbedding
from m2po_megatron.policy.settings import ModelSettings, OptimizerSettings, ParallelSettings

logger = logging.getLogger(__name__)


class RMSNorm(torch.nn.RMSNorm):
    """The local spec's stock norm refuses sequence parallelism; this one marks its weight for the extra all-reduce."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def transformer_config(
    architecture: Architecture, model: ModelSettings, parallel: ParallelSettings
) -> TransformerConfig:
    """Megatron's configuration of this model under this layout. Every fusion that needs CUDA is off without it."""
    dtype = torch.bfloat16 if model.bf16 else torch.float32
    recompute: dict[str, Any] = {"recompute_granularity": model.recompute_granularity}
    if model.recompute_granularity == "full":
        at_once = 1 if model.recompute_num_layers is None else model.recompute_num_layers
        if at_once > architecture.num_layers:
            raise ValueError(f"--recompute-num-layers {at_once}: the model has {architecture.num_layers} layers")
        recompute.update(recompute_method=model.recompute_method or "uniform", recompute_num_layers=at_once)
    return TransformerConfig(
        num_layers=architecture.num_layers,
        hidden_size=architecture.hidden_size,
        ffn_hidden_size=architecture.ffn_hidden_size,
        num_attention_heads=architecture.num_heads,
        num_query_groups=architecture.num_key_value_heads,
        kv_channels=architecture.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=architecture.norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=architecture.qkv_bias,
        qk_layernorm=architecture.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_softmax_in_fp32=True,
        bf16=model.bf16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        autocast_dtype=dtype,
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=virtual_stages(parallel),
        overlap_p2p_comm=virtual_stages(parallel) is not None,  # the interleaved schedule knows no other way
        context_parallel_size=parallel.context_parallel_size,
        sequence_parallel=parallel.sequence_parallel,
        **_expert_config(architecture, model, parallel),
        variable_seq_lengths=True,  # micro-batches are packed rows of different lengths
        # The loss we hand over is already divided by the global denominator: Megatron must sum, never average.
        calculate_per_token_loss=True,
        use_cpu_initialization=True,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        batch_p2p_comm=False,
        **recompute,
    )


def _expert_config(architecture: Architecture, model: ModelSettings, parallel: ParallelSettings) -> dict[str, Any]:
    if not architecture.num_experts:
        return {"moe_token_dispatcher_type": model.moe_token_dispatcher_type}  # Megatron checks it without experts too
    return {
        "num_moe_experts": architecture.num_experts,
        "moe_router_topk": architecture.experts_per_token,
        "moe_ffn_hidden_size": architecture.moe_ffn_hidden_size,
        # The softmax over the chosen experts alone gives the same weights as one over all, made to sum to 1.
        "moe_router_pre_softmax": not architecture.norm_topk_prob,
        "moe_router_score_function": "softmax",
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": model.moe_router_load_balancing_type,
        "moe_aux_loss_coeff": model.moe_aux_loss_coeff,
        "moe_token_dispatcher_type": model.moe_token_dispatcher_type,
        "moe_grouped_gemm": layer_spec_name() == "transformer_engine",
        "expert_model_parallel_size": parallel.expert_model_parallel_size,
        "expert_tensor_parallel_size": _expert_tensor_size(parallel),
    }


def _expert_tensor_size(parallel: ParallelSettings) -> int:
    return parallel.expert_tensor_parallel_size or parallel.tensor_model_parallel_size


def check_experts(architecture: Architecture, model: ModelSettings, parallel: ParallelSettings) -> None:
    """Raise ValueError, naming the flag, for a layout or a setting that does not fit the model's experts, or their lack."""
    experts, size, shards = architecture.num_experts, parallel.expert_model_parallel_size, _expert_tensor_size(parallel)
    balanced = model.moe_router_load_balancing_type == "aux_loss"
    tensor, what = parallel.tensor_model_parallel_size, ""
    if not experts and size > 1:
        what = f"--expert-model-parallel-size {size}: {architecture.name} has no experts"
    elif not experts and parallel.expert_tensor_parallel_size not in (None, tensor):
        what = f"--expert-tensor-parallel-size {shards}: {architecture.name} has no experts"
    elif not experts and balanced:
        what = f"--moe-router-load-balancing-type aux_loss: {architecture.name} has no experts"
    elif not balanced and model.moe_aux_loss_coeff:
        what = f"--moe-aux-loss-coeff {model.moe_aux_loss_coeff}: needs --moe-router-load-balancing-type aux_loss"
    elif not 0 <= model.moe_aux_loss_coeff < float("inf"):
        what = f"--moe-aux-loss-coeff {model.moe_aux_loss_coeff}: must be a number that is not negative"
    elif experts and experts % size:
        what = f"--expert-model-parallel-size {size}: the model's {experts} experts do not divide by it"
    elif experts and architecture.moe_ffn_hidden_size % shards:
        width = architecture.moe_ffn_hidden_size
        what = f"--expert-tensor-parallel-size {shards}: the width of the model's experts ({width}) does not divide by it"
    elif experts and size == 1 and shards != tensor:  # Megatron would add up the experts' gradients over other ranks
        what = (
            f"--expert-tensor-parallel-size {shards}: other than --tensor-model-parallel-size {tensor} it needs "
            "--expert-model-parallel-size above 1"
        )
    elif experts and tensor > 1 and not parallel.sequence_parallel:
        what = f"--tensor-model-parallel-size {tensor}: a model with experts needs --sequence-parallel beside it"
    if what:
        raise ValueError(what)


def virtual_stages(parallel: ParallelSettings) -> int | None:
    """Pieces of the layers on each pipeline rank; None where there is one."""
    pieces = parallel.num_virtual_stages_per_pipeline_rank
    return pieces if pieces is not None and pieces > 1 else None


def padded_vocab_size(architecture: Architecture, model: ModelSettings, parallel: ParallelSettings) -> int:
    """The vocabulary with as many empty rows as make every shard a multiple of --make-vocab-size-divisible-by."""
    multiple = model.make_vocab_size_divisible_by * parallel.tensor_model_parallel_size
    return -(-architecture.vocab_size // multiple) * multiple


def layer_spec_name() -> str:
    """Which layer implementation this process uses, for the start-up line."""
    if HAVE_TE and torch.cuda.is_available():
        return "transformer_engine"
    return "local"


def _layer_specs(config: TransformerConfig, virtual_stage: int | None) -> Any:
    if layer_spec_name() == "transformer_engine":
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

        return get_gpt_layer_with_transformer_engine_spec(
            num_experts=config.num_moe_experts,
            moe_grouped_gemm=config.moe_grouped_gemm,
            qk_layernorm=config.qk_layernorm,
        )
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, qk_layernorm=config.qk_layernorm, normalization="RMSNorm"
    )
    parts: Any = spec.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    if config.qk_layernorm:
        parts.self_attention.submodules.q_layernorm = RMSNorm
        parts.self_attention.submodules.k_layernorm = RMSNorm
    parts.self_attention.submodules.core_attention = PackedAttention
    layers = [spec] * get_num_layers_to_build(config, virtual_stage)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm)


def _pass_hidden_states(hidden: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
    """The output layer's forward: its product belongs to `linear_logprob`, which bounds how many logits exist."""
    return hidden, None


def build_model(
    architecture: Architecture, model: ModelSettings, parallel: ParallelSettings, device: torch.device
) -> list[GPTModel]:
    """This rank's part of the model, on `device`, with Megatron's initial weights: one GPTModel, or one for each of its
    virtual pipeline stages, in the order of their layers.

    The last of the last stage returns hidden states, [1, t, H] (under sequence parallelism this rank's t/TP), instead of
    logits; `output_weight` is the matrix that makes logits of them. Raises ValueError where `check_experts` does.
    """
    check_experts(architecture, model, parallel)
    config = transformer_config(architecture, model, parallel)
    pieces = virtual_stages(parallel)
    stages = [None] if pieces is None else list(range(pieces))
    return [_build_piece(config, architecture, padded_vocab_size(architecture, model, parallel), s, device) for s in stages]


def _build_piece(
    config: TransformerConfig, architecture: Architecture, vocabulary: int, stage: int | None, device: torch.device
) -> GPTModel:
    gpt = GPTModel(
        config=config,
        transformer_layer_spec=_layer_specs(config, stage),
        vocab_size=vocabulary,
        max_sequence_length=architecture.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
        share_embeddings_and_output_weights=architecture.tied_embeddings,
        position_embedding_type="rope",
        rotary_base=architecture.rope_theta,  # type: ignore[arg-type]
        parallel_output=True,
        vp_stage=stage,
    )
    if layer_spec_name() == "local":
        gpt.rotary_pos_emb = PackedRotaryEmbedding(
            kv_channels=architecture.head_dim,
            rotary_percent=1.0,
            rotary_base=architecture.rope_theta,  # type: ignore[arg-type]
            use_cpu_initialization=True,
        )
    if gpt.post_process:
        gpt.output_layer.forward = _pass_hidden_states
    return gpt.to(device)


def output_weight(gpt: GPTModel) -> torch.Tensor:
    """[V/TP, H]: the output layer's own weight, or the embeddings' where they are tied. Last pipeline stage only."""
    if gpt.share_embeddings_and_output_weights:
        tied: torch.Tensor = gpt.shared_embedding_or_output_weight()
        return tied
    own: torch.Tensor = gpt.output_layer.weight
    return own


def wrap_model(chunks: Sequence[GPTModel], optimizer: OptimizerSettings) -> list[DistributedDataParallel]:
    """Megatron's DDP: contiguous float32 gradient buffers, summed (not averaged) over data-parallel ranks."""
    config = chunks[0].config
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=optimizer.use_distributed_optimizer,
        overlap_grad_reduce=optimizer.overlap_grad_reduce,
        average_in_collective=False,
    )
    wrapped = [
        DistributedDataParallel(
            config,
            ddp,
            Float16Module(config, chunk) if config.bf16 else chunk,
            disable_bucketing=number > 0,  # later pieces have no communication left to hide theirs behind
        )
        for number, chunk in enumerate(chunks)
    ]
    if optimizer.overlap_grad_reduce:
        config.no_sync_func = wrapped[0].no_sync if len(wrapped) == 1 else [each.no_sync for each in wrapped]
    return wrapped
