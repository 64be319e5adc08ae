"""Built-in rewards, a user's own, and what happens when it raises, hangs or cannot be imported."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path

import pytest

from m2po_megatron.reward import RewardPool, Scoring, reward_function

USER_REWARD = """
import os, time
def length(prompt, response, answer):
    print("a user may print")
    return len(response) - len(answer)
def moody(prompt, response, answer):
    if response == "raise": raise KeyError("gone")
    if response == "hang": time.sleep(1000)
    if response == "die": os._exit(3)
    if response == "nan": return float("nan")
    if response == "none": return None
    return 1
not_callable = 3
"""


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "user_reward.py").write_text(USER_REWARD)
    (tmp_path / "broken_reward.py").write_text("raise RuntimeError('broken at import')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    return "user_reward"


def test_arithmetic_is_exact_to_the_character() -> None:
    reward = reward_function("arithmetic")
    assert reward("1+1=", "2", "2") == 1.0
    assert [reward("1+1=", said, "2") for said in ("3", "22", "2 ", " 2", "", "02")] == [0.0] * 6


def test_exact_ignores_white_space_at_the_ends() -> None:
    reward = reward_function("exact")
    assert reward("q", " Paris\n", "Paris") == 1.0
    assert reward("q", "paris", "Paris") == 0.0


def test_a_users_function(user_module: str) -> None:
    assert reward_function(f"{user_module}:length")("p", "abcd", "a") == 3


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("maths", "'maths' is neither one of arithmetic, exact nor module:function"),
        (":f", "neither one of"),
        ("user_reward:absent", "user_reward has no function absent"),
        ("user_reward:not_callable", "has no function not_callable"),
        ("absent_module:f", "cannot import absent_module"),
    ],
)
def test_a_reward_that_cannot_be_had(user_module: str, name: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        reward_function(name)


def scorings(*responses: str) -> list[Scoring]:
    return [Scoring(f"g0.{i}", "p", response, "a") for i, response in enumerate(responses)]


def score(name: str, items: list[Scoring], **options: float) -> tuple[list[float], dict[str, int]]:
    async def run() -> tuple[list[float], dict[str, int]]:
        pool = RewardPool(name, **options)  # type: ignore[arg-type]
        await pool.start()
        try:
            return await pool.score(items), dict(pool.failures)
        finally:
            await pool.close()

    return asyncio.run(run())


def test_pool_with_a_built_in() -> None:
    assert score("arithmetic", scorings("a", "b")) == ([1.0, 0.0], {})


def test_pool_with_a_users_function_in_processes(user_module: str) -> None:
    assert score(f"{user_module}:length", scorings("a", "bb", "ccc", ""), workers=2) == ([0.0, 1.0, 2.0, -1.0], {})


def test_a_bad_sample_scores_zero_is_counted_and_named(user_module: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        rewards, failures = score(
            f"{user_module}:moody", scorings("ok", "raise", "nan", "none", "die", "ok"), workers=1
        )
    assert rewards == [1.0, 0.0, 0.0, 0.0, 0.0, 1.0]
    assert failures == {"error": 4}
    assert "g0.1" in caplog.text and "KeyError: 'gone'" in caplog.text


def test_a_reward_that_hangs_is_killed_and_the_next_is_scored(user_module: str) -> None:
    rewards, failures = score(f"{user_module}:moody", scorings("hang", "ok"), workers=1, timeout_s=0.3)
    assert rewards == [0.0, 1.0]
    assert failures == {"timeout": 1}


@pytest.mark.parametrize("name", ["user_reward:absent", "broken_reward:f"])
def test_pool_start_names_what_is_wrong(user_module: str, name: str) -> None:
    with pytest.raises(ValueError, match=r"has no function absent|broken at import"):
        score(name, [])
