"""Checkpoints in Megatron's dist_checkpointing format, with the run's position beside the weights.

A directory is written aside, by processes of its own, and renamed when every rank's are done: what `latest` names is whole.
With --async-save training goes on meanwhile. Checkpoints lie at batch boundaries, so `consumed_batches` says exactly which
groups the weights have learnt from. Every function and method here is collective over all ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
import logging
import os
import pickle
import shutil
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.dist_checkpointing.validation import StrictHandling
from torch.distributed.checkpoint.api import CheckpointException

from m2po_megatron.checkpoint_files import (
    RunPosition,
    WriteResults,
    begin_directory,
    checkpoint_name,
    complete_directory,
    read_position,
)
from m2po_megatron.checkpoint_state import (
    RNG_KEY,
    fill_optimizer,
    named_chunks,
    optimizer_layout,
    policy_state,
    random_state,
    rank_layout,
)
from m2po_megatron.parentage import ask_for_death_signal, leave_signals_to_parent
from m2po_megatron.policy.forward import Policy
from m2po_megatron.randomness import restore_generators, seed_generators

logger = logging.getLogger(__name__)
T = TypeVar("T")

LONGEST_WRITE_SECONDS = 3600.0
_POLL_SECONDS = 0.02
# megatron-core 0.19 has several ways to write in the background; the one of all supported versions is called "mcore" there.
_OWN_WRITER = {"async_strategy": "mcore"} if "async_strategy" in inspect.signature(dist_checkpointing.save).parameters else {}


class CheckpointWriter:
    """Writes one run's checkpoints, one at a time; without a directory (`save` None) it does nothing.

    keep_last: whole checkpoints that stay; 0 = all. in_background: `save` returns once the weights are copied.
    loaded: the checkpoint that the run goes on from; it is not removed, and not written again.
    After a save that failed, `failure` says why, until a later one succeeds; `newest` is the last one that is whole.
    """

    def __init__(
        self, save: str | Path | None, *, keep_last: int = 0, in_background: bool = False, loaded: Path | None = None
    ) -> None:
        self.root = None if save is None else Path(save)
        self.failure: str | None = None
        self.newest: Path | None = None
        self._keep_last = keep_last
        self._in_background = in_background
        self._queue = AsyncCallsQueue()
        self._pending: tuple[Path, RunPosition, float] | None = None
        if self.root is not None and loaded is not None and loaded.parent.resolve() == self.root.resolve():
            self.newest = self.root / loaded.name
        self._loaded = self.newest

    def save(self, policy: Policy, position: RunPosition) -> None:
        """Begin a checkpoint, after the one before it has come to its end; nothing is done where this version has one."""
        root = self.root
        if root is None:
            return
        self.finish()
        if self.newest is not None and self.newest.name == checkpoint_name(position.version):
            return
        try:
            aside = _on_main(lambda: begin_directory(root, position.version))
        except OSError as error:
            self._fail(position, str(error))
            return
        state, _ = policy_state(policy, is_loading=False)
        filesystem_async._results_queue = WriteResults()  # a new one: nothing of a killed writer's may be taken for this one's
        request = dist_checkpointing.save(
            {**state, **random_state(policy)}, str(aside), async_sharded_save=True, **_OWN_WRITER
        )
        write = None if request.async_fn is None else partial(_write_apart, os.getpid(), request.async_fn)
        self._pending = aside, dataclasses.replace(position), time.monotonic()
        self._queue.schedule_async_request(request._replace(async_fn=write))
        if not self._in_background:
            self.finish()

    def poll(self) -> None:
        """Complete the checkpoint in hand if every rank has written its part. Cheap; call it often, on all ranks alike."""
        if self._pending is None:
            return
        aside, position, _ = self._pending
        try:
            if not self._queue.maybe_finalize_async_calls(blocking=False):
                return
            path = _on_main(lambda: complete_directory(aside, position, self._keep_last, self._loaded))
        except (CheckpointException, OSError) as error:
            self._pending = None
            self._fail(position, _first_words(error))
            if dist.get_rank() == 0:
                shutil.rmtree(aside, ignore_errors=True)
            return
        self._pending, self.failure, self.newest = None, None, path

    def finish(self) -> None:
        """Wait until the checkpoint in hand is complete, or has failed. RuntimeError after an hour."""
        while self._pending is not None:
            if time.monotonic() - self._pending[2] > LONGEST_WRITE_SECONDS:
                raise RuntimeError(f"--save: {self._pending[0]} is not written after {LONGEST_WRITE_SECONDS:.0f} s")
            self.poll()
            if self._pending is not None:
                time.sleep(_POLL_SECONDS)

    def _fail(self, position: RunPosition, words: str) -> None:
        name = checkpoint_name(position.version)
        self.failure = f"--save {self.root}: {name} could not be written: {words}"
        if dist.get_rank() == 0:
            logger.error("%s", self.failure)


def _on_main(action: Callable[[], T]) -> T:
    """Rank 0's result on every rank, or its OSError."""
    answer: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            answer[0] = action()
        except OSError as error:
            answer[1] = str(error)
    dist.broadcast_object_list(answer, src=0)
    if answer[1] is not None:
        raise OSError(answer[1])
    result: T = answer[0]
    return result


