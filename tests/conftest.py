"""Options and fixtures shared by all tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_models import make_tiny_model


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("engines", "a real rollout engine for the contract tests")
    group.addoption("--sglang-url", default=None, help="base URL of a running SGLang server: the contract tests run on it too")
    group.addoption("--sglang-model", default=None, help="the Hugging Face directory that server was started with")


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
