"""The policy's weights for the engines: RUN_DIR/publish/v%08d, a complete Hugging Face directory per version.

Written aside and renamed; the `latest` file moves last, so that whoever follows it finds a whole directory. The newest
few are kept: an engine may still be reading the one before.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist
from megatron.core.models.gpt import GPTModel

from m2po_megatron.policy.architecture import Architecture
from m2po_megatron.weights.hf_io import save_hf

KEPT_VERSIONS = 3


def published_path(run_dir: str | Path, version: int) -> Path:
    return Path(run_dir) / "publish" / f"v{version:08d}"


def write_version(
    chunks: Sequence[GPTModel], arch: Architecture, template: str | Path, run_dir: str | Path, version: int, *, in_use_from: int
) -> Path:
    """Write this version's directory and return it. Collective over all ranks.

    in_use_from: the oldest version an engine may still be loading; directories from there on are kept.
    """
    path = published_path(run_dir, version)
    save_hf(chunks, arch, template, path)
    if dist.get_rank() == 0:
        replace_text(path.parent / "latest", path.name)
        _remove_others(path.parent, version, in_use_from)
    return path


def _remove_others(directory: Path, version: int, in_use_from: int) -> None:
    """Keep the newest few up to `version` and what is in use. What is newer belongs to a life of the run that ended."""
    found = {int(path.name[1:]): path for path in directory.glob("v????????")}
    kept = set(sorted(v for v in found if v <= version)[-KEPT_VERSIONS:])
    for number, path in found.items():
        if number > version or (number not in kept and number < in_use_from):
            shutil.rmtree(path, ignore_errors=True)


def replace_text(path: Path, text: str) -> None:
    """Replace a small file's contents at once: a reader sees the old text or the new."""
    aside = path.with_name(path.name + ".tmp")
    with open(aside, "w") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)
