"""Where checkpoints lie, and which of them count.

    SAVE/iter_0000120/            a whole one: Megatron's files and run.json
    SAVE/latest                   the name of the newest whole one, moved last
    SAVE/iter_0000160.*.tmp/      one that is being written, or whose writing was killed

Every step leaves a directory that can be resumed from: names change by a rename alone, and what is removed is renamed first.
All functions are for global rank 0, except `latest_checkpoint` and `read_position`; every rank has its `WriteResults`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pickle
import queue
import re
import shutil
import struct
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from m2po_megatron.weights.publish import replace_text

_REPLACED = ".replaced.tmp"
_LENGTH = struct.Struct("<q")


@dataclass
class RunPosition:
    """Where a run stands: updates done, batches consumed, and which life of the run this is.

    batch_sizes: flag by flag, what the place in the data is counted in; a run with others would train groups twice or never.
    """

    version: int = 0
    consumed_batches: int = 0
    incarnation: int = 0
    hf_path: str = ""
    batch_sizes: dict[str, int] = field(default_factory=dict)


def checkpoint_name(version: int) -> str:
    return f"iter_{version:07d}"


def is_whole(path: Path) -> bool:
    return path.suffix != ".tmp" and (path / "run.json").is_file()


def begin_directory(root: Path, version: int) -> Path:
    """Remove what killed saves left, and make the directory that a checkpoint is written into.

    Its name was never used before: a writer whose job was killed may still be about to open files in the old one.
    """
    _undo_replacement(root)
    for leftover in root.glob("iter_*.tmp"):
        shutil.rmtree(leftover, ignore_errors=True)
    aside = root / f"{checkpoint_name(version)}.{time.time_ns():x}.tmp"
    aside.mkdir(parents=True)
    return aside


def complete_directory(aside: Path, position: RunPosition, keep_last: int, in_use: Path | None) -> Path:
    """Give a fully written directory its name, move `latest` to it, then let older ones go; returns its path.

    keep_last: how many whole checkpoints stay, this one included; 0 = all. `in_use` stays in any case.
    """
    root = aside.parent
    final = root / checkpoint_name(position.version)
    for file in aside.iterdir():
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
    replace_text(aside / "run.json", json.dumps(dataclasses.asdict(position), indent=2))
    replaced = root / (final.name + _REPLACED)
    if final.exists():  # this version once more, by another life of the run
        shutil.rmtree(replaced, ignore_errors=True)
        os.replace(final, replaced)
    os.replace(aside, final)
    replace_text(root / "latest", final.name)
    shutil.rmtree(replaced, ignore_errors=True)
    if keep_last:
        _remove_older(root, position.version, keep_last, in_use)
    return final


def _remove_older(root: Path, newest: int, keep_last: int, in_use: Path | None) -> None:
    found = {int(m[1]): p for p in root.glob("iter_*") if (m := re.fullmatch(r"iter_(\d+)", p.name)) and is_whole(p)}
    for version in sorted(v for v in found if v <= newest)[:-keep_last]:
        if found[version] != in_use:
            doomed = found[version].with_name(found[version].name + ".old.tmp")
            os.replace(found[version], doomed)  # else a removal that is killed leaves what looks like a whole one
            shutil.rmtree(doomed, ignore_errors=True)


def _undo_replacement(root: Path) -> None:
    """A save killed between its two renames has taken away what `latest` names; the whole old one lies beside it."""
    name = _pointed_to(root)
    if name is not None and not (root / name).exists():
        with contextlib.suppress(FileNotFoundError):  # there is none, or another rank was faster
            os.replace(root / (name + _REPLACED), root / name)


def _pointed_to(root: Path) -> str | None:
    """What `latest` says, or None where there is no such file or it says no name."""
    pointer = root / "latest"
    if not pointer.is_file():
        return None
    name = pointer.read_bytes().decode(errors="replace").strip()
    return name if re.fullmatch(r"[\w.-]+", name) and name.strip(".") else None


def latest_checkpoint(load: str | Path) -> Path | None:
    """The checkpoint that `latest` names, or None where there is none yet (a run that starts again from its beginning).

    A run that was killed before its first checkpoint was pointed to has one whole checkpoint and no `latest`: that one.
    Raises ValueError if `latest` names a missing or half-written one, or if there are several checkpoints but no `latest`:
    a run that was meant to be resumed must not begin anew.
    """
    root = Path(load)
    pointer = root / "latest"
    _undo_replacement(root)
    if pointer.is_file():
        name = _pointed_to(root)
        if name is None:
            raise ValueError(
                f"--load {load}: what its file latest holds is no name of a checkpoint: write that into it"
            )
        if not is_whole(root / name):
            raise ValueError(f"--load {load}: latest names {name}, which is not a complete checkpoint there")
        return root / name
    if (root / "run.json").is_file():
        raise ValueError(f"--load {load}: is one checkpoint; give the directory that holds it and the file latest")
    whole = sorted(p.name for p in root.glob("iter_*") if is_whole(p))
    if len(whole) == 1:
        return root / whole[0]
    if whole:
        raise ValueError(f"--load {load}: has no file latest; to resume from {whole[-1]}, write this name into it")
    return None


def read_position(checkpoint: Path) -> RunPosition:
    """What run.json says. Raises ValueError if it cannot be read, or says what cannot be."""
    try:
        position = RunPosition(**json.loads((checkpoint / "run.json").read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"--load: {checkpoint}/run.json cannot be read: {error}") from error
    for name in ("version", "consumed_batches", "incarnation"):
        value = getattr(position, name)
        if type(value) is not int or value < 0:
            raise ValueError(f"--load: {checkpoint}/run.json: {name} is {value!r}, not a number of 0 or more")
    if not isinstance(position.batch_sizes, dict):
        raise ValueError(
            f"--load: {checkpoint}/run.json: batch_sizes is {position.batch_sizes!r}, not numbers by flags"
        )
    return position


def check_batch_sizes(checkpoint: Path, now: dict[str, int]) -> None:
    """Raises ValueError, naming the flags, where the run that wrote it counted its batches in other sizes."""
    was = read_position(checkpoint).batch_sizes
    other = {flag: value for flag, value in was.items() if now.get(flag, value) != value}
    if other:
        told = ", ".join(f"{flag} {value} (now {now[flag]})" for flag, value in other.items())
        raise ValueError(f"--load: {checkpoint} counts its place in the prompts with {told}: resume with the same")


class WriteResults:
    """What Megatron's forked writer hands to its rank: the last thing that was put, through an open file without a name.

    Megatron's own is a queue in a process that imports the whole program once more (six seconds of a first save), outlives a
    killed rank and dies of a signal to the job. A pipe would fill up: nobody reads before the writer has ended.
    """

    def __init__(self) -> None:
        if hasattr(os, "memfd_create"):  # Linux: a full disk elsewhere than in --save is no matter of ours
            self._file = os.fdopen(os.memfd_create("write results"), "w+b", buffering=0)
        else:
            self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - open as long as this object

    def put(self, results: object) -> None:
        """Called in the writer. It takes effect at once or, if the process is killed meanwhile, not at all."""
        content = pickle.dumps(results)
        number = self._file.fileno()
        os.ftruncate(number, 0)
        written = 0
        while written < len(content):  # Linux writes 2 GiB at most in one call
            written += os.pwrite(number, content[written:], _LENGTH.size + written)
        os.pwrite(number, _LENGTH.pack(len(content)), 0)

    def get_nowait(self) -> Any:
        """Called in the rank; what was put, once. Raises queue.Empty if the writer came to no result."""
        number = self._file.fileno()
        (length,) = _LENGTH.unpack(os.pread(number, _LENGTH.size, 0).ljust(_LENGTH.size, b"\0"))
        if not length:
            raise queue.Empty
        content = bytearray()
        while len(content) < length:
            content += os.pread(number, length - len(content), _LENGTH.size + len(content))
        os.ftruncate(number, 0)
        return pickle.loads(bytes(content))
