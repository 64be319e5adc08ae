"""TransformerEngine and NVIDIA's apex: used where they work, absent where only something of their name is installed.

megatron-core tries to import both and expects ImportError where there is none. Two installations answer otherwise:
PyPI's `transformer-engine` without its framework part raises RuntimeError on import, which ends megatron-core's own, and
PyPI's `apex` is another project, whose import succeeds, so that megatron-core would go on to use kernels it does not have.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

_TRANSFORMER_ENGINE = "transformer_engine"
_APEX = "apex"
_hidden: dict[str, str] = {}


def hide_unusable() -> None:
    """Make unusable installations look absent. Before anything imports megatron-core; once a process."""
    for name, find_fault in ((_TRANSFORMER_ENGINE, _transformer_engine_fault), (_APEX, _apex_fault)):
        if name not in sys.modules and _location(name) is not None:
            fault = find_fault()
            if fault:
                _hidden[name] = fault
                sys.modules[name] = None  # type: ignore[assignment]  # what makes `import` raise ImportError


def describe() -> str:
    """For the start-up lines: each package, and what to do about one that cannot be used."""
    words = []
    for shown, name, module in (("TransformerEngine", _TRANSFORMER_ENGINE, "transformer_engine_torch"), ("apex", _APEX, _APEX)):
        if name in _hidden:
            words.append(f"{shown} ignored: {_hidden[name]}")
        else:
            words.append(f"{shown} {'not installed' if _location(module) is None else 'found'}")
    return ", ".join(words)


def _location(name: str) -> Path | None:
    """Where a top-level package or module lies, without importing it."""
    if sys.modules.get(name, 0) is None:
        return None
    spec = importlib.util.find_spec(name)
    if spec is None:
        return None
    folders = list(spec.submodule_search_locations or [])
    return Path(folders[0] if folders else spec.origin or name)


def _transformer_engine_fault() -> str:
    try:
        importlib.import_module(_TRANSFORMER_ENGINE)
    except Exception as error:  # noqa: BLE001  its own checks raise RuntimeError, a missing library OSError
        for name in [n for n in sys.modules if n.split(".")[0] == _TRANSFORMER_ENGINE]:
            del sys.modules[name]  # what the failed import left behind
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        return f"{first} (install transformer-engine[pytorch] with --no-build-isolation, see docs/usage.md)"
    return ""


def _apex_fault() -> str:
    location = _location(_APEX)
    if location is None or (location / "multi_tensor_apply").is_dir():
        return ""
    return f"{location} is not NVIDIA's apex, which is built from its source (PyPI's apex is another project)"
