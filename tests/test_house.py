"""The rules of the house, read from the source: who imports whom, sizes, the hot path, what README promises."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "m2po_megatron"
OURS = "m2po_megatron"

# room -> what it may import of ours besides itself. The longest matching name is the room: `data.trajectory` has a rule of
# its own inside `data`. "*" = everything: these put the rooms together.
MAY_IMPORT = {
    "algo": set(),
    "kernels": set(),
    "console": set(),
    "cpu": set(),
    "parentage": set(),
    "run_settings": set(),
    "data.trajectory": set(),
    "data": {"data.trajectory"},
    "policy": {"kernels", "data"},
    "weights": {"policy.architecture", "policy.settings"},
    "reward": {"data", "parentage"},
    "rollout": {"data", "reward", "parentage"},
    "rollout.embedded": {"rollout", "data", "reward", "parentage", "kernels.logprob"},
    "trainer": {"algo", "policy", "data", "kernels"},
    "initialize": {"policy.settings", "data.packing", "randomness"},
    "randomness": set(),
    "optional_packages": set(),
    "checkpoint_files": {"weights"},
    "checkpoint_state": {"policy", "randomness"},
    "checkpoint": {"checkpoint_files", "checkpoint_state", "parentage", "policy", "randomness"},
    "metrics": {"data.trajectory"},
    "evaluate": {"rollout.settings", "rollout_feed", "run_settings"},
    "rollout_feed": {"data", "rollout", "initialize", "parentage"},
    "arguments": {"algo", "data.packing", "policy", "rollout", "run_settings", "trainer"},
    "startup": {"*"},
}
# The rollout side runs where there is no megatron-core; the nouns and the rewards run where there is no torch either.
FOREIGN = {
    "rollout": {"megatron"},
    "reward": {"megatron", "torch"},
    "data.trajectory": {"megatron", "torch"},
    "algo": {"megatron"},
}
LARGEST_FILE = 300
LONGEST_FUNCTION = 60
# What may be larger, each with its reason. Nothing is at present.
LARGER: dict[str, str] = {}
HOT_PATH = ("algo", "kernels", "policy/forward.py", "policy/attention.py", "trainer.py", "data/packing.py")


def source_files() -> list[Path]:
    """Production code: the package (kernels through its symlink), the main script, tools, examples, docs."""
    package = list(PACKAGE.rglob("*.py")) + list((PACKAGE / "kernels").glob("*.py"))
    scripts = [ROOT / "pretrain_rl.py", *(ROOT / "tools").glob("*.py"), *(ROOT / "examples").rglob("*.py")]
    return sorted({*package, *scripts, *(ROOT / "docs").glob("*.py")})


def package_files() -> list[Path]:
    return [path for path in source_files() if PACKAGE in path.parents]


def module_name(path: Path) -> str:
    """`m2po_megatron/data/packing.py` -> `data.packing`; the package itself -> ``."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import, inside functions too. `from a import b` gives `a.b`: b may be a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: import by the full name, as everywhere"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def is_in(name: str, room: str) -> bool:
    return name == room or name.startswith((room + ".", room + "_" if room == "rollout.embedded" else room + "."))


def room_of(name: str) -> str | None:
    """The most particular room a module is in."""
    return max((room for room in MAY_IMPORT if is_in(name, room)), key=len, default=None)


def broken_imports(name: str, source: str) -> list[str]:
    """What a module imports of ours, or of others, that its room may not."""
    if not name:
        return []
    room = room_of(name)
    if room is None:
        return [f"{name}: this room has no rule in tests/test_house.py; say what it may import"]
    allowed = MAY_IMPORT[room]
    broken = []
    for line, imported in imported_modules(ast.parse(source)):
        if imported.startswith(OURS + "."):
            target = imported.removeprefix(OURS + ".")
            fine = "*" in allowed or is_in(target, room) or any(is_in(target, other) for other in allowed)
        else:
            fine = not any(
                is_in(name, inside) and is_in(imported, lib) for inside, libs in FOREIGN.items() for lib in libs
            )
        if not fine:
            broken.append(f"{name}:{line}: imports {imported}")
    return broken


def test_who_imports_whom() -> None:
    assert [b for path in package_files() for b in broken_imports(module_name(path), path.read_text())] == []


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("algo.m2", "from m2po_megatron.data.trajectory import Batch"),
        ("rollout.store", "def f():\n    from m2po_megatron import trainer"),
        ("rollout.store", "from m2po_megatron.kernels.logprob import linear_logprob"),
        ("rollout.engines", "import megatron.core"),
        ("data.trajectory", "import m2po_megatron.data.prompts"),
        ("reward.pool", "from torch import nn"),
        ("trainer", "from m2po_megatron.rollout import codec"),
        ("weights.hf_io", "from m2po_megatron.policy.forward import Policy"),
        ("new_room.thing", "import json"),
    ],
)
def test_a_broken_import_rule_is_seen(name: str, source: str) -> None:
    assert len(broken_imports(name, source)) == 1


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("rollout.embedded_model", "from m2po_megatron.kernels.logprob import vocab_parallel_logprob"),
        ("rollout.embedded", "from m2po_megatron.rollout.schema import Request"),
        ("data.prompts", "from m2po_megatron.data.trajectory import Prompt"),
        ("startup", "from m2po_megatron.weights.hf_io import load_hf"),
        ("algo.m2", "import torch.distributed as dist"),
    ],
)
def test_a_kept_import_rule_is_left_alone(name: str, source: str) -> None:
    assert broken_imports(name, source) == []


