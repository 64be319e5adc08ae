"""One update of the trainer against a bare megatron-core loop on the same batch: what the mask, the metrics and our
log-prob function cost on top.

    python tools/bench_step.py [--layout tp2|dp2] [--repeats 15] [--output FILE.json]

Both do a forward-only pass over all micro-batches, a forward and backward pass, clip and step. The bare loop takes
Megatron's own vocab_parallel_cross_entropy and the unmasked loss -r A; it has no mask and reports nothing. They take
turns, so that whatever else the machine does meets both; times are the slowest rank's, and the figure is the ratio of
the medians.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_ranks import end_rank, make_advantages, make_trajectories, run_group, slowest, start_rank
from megatron.core import parallel_state, tensor_parallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from m2po_megatron.algo.losses import LossSettings
from m2po_megatron.data.packing import MicroBatch, pack
from m2po_megatron.initialize import World
from m2po_megatron.policy.attention import pack_sequences
from m2po_megatron.policy.forward import Policy
from m2po_megatron.policy.model import output_weight
from m2po_megatron.policy.settings import ParallelSettings
from m2po_megatron.trainer import train_update

LAYOUTS = {"tp2": 2, "dp2": 1}
"""Tensor-parallel size on two ranks."""


def bare_update(policy: Policy, micro_batches: Sequence[MicroBatch]) -> None:
    """Forward-only pass, forward and backward, clip and step, as megatron-core alone gives them."""
    scored: list[Tensor] = []

    def forward_step(batches: Iterator[MicroBatch], model: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
        batch = next(batches)
        hidden = model(
            batch.token_ids[None],
            None,
            None,
            packed_seq_params=pack_sequences(batch.lengths, batch.token_ids.device),
        )

        def loss(hidden: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            logits, _ = tensor_parallel.ColumnParallelLinear.forward(  # our model leaves the output layer out
                policy.gpt.output_layer, hidden[0], weight=output_weight(policy.gpt)
            )
            logprobs = -tensor_parallel.vocab_parallel_cross_entropy(logits, batch.targets.clamp(min=0))
            scored.append(logprobs.detach())
            ratio = torch.where(batch.loss_mask, logprobs - batch.behaviour_logprobs, 0.0).exp()
            value = -(ratio * batch.advantages * batch.loss_mask).sum() / 1e4
            return value, torch.zeros((), dtype=torch.int), {}

        return hidden, loss

    def run(forward_only: bool) -> None:
        with torch.set_grad_enabled(not forward_only):
            get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=iter(micro_batches),
                model=policy.models[0],
                num_microbatches=len(micro_batches),
                seq_length=int(micro_batches[0].token_ids.numel()),
                micro_batch_size=1,
                forward_only=forward_only,
            )

    run(forward_only=True)
    policy.models[0].zero_grad_buffer()
    policy.optimizer.zero_grad()
    run(forward_only=False)
    policy.optimizer.step()
    policy.scheduler.step(increment=1)


def make_batch(world: World, vocabulary: int, arguments: argparse.Namespace) -> list[MicroBatch]:
    count = arguments.trajectories
    responses = np.random.default_rng(0).integers(1, 2 * arguments.response_length, size=count).tolist()
    return pack(
        make_trajectories([arguments.prompt_length] * count, responses, vocabulary),
        make_advantages(count),
        world.packing,
        micro_batch_size=arguments.micro_batch_size,
        device=world.device,
    )


def run_rank(rank: int, folder: str, arguments: argparse.Namespace) -> None:
    parallel = ParallelSettings(tensor_model_parallel_size=LAYOUTS[arguments.layout])
    world, policy = start_rank(rank, 2, folder, arguments.hf_path, parallel, optimizer={})
    batch = make_batch(world, policy.architecture.vocab_size, arguments)
    settings = LossSettings()
    ours, bare = [], []
    for _ in range(arguments.repeats + 2):
        bare.append(slowest(lambda: bare_update(policy, batch)))
        ours.append(slowest(lambda: train_update(policy, batch, settings, temperature=1.0, version=0)))
    result = {
        "layout": arguments.layout,
        "tokens": sum(len(b.token_ids) for b in batch) * parallel_state.get_data_parallel_world_size(),
        "micro_batches": len(batch),
        "trainer_ms": 1e3 * statistics.median(ours[2:]),
        "bare_ms": 1e3 * statistics.median(bare[2:]),
        "ratio": statistics.median(ours[2:]) / statistics.median(bare[2:]),
    }
    end_rank(folder, result)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", choices=list(LAYOUTS), default="tp2", help="of two ranks")
    parser.add_argument("--hf-path", default="examples/arithmetic/model")
    parser.add_argument("--trajectories", type=int, default=512)
    parser.add_argument("--prompt-length", type=int, default=6)
    parser.add_argument("--response-length", type=int, default=16, help="mean, in tokens")
    parser.add_argument("--micro-batch-size", type=int, default=64, help="trajectories")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--output", type=Path, default=None, help="also write the result as JSON")
    arguments = parser.parse_args()
    result = run_group(run_rank, 2, arguments)
    print(
        f"{result['layout']} on 2 gloo ranks, {os.cpu_count()} cores, torch {torch.__version__}: "
        f"{result['tokens']:,} tokens in {result['micro_batches']} micro-batches a rank\n"
        f"trainer {result['trainer_ms']:.1f} ms, bare megatron-core loop {result['bare_ms']:.1f} ms: {result['ratio']:.3f}x"
    )
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
