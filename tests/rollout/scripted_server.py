"""A server without a network for the client's tests: answers as it is told, keeps what it was asked (not a test module)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx

from m2po_megatron.rollout.client import (
    EngineClient,
    GenerateRequest,
)

URL = "http://engine:30000"


REQUEST = GenerateRequest("r7", [3, 4], max_new_tokens=5, temperature=0.7, n=2, stop_token_ids=(1, 9))


Answer = Callable[[httpx.Request], Awaitable[httpx.Response]]


class Server:
    """Answers every path with what the test put there, and keeps what it was asked."""

    def __init__(self, **answers: httpx.Response | Exception | Answer) -> None:
        self.answers = answers
        self.asked: list[tuple[str, str, Any]] = []
        self.headers: list[httpx.Headers] = []

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content) if request.content else None
        self.asked.append((request.method, request.url.path, body))
        self.headers.append(request.headers)
        answer = self.answers[request.url.path.strip("/")]
        if isinstance(answer, Exception):
            raise answer
        return answer if isinstance(answer, httpx.Response) else await answer(request)

    def client(
        self, timeout_s: float = 5.0, control_timeout_s: float = 5.0, api_key: str | None = None
    ) -> EngineClient:
        return EngineClient(
            URL + "/",
            timeout_s=timeout_s,
            control_timeout_s=control_timeout_s,
            api_key=api_key,
            transport=httpx.MockTransport(self),
        )


def run(server: Server, calls: Callable[[EngineClient], Awaitable[Any]], **options: Any) -> Any:
    async def bounded() -> Any:
        client = server.client(**options)
        try:
            return await asyncio.wait_for(calls(client), 20)
        finally:
            await client.aclose()

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
