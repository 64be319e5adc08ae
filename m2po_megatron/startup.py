"""What pretrain_rl.py does once before its loop: the policy, the rollouts, the start-up lines.

A fault on one rank becomes the same error on every rank, so that none is left waiting in a collective.
"""

from __future__ import annotations

import importlib.metadata
import logging
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from m2po_megatron import optional_packages
from m2po_megatron.arguments import Settings
from m2po_megatron.checkpoint import CheckpointWriter, load_checkpoint
from m2po_megatron.checkpoint_files import RunPosition, check_batch_sizes, latest_checkpoint
from m2po_megatron.data.prompts import read_prompts
from m2po_megatron.initialize import World
from m2po_megatron.kernels.backends import backend_name
from m2po_megatron.metrics import MetricsWriter
from m2po_megatron.policy.forward import Policy, build_policy
from m2po_megatron.policy.model import layer_spec_name, virtual_stages
from m2po_megatron.policy.settings import ParallelSettings
from m2po_megatron.rollout.connection import ControllerConnection
from m2po_megatron.rollout.errors import RolloutError
from m2po_megatron.rollout.settings import RolloutJob
from m2po_megatron.rollout_feed import RolloutFeed, StopSignal
from m2po_megatron.weights.hf_io import load_hf
from m2po_megatron.weights.publish import replace_text, write_version

logger = logging.getLogger(__name__)
T = TypeVar("T")


def together(world: World, action: Callable[[], T]) -> T:
    """Run `action` on every rank; if it fails on any, raise ValueError with that rank's words on all of them.

    The words are those of the first rank that failed, in full.
    """
    result, words = None, b""
    try:
        result = action()
    except (ValueError, RolloutError, OSError) as error:
        words = (str(error) or repr(error)).encode(errors="replace")
    sizes = torch.zeros(world.world_size, dtype=torch.int64)
    sizes[world.rank] = len(words)
    dist.all_reduce(sizes, group=world.control_group)
    if sizes.any():
        speaker = int(sizes.nonzero()[0])
        spoken = torch.zeros(int(sizes[speaker]), dtype=torch.uint8)
        if world.rank == speaker:
            spoken.copy_(torch.frombuffer(bytearray(words), dtype=torch.uint8))
        dist.broadcast(spoken, src=speaker, group=world.control_group)
        raise ValueError(bytes(spoken.tolist()).decode())
    return result  # type: ignore[return-value]


def start_policy(settings: Settings, world: World) -> tuple[Policy, RunPosition, CheckpointWriter]:
    """The policy with its weights; where the run stands: at version 0, or where --load's checkpoint left it; and what
    writes its checkpoints."""
    run = settings.run
    together(world, lambda: check_prompts(settings) if world.is_main else None)
    together(world, lambda: check_directories(settings) if world.is_main else None)
    checkpoint = together(world, lambda: find_checkpoint(settings))
    policy = together(
        world,
        lambda: build_policy(
            settings.model,
            settings.parallel,
            settings.optimizer,
            train_iters=run.train_iters,
            device=world.device,
            load_weights=lambda chunks, arch: None if checkpoint else load_hf(chunks, arch, settings.model.hf_path),
        ),
    )
    position = RunPosition(hf_path=settings.model.hf_path, batch_sizes=batch_sizes(settings))
    if checkpoint is not None:
        position = together(world, lambda: load_checkpoint(policy, checkpoint))
    position.incarnation = together(world, lambda: _next_incarnation(world, run.directory, position.incarnation))
    writer = CheckpointWriter(run.save, keep_last=run.keep_last, in_background=run.async_save, loaded=checkpoint)
    return policy, position, writer


def check_directories(settings: Settings) -> None:
    """What is written after hours must be known to be writable now."""
    run = settings.run
    for flag, path in {
        "--run-dir": run.directory,
        "--save": run.save,
        "--tensorboard-dir": run.tensorboard_dir,
    }.items():
        try:
            if path:
                Path(path).mkdir(parents=True, exist_ok=True)
                with tempfile.TemporaryFile(dir=path):
                    pass
        except OSError as error:
            raise ValueError(f"{flag} {path}: cannot be written: {error}") from error


