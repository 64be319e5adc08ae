"""The client's bounds: time limits, cancellation, idle connections, and no limit on how many requests are in flight."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest

from m2po_megatron.rollout import client as client_module
from m2po_megatron.rollout.client import (
    EngineClient,
    EngineError,
    GenerateRequest,
)
from tests.rollout.scripted_server import DROP, HANG, REQUEST, Reply, Server, run, sample

SHORT_S = 0.3
"""A time limit that a loopback call on a busy machine keeps, and a call that hangs does not."""


def test_a_generation_out_of_time_is_aborted_at_the_engine() -> None:
    server = Server(generate=HANG, abort_request=Reply(200))
    with pytest.raises(EngineError, match="generate: no answer within 0.3 s"):
        run(server, lambda client: client.generate(REQUEST), timeout_s=SHORT_S)
    assert server.asked[1:] == [("POST", "/abort_request", {"rid": "r7"})]


def test_a_control_call_out_of_time_is_an_error() -> None:
    with pytest.raises(EngineError, match="flush_cache: no answer within 0.3 s"):
        run(Server(flush_cache=HANG), lambda client: client.flush_cache(), control_timeout_s=SHORT_S)


@pytest.mark.parametrize("abort", [Reply(200), Reply(500), DROP, HANG])
def test_a_cancelled_generation_is_aborted_within_a_bound(abort: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "ABORT_TIMEOUT_S", SHORT_S)
    server = Server(generate=HANG, abort_request=abort)

    async def calls(client: EngineClient) -> float:
        task = asyncio.ensure_future(client.generate(REQUEST))
        while not server.asked:
            await asyncio.sleep(0)
        started = time.monotonic()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return time.monotonic() - started

    assert run(server, calls) < 3
    # Aborted before the cancelled call ends: the next request may have the same id.
    assert server.asked[1:] == [("POST", "/abort_request", {"rid": "r7"})]


def test_nothing_caps_the_requests_in_flight() -> None:
    """aiohttp alone would keep the 101st waiting, and a server with 100 in flight would starve."""
    count = 300

    async def test() -> int:
        everyone = asyncio.Event()
        arrived = 0

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal arrived
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            await reader.readexactly(length)
            arrived += 1
            if arrived == count:
                everyone.set()
            await everyone.wait()
            body = json.dumps(sample([5], [-1])).encode()
            writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0, backlog=count)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        client = EngineClient(url, timeout_s=20, control_timeout_s=5)
        requests = [GenerateRequest(f"r{i}", [3], max_new_tokens=1, temperature=1.0) for i in range(count)]
        answers = await asyncio.gather(*(client.generate(request) for request in requests))
        await client.aclose()
        server.close()
        return sum(len(samples) for samples in answers)

    assert asyncio.run(asyncio.wait_for(test(), 30)) == count


def test_a_connection_is_used_again_and_closed_before_the_server_would(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that closes first, after 5 s idle, would lose the request that is just being sent."""
    assert client_module.KEEPALIVE_S < 5
    monkeypatch.setattr(client_module, "KEEPALIVE_S", SHORT_S)

    async def test() -> tuple[int, int]:
        opened = answered = 0
        closed = asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal opened, answered
            opened += 1
            try:
                while True:
                    await reader.readuntil(b"\r\n\r\n")
                    answered += 1
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
            except asyncio.IncompleteReadError:
                closed.set()  # by the client: this server would wait for ever
                writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        client = EngineClient(
            f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", timeout_s=5, control_timeout_s=5
        )
        assert await client.health() and await client.ready()
        assert (opened, answered) == (1, 2)
        await asyncio.wait_for(closed.wait(), 10)
        assert await client.health()
        await client.aclose()
        server.close()
        return opened, answered

    assert asyncio.run(asyncio.wait_for(test(), 20)) == (2, 3)
