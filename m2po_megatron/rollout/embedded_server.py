"""The embedded engine's HTTP face: SGLang's endpoints, on the event loop; the computing is the worker thread's."""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from m2po_megatron.rollout.embedded_model import EngineModel, ModelError
from m2po_megatron.rollout.embedded_protocol import GenerateProtocol
from m2po_megatron.rollout.embedded_scheduler import Scheduler
from m2po_megatron.rollout.embedded_sequence import Job, RequestError, Sequence
from m2po_megatron.rollout.embedded_weights import load_weights
from m2po_megatron.rollout.embedded_worker import Worker

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 256 * 2**20
HEALTH_TIMEOUT_S = 20.0
MAX_STEP_DELAY_S = 10.0

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class EmbeddedServer:
    """The endpoints of one engine. Made on the event loop that serves it; `close` ends its thread."""

    def __init__(self, engine: EngineModel, scheduler: Scheduler, protocol: GenerateProtocol, model_path: str) -> None:
        """`model_path`: where the weights came from, for `/model_info`. From here on the worker owns `scheduler`."""
        self._engine = engine
        self._scheduler = scheduler
        self._protocol = protocol
        self._model_path = self._start_path = model_path
        self._loop = asyncio.get_running_loop()
        self._answers: dict[Job, asyncio.Future[None]] = {}
        self._worker = Worker(scheduler, self._deliver)

    def application(self) -> web.Application:
        """The routes. Errors are {"error": {"message": text}} with their HTTP status."""
        application = web.Application(middlewares=[self._errors_as_json], client_max_size=MAX_BODY_BYTES)
        for path, handler in {
            "/generate": self.generate,
            "/update_weights_from_disk": self.update_weights_from_disk,
            "/pause_generation": self.pause_generation,
            "/continue_generation": self.continue_generation,
            "/abort_request": self.abort_request,
            "/flush_cache": self.flush_cache,
            "/slow_down": self.slow_down,
        }.items():
            application.router.add_post(path, handler)
        for path, handler in {
            "/flush_cache": self.flush_cache,
            "/model_info": self.model_info,
            "/get_model_info": self.model_info,
            "/health": self.health,
            "/health_generate": self.health_generate,
            "/ready": self.ready,
        }.items():
            application.router.add_get(path, handler)
        return application

    async def generate(self, request: web.Request) -> web.Response:
        """Sample; answered when all samples are complete or aborted. A client that hangs up has its samples aborted."""
        job = self._protocol.job(await _json(request))
        await self._run(job)
        return web.json_response(self._protocol.answer(job))

    async def update_weights_from_disk(self, request: web.Request) -> web.Response:
        """Load a directory: at once while paused, else when what is running has ended. 400 and success false, with the
        old weights and label in place, if it cannot be loaded."""
        body = await _object(request)
        path, label = body.get("model_path"), body.get("weight_version")
        if not isinstance(path, str) or not path:
            return _update_answer(False, "model_path must name a Hugging Face model directory", 400)
        if label is not None and not isinstance(label, str):
            return _update_answer(False, f"weight_version must be a string, got {label!r}", 400)
        if body.get("load_format") not in (None, "auto", "safetensors"):
            return _update_answer(False, f"load_format {body['load_format']!r} is not supported, only safetensors", 400)
        if body.get("abort_all_requests"):
            await self._call(lambda: self._scheduler.abort(lambda _: True, "aborted for a weight update"))

        def load() -> None:
            self._scheduler.load_weights(lambda: load_weights(self._engine.model, path), label)
            self._model_path = path

        try:
            await asyncio.wrap_future(self._worker.call_when_idle(load))
        except ModelError as error:
            return _update_answer(False, str(error), 400)
        return _update_answer(True, f"loaded {path} as weight version {self._scheduler.weight_version}", 200)

    async def pause_generation(self, request: web.Request) -> web.Response:
        """Mode "abort" (the default, as in SGLang) or "retract"."""
        mode = (await _object(request)).get("mode", "abort")
        await self._call(lambda: self._scheduler.pause(mode))
        return web.json_response({"status": "ok", "message": f"generation is paused in mode {mode}"})

    async def continue_generation(self, request: web.Request) -> web.Response:
        await self._call(self._scheduler.resume)
        return web.json_response({"status": "ok", "message": "generation continues"})

    async def abort_request(self, request: web.Request) -> web.Response:
        """By `rid`, of a request or of one of its samples, or all; an rid that is not there is no error."""
        body = await _object(request)
        rid = body.get("rid")
        if body.get("abort_all"):
            await self._call(lambda: self._scheduler.abort(lambda _: True, "all requests were aborted"))
        elif isinstance(rid, str) and rid:

            def concerns(sequence: Sequence) -> bool:
                return sequence.job.rid == rid or sequence.id == rid

            await self._call(lambda: self._scheduler.abort(concerns, f"request {rid} was aborted"))
        else:
            raise RequestError(400, f"abort_request needs an rid or abort_all, got {json.dumps(body)}")
        return web.Response()

    async def flush_cache(self, request: web.Request) -> web.Response:
        await self._call(self._scheduler.flush_cache)
        return web.Response(text="The cache is flushed.\n")

    async def slow_down(self, request: web.Request) -> web.Response:
        """Wait `forward_sleep_time` seconds after every step (null: not any more)."""
        seconds = (await _object(request)).get("forward_sleep_time") or 0.0
        if not isinstance(seconds, int | float) or not 0 <= seconds <= MAX_STEP_DELAY_S or not math.isfinite(seconds):
            raise RequestError(400, f"forward_sleep_time must be 0 to {MAX_STEP_DELAY_S:g} seconds, got {seconds!r}")
        delay = float(seconds)
        await self._call(lambda: self._worker.set_step_delay(delay))
        return web.json_response({})

    async def model_info(self, request: web.Request) -> web.Response:
        """Answered while paused too."""
        info = {
            "model_path": self._model_path,
            "tokenizer_path": self._start_path,
            "is_generation": True,
            "weight_version": self._scheduler.weight_version,
        }
        return web.json_response(info)

    async def health(self, request: web.Request) -> web.Response:
        """200 while the worker lives, paused or not; the middleware answers 503 when it does not."""
        return web.Response()

    async def health_generate(self, request: web.Request) -> web.Response:
        """200 when a token could be sampled; 503 while paused (SGLang waits for the end of the pause)."""
        self._check_ready()
        body = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True}}
        try:
            await asyncio.wait_for(self._run(self._protocol.job(body)), HEALTH_TIMEOUT_S)
        except TimeoutError as error:
            raise RequestError(503, f"no token within {HEALTH_TIMEOUT_S:g} s") from error
        return web.Response()

    async def ready(self, request: web.Request) -> web.Response:
        self._check_ready()
        return web.Response()

    async def close(self) -> None:
        """Refuse what is unfinished (503) and end the worker."""
        for job, answered in self._answers.items():
            if not answered.done():
                job.error = RequestError(503, "the engine is shutting down")
                answered.set_result(None)
        await asyncio.to_thread(self._worker.stop)

    def _check_ready(self) -> None:
        if self._scheduler.paused:
            raise RequestError(503, "generation is paused")

    async def _run(self, job: Job) -> None:
        """Until `job` is finished; RequestError if it failed. Cancelled, it aborts the job."""
        answered = self._answers[job] = self._loop.create_future()
        self._worker.call(lambda: self._scheduler.submit(job))
        try:
            await answered
        except asyncio.CancelledError:
            self._worker.call(lambda: self._scheduler.abort(lambda sequence: sequence.job is job, "the client hung up"))
            raise
        finally:
            del self._answers[job]
        if job.error is not None:
            raise job.error

    def _deliver(self, jobs: list[Job]) -> None:
        """On the worker's thread: finished jobs, to their handlers."""
        self._loop.call_soon_threadsafe(self._resolve, jobs)

    def _resolve(self, jobs: list[Job]) -> None:
        for job in jobs:
            answered = self._answers.get(job)
            if answered is not None and not answered.done():
                answered.set_result(None)

    async def _call(self, function: Callable[[], Any]) -> Any:
        return await asyncio.wrap_future(self._worker.call(function))

    @web.middleware
    async def _errors_as_json(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if not self._worker.alive:
            return _error(503, "the engine's worker thread has died; see its log")
        try:
            return await handler(request)
        except RequestError as error:
            return _error(error.status, error.message)
        except web.HTTPException as error:
            return _error(error.status, f"{request.method} {request.path}: {error.reason}")
        except Exception as error:
            logger.exception("%s %s", request.method, request.path)
            return _error(500, f"{request.method} {request.path}: {type(error).__name__}: {error}")


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=status)


def _update_answer(success: bool, message: str, status: int) -> web.Response:
    return web.json_response({"success": success, "message": message, "num_paused_requests": 0}, status=status)


async def _json(request: web.Request) -> Any:
    """The body; nothing at all counts as {}."""
    try:
        text = await request.text()
        return json.loads(text) if text.strip() else {}
    except UnicodeDecodeError as error:
        text = f"{error.reason} at byte {error.start}"
        raise RequestError(400, f"{request.path}: the body is not {error.encoding}: {text}") from error
    except LookupError as error:
        raise RequestError(400, f"{request.path}: the charset of the body is not known: {error}") from error
    except RecursionError as error:
        raise RequestError(400, f"{request.path}: the body is nested too deeply") from error
    except ValueError as error:
        raise RequestError(400, f"{request.path}: the body is not JSON: {error}") from error


async def _object(request: web.Request) -> dict[str, Any]:
    body = await _json(request)
    if not isinstance(body, dict):
        raise RequestError(400, f"{request.path}: the body must be a JSON object")
    return body
