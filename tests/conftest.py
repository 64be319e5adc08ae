"""Options and fixtures shared by all tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests.tiny_models import make_tiny_model

hypothesis.settings.register_profile("seeded", derandomize=True)  # the same examples in every run, as all else here
hypothesis.settings.load_profile("seeded")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("engines", "a real SGLang server beside the embedded engine")
    group.addoption(
        "--sglang-python",
        default=None,
        help="interpreter of an environment with SGLang (tests/integration/sglang_cpu/install.sh makes one)",
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Tests on SGLang exist only where it is given: a test that cannot run is not collected."""
    return True if collection_path.name.startswith("test_sglang") and not config.getoption("--sglang-python") else None


@pytest.fixture(scope="session")
def sglang_python(request: pytest.FixtureRequest) -> str:
    """The interpreter that --sglang-python names."""
    return str(Path(request.config.getoption("--sglang-python")).absolute())


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Factory: tiny_model(kind="llama"|"qwen2"|"qwen3", tie=False, vocab_size=32, seed=0, **config overrides) -> directory.

    Directories are made once per session and shared between tests: copy one before changing it.
    """
    made: dict[str, Path] = {}

    def make(kind: str = "llama", tie: bool = False, vocab_size: int = 32, seed: int = 0, **overrides: Any) -> Path:
        key = repr((kind, tie, vocab_size, seed, sorted(overrides.items())))
        if key not in made:
            directory = tmp_path_factory.mktemp(f"tiny-{kind}-")
            made[key] = make_tiny_model(directory, kind=kind, tie=tie, vocab_size=vocab_size, seed=seed, **overrides)
        return made[key]

    return make