def test_the_import_name_kernels_is_not_taken() -> None:
    assert (PACKAGE / "kernels").is_symlink()
    assert (PACKAGE / "kernels").resolve() == (ROOT / "kernels").resolve()
    assert not (ROOT / "kernels" / "__init__.py").exists()
    taken = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in [*source_files(), *(ROOT / "tests").rglob("*.py")]
        for line, name in imported_modules(ast.parse(path.read_text()))
        if is_in(name, "kernels")
    ]
    assert taken == []


def too_large(path: Path, name: str) -> list[str]:
    """Files and functions above the limits that LARGER does not excuse."""
    text = path.read_text()
    found = []
    if (count := len(text.splitlines())) > LARGEST_FILE and name not in LARGER:
        found.append(f"{name}: {count} lines")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            count = (node.end_lineno or node.lineno) - node.lineno + 1
            if count > LONGEST_FUNCTION and f"{name}:{node.name}" not in LARGER:
                found.append(f"{name}:{node.name}: {count} lines")
    return found


def test_files_and_functions_stay_readable() -> None:
    assert [found for path in source_files() for found in too_large(path, str(path.relative_to(ROOT)))] == []


def test_an_overgrown_function_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "long.py"
    path.write_text("def f():\n" + "    x = 1\n" * LONGEST_FUNCTION + "\n" * LARGEST_FILE)
    assert too_large(path, "long.py") == ["long.py: 361 lines", "long.py:f: 61 lines"]


def test_excuses_are_still_needed() -> None:
    for name in LARGER:
        path = ROOT / name.split(":")[0]
        assert path.is_file(), f"{name} is excused in tests/test_house.py but does not exist"


def test_the_loop_fits_one_reading() -> None:
    assert len((ROOT / "pretrain_rl.py").read_text().splitlines()) <= 160


def waits_for_the_device(source: str) -> list[str]:
    """Calls that stop the pipeline of work or write to the terminal: `.item()`, `print`, an environment read."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "item":
            found.append(f"{node.lineno}: .item()")
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            found.append(f"{node.lineno}: print")
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv"):
            found.append(f"{node.lineno}: environment")
    return found


def test_the_hot_path_does_not_wait_print_or_read_the_environment() -> None:
    assert waits_for_the_device("import os\nprint(x.item(), os.environ)") != []
    files = [
        path
        for path in package_files()
        if str(path.relative_to(PACKAGE)).startswith(HOT_PATH)  # a folder's name or a file's
    ]
    assert len(files) >= len(HOT_PATH)
    assert [f"{path.name}:{found}" for path in files for found in waits_for_the_device(path.read_text())] == []


def test_one_place_knows_how_megatron_runs_without_cuda() -> None:
    """Nobody else redirects torch.cuda or catches device arguments."""
    marks = re.compile(
        r"TorchFunctionMode|torch\.cuda\.\w+ *= |setattr\(torch\.cuda|Tensor\.(cuda|type|pin_memory) *= "
    )
    holders = {path.relative_to(ROOT).as_posix() for path in source_files() if marks.search(path.read_text())}
    assert holders == {"m2po_megatron/cpu.py"}


def test_no_stubs_and_no_silence() -> None:
    words = re.compile(r"\b(?:TO" + r"DO|FIX" + r"ME|NotImplemented" + r"Error)\b|except:\s*$", re.MULTILINE)
    assert [str(path.relative_to(ROOT)) for path in source_files() if words.search(path.read_text())] == []


def test_documents_name_only_make_targets_and_files_that_exist() -> None:
    targets = set(re.findall(r"^([a-z][a-z0-9-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"demo", "test", "check", "bench"} <= targets
    documents = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").rglob("*.md")]
    missing = []
    for document in documents:
        for command in re.findall(r"^\s*(make .*)$|`(make [^`]*)`", document.read_text(), re.MULTILINE):
            words = re.sub(r'\w+="[^"]*"|\w+=\S+', "", "".join(command)).split()[1:]
            missing += [f"{document.name}: make {word}" for word in words if word not in targets]
        for script in re.findall(r"\b((?:tools|examples|docs)/[\w/.-]+\.(?:py|sh|yaml))\b", document.read_text()):
            missing += [] if (ROOT / script).is_file() else [f"{document.name}: {script}"]
        for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", document.read_text()):
            missing += [] if (document.parent / link).exists() else [f"{document.name}: {link}"]
    assert missing == []


def test_readme_has_the_two_commands() -> None:
    readme = (ROOT / "README.md").read_text()
    assert re.search(r"^make demo$", readme, re.MULTILINE)
    assert re.search(r"^make test$", readme, re.MULTILINE)
    for package in ("make", "git", "python3-venv"):
        assert re.search(rf"apt-get install .*\b{package}\b", readme)


def test_usage_lists_every_flag_as_the_settings_have_it() -> None:
    code = "import docs.flags as f; raise SystemExit(f.rewritten(f.USAGE.read_text()) != f.USAGE.read_text())"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, f"run: python docs/flags.py\n{done.stderr}"
