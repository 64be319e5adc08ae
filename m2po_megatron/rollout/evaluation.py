"""Sampling that is not training: evaluations of one version, and probes of the live one for `m2/engine_floor`."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from dataclasses import dataclass
from typing import Any

from m2po_megatron.data.prompts import read_prompts
from m2po_megatron.data.trajectory import Prompt, Trajectory
from m2po_megatron.rollout.changes import Changes
from m2po_megatron.rollout.errors import RolloutError
from m2po_megatron.rollout.publishing import Publisher
from m2po_megatron.rollout.workflow import SampleRequest, SingleTurn, UnusableSample

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EvaluationRequest:
    """What to evaluate; `temperature` 0 is greedy; `version` is waited for."""

    name: str
    prompts_file: str
    samples_per_prompt: int
    temperature: float
    max_new_tokens: int
    version: int

    def __post_init__(self) -> None:
        if self.samples_per_prompt < 1 or self.max_new_tokens < 1 or self.temperature < 0:
            raise ValueError(
                f"evaluation {self.name}: samples per prompt and tokens must be at least 1, the temperature at least 0"
            )


class Sideline:
    """Evaluations and probes: each holds publications back while it samples, so that all its tokens are of one version."""

    def __init__(
        self,
        workflow: SingleTurn,
        publisher: Publisher,
        prompts: list[Prompt],
        changes: Changes,
        *,
        concurrency: int,
        retries: int,
        seed: int,
        probe_temperature: float,
        probe_max_new_tokens: int,
    ) -> None:
        """`prompts` are the training prompts (for probes); `concurrency` in trajectories."""
        self._workflow = workflow
        self._publisher = publisher
        self._prompts = prompts
        self._changes = changes
        self._slots = asyncio.Semaphore(max(1, concurrency))
        self._retries = retries
        self._random = random.Random(f"probe {seed}")
        self._probe_temperature = probe_temperature
        self._probe_max_new_tokens = probe_max_new_tokens
        self._probe: asyncio.Task[list[Trajectory]] | None = None
        self._evaluations: dict[str, asyncio.Task[dict[str, Any]]] = {}
        self._serial = 0

    def start_evaluation(self, request: EvaluationRequest) -> str:
        """Start one; its job id. ValueError or FileNotFoundError for a bad prompt file."""
        self._check_published(request.version)
        prompts = read_prompts(request.prompts_file)
        self._serial += 1
        job_id = f"{request.name}-{self._serial}"
        self._evaluations[job_id] = asyncio.ensure_future(self._evaluate(job_id, request, prompts))
        return job_id

    async def evaluation_result(self, job_id: str, wait_s: float) -> dict[str, Any] | None:
        """Its result once it is done, which is kept; None if not within `wait_s`. Raises what the evaluation raised."""
        task = self._evaluations.get(job_id)
        if task is None:
            raise RolloutError(f"there is no evaluation {job_id!r}")
        await asyncio.wait({task}, timeout=wait_s)
        return task.result() if task.done() else None

    async def probe(self, samples: int, wait_s: float, version: int | None) -> list[Trajectory] | None:
        """The probe's trajectories, once; None if not within `wait_s` (ask again: the same probe goes on)."""
        if self._probe is None:
            if version is not None:
                self._check_published(version)
            self._probe = asyncio.ensure_future(self._run_probe(samples, version))
        await asyncio.wait({self._probe}, timeout=wait_s)
        if not self._probe.done():
            return None
        task, self._probe = self._probe, None
        return task.result()

    def _check_published(self, version: int) -> None:
        """Nobody may wait for weights that never come."""
        if version > self._publisher.newest:
            raise RolloutError(
                f"version {version} is not published: the newest is {self._publisher.newest}. Publish before evaluating it"
            )

    async def close(self) -> None:
        tasks = [*self._evaluations.values(), *([self._probe] if self._probe else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _evaluate(self, job_id: str, request: EvaluationRequest, prompts: list[Prompt]) -> dict[str, Any]:
        started = time.monotonic()
        async with self._publisher.hold(request.version) as version:
            groups = await self._sample_all(
                [
                    SampleRequest(
                        f"eval-{job_id}-{i}",
                        prompt,
                        request.samples_per_prompt,
                        request.temperature,
                        request.max_new_tokens,
                    )
                    for i, prompt in enumerate(prompts)
                ],
                version,
            )
        for prompt, trajectories in zip(prompts, groups, strict=True):
            await self._workflow.score(prompt, trajectories)
        rewards = [float(t.reward or 0.0) for trajectories in groups for t in trajectories]
        return {
            "name": request.name,
            "accuracy": sum(rewards) / len(rewards),
            "samples": len(rewards),
            "version": version,
            "truncated": sum(t.finish_reason == "length" for trajectories in groups for t in trajectories),
            "seconds": time.monotonic() - started,
        }

    async def _run_probe(self, samples: int, version: int | None) -> list[Trajectory]:
        self._serial += 1
        serial = self._serial
        async with self._publisher.hold(version) as served:
            requests = [
                SampleRequest(
                    f"probe-{serial}-{i}",
                    self._random.choice(self._prompts),
                    1,
                    self._probe_temperature,
                    self._probe_max_new_tokens,
                )
                for i in range(samples)
            ]
            groups = await self._sample_all(requests, served)
        return [trajectory for trajectories in groups for trajectory in trajectories]

    async def _sample_all(self, requests: list[SampleRequest], version: int) -> list[list[Trajectory]]:
        """All requests, at most `concurrency` samples at once; every other one is cancelled when one fails."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._sample(request, version)) for request in requests]
        return [task.result() for task in tasks]

    async def _sample(self, request: SampleRequest, version: int) -> list[Trajectory]:
        async with self._slots:
            for again in range(self._retries + 1):
                try:
                    trajectories = await self._workflow.sample(
                        request, f"{request.id}-{again}" if again else request.id
                    )
                except UnusableSample as error:
                    last = error
                    logger.warning("%s; sampled anew", error)
                    continue
                for trajectory in trajectories:
                    if (trajectory.versions[trajectory.loss_mask] != version).any():
                        raise RolloutError(f"sample {trajectory.id} should be of version {version} alone")
                return trajectories
        raise RolloutError(f"{last}. It was sampled {self._retries + 1} times without a usable result")
