"""What pretrain_rl.py does once before its loop: the policy, the rollouts, the start-up lines.

A fault on one rank becomes the same error on every rank, so that none is left waiting in a collective.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from m2po_megatron.arguments import Settings
from m2po_megatron.checkpoint import RunPosition, latest_checkpoint, load_checkpoint
from m2po_megatron.initialize import World
from m2po_megatron.metrics import MetricsWriter
from m2po_megatron.policy.forward import Policy, build_policy
from m2po_megatron.policy.model import layer_spec_name
from m2po_megatron.rollout.connection import ControllerConnection
from m2po_megatron.rollout.errors import RolloutError
from m2po_megatron.rollout.settings import RolloutJob
from m2po_megatron.rollout_feed import RolloutFeed, StopSignal
from m2po_megatron.weights.hf_io import load_hf
from m2po_megatron.weights.publish import replace_text, write_version

logger = logging.getLogger(__name__)
T = TypeVar("T")
_WORDS = 4096
"""Bytes of an error text that reach the other ranks."""


def together(world: World, action: Callable[[], T]) -> T:
    """Run `action` on every rank; if it fails on any, raise ValueError with that rank's words on all of them."""
    result, words = None, ""
    try:
        result = action()
    except (ValueError, RolloutError, OSError) as error:
        words = str(error)
    spoken = torch.zeros(_WORDS, dtype=torch.uint8)
    raw = words.encode()[:_WORDS]
    spoken[: len(raw)] = torch.frombuffer(bytearray(raw or b"\0"), dtype=torch.uint8)[: len(raw)]
    heard = [torch.empty_like(spoken) for _ in range(world.world_size)]
    dist.all_gather(heard, spoken, group=world.control_group)
    for text in heard:
        if text.any():
            raise ValueError(bytes(text.tolist()).rstrip(b"\0").decode(errors="replace"))
    return result  # type: ignore[return-value]


def start_policy(settings: Settings, world: World) -> tuple[Policy, RunPosition]:
    """The policy with its weights, and where the run stands: at version 0, or where --load's checkpoint left it."""
    run = settings.run
    checkpoint = together(world, lambda: latest_checkpoint(run.load) if run.load else None)
    policy = together(
        world,
        lambda: build_policy(
            settings.model,
            settings.parallel,
            settings.optimizer,
            train_iters=run.train_iters,
            device=world.device,
            load_weights=lambda gpt, arch: None if checkpoint else load_hf(gpt, arch, settings.model.hf_path),
        ),
    )
    position = RunPosition(hf_path=settings.model.hf_path)
    if checkpoint is not None:
        position = load_checkpoint(policy, checkpoint)
    position.incarnation = together(world, lambda: _next_incarnation(world, run.directory, position.incarnation))
    return policy, position


def _next_incarnation(world: World, run_dir: Path, saved: int) -> int:
    """One more at every start in this directory: a version reached twice is never one label for two sets of weights."""
    if not world.is_main:
        return saved
    run_dir.mkdir(parents=True, exist_ok=True)
    counter = run_dir / "incarnation"
    incarnation = max(int(counter.read_text()) if counter.is_file() else -1, saved - 1) + 1
    replace_text(counter, str(incarnation))
    return incarnation


def publish_policy(settings: Settings, policy: Policy, version: int, in_use_from: int) -> Path:
    """Write the weights for the engines. Collective over all ranks."""
    return write_version(
        policy.gpt,
        policy.architecture,
        settings.model.hf_path,
        settings.run.directory,
        version,
        in_use_from=in_use_from,
    )


def start_rollouts(
    settings: Settings, world: World, policy: Policy, position: RunPosition, stop: StopSignal
) -> RolloutFeed:
    """Start the controller and its engines (rank 0) with this version's weights, and connect every rank to them."""
    model_path = settings.model.hf_path
    if position.version > 0:
        model_path = str(publish_policy(settings, policy, position.version, position.version))
    job = RolloutJob(
        run_dir=str(settings.run.directory),
        model_path=model_path,
        incarnation=position.incarnation,
        start_version=position.version,
        consumed_batches=position.consumed_batches,
        resume=settings.run.load is not None,
    )
    connection = together(world, lambda: ControllerConnection.start(settings.rollout, job) if world.is_main else None)
    return RolloutFeed(world, connection, stop)


def open_metrics(settings: Settings, world: World, position: RunPosition) -> MetricsWriter:
    """Rank 0's writer; on other ranks one that writes nothing."""
    run = settings.run
    return MetricsWriter(
        run.directory,
        run.tensorboard_dir or run.directory / "tensorboard",
        start_iteration=position.version,
        total_iterations=run.train_iters,
        enabled=world.is_main,
    )


def announce(settings: Settings, world: World, policy: Policy, position: RunPosition) -> None:
    """The start-up lines: what runs, on what, with which optional parts."""
    if not world.is_main:
        return
    parallel, rollout = settings.parallel, settings.rollout
    apex = importlib.util.find_spec("apex") is not None and importlib.util.find_spec("apex.optimizers") is not None
    layout = (
        f"TP={parallel.tensor_model_parallel_size} PP={parallel.pipeline_model_parallel_size} DP={world.data_parallel_size}"
    )
    lines = [
        f"policy       {policy.architecture.name}, {sum(p.numel() for p in policy.gpt.parameters()):,} parameters on rank 0",
        f"layout       {layout} on {world.device.type} ({dist.get_backend()}), torch {torch.__version__}",
        f"megatron     core {importlib.metadata.version('megatron-core')}, {layer_spec_name()} layer spec, "
        f"apex {'found' if apex else 'not installed'}",
        f"loss         {settings.loss.policy_loss}, M2 threshold {settings.loss.m2_threshold}",
        f"rollouts     {rollout.rollout_engine}, at most {rollout.max_staleness} updates stale",
        f"run          {settings.run.directory}, version {position.version}, incarnation {position.incarnation}",
    ]
    for line in lines:
        logger.info(line)


