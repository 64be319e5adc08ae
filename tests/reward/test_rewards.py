"""Built-in rewards, a user's own, and what happens when it raises, hangs or cannot be imported."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

from m2po_megatron.reward import RewardError, RewardPool, Scoring, reward_function
from m2po_megatron.reward.pool import FIRST_FAILURES

USER_REWARD = """
import os, signal, sys, time
def endless(prompt, response, answer):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print(os.getpid(), file=open(prompt, "w"), flush=True)
    while True: time.sleep(1)
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
    with pytest.raises(ValueError, match=r"has no function absent|broken at import") as caught:
        score(name, [])
    assert str(caught.value).count("--reward") == 1


@pytest.mark.parametrize("kind", ["raise", "nan", "none", "die", "hang"])
def test_a_reward_that_never_works_is_an_error(user_module: str, kind: str) -> None:
    texts = {"raise": "KeyError: 'gone'", "nan": "the reward is nan", "none": "TypeError", "die": "its process ended"}
    text = texts.get(kind, "took longer than 0.05 s")

    async def run() -> None:
        pool = RewardPool(f"{user_module}:moody", workers=2, timeout_s=0.05 if kind == "hang" else 30.0)
        await pool.start()
        try:
            fewer = FIRST_FAILURES - 1
            # Most are counted here: a process anew for each is slow, and the rule does not ask which kind failed.
            pool.failures["error"] = fewer - 2
            assert await pool.score(scorings(kind, kind)) == [0.0, 0.0]
            with pytest.raises(RewardError, match=f"--reward user_reward:moody: all of the first {fewer + 1} scor.*{text}"):
                await pool.score(scorings(kind))
        finally:
            await pool.close()

    asyncio.run(run())


def test_all_first_scorings_of_one_call_may_fail_too(user_module: str) -> None:
    with pytest.raises(RewardError, match="all of the first 32 scorings failed"):
        score(f"{user_module}:moody", scorings(*["raise"] * FIRST_FAILURES))


def test_one_success_makes_all_failures_isolated_ones(user_module: str) -> None:
    rewards, failures = score(f"{user_module}:moody", scorings("ok", *["raise"] * (2 * FIRST_FAILURES)))
    assert rewards == [1.0] + [0.0] * (2 * FIRST_FAILURES)
    assert failures == {"error": 2 * FIRST_FAILURES}


HOLDER = """
import asyncio, sys
from m2po_megatron.reward import RewardPool, Scoring
async def main():
    pool = RewardPool("user_reward:endless", timeout_s=1000)
    await pool.start()
    await pool.score([Scoring("g0.0", sys.argv[1], "r", "a")])
asyncio.run(main())
"""


def test_a_worker_that_hangs_does_not_outlive_its_killed_parent(user_module: str, tmp_path: Path) -> None:
    path = tmp_path / "pid"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(path)])
    try:
        assert select.select([reader], [], [], 60)[0], "the reward was never called"
        worker = os.pidfd_open(int(os.read(reader, 100)))
        try:
            holder.kill()
            holder.wait(10)
            assert select.select([worker], [], [], 10)[0], "the worker lives on"
        finally:
            os.close(worker)
    finally:
        holder.kill()
        holder.wait(10)
        os.close(reader)


def test_a_worker_whose_parent_is_another_ends_at_once(user_module: str) -> None:
    command = [sys.executable, "-m", "m2po_megatron.reward.worker", f"{user_module}:length", "1"]
    request = json.dumps({"prompt": "p", "response": "r", "answer": "a"}) + "\n"
    done = subprocess.run(command, input=request, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (1, "")
