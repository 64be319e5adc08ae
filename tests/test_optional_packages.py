"""Packages of the right name that are not what megatron-core expects must look absent, and be named with what to do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = """
from m2po_megatron import cpu, optional_packages
optional_packages.hide_unusable()
cpu.install()
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.transformer import transformer_block
from m2po_megatron.policy.model import layer_spec_name
print(HAVE_TE, transformer_block.HAVE_APEX, layer_spec_name())
print(optional_packages.describe())
"""
EMPTY_METAPACKAGE = 'raise RuntimeError("Found empty `transformer-engine` meta package installed.\\nInstall it with")'
BROKEN_LIBRARY = 'raise OSError("libcudnn.so.9: cannot open shared object file")'


def run(path: Path) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{path}{os.pathsep}{ROOT}"},
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()


def install(folder: Path, name: str, text: str) -> Path:
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text(text + "\n")
    return folder


def test_nothing_is_installed(tmp_path: Path) -> None:
    assert run(tmp_path) == ["False False local", "TransformerEngine not installed, apex not installed"]


@pytest.mark.parametrize(("text", "said"), [(EMPTY_METAPACKAGE, "Found empty"), (BROKEN_LIBRARY, "libcudnn.so.9")])
def test_a_transformer_engine_that_cannot_be_imported_is_absent(tmp_path: Path, text: str, said: str) -> None:
    install(tmp_path, "transformer_engine/common", "")
    install_at = tmp_path / "transformer_engine"
    (install_at / "__init__.py").write_text(f"from transformer_engine import common\n{text}\n")
    first, second = run(tmp_path)
    assert first == "False False local"
    assert f"TransformerEngine ignored: {said}" in second
    assert "--no-build-isolation" in second


def test_pypis_apex_is_not_nvidias(tmp_path: Path) -> None:
    first, second = run(install(tmp_path, "apex", "from_another_project = True"))
    assert first == "False False local"
    assert "apex ignored" in second
    assert "is not NVIDIA's apex" in second


def test_nvidias_apex_stays_visible(tmp_path: Path) -> None:
    """Told apart by a package of its own, without importing it."""
    install(tmp_path, "apex", "")
    install(tmp_path / "apex", "multi_tensor_apply", "")
    program = "from m2po_megatron import optional_packages as o; o.hide_unusable(); print(o.describe())"
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        timeout=60,
        check=True,
    )
    assert "apex found" in done.stdout
