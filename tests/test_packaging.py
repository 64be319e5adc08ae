"""What is shipped: a wheel and an sdist built from a copy of the tree, and the pinned versions."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
KERNEL_FILES = {f"m2po_megatron/kernels/{path.name}" for path in (ROOT / "kernels").glob("*.py")}


def build(tree: Path, kind: str, output: Path) -> Path:
    """Call the build backend as pip does: `kind` is wheel or sdist."""
    output.mkdir(parents=True, exist_ok=True)
    code = f"from setuptools import build_meta; print(build_meta.build_{kind}({str(output)!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=tree, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return output / done.stdout.split()[-1]


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources (links kept), so that building leaves nothing in the repository."""
    copy = tmp_path_factory.mktemp("sources") / "m2po"
    generated = shutil.ignore_patterns(
        ".git", ".venv*", "runs", "build", "dist", "*.egg-info", "__pycache__", ".*_cache"
    )
    shutil.copytree(ROOT, copy, symlinks=True, ignore=generated)
    return copy


@pytest.fixture(scope="module")
def wheel(tree: Path) -> Path:
    return build(tree, "wheel", tree.parent / "dist")


def test_the_wheel_holds_every_module_and_nothing_else(tree: Path, wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {str(path.relative_to(tree)) for path in (tree / "m2po_megatron").rglob("*.py")}
    assert KERNEL_FILES
    assert {name for name in names if name.endswith(".py")} == modules | KERNEL_FILES
    assert {name.split("/")[0] for name in names} == {"m2po_megatron", f"m2po_megatron-{PROJECT['version']}.dist-info"}
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_wheel_works_away_from_the_repository(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    code = """
import importlib.util, torch
from m2po_megatron.kernels import logprob
print(logprob.__file__, importlib.util.find_spec("kernels") is None)
value, _ = logprob.vocab_parallel_logprob(torch.tensor([[0.0, 0.0, 0.0, 0.0]]), torch.tensor([2]))
print(round(float(value), 4))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path / "site"), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    place, free, value = done.stdout.split()
    assert Path(place).is_relative_to(tmp_path / "site")
    assert (free, value) == ("True", "-1.3863")  # log 1/4


def test_the_sdist_builds_the_same_wheel(tree: Path, wheel: Path, tmp_path: Path) -> None:
    with tarfile.open(build(tree, "sdist", tmp_path)) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = (path for path in tmp_path.iterdir() if path.is_dir())
    for name in ("pretrain_rl.py", "Makefile", "constraints.txt", "examples/arithmetic/train.jsonl", *KERNEL_FILES):
        assert (unpacked / name).is_file(), name
    again = build(unpacked, "wheel", tmp_path / "dist")
    contents = [zipfile.ZipFile(path) for path in (wheel, again)]
    listing = [{name for name in archive.namelist() if "dist-info" not in name} for archive in contents]
    assert listing[0] == listing[1]
    assert [name for name in listing[0] if contents[0].read(name) != contents[1].read(name)] == []


def test_a_folder_named_kernels_does_not_disturb_transformers() -> None:
    code = "import kernels, transformers; print(kernels.__file__, transformers.LlamaForCausalLM.__name__)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        env={"PATH": "/usr/bin:/bin"},
    )
    assert done.stdout.split() == ["None", "LlamaForCausalLM"], done.stderr


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pairs}


def test_every_dependency_is_pinned_within_its_range() -> None:
    wanted = PROJECT["dependencies"] + PROJECT["optional-dependencies"]["dev"]
    for requirement in map(Requirement, wanted):
        version = pins().get(canonicalize_name(requirement.name))
        assert version is not None, f"{requirement.name} is not in constraints.txt"
        assert requirement.specifier.contains(version), (
            f"constraints.txt has {requirement.name}=={version}: {requirement}"
        )


def test_the_changelog_begins_with_this_version() -> None:
    versions = re.findall(r"^## (\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert versions[0] == PROJECT["version"]
