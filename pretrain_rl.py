"""Post-train a policy with reinforcement learning on data that may be many updates old.

    torchrun --nproc-per-node 2 pretrain_rl.py --tensor-model-parallel-size 2 --m2-threshold 0.04 \\
        --hf-path DIR --prompt-data FILE.jsonl --reward arithmetic --max-staleness 4

Engines sample groups of responses all the time (a controller process, child of rank 0, keeps them busy within the
staleness bound); this loop leases a batch, takes its updates, publishes the weights, and leases the next.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator

import numpy as np
import torch

from m2po_megatron import console, cpu, optional_packages

console.set_up_console()
optional_packages.hide_unusable()
cpu.install()  # before anything imports megatron-core; does nothing where there is a GPU

from m2po_megatron.algo.advantage import group_advantages  # noqa: E402
from m2po_megatron.arguments import Settings, parse_arguments  # noqa: E402
from m2po_megatron.checkpoint import CheckpointWriter  # noqa: E402
from m2po_megatron.checkpoint_files import RunPosition  # noqa: E402
from m2po_megatron.data.packing import MicroBatch, pack_rows, plan_micro_batches  # noqa: E402
from m2po_megatron.data.trajectory import Batch, Trajectory  # noqa: E402
from m2po_megatron.evaluate import evaluate  # noqa: E402
from m2po_megatron.initialize import World, initialize, shut_down  # noqa: E402
from m2po_megatron.metrics import MetricsWriter, rollout_metrics  # noqa: E402
from m2po_megatron.policy.forward import Policy  # noqa: E402
from m2po_megatron.rollout_feed import RolloutFeed, StopSignal  # noqa: E402
from m2po_megatron.startup import announce, open_metrics, publish_policy, start_policy, start_rollouts  # noqa: E402
from m2po_megatron.trainer import measure_engine_floor, train_update  # noqa: E402


def main(argv: list[str] | None = None) -> int:
    try:
        settings = parse_arguments(argv)
        world = initialize(settings.parallel, settings.run.seed)
        stop = StopSignal()
        policy, position, writer = start_policy(settings, world)
        feed = start_rollouts(settings, world, policy, position, stop)
    except ValueError as error:
        shut_down()
        return console.report_error(error)
    except KeyboardInterrupt:
        shut_down()
        return console.report_stop(0, signal.SIGINT, None)
    stop.install()
    announce(settings, world, policy, position)
    with feed, open_metrics(settings, world, position) as metrics:
        train(settings, world, policy, position, feed, metrics, writer)
        with stop.held():
            writer.save(policy, position)
            writer.finish()
    shut_down()
    if failure := feed.failure or writer.failure:
        return console.report_error(RuntimeError(failure))
    if position.version >= settings.run.train_iters or feed.stop_number is None:
        return 0
    return console.report_stop(position.version, feed.stop_number, writer.newest)


def train(
    settings: Settings,
    world: World,
    policy: Policy,
    position: RunPosition,
    feed: RolloutFeed,
    metrics: MetricsWriter,
    writer: CheckpointWriter,
) -> None:
    run, rollout = settings.run, settings.rollout
    feed.while_waiting = writer.poll
    metrics.write_evaluation(position.version, evaluate(feed, run, rollout, position.version))
    while position.version < run.train_iters and not feed.stopping:
        waited = time.perf_counter()
        batch = feed.next_batch(position.version)
        if batch is None:
            break
        wait_seconds, batch_version = time.perf_counter() - waited, position.version
        try:
            updates = list(mini_batches(batch, settings, world, policy))
        except ValueError as error:  # the same on every rank, since each plans for all; nothing of the batch is trained
            feed.fail(str(error))
            break
        for mini_batch, micro_batches, balance in updates:
            version = position.version
            report = train_update(policy, micro_batches, settings.loss, temperature=rollout.temperature, version=version)
            report.metrics["tokens/balance"] = balance
            position.version += 1
            started = time.perf_counter()
            if position.version % rollout.publish_interval == 0 or position.version == run.train_iters:
                feed.publish(str(publish_policy(settings, policy, position.version, feed.loaded_version)), position.version)
                if run.engine_floor_interval and position.version % run.engine_floor_interval == 0:
                    report.metrics["m2/engine_floor"] = engine_floor(settings, world, policy, feed, position.version)
            seconds = {"time/wait": wait_seconds, "time/publish": time.perf_counter() - started}
            metrics.write_update(
                position.version, {**report.metrics, **rollout_metrics(mini_batch, batch_version), **seconds, **feed.counters()}
            )
            wait_seconds = 0.0
            writer.poll()
        position.consumed_batches += 1
        feed.trained(batch.id, position.version)
        if due(run.eval_interval, position.version, settings) or position.version >= run.train_iters:
            metrics.write_evaluation(position.version, evaluate(feed, run, rollout, position.version))
        if due(run.save_interval, position.version, settings):
            with feed.stop.held():
                writer.save(policy, position)


def mini_batches(
    batch: Batch, settings: Settings, world: World, policy: Policy
) -> Iterator[tuple[list[Trajectory], list[MicroBatch], float]]:
    """What each update consumes: its trajectories, this rank's micro-batches of them with advantages, and the balance."""
    trajectories = batch.trajectories
    rewards = torch.tensor([t.reward for t in trajectories], dtype=torch.float32)
    groups = torch.tensor([number for number, group in enumerate(batch.groups) for _ in group.trajectories])
    advantages = group_advantages(rewards, groups).numpy()
    size = settings.batch.global_batch_size
    for start in range(0, len(trajectories), size):
        part = trajectories[start : start + size]
        yield part, *pack_for_rank(part, advantages[start : start + size], settings, world, policy)


def pack_for_rank(
    trajectories: list[Trajectory], advantages: np.ndarray, settings: Settings, world: World, policy: Policy
) -> tuple[list[MicroBatch], float]:
    """(this rank's micro-batches, the largest data-parallel rank's tokens over the mean)"""
    lengths, limits = [len(t.token_ids) for t in trajectories], settings.batch
    plan = plan_micro_batches(
        lengths, world.packing, micro_batch_size=limits.micro_batch_size, max_tokens=limits.max_tokens_per_micro_batch
    )
    return pack_rows(trajectories, advantages, plan, world.packing, device=policy.device), plan.balance


def engine_floor(settings: Settings, world: World, policy: Policy, feed: RolloutFeed, version: int) -> float | None:
    """M2 of freshly sampled tokens under the very weights that sampled them: the engine's error alone."""
    probe = feed.probe(version, settings.run.engine_floor_samples)
    if not probe:
        return None
    micro_batches, _ = pack_for_rank(probe, np.zeros(len(probe)), settings, world, policy)
    return measure_engine_floor(policy, micro_batches, temperature=settings.rollout.temperature)


def due(interval: int, version: int, settings: Settings) -> bool:
    """Whether an interval counted in updates ended within the batch that ends at `version`."""
    return interval > 0 and version // interval > (version - settings.rollout.updates_per_batch) // interval


if __name__ == "__main__":
    sys.exit(main())
