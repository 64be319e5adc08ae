"""A real server on loopback for the client's tests: answers as it is told, keeps what it was asked (not a test module)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

from aiohttp import web
from multidict import CIMultiDictProxy

from m2po_megatron.rollout.client import (
    EngineClient,
    GenerateRequest,
)

REQUEST = GenerateRequest("r7", [3, 4], max_new_tokens=5, temperature=0.7, n=2, stop_token_ids=(1, 9))

SHUTDOWN_S = 1.0
"""What handlers that hang have to end when the server does."""


@dataclass(frozen=True)
class Reply:
    """An answer: `json`, where it is given, else `text`."""

    status: int
    text: str = ""
    json: Any = None
    headers: tuple[tuple[str, str], ...] = ()

    def response(self) -> web.Response:
        kind = "text/plain" if self.json is None else "application/json"
        body = self.text if self.json is None else json.dumps(self.json)
        return web.Response(status=self.status, text=body, content_type=kind, headers=dict(self.headers))


HANG: Final = "hang"
"""No answer, ever."""
DROP: Final = "drop"
"""The connection is closed instead of an answer."""
CUT: Final = "cut"
"""The connection is closed in the middle of an answer."""

Answer = Reply | str


class Server:
    """Answers every path with what the test put there, and keeps what it was asked. `url` is known while it runs."""

    def __init__(self, **answers: Answer) -> None:
        self.answers = answers
        self.asked: list[tuple[str, str, Any]] = []
        self.headers: list[CIMultiDictProxy[str]] = []
        self.url = ""
        application = web.Application()
        application.router.add_route("*", "/{call}", self._answer)
        # With handler cancellation, a handler that hangs ends when its client hangs up.
        self._runner = web.AppRunner(
            application, handler_cancellation=True, shutdown_timeout=SHUTDOWN_S, access_log=None
        )

    async def start(self) -> None:
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def close(self) -> None:
        await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        content = await request.read()
        self.asked.append((request.method, request.path, json.loads(content) if content else None))
        self.headers.append(request.headers)
        answer = self.answers[request.match_info["call"]]
        if isinstance(answer, Reply):
            return answer.response()
        if answer == HANG:
            await asyncio.Event().wait()
        assert request.transport is not None
        if answer == CUT:
            request.transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{")
        request.transport.close()
        return web.Response()


def run(
    server: Server,
    calls: Callable[[EngineClient], Awaitable[Any]],
    *,
    timeout_s: float = 5.0,
    control_timeout_s: float = 5.0,
    api_key: str | None = None,
) -> Any:
    """What `calls` makes of a client of `server`, which runs meanwhile."""

    async def bounded() -> Any:
        await server.start()
        client = EngineClient(
            server.url + "/", timeout_s=timeout_s, control_timeout_s=control_timeout_s, api_key=api_key
        )
        try:
            return await asyncio.wait_for(calls(client), 20)
        finally:
            await client.aclose()
            await server.close()

    return asyncio.run(bounded())


def sample(
    ids: list[int], logprobs: list[float | None] | None, finish: str = "stop", rid: str = "r7_0", **meta: Any
) -> dict[str, Any]:
    """An entry of SGLang's answer."""
    about: dict[str, Any] = {"id": rid, "finish_reason": {"type": finish}, "completion_tokens": len(ids), **meta}
    about.setdefault("weight_version", "0.3")
    if logprobs is not None:
        about["output_token_logprobs"] = [[lp, token, None] for lp, token in zip(logprobs, ids, strict=True)]
    return {"text": "", "output_ids": ids, "meta_info": about}


def span(version: str, start: int, end: int) -> dict[str, Any]:
    return {"version": version, "start": start, "end": end}
