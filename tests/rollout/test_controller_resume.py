"""A controller started again on its store; evaluations and probes beside the training."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from m2po_megatron.rollout.controller import Controller
from m2po_megatron.rollout.errors import RolloutError, StoreError
from m2po_megatron.rollout.evaluation import EvaluationRequest
from m2po_megatron.rollout.store import RolloutStore
from tests.rollout.controller_lab import WAIT_S, Lab, lease, run, train


@pytest.fixture
def lab(tmp_path: Path, tiny_model: Callable[..., Path]) -> Lab:
    return Lab(tmp_path, tiny_model())


def test_resume_loses_nothing_and_trains_nothing_twice(lab: Lab) -> None:
    async def first() -> list[str]:
        async with lab.running() as controller:
            parts = controller.parts()
            version = 0
            for _ in range(3):
                batch = await lease(parts, version)
                version = await train(lab, parts, batch)
            await lab.until(lambda: controller.status()["groups"]["ready"] == 8)
            batch = await lease(parts, version)
            return [g.prompt.id for g in batch.groups]

    leased_prompts = asyncio.run(first())
    # The checkpoint is of batch 2: what was trained or leased since comes again, the same prompts, in order.
    lab.job = replace(lab.job, incarnation=1, start_version=4, consumed_batches=2, resume=True)
    lab.clients.clear()

    async def second() -> None:
        async with lab.running() as controller:
            parts = controller.parts()
            assert controller.status()["incarnation"] == 1
            assert {c.label for c in lab.clients.values()} == {"1.4"}
            version, seen = 4, []
            for expected in range(2, 5):
                batch = await lease(parts, version)
                assert batch.id == expected
                assert all(version - g.oldest_version <= 2 for g in batch.groups)
                seen += [g.prompt.id for g in batch.groups]
                version = await train(lab, parts, batch)
            assert seen[4:8] == leased_prompts
            assert len(set(seen[2:12])) == 10  # positions 10..19: the second epoch, no prompt lost or doubled
            assert controller.status()["groups"]["trained"] == 20

    asyncio.run(second())


def test_a_lost_store_continues_the_prompt_order_from_the_position(lab: Lab) -> None:
    async def prompts(version: int) -> list[str]:
        async with lab.running() as controller:
            parts, seen = controller.parts(), []
            for _ in range(2):
                batch = await lease(parts, version)
                seen += [g.prompt.id for g in batch.groups]
                version = await train(lab, parts, batch)
            return seen

    whole = asyncio.run(prompts(0))
    lab.job.store_path.unlink()
    lab.job = replace(lab.job, start_version=2, consumed_batches=1, resume=True)
    assert asyncio.run(prompts(2))[:4] == whole[4:8]


def test_a_fresh_run_refuses_a_used_run_directory(lab: Lab) -> None:
    async def test() -> None:
        async with lab.running() as controller:
            await lease(controller.parts(), 0)

    run(test())
    with pytest.raises(StoreError, match="already holds rollouts"):
        Controller(lab.settings, lab.job, lab.client)


def test_an_evaluation_is_of_one_version_and_holds_publications_back(lab: Lab) -> None:
    heldout = lab.prompts.with_name("heldout.jsonl")
    heldout.write_text('{"prompt": "1+1=", "answer": "23"}\n{"prompt": "5+4=", "answer": "9"}\n')

    async def test() -> None:
        async with lab.running() as controller:
            parts = controller.parts()
            text = parts.producer._workflow._model.tokenizer.decode([5, 6], skip_special_tokens=True)
            heldout.write_text(
                json.dumps({"prompt": "1+1=", "answer": text})
                + "\n"
                + json.dumps({"prompt": "5+4=", "answer": "x"})
                + "\n"
            )
            version = await train(lab, parts, await lease(parts, 0))
            for client in lab.clients.values():
                client.gate.clear()
            job = parts.sideline.start_evaluation(EvaluationRequest("heldout", str(heldout), 3, 0.0, 8, version))
            assert await parts.sideline.evaluation_result(job, 0.05) is None
            parts.publisher.publish(str(lab.weights), version + 1)
            assert parts.pool.loaded_version() == version
            for client in lab.clients.values():
                client.gate.set()
            result = await parts.sideline.evaluation_result(job, WAIT_S)
            assert result is not None
            assert (result["accuracy"], result["samples"], result["version"]) == (0.5, 6, version)
            await lab.until(lambda: parts.pool.loaded_version() == version + 1)
            with pytest.raises(RolloutError, match="no evaluation 'absent'"):
                await parts.sideline.evaluation_result("absent", 0)

    run(test())


def test_a_probe_is_of_the_live_version_and_takes_no_prompt(lab: Lab) -> None:
    async def test() -> None:
        async with lab.running() as controller:
            parts = controller.parts()
            version = await train(lab, parts, await lease(parts, 0))
            await lab.until(lambda: controller.status()["groups"]["ready"] == 8)
            cursor = controller.status()["prompt_cursor"]
            trajectories = await parts.sideline.probe(5, WAIT_S, version)
            assert trajectories is not None and len(trajectories) == 5
            assert {int(v) for t in trajectories for v in t.versions[t.loss_mask]} == {version}
            assert controller.status()["prompt_cursor"] == cursor
            for client in lab.clients.values():
                client.gate.clear()
            assert await parts.sideline.probe(2, 0.05, None) is None
            for client in lab.clients.values():
                client.gate.set()
            again = await parts.sideline.probe(2, WAIT_S, None)
            assert again is not None and len(again) == 2

    run(test())


def test_the_store_is_readable_after_the_run(lab: Lab) -> None:
    async def test() -> None:
        async with lab.running() as controller:
            await lease(controller.parts(), 0)

    run(test())
    store = RolloutStore(lab.job.store_path, create=False)
    assert store.counts()["leased"] == 4
    store.close()
