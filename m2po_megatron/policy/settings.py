"""Settings of the model, its layout over ranks and its optimizer. Each field is a flag with Megatron's spelling."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class ModelSettings:
    hf_path: str = field(default="", metadata={"help": "Hugging Face directory: config, safetensors and tokenizer"})
    make_vocab_size_divisible_by: int = field(
        default=1, metadata={"help": "pad the vocabulary so that each tensor-parallel shard is a multiple of this"}
    )
    bf16: bool = field(default=False, metadata={"help": "train in bfloat16 with float32 main weights and gradients"})
    recompute_granularity: str | None = field(
        default=None, metadata={"help": "activation recomputation", "choices": ["full", "selective"]}
    )
    recompute_method: str | None = field(
        default=None,
        metadata={"help": "which layers 'full' recomputes (default: uniform)", "choices": ["uniform", "block"]},
    )
    recompute_num_layers: int | None = field(default=None, metadata={"help": "layers per unit of --recompute-method"})
    moe_router_load_balancing_type: str = field(
        default="none",
        metadata={"help": "balance experts by an auxiliary loss, or leave the router alone", "choices": ["none", "aux_loss"]},
    )
    moe_aux_loss_coeff: float = field(
        default=0.0, metadata={"help": "weight of that loss: of its mean over the mini-batch's tokens, summed over layers"}
    )
    moe_token_dispatcher_type: str = field(
        default="alltoall",
        # Megatron's allgather takes no rows of different lengths.
        metadata={"help": "how tokens reach their experts' ranks", "choices": ["alltoall"]},
    )
    logprob_mode: str = field(
        default="store",
        metadata={
            "help": "keep the logits from forward to backward (fastest), or recompute them in chunks (least memory)",
            "choices": ["store", "recompute"],
        },
    )
    logprob_chunk_tokens: int = field(
        default=2048, metadata={"help": "tokens whose logits exist at a time where they are not stored"}
    )
    logits_dtype: str = field(
        default="fp32",
        metadata={"help": "precision of the logits under --bf16 (bf16 halves what 'store' keeps)", "choices": ["fp32", "bf16"]},
    )


@dataclass
class ParallelSettings:
    tensor_model_parallel_size: int = field(default=1, metadata={"help": "ranks that share each layer's matrices"})
    pipeline_model_parallel_size: int = field(default=1, metadata={"help": "ranks that share the layers"})
    num_virtual_stages_per_pipeline_rank: int | None = field(
        default=None, metadata={"help": "pieces of the layers per pipeline rank, interleaved (needs pipeline parallelism)"}
    )
    context_parallel_size: int = field(default=1, metadata={"help": "ranks that share each sequence"})
    expert_model_parallel_size: int = field(default=1, metadata={"help": "ranks that share the experts of a layer"})
    expert_tensor_parallel_size: int | None = field(
        default=None, metadata={"help": "ranks that share each expert's matrices (default: --tensor-model-parallel-size)"}
    )
    sequence_parallel: bool = field(default=False, metadata={"help": "shard norm activations over tensor-parallel ranks"})
    distributed_backend: str = field(
        default="auto", metadata={"help": "auto = nccl with CUDA, else gloo", "choices": ["auto", "nccl", "gloo"]}
    )
    distributed_timeout_minutes: int = field(default=10, metadata={"help": "a collective waits at most this long"})

    @property
    def row_alignment(self) -> int:
        """Tokens of a row on one context-parallel rank are a multiple of it: tensor-parallel ranks may share them."""
        return self.tensor_model_parallel_size if self.sequence_parallel else 1

    @property
    def micro_batch_multiple(self) -> int:
        """Micro-batches of an update are a multiple of it: the interleaved schedule takes them by the pipeline's size."""
        virtual = self.num_virtual_stages_per_pipeline_rank or 1
        return self.pipeline_model_parallel_size if virtual > 1 else 1


@dataclass
class OptimizerSettings:
    lr: float = field(default=1e-6, metadata={"help": "peak learning rate"})
    min_lr: float = field(default=0.0, metadata={"help": "learning rate at the end of the decay"})
    lr_decay_style: str = field(
        default="constant", metadata={"help": "shape of the decay", "choices": ["constant", "linear", "cosine"]}
    )
    lr_warmup_iters: int = field(default=0, metadata={"help": "updates of linear warm-up"})
    lr_decay_iters: int | None = field(default=None, metadata={"help": "updates until min_lr (default: --train-iters)"})
    weight_decay: float = field(default=0.01, metadata={"help": "AdamW weight decay (not on norms and biases)"})
    adam_beta1: float = field(default=0.9, metadata={"help": "AdamW beta1"})
    adam_beta2: float = field(default=0.999, metadata={"help": "AdamW beta2"})
    adam_eps: float = field(default=1e-8, metadata={"help": "AdamW epsilon"})
    clip_grad: float = field(default=1.0, metadata={"help": "largest global gradient norm; 0 = no clipping"})
    use_distributed_optimizer: bool = field(
        default=False, metadata={"help": "shard optimizer state over data-parallel ranks"}
    )
    overlap_grad_reduce: bool = field(
        default=False, metadata={"help": "reduce gradients over data-parallel ranks while the backward pass still runs"}
    )
