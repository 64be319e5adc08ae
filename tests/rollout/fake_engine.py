"""An engine without a network: implements the client's interface, scripted by the test (not a test module).

It speaks for the server only as far as the pool and the producer need; the real protocol is tested in test_client.py and
against the embedded server.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

from m2po_megatron.rollout.changes import Changes
from m2po_megatron.rollout.client import EngineError, GeneratedSample, GenerateRequest, ModelInfo, RequestRefused
from m2po_megatron.rollout.engines import Engine, EnginePool


class FakeClient:
    """Answers every request at once with three tokens per sample, unless told otherwise.

    gate       cleared: requests wait until it is set
    failing    names of calls that raise EngineError, each time they are made
    hanging    names of calls that never answer
    refusing   every generation is refused as a bad request
    bad_samples   what is wrong with the next answers' first sample, one entry per answer: "no log-probs", "missing sample",
               or a weight version to be said for all its tokens
    """

    def __init__(self, url: str, label: str = "0.0") -> None:
        self.url = url
        self.label = label
        self.gate = asyncio.Event()
        self.gate.set()
        self.failing: set[str] = set()
        self.hanging: set[str] = set()
        self.refusing = False
        self.bad_samples: list[str] = []
        self.calls: list[str] = []
        self.rids: list[str] = []
        self.answered: Counter[str] = Counter()
        self.said_version: str | None = None
        self.closed = False

    async def _call(self, name: str) -> None:
        self.calls.append(name)
        if name in self.hanging:
            await asyncio.Event().wait()
        if name in self.failing:
            raise EngineError(self.url, name, "told to fail")

    async def generate(self, request: GenerateRequest) -> list[GeneratedSample]:
        self.rids.append(request.rid)
        if self.refusing:
            raise RequestRefused(self.url, "generate", "HTTP 400: prompt too long")
        label = self.label
        await self.gate.wait()
        await self._call("generate")
        self.answered[request.rid] += 1
        samples = []
        for i in range(request.n):
            # The last token is sampled after a publication that fell into the request.
            versions = [label, label, self.label]
            samples.append(GeneratedSample(f"{request.rid}_{i}", [5, 6, 1], [-0.5, -0.25, -0.125], versions, "stop"))
        if self.bad_samples:
            kind = self.bad_samples.pop(0)
            if kind == "no log-probs":
                samples[0].output_logprobs.clear()
            elif kind == "missing sample":
                samples.pop()
            else:
                samples[0].weight_versions[:] = [kind] * 3
        return samples

    async def update_weights_from_disk(self, path: str, weight_version: str) -> None:
        await self._call("update_weights_from_disk")
        self.label = weight_version

    async def pause_generation(self, mode: str = "retract") -> None:
        assert mode == "retract"
        await self._call("pause_generation")

    async def continue_generation(self) -> None:
        await self._call("continue_generation")

    async def flush_cache(self) -> None:
        await self._call("flush_cache")

    async def model_info(self) -> ModelInfo:
        await self._call("model_info")
        return ModelInfo(model_path="fake", weight_version=self.said_version or self.label)

    async def health(self) -> bool:
        await self._call("health")
        return True

    async def aclose(self) -> None:
        self.closed = True


def fake_engine(index: int = 0, version: int = 0) -> tuple[Engine, FakeClient]:
    client = FakeClient(f"http://fake-{index}", f"0.{version}")
    return Engine(f"engine-{index}", client, version), client  # type: ignore[arg-type]


def make_pool(count: int, control_timeout_s: float = 5.0) -> tuple[EnginePool, list[FakeClient], Changes]:
    changes = Changes()
    engines, clients = zip(*(fake_engine(i) for i in range(count)), strict=True)
    return EnginePool(list(engines), 0, changes, control_timeout_s), list(clients), changes


def run_bounded(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(test(), 20)

    asyncio.run(bounded())