def _first_words(error: CheckpointException | OSError) -> str:
    """What went wrong on the first rank where something did. Rank 0 knows; others say that it does."""
    if not isinstance(error, CheckpointException):
        return str(error)
    for rank, (cause, _) in sorted(error.failures.items()):
        words = "its writing process was killed" if "results_queue" in str(cause) else str(cause)
        return f"on rank {rank}: {words}"
    return "see rank 0"


def _write_apart(rank_pid: int, write: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """What the forked writer runs; it forks again, once a file."""
    leave_signals_to_parent()
    os.register_at_fork(after_in_child=partial(ask_for_death_signal, signal.SIGKILL))
    signal.signal(signal.SIGCHLD, _end_with_a_failed_child)
    if os.getppid() == rank_pid:
        write(*args, **kwargs)


def _end_with_a_failed_child(*_: Any) -> None:
    """Megatron's writer would wait for ever for a file's process that was killed, by the kernel for want of memory say."""
    for child in psutil.Process().children():
        with contextlib.suppress(ChildProcessError):  # already waited for
            ended = os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is not None and ended.si_status != 0:
                os._exit(1)


def load_checkpoint(policy: Policy, checkpoint: Path) -> RunPosition:
    """Fill the policy, its optimizer and its schedule from a checkpoint, and set the generators of random numbers.

    Learning rates, their schedule and the other numbers of the optimizer stay those of the flags; its moments and the
    place in the schedule come from the checkpoint. Raises ValueError for a checkpoint of another model, or one that
    cannot be read.
    """
    position = read_position(checkpoint)
    try:
        saved = dist_checkpointing.load_common_state_dict(str(checkpoint))
        _check_fits(policy, checkpoint, saved)
        wanted, optimizer = policy_state(policy, is_loading=True)
        same_ranks = saved.get("rank_layout") == rank_layout(policy)
        if same_ranks:
            wanted.update(random_state(policy))
        state, missing, unexpected = dist_checkpointing.load(wanted, str(checkpoint), strict=StrictHandling.RETURN_ALL)
    except CheckpointException as error:  # what any rank met
        first = next(iter(error.failures.values()), (error, None))[0]
        raise ValueError(f"--load: {checkpoint} is not a whole checkpoint: {first}") from error
    except (CheckpointingException, OSError, RuntimeError, KeyError, AttributeError, TypeError, *_TRUNCATED) as error:
        # AttributeError: megatron-core 0.16 stumbles over its own words where common.pt is missing; TypeError: so does it where
        # metadata.json is of another kind.
        raise ValueError(f"--load: {checkpoint} is not a whole checkpoint: {error}") from error
    unused = sorted(str(key) for key in missing if not str(key).startswith(RNG_KEY))
    if unused or unexpected:
        names = f"it lacks {sorted(map(str, unexpected))[:3]}" if unexpected else f"only it has {unused[:3]}"
        raise ValueError(f"--load: {checkpoint} holds other tensors than the model at --hf-path: {names}")
    with torch.no_grad():
        for prefix, chunk in named_chunks(policy):
            own = {name.removeprefix(prefix): value for name, value in state["model"].items() if name.startswith(prefix)}
            chunk.load_state_dict(own, strict=False)
        fill_optimizer(policy, optimizer, state)
    _set_schedule(policy, state["scheduler"])
    if same_ranks:
        restore_generators(state[RNG_KEY])
    else:
        _seed_anew(position)
    return position


_TRUNCATED = (EOFError, pickle.UnpicklingError, json.JSONDecodeError)


def _set_schedule(policy: Policy, saved: dict[str, Any]) -> None:
    policy.scheduler.num_steps = saved["num_steps"]
    policy.scheduler.step(increment=0)
    changed = {k: v for k, v in policy.scheduler.state_dict().items() if v != saved[k]}
    if changed and dist.get_rank() == 0:
        logger.info("schedule by the flags, not by the checkpoint: %s", changed)


def _seed_anew(position: RunPosition) -> None:
    """Another number of ranks has no state saved for each: seeds that the run has not used yet."""
    seed = (torch.initial_seed() + 1_000_003 * (position.version + 1)) % 2**31
    seed_generators(seed)
    if dist.get_rank() == 0:
        logger.info("random numbers: the checkpoint is of another layout, so they are seeded anew, with %d", seed)


def _check_fits(policy: Policy, checkpoint: Path, saved: dict[str, Any]) -> None:
    """Megatron itself would load a model of another vocabulary, or with another rotary base, without a word."""
    for name, value in dataclasses.asdict(policy.architecture).items():
        was = saved.get("architecture", {}).get(name, value)
        if was != value:
            raise ValueError(f"--load: {checkpoint} is of a model with {name} {was}, but at --hf-path it is {value}")
    layout, now = saved.get("optimizer_layout", {}), optimizer_layout(policy)
    if {**now, **layout} != now:
        was, given = (", ".join(f"{flag} {value}" for flag, value in d.items()) for d in (layout, now))
        raise ValueError(f"--load: {checkpoint} was saved under {was}; its optimizer cannot be loaded under {given}")
