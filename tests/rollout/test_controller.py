"""The controller's parts together on one event loop: real store, real admission, engines without a network."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from m2po_megatron.rollout.errors import RolloutError
from tests.rollout.controller_lab import WAIT_S, Lab, lease, run, train


@pytest.fixture
def lab(tmp_path: Path, tiny_model: Callable[..., Path]) -> Lab:
    return Lab(tmp_path, tiny_model())


def test_batches_come_in_order_complete_scored_and_within_the_bound(lab: Lab) -> None:
    async def test() -> None:
        async with lab.running() as controller:
            parts = controller.parts()
            version, prompts = 0, []
            for expected in range(5):
                batch = await lease(parts, version)
                assert batch.id == expected
                assert [g.id for g in batch.groups] == [f"g{4 * expected + i}" for i in range(4)]
                assert all(len(g.trajectories) == 2 for g in batch.groups)
                assert all(t.reward == 0.0 for t in batch.trajectories)
                assert all(version - g.oldest_version <= 2 for g in batch.groups)
                prompts += [g.prompt.id for g in batch.groups]
                version = await train(lab, parts, batch)
            assert sorted(prompts[:10]) == sorted(f"p{i}" for i in range(10))  # an epoch
            assert sorted(prompts[10:]) == sorted(f"p{i}" for i in range(10))
            status = controller.status()
            assert status["groups"]["trained"] == 20
            assert status["dropped"] == {}
            assert status["generated_tokens"] >= 20 * 2 * 3

    run(test())


def test_a_prompt_that_is_too_long_is_refused_at_the_start(lab: Lab) -> None:
    with lab.prompts.open("a") as file:
        file.write(json.dumps({"prompt": "1+" * 20 + "1=", "answer": "21"}) + "\n")
    lab.settings = replace(lab.settings, max_prompt_length=10)

    async def test() -> None:
        async with lab.running(ready=False) as controller:
            with pytest.raises(RolloutError, match="prompts.jsonl: prompt 'prompts.jsonl:11' has 42 tokens, more than 10"):
                await controller.wait_ready(WAIT_S)
            assert controller._store.counts().get("running", 0) == 0

    run(test())


def test_a_prompt_whose_sequence_no_micro_batch_holds_is_refused_at_the_start(lab: Lab) -> None:
    lab.job = replace(lab.job, longest_sequence=lab.settings.max_response_length + 2)

    async def test() -> None:
        async with lab.running(ready=False) as controller:
            with pytest.raises(RolloutError, match="prompt .* tokens, more than 2 .* --max-tokens-per-micro-batch"):
                await controller.wait_ready(WAIT_S)
            assert controller._store.counts().get("running", 0) == 0

    run(test())


def test_a_reward_that_never_works_reaches_the_trainer(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bad_reward.py").write_text("def f(prompt, response, answer):\n    raise KeyError('gone')\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    lab.settings = replace(lab.settings, reward="bad_reward:f", group_size=40, rollout_batch_size=160, global_batch_size=80)

    async def test() -> None:
        async with lab.running() as controller:
            with pytest.raises(RolloutError, match=r"^--reward bad_reward:f: all of the first \d+ scorings.*KeyError: 'gone'"):
                await controller.parts().producer.lease(0, WAIT_S)

    run(test())


def test_generation_runs_ahead_as_far_as_the_rules_allow(lab: Lab) -> None:
    async def test() -> None:
        async with lab.running() as controller:
            parts = controller.parts()
            await lab.until(lambda: controller.status()["groups"]["ready"] == 8)  # this batch and one ahead
            assert parts.producer.refusal() == "staleness"  # batch 2 starts at 4, the engines have 0
            batch = await lease(parts, 0)
            await train(lab, parts, batch, publish=False)
            assert parts.producer.refusal() == "staleness"
            parts.publisher.publish(str(lab.weights), 2)
            await lab.until(lambda: controller.status()["groups"]["ready"] == 8)
            assert controller.status()["next_position"] == 12

    run(test())


def test_depth_holds_generation_back_where_staleness_would_not(lab: Lab) -> None:
    lab.settings = replace(lab.settings, max_staleness=100, pipeline_depth=0)

    async def test() -> None:
        async with lab.running() as controller:
            await lab.until(lambda: controller.status()["groups"]["ready"] == 4)
            assert controller.parts().producer.refusal() == "depth"

    run(test())


def test_concurrency_bounds_the_load(lab: Lab) -> None:
    lab.settings = replace(lab.settings, max_concurrent_rollouts=5)
    for url in lab.settings.sglang_urls:
        lab.client(url).gate.clear()

    async def test() -> None:
        async with lab.running() as controller:
            await lab.until(lambda: controller.parts().producer.refusal() == "concurrency")
            assert controller.status()["running_trajectories"] == 4
            assert controller.status()["oldest_running"]["group"] == 0

    run(test())


def test_synchronous_training_uses_only_the_newest_weights(lab: Lab) -> None:
    lab.settings = replace(lab.settings, max_staleness=0)

    async def test() -> None:
        async with lab.running() as controller:
            parts = controller.parts()
            version = 0
            for _ in range(4):
                batch = await lease(parts, version)
                assert {t.oldest_version for t in batch.trajectories} == {version}
                assert controller.status()["groups"]["ready"] == 0  # nothing runs ahead
                version = await train(lab, parts, batch)

    run(test())


def test_a_lease_is_the_same_until_trained_and_none_before_ready(lab: Lab) -> None:
    for url in lab.settings.sglang_urls:
        lab.client(url).gate.clear()

    async def test() -> None:
        async with lab.running() as controller:
            parts = controller.parts()
            assert await parts.producer.lease(0, 0.05) is None
            with pytest.raises(RolloutError, match="batch 0 was never leased"):
                await parts.producer.trained(0, 2)
            for client in lab.clients.values():
                client.gate.set()
            first, again = await lease(parts, 0), await lease(parts, 0)
            assert [t.id for t in first.trajectories] == [t.id for t in again.trajectories]
            await parts.producer.trained(0, 2)
            await parts.producer.trained(0, 2)  # an answer that was lost may be asked for again
            for wrong in ((0, 3), (2, 4), (1, 2)):
                with pytest.raises(RolloutError, match="expected batch 1 at version 4"):
                    await parts.producer.trained(*wrong)
            with pytest.raises(RolloutError, match="trainer is at version 0, but batch 1 starts at 2"):
                await parts.producer.lease(0, 1)

    run(test())


def test_a_group_over_the_bound_is_dropped_at_lease_and_sampled_again(lab: Lab) -> None:
    async def test() -> None:
        async with lab.running() as controller:
            parts = controller.parts()
            await lab.until(lambda: controller.status()["groups"]["ready"] == 8)
            # An engine that lied about its version: what came out is older than the admission assumed.
            ready = parts.producer._ready
            ready[1] = replace(ready[1], oldest_version=-1 - lab.settings.max_staleness)
            batch = await lease(parts, 0)
            assert [g.id for g in batch.groups] == ["g0", "g1r1", "g2", "g3"]
            assert controller.status()["dropped"] == {"stale": 1}

    run(test())


def test_unusable_samples_are_sampled_again_a_bounded_number_of_times(lab: Lab) -> None:
    lab.settings = replace(lab.settings, sglang_urls=["http://fake-0"], group_retries=2)
    client = lab.client("http://fake-0")
    client.bad_samples = ["no log-probs", "missing sample"]

    async def fine() -> None:
        async with lab.running() as controller:
            batch = await lease(controller.parts(), 0)
            assert len(batch.trajectories) == 8
            assert len(client.rids) == len(set(client.rids))  # every try under an id of its own

    run(fine())


def test_a_group_that_is_never_usable_stops_the_run_and_names_the_sample(lab: Lab) -> None:
    lab.settings = replace(lab.settings, sglang_urls=["http://fake-0"], group_retries=1)
    lab.client("http://fake-0").bad_samples = ["no log-probs"] * 100

    async def test() -> None:
        async with lab.running() as controller:
            with pytest.raises(RolloutError, match=r"g\d\.0: 3 tokens came with 0 log-probs.*2 times without a usable"):
                await controller.parts().producer.lease(0, WAIT_S)

    run(test())


def test_one_dead_engine_of_two_costs_nothing(lab: Lab) -> None:
    async def test() -> None:
        for url in lab.settings.sglang_urls:
            lab.client(url).gate.clear()
        async with lab.running() as controller:
            parts = controller.parts()
            await lab.until(lambda: controller.status()["running_trajectories"] == 8)
            parts.pool.fence(parts.pool.engines[0], "a test")
            lab.clients["http://fake-1"].gate.set()
            batch = await lease(parts, 0)
            assert len({t.id for t in batch.trajectories}) == 8
            assert parts.pool.engines[0].generated_tokens == 0

    run(test())


def test_no_engine_left_reaches_the_lease(lab: Lab) -> None:
    async def test() -> None:
        for url in lab.settings.sglang_urls:
            lab.client(url).gate.clear()
        async with lab.running() as controller:
            parts = controller.parts()
            for engine in parts.pool.engines:
                parts.pool.fence(engine, "a test")
            with pytest.raises(RolloutError, match=r"(?s)no rollout engine is left.*fake-0.*fake-1"):
                await parts.producer.lease(0, WAIT_S)

    run(test())


def test_an_engine_that_cannot_be_reached_stops_the_start(lab: Lab) -> None:
    lab.client("http://fake-1").failing = {"model_info"}

    async def test() -> None:
        async with lab.running(ready=False) as controller:
            with pytest.raises(RolloutError, match="SGLang server http://fake-1 cannot be reached.*--sglang-urls"):
                await controller.wait_ready(WAIT_S)

    run(test())


def test_a_lease_of_2048_trajectories_is_quick(lab: Lab) -> None:
    """Not a benchmark: a guard against a cost per trajectory that would show (8 s here would be a defect)."""
    lab.settings = replace(lab.settings, group_size=8, rollout_batch_size=2048, global_batch_size=2048, max_staleness=1)

    async def test() -> None:
        async with lab.running() as controller:
            batch = await asyncio.wait_for(lease(controller.parts(), 0), 8)
            assert len(batch.trajectories) == 2048

    run(test())
