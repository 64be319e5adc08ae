"""The controller's HTTP face on loopback, for the trainer (rollout/connection.py) and for tools that read `/status`."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from aiohttp import web

from m2po_megatron.data.trajectory import Batch, Group, Prompt, Trajectory
from m2po_megatron.rollout.codec import encode_batch
from m2po_megatron.rollout.errors import RolloutError
from m2po_megatron.rollout.evaluation import EvaluationRequest

if TYPE_CHECKING:
    from m2po_megatron.rollout.controller import Controller

logger = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every failure is {"error": text}: 409 for what the caller must know, 500 for a defect (its traceback is logged)."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        return web.json_response({"error": f"{request.method} {request.path}: {error.reason}"}, status=error.status)
    except (RolloutError, ValueError, KeyError, TypeError, FileNotFoundError) as error:
        return web.json_response({"error": str(error)}, status=409)
    except ExceptionGroup as group:
        first = _first(group)
        logger.error("%s %s: %s", request.method, request.path, first)
        return web.json_response({"error": str(first)}, status=409)
    except Exception as error:
        logger.exception("%s %s", request.method, request.path)
        return web.json_response({"error": f"rollout controller: {type(error).__name__}: {error}"}, status=500)


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def build_application(controller: Controller) -> web.Application:
    """The routes. All answers are JSON except batches (safetensors, rollout/codec.py)."""
    api = _Api(controller)
    application = web.Application(middlewares=[_errors_as_json], client_max_size=16 * 2**20)
    application.add_routes(
        [
            web.get("/ready", api.ready),
            web.get("/status", api.status),
            web.get("/lease", api.lease),
            web.post("/trained", api.trained),
            web.post("/publish", api.publish),
            web.get("/loaded", api.loaded),
            web.post("/evaluate", api.evaluate),
            web.get("/evaluate/{job_id}", api.evaluation),
            web.get("/probe", api.probe),
        ]
    )
    return application


class _Api:
    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    async def ready(self, request: web.Request) -> web.Response:
        """{"ready"}: whether engines serve and admission is on; waits up to wait_s."""
        return web.json_response({"ready": await self._controller.wait_ready(_seconds(request))})

    async def status(self, request: web.Request) -> web.Response:
        return web.json_response(self._controller.status())

    async def lease(self, request: web.Request) -> web.Response:
        """200 with a batch, or 204; `X-Lease-Info` says how things stand in both."""
        started = time.monotonic()
        parts = self._controller.parts()
        reason = parts.producer.refusal()
        batch = await parts.producer.lease(int(request.query["version"]), _seconds(request))
        info = self._controller.lease_info()
        info["waited_s"] = round(time.monotonic() - started, 4)
        info["wait_reason"] = reason
        headers = {"X-Lease-Info": json.dumps(info)}
        if batch is None:
            return web.Response(status=204, headers=headers)
        return await _batch_response(batch, headers)

    async def trained(self, request: web.Request) -> web.Response:
        body = await request.json()
        await self._controller.parts().producer.trained(int(body["batch_id"]), int(body["version"]))
        return web.json_response({})

    async def publish(self, request: web.Request) -> web.Response:
        body = await request.json()
        self._controller.parts().publisher.publish(str(body["path"]), int(body["version"]))
        return web.json_response({})

    async def loaded(self, request: web.Request) -> web.Response:
        """{"loaded_version"}, after waiting up to wait_s for `version`."""
        loaded = await self._controller.wait_loaded(int(request.query["version"]), _seconds(request))
        return web.json_response({"loaded_version": loaded})

    async def evaluate(self, request: web.Request) -> web.Response:
        body: dict[str, Any] = await request.json()
        return web.json_response(
            {"job_id": self._controller.parts().sideline.start_evaluation(EvaluationRequest(**body))}
        )

    async def evaluation(self, request: web.Request) -> web.Response:
        job_id = request.match_info["job_id"]
        result = await self._controller.parts().sideline.evaluation_result(job_id, _seconds(request))
        return web.Response(status=204) if result is None else web.json_response(result)

    async def probe(self, request: web.Request) -> web.Response:
        version = request.query.get("version")
        trajectories = await self._controller.parts().sideline.probe(
            int(request.query["samples"]), _seconds(request), None if version is None else int(version)
        )
        if trajectories is None:
            return web.Response(status=204)
        return await _batch_response(_as_batch(trajectories), {})


def _seconds(request: web.Request) -> float:
    return max(0.0, float(request.query.get("wait_s", "0")))


def _as_batch(trajectories: list[Trajectory]) -> Batch:
    """Loose trajectories in the wire's form: a batch without a number, one group each."""
    prompt = Prompt(id="", text="")
    return Batch(id=-1, groups=[Group(id=t.group_id, prompt=prompt, trajectories=[t]) for t in trajectories])


async def _batch_response(batch: Batch, headers: dict[str, str]) -> web.Response:
    body = await asyncio.to_thread(encode_batch, batch)
    return web.Response(body=body, content_type="application/octet-stream", headers=headers)
