"""One optimizer step: pass A, global mask, one global denominator, pass B, clip, step.

    pass A   log-probs of every micro-batch under the current weights           (no gradient)
    mask     Algorithm 1 over the tokens of ALL ranks and micro-batches, exactly  (a few small all-reduces)
    pass B   forward and backward with the frozen mask

Where each rank's tokens fit one micro-batch and there is no pipeline, pass A and the forward of pass B are the same
computation, so it is done once: the mask is found between that forward and its backward. A loss that needs no mask goes
through pass B alone, and its log-ratios are measured from it.

The denominator counts every response token of the mini-batch, masked ones included (M2PO's paper, footnote 2).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from m2po_megatron.algo.losses import LossInputs, LossSettings, policy_loss
from m2po_megatron.algo.m2 import SecondMomentMask, second_moment_mask
from m2po_megatron.data.packing import MicroBatch
from m2po_megatron.policy.balance import mean_aux_loss, scale_aux_loss
from m2po_megatron.policy.forward import Policy, compute_logprobs, run_micro_batches


@dataclass
class BatchSettings:
    """How many trajectories make an update, and how they are cut into micro-batches."""

    global_batch_size: int = field(default=512, metadata={"help": "trajectories per update (the mini-batch)"})
    micro_batch_size: int | None = field(default=None, metadata={"help": "trajectories per micro-batch, at most"})
    max_tokens_per_micro_batch: int | None = field(
        default=None,
        metadata={
            "help": "tokens per micro-batch on a context-parallel rank, padding included, at most: a whole row holds that "
            "times --context-parallel-size (instead of --micro-batch-size)"
        },
    )


@dataclass
class UpdateReport:
    """What one update did. Global numbers, equal on every rank."""

    metrics: dict[str, float | None]
    mask: SecondMomentMask | None = None  # this rank's bits; None off the last pipeline stage


class _MaskedLoss:
    """The consumer of pass B: holds each micro-batch's mask, or finds the mask when the first log-probs arrive."""

    def __init__(self, settings: LossSettings, denominator: float, masks: list[Tensor] | None) -> None:
        self.settings = settings
        self.denominator = denominator
        self.masks = masks
        self.log_ratios: list[Tensor] = []
        self.mask: SecondMomentMask | None = None
        self.mask_seconds = 0.0
        self.loss = policy_loss(settings.policy_loss)

    def __call__(
        self, number: int, batch: MicroBatch, logprobs: Tensor, entropy: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        log_ratio = _log_ratio(logprobs.detach(), batch)
        self.log_ratios.append(log_ratio)
        trust = None
        if self.masks is not None:
            trust = self.masks[number]
        elif self.loss.needs_second_moment_mask:  # pass A and this forward are one: only with a single micro-batch
            start = time.perf_counter()
            self.mask = find_mask([log_ratio], [batch], self.settings.m2_threshold)
            self.mask_seconds = time.perf_counter() - start
            trust = self.mask.mask
        outputs = self.loss(
            LossInputs(
                logprobs=logprobs,
                behaviour_logprobs=batch.behaviour_logprobs,
                advantages=batch.advantages,
                loss_mask=batch.loss_mask,
                denominator=self.denominator,
                trust_mask=trust,
            ),
            self.settings,
        )
        report = {"loss/policy": outputs.loss.detach() * self.denominator, **outputs.metrics}
        if entropy is not None:
            report["entropy"] = (entropy.detach() * batch.loss_mask).sum()
        return outputs.loss, report


def _log_ratio(logprobs: Tensor, batch: MicroBatch) -> Tensor:
    """log r = logp_theta - logp_behaviour [t], 0 where no token was sampled."""
    return torch.where(batch.loss_mask, logprobs - batch.behaviour_logprobs, 0.0)


def data_group() -> dist.ProcessGroup:
    """The ranks over which the mini-batch's tokens are spread, each token on one of them."""
    return parallel_state.get_data_parallel_group(with_context_parallel=True)


def find_mask(log_ratios: Sequence[Tensor], batches: Sequence[MicroBatch], threshold: float) -> SecondMomentMask:
    """The exact mask over the mini-batch's tokens; this rank's are those of `batches`, end to end. Collective."""
    return second_moment_mask(
        torch.cat(list(log_ratios)),
        torch.cat([b.advantages for b in batches]),
        torch.cat([b.loss_mask for b in batches]),
        threshold,
        token_ids=torch.cat([b.mask_ids for b in batches]),
        group=data_group(),
    )


def train_update(
    policy: Policy, micro_batches: Sequence[MicroBatch], settings: LossSettings, *, temperature: float, version: int
) -> UpdateReport:
    """One update from this rank's micro-batches of the mini-batch. Collective over all ranks.

    `version`: of the weights before the update; tokens sampled by it measure the engine's own error (m2/engine_floor).
    """
    start = time.perf_counter()
    denominator = _response_tokens(policy, micro_batches)
    needs_mask = policy_loss(settings.policy_loss).needs_second_moment_mask
    one_pass = len(micro_batches) == 1 and parallel_state.get_pipeline_model_parallel_world_size() == 1
    masks = mask = None
    logprob_seconds = mask_seconds = 0.0
    if needs_mask and not one_pass:
        logprobs = compute_logprobs(policy, micro_batches, temperature=temperature)
        logprob_seconds = time.perf_counter() - start
        if policy.is_last_stage:
            ratios = [_log_ratio(lp, b) for lp, b in zip(logprobs, micro_batches, strict=True)]
            mask = find_mask(ratios, micro_batches, settings.m2_threshold)
            masks = list(mask.mask.split([len(b.token_ids) for b in micro_batches]))
        mask_seconds = time.perf_counter() - start - logprob_seconds
    for model in policy.models:
        model.zero_grad_buffer()
    policy.optimizer.zero_grad()
    scale_aux_loss(policy.gpt.config, policy.settings.moe_aux_loss_coeff, micro_batches)
    consumer = _MaskedLoss(settings, denominator, masks)
    reports = run_micro_batches(policy, micro_batches, consumer, temperature=temperature, entropy="value")
    stepped, grad_norm, _ = policy.optimizer.step()
    lr = policy.optimizer.param_groups[0]["lr"]
    policy.scheduler.step(increment=1)
    if policy.is_last_stage and mask is None:  # found in pass B, or only measured (a loss without a mask)
        mask = consumer.mask or find_mask(consumer.log_ratios, micro_batches, settings.m2_threshold)
    sums = _sum_over_ranks(policy, reports, consumer.log_ratios, micro_batches, version)
    metrics = _metrics(mask, needs_mask, sums, denominator, policy)
    metrics.update(grad_norm=float(grad_norm), lr=float(lr), update_skipped=float(not stepped))
    if (balance := mean_aux_loss(policy.gpt.config, len(micro_batches))) is not None:
        metrics["loss/moe_aux"] = balance
    metrics["m2/threshold"] = settings.m2_threshold if needs_mask else None
    seconds = time.perf_counter() - start
    mask_seconds += consumer.mask_seconds
    metrics.update(
        {"time/logprob": logprob_seconds, "time/mask": mask_seconds, "time/train": seconds - logprob_seconds - mask_seconds}
    )
    return UpdateReport(metrics, mask)


def _response_tokens(policy: Policy, micro_batches: Sequence[MicroBatch]) -> float:
    """Response tokens of the whole mini-batch. Every stage holds its row's tokens, so every rank gets the number."""
    count = torch.stack([b.loss_mask.sum() for b in micro_batches]).sum()
    dist.all_reduce(count, group=data_group())
    return max(float(count), 1.0)


def _sum_over_ranks(
    policy: Policy,
    reports: Sequence[dict[str, Tensor]],
    log_ratios: Sequence[Tensor],
    batches: Sequence[MicroBatch],
    version: int,
) -> dict[str, float]:
    """Sums over the mini-batch, on every rank: the last stage's first tensor-parallel rank speaks for its tokens."""
    names = ("loss/policy", "entropy", "kl/behavior", "ratio", "clipped", "floor/squares", "floor/tokens")
    total = torch.zeros(len(names), dtype=torch.float64, device=policy.device)
    if policy.is_last_stage and parallel_state.get_tensor_model_parallel_rank() == 0:
        for report, log_ratio, batch in zip(reports, log_ratios, batches, strict=True):
            current = batch.versions == version
            floor = {"floor/squares": (log_ratio.double().square() * current).sum(), "floor/tokens": current.sum()}
            zero = torch.zeros((), device=policy.device)
            total += torch.stack([({**report, **floor}).get(name, zero).double() for name in names])
    dist.all_reduce(total)
    return dict(zip(names, total.tolist(), strict=True))


def _metrics(
    mask: SecondMomentMask | None, needs_mask: bool, sums: dict[str, float], denominator: float, policy: Policy
) -> dict[str, float | None]:
    """Everything per response token; the mask's own numbers come from the last stage to every rank."""
    numbers = torch.full((7,), float("nan"), dtype=torch.float64, device=policy.device)
    if mask is not None:
        cutoff = float("nan") if mask.cutoff is None else mask.cutoff
        masked, after = (mask.masked_tokens, mask.m2_after) if needs_mask else (float("nan"), float("nan"))
        numbers = torch.tensor(
            [
                mask.m2_before,
                after,
                masked / denominator,
                mask.trust_region_tokens / denominator,
                cutoff if needs_mask else float("nan"),
                mask.nonfinite_tokens,
                1.0,
            ],
            dtype=torch.float64,
            device=policy.device,
        )
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        dist.broadcast(
            numbers,
            src=parallel_state.get_pipeline_model_parallel_last_rank(),
            group=parallel_state.get_pipeline_model_parallel_group(),
        )
    names = ("m2/before", "m2/after", "m2/masked_fraction", "m2/trust_region_fraction", "m2/cutoff", "m2/nonfinite")
    metrics: dict[str, float | None] = {
        name: None if number != number else number for name, number in zip(names, numbers.tolist(), strict=False)
    }
    for name in ("loss/policy", "entropy", "kl/behavior"):
        metrics[name] = sums[name] / denominator
    metrics["loss/clipped_fraction"] = sums["clipped"] / denominator
    metrics["m2/engine_floor"] = sums["floor/squares"] / sums["floor/tokens"] if sums["floor/tokens"] else None
    metrics["tokens/response"] = denominator
    return metrics


def measure_engine_floor(policy: Policy, micro_batches: Sequence[MicroBatch], *, temperature: float) -> float | None:
    """M2 over all response tokens of trajectories that the current version sampled: what the engine's arithmetic alone
    contributes. Collective over all ranks; None where there are no tokens."""
    logprobs = compute_logprobs(policy, micro_batches, temperature=temperature)
    total = torch.zeros(2, dtype=torch.float64, device=policy.device)
    if policy.is_last_stage and parallel_state.get_tensor_model_parallel_rank() == 0:
        for lp, batch in zip(logprobs, micro_batches, strict=True):
            total += torch.stack([_log_ratio(lp, batch).double().square().sum(), batch.loss_mask.sum().double()])
    dist.all_reduce(total)
    squares, tokens = total.tolist()
    return squares / tokens if tokens else None
