"""A controller's parts on one event loop, with engines without a network, for tests (not a test module)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from m2po_megatron.data.trajectory import Batch
from m2po_megatron.rollout.controller import Controller, Parts
from m2po_megatron.rollout.settings import RolloutJob, RolloutSettings
from tests.rollout.fake_engine import FakeClient

WAIT_S = 10.0


class Lab:
    """Settings, a job and fake engines; `running()` is a started controller."""

    def __init__(self, tmp_path: Path, model: Path) -> None:
        prompts = tmp_path / "prompts.jsonl"
        rows = [{"prompt": f"{i}+1=", "answer": str(i + 1), "id": f"p{i}"} for i in range(10)]
        prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
        self.prompts = prompts
        self.weights = tmp_path / "weights"
        self.weights.mkdir()
        # Fake engines come in by URL, as SGLang servers would.
        self.settings = RolloutSettings(
            prompt_data=str(prompts),
            rollout_engine="sglang",
            sglang_urls=["http://fake-0", "http://fake-1"],
            group_size=2,
            rollout_batch_size=8,
            global_batch_size=4,
            max_staleness=2,
            max_response_length=4,
            engine_control_timeout_s=5.0,
        )
        run_dir = tmp_path / "run"
        (run_dir / "logs").mkdir(parents=True)
        self.job = RolloutJob(run_dir=str(run_dir), model_path=str(model))
        self.clients: dict[str, FakeClient] = {}

    def client(self, url: str) -> Any:
        return self.clients.setdefault(url, FakeClient(url))

    @asynccontextmanager
    async def running(self, ready: bool = True) -> AsyncIterator[Controller]:
        self.controller = Controller(self.settings, self.job, self.client)
        await self.controller.start()
        if ready:
            assert await self.controller.wait_ready(WAIT_S)
        try:
            yield self.controller
        finally:
            await self.controller.close()

    async def until(self, condition: Callable[[], bool]) -> None:
        assert await self.controller._changes.wait_until(condition, WAIT_S), self.controller.status()


def run(test: Any) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(test, 30)

    asyncio.run(bounded())


async def lease(parts: Parts, version: int) -> Batch:
    batch = await parts.producer.lease(version, WAIT_S)
    assert batch is not None
    return batch


async def train(lab: Lab, parts: Parts, batch: Batch, publish: bool = True) -> int:
    """What a trainer does with a batch; the new version."""
    version = (batch.id + 1) * lab.settings.updates_per_batch
    await parts.producer.trained(batch.id, version)
    if publish:
        parts.publisher.publish(str(lab.weights), version)
    return version
