"""Megatron's optimizer, gradient clipping and learning-rate schedule, from our settings."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from m2po_megatron.policy.settings import OptimizerSettings


def build_optimizer(
    models: list[DistributedDataParallel], settings: OptimizerSettings, train_iters: int
) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
    """AdamW under Megatron's wrapper (FP32 or mixed precision), and its schedule counted in updates."""
    bf16 = bool(models[0].config.bf16)
    config = OptimizerConfig(
        optimizer="adam",
        lr=settings.lr,
        min_lr=settings.min_lr,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.adam_beta1,
        adam_beta2=settings.adam_beta2,
        adam_eps=settings.adam_eps,
        clip_grad=settings.clip_grad,
        bf16=bf16,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
        use_distributed_optimizer=settings.use_distributed_optimizer,
    )
    with warnings.catch_warnings():  # Megatron says that it falls back to torch's AdamW: so does our start-up line
        warnings.simplefilter("ignore")
        optimizer = get_megatron_optimizer(config, models)
    decay: Any = settings.lr_decay_iters or train_iters
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=settings.lr,
        min_lr=settings.min_lr,
        lr_warmup_steps=settings.lr_warmup_iters,
        lr_decay_steps=max(decay, settings.lr_warmup_iters + 1),
        lr_decay_style=settings.lr_decay_style,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
    return optimizer, scheduler
