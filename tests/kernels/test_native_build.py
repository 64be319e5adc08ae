"""The compiled CPU backend's library: that it was built, and what happens where it could not be."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from m2po_megatron.kernels import backends, logprob_native, logprob_torch
from m2po_megatron.kernels.logprob import vocab_parallel_logprob

ROOT = Path(__file__).parent.parent.parent


def test_what_it_cannot_take_is_named_and_auto_takes_another() -> None:
    half = torch.zeros(2, 3, dtype=torch.float16)
    assert "float16" in logprob_native.obstacle(half)
    assert "meta" in logprob_native.obstacle(torch.zeros(2, 3, device="meta"))
    assert backends.choose_backend("auto", half) is logprob_torch
    assert backends.choose_backend("auto", half.float()) is logprob_native
    with pytest.raises(ValueError, match="native.*float16"):
        vocab_parallel_logprob(half, torch.tensor([0, 1]), backend="native")


def test_a_missing_broken_or_older_library_is_an_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.zeros(1, 2)
    load = logprob_native._library.__wrapped__
    monkeypatch.setattr(logprob_native, "BINARY", tmp_path / "library.so")
    monkeypatch.setattr(logprob_native, "_library", load)
    assert "was not built" in logprob_native.obstacle(logits)
    (tmp_path / "library.so").write_bytes(b"no library")
    assert "cannot be loaded" in logprob_native.obstacle(logits)
    assert backends.choose_backend("auto", logits) is logprob_torch
    monkeypatch.undo()
    monkeypatch.setattr(logprob_native, "INTERFACE", 0)
    assert "another version" in load()


def test_the_library_was_built() -> None:
    """It is optional for users, not for the tests: where there is a compiler, what they test must exist."""
    assert shutil.which("c++") or shutil.which("g++"), "these tests need a C++ compiler"
    assert logprob_native.obstacle(torch.zeros(1, 1)) == "", "run `python setup.py build_ext --inplace`"
    library = ctypes.CDLL(str(logprob_native.BINARY))
    assert library.logprob_native_interface() == logprob_native.INTERFACE


def test_an_installation_without_a_compiler_falls_back_to_torch(tmp_path: Path) -> None:
    generated = shutil.ignore_patterns("build", "*.egg-info", "__pycache__", "*.so")
    for name in ("kernels", "m2po_megatron"):
        shutil.copytree(ROOT / name, tmp_path / name, symlinks=True, ignore=generated)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    environment = {"PATH": os.environ["PATH"], "CC": "/bin/false", "CXX": "/bin/false", "PYTHONPATH": str(tmp_path)}
    code = """
import torch
from m2po_megatron.kernels import backends, logprob_native
print(backends.choose_backend("auto", torch.zeros(1, 1)).__name__, logprob_native.obstacle(torch.zeros(1, 1)))
"""

    def python(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200
        )

    built = python("setup.py", "build_ext", "--inplace")
    assert built.returncode == 0, built.stderr
    assert list(tmp_path.rglob("*.so")) == []
    chosen = python("-c", code)
    assert chosen.stdout.startswith("m2po_megatron.kernels.logprob_torch its library"), chosen.stderr
    assert "build_ext --inplace" in chosen.stdout