def find_checkpoint(settings: Settings) -> Path | None:
    """The checkpoint to resume from. None without --load, and where --load is --save and holds none yet: a job that may be
    started again at any time is given both from the beginning. Any other --load must hold one."""
    run = settings.run
    if not run.load:
        return None
    checkpoint = latest_checkpoint(run.load)
    if checkpoint is None and not (run.save and Path(run.save).resolve() == Path(run.load).resolve()):
        raise ValueError(f"--load {run.load}: there is no checkpoint (it may be missing only where --save is the same)")
    if checkpoint is not None:
        check_batch_sizes(checkpoint, batch_sizes(settings))
    return checkpoint


def batch_sizes(settings: Settings) -> dict[str, int]:
    rollout = settings.rollout
    return {
        "--group-size": rollout.group_size,
        "--rollout-batch-size": rollout.rollout_batch_size,
        "--global-batch-size": settings.batch.global_batch_size,
    }


def check_prompts(settings: Settings) -> None:
    """Both files are read again where they are used; a bad line is said before weights are loaded and engines started."""
    for flag, path in {"--prompt-data": settings.rollout.prompt_data, "--eval-data": settings.run.eval_data}.items():
        try:
            if path:
                read_prompts(path)
        except (ValueError, OSError) as error:
            raise ValueError(f"{flag}: {error}") from error


def _next_incarnation(world: World, run_dir: Path, saved: int) -> int:
    """One more at every start in this directory: a version reached twice is never one label for two sets of weights."""
    if not world.is_main:
        return saved
    run_dir.mkdir(parents=True, exist_ok=True)
    counter = run_dir / "incarnation"
    try:
        counted = int(counter.read_text()) if counter.is_file() else -1
    except ValueError as error:
        raise ValueError(f"{counter}: holds no number of the run's last start: {error}") from error
    incarnation = max(counted, saved - 1) + 1
    replace_text(counter, str(incarnation))
    return incarnation


def publish_policy(settings: Settings, policy: Policy, version: int, in_use_from: int) -> Path:
    """Write the weights for the engines. Collective over all ranks."""
    return write_version(
        policy.chunks,
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
        longest_sequence=world.packing.longest_sequence(settings.batch.max_tokens_per_micro_batch or 0),
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
    rollout = settings.rollout
    parameters = sum(p.numel() for chunk in policy.chunks for p in chunk.parameters())
    lines = [
        f"policy       {policy.architecture.name}, {parameters:,} parameters on rank 0",
        f"layout       {_layout(settings.parallel, world)} on {world.device.type} ({dist.get_backend()})",
        f"megatron     core {importlib.metadata.version('megatron-core')} on torch {torch.__version__}; "
        f"{layer_spec_name()} layer spec, {optional_packages.describe()}",
        f"log-probs    {_logprob_kernel(settings, world)}",
        f"loss         {settings.loss.policy_loss}, M2 threshold {settings.loss.m2_threshold}",
        f"rollouts     {rollout.rollout_engine}, at most {rollout.max_staleness} updates stale",
        f"run          {settings.run.directory}, version {position.version}, incarnation {position.incarnation}",
    ]
    for line in lines:
        logger.info(line)


def _layout(parallel: ParallelSettings, world: World) -> str:
    """TP, PP and DP, and of the other divisions those that divide anything."""
    sizes = {
        "TP": parallel.tensor_model_parallel_size,
        "PP": parallel.pipeline_model_parallel_size,
        "DP": world.data_parallel_size,
        "VPP": virtual_stages(parallel) or 1,
        "CP": parallel.context_parallel_size,
        "EP": parallel.expert_model_parallel_size,
    }
    expert_tensor = parallel.expert_tensor_parallel_size
    if expert_tensor not in (None, parallel.tensor_model_parallel_size):
        sizes["ETP"] = expert_tensor
    words = [f"{name}={size}" for name, size in sizes.items() if size > 1 or name in ("TP", "PP", "DP", "ETP")]
    return " ".join(words + ["SP"] * parallel.sequence_parallel)


def _logprob_kernel(settings: Settings, world: World) -> str:
    """Which kernel makes log-probs here, from which logits."""
    model = settings.model
    logits = torch.empty(
        0, dtype=torch.float32 if model.logits_dtype == "fp32" else torch.bfloat16, device=world.device
    )
    return f"{backend_name(logits)} kernel, {model.logits_dtype} logits, mode {model.logprob_mode}"
