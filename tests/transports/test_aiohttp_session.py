"""The client door over aiohttp: policies above it see what happened, and a caller who leaves takes the call along."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import anyio
import pytest

from resilient_llm import Backoff, Bulkhead, CircuitBreaker, ConfigurationError, Reply, Retry
from resilient_llm.aiohttp import AiohttpTransport, ResilientSession
from resilient_llm.testing import FakeProvider, Fault, serve
from tests.transports.wire import Connection, wire

pytestmark = [pytest.mark.anyio, pytest.mark.realtime]

ASK = b'{"model": "gpt-4o", "messages": [], "stream": true}'
JSON = {"content-type": "application/json"}
ANSWER = (
    b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 73\r\n\r\n"
    b'{"choices": [{"message": {"content": "Hello"}, "finish_reason": "stop"}]}'
)
QUICK = Retry(max_attempts=2, backoff=Backoff(initial=0.01))


async def read(reply: Reply) -> bytes:
    return b"".join([chunk async for chunk in reply.stream])


async def test_a_stream_that_fails_before_it_begins_is_made_good() -> None:
    provider = FakeProvider()
    provider.script(None, [Fault(status=503), Fault(status=529)])
    async with (
        serve(provider) as url,
        ResilientSession(policies=[Retry(backoff=Backoff(initial=0.01))]) as session,
    ):
        reply = await session.request("POST", url + "/v1/chat/completions", headers=JSON, body=ASK)
        assert reply.status == 200
        assert (await read(reply)).endswith(b"data: [DONE]\n\n")
    assert len(provider.requests) == 3


async def test_an_error_reply_can_be_read_again_and_a_refusal_too() -> None:
    provider = FakeProvider()
    provider.script(None, [Fault(status=400)])
    full = Bulkhead(max_concurrent=1, max_queued=0)
    async with serve(provider) as url, ResilientSession(policies=[full]) as session:
        failed = await session.request("POST", url + "/v1/chat/completions", headers=JSON, body=ASK)
        assert failed.status == 400
        assert b"error" in await read(failed)
        holds = await session.request("POST", url + "/v1/chat/completions", headers=JSON, body=ASK)
        refused = await session.request("POST", url + "/v1/chat/completions", headers=JSON, body=ASK)
        assert refused.status in (429, 503)
        assert refused.header(b"x-should-retry") == b"false"
        assert b"bulkhead_full" in await read(refused)
        await holds.stream.aclose()


async def test_an_upload_is_kept_for_a_second_attempt() -> None:
    bodies: list[bytes] = []

    async def script(connection: Connection) -> None:
        bodies.append((await connection.request())[1])
        if connection.number:
            await connection.send(ANSWER)

    async def pieces() -> AsyncIterator[bytes]:
        yield ASK[:10]
        yield ASK[10:].replace(b"true", b"false")

    async with wire(script) as server, ResilientSession(policies=[QUICK]) as session:
        reply = await session.request(
            "POST", server.url + "/v1/chat/completions", headers=JSON, body=pieces()
        )
        assert (reply.status, await read(reply)) == (200, ANSWER.partition(b"\r\n\r\n")[2])
    assert bodies == [ASK.replace(b"true", b"false")] * 2


async def test_HTTP_06_a_stale_connection_is_no_failure_of_the_provider() -> None:  # noqa: N802 - a case's id
    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(ANSWER)
        await connection.head()  # and leaves

    breaker = CircuitBreaker(consecutive_failures=1)
    async with wire(script) as server, ResilientSession(policies=[breaker]) as session:
        body = ASK.replace(b"true", b"false")
        for _ in range(4):
            reply = await session.request(
                "POST", server.url + "/v1/chat/completions", headers=JSON, body=body
            )
            assert reply.status == 200
            await read(reply)
        assert len(server.connections) == 4


@pytest.mark.parametrize("policies", [[], [QUICK]])
@pytest.mark.parametrize("stage", ["head", "held", "events"])
async def test_a_cancelled_caller_closes_the_connection_at_once(stage: str, policies: list[Retry]) -> None:
    async def script(connection: Connection) -> None:
        await connection.request()
        if stage != "head":
            await connection.send(
                b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
            )
        if stage == "events":
            event = b'data: {"choices": [{"index": 0, "delta": {"content": "Hello"}}]}\n\n'
            await connection.send(b"%x\r\n%b\r\n" % (len(event), event))
        await connection.until_gone()

    before = asyncio.all_tasks()
    async with wire(script) as server, ResilientSession(policies=policies) as session:
        with anyio.move_on_after(0.05) as scope:
            await read(
                await session.request("POST", server.url + "/v1/chat/completions", headers=JSON, body=ASK)
            )
        assert scope.cancelled_caught
        assert await server.gone()
        assert len(server.connections) == 1
    assert asyncio.all_tasks() == before


async def test_what_it_is_made_of() -> None:
    async with ResilientSession(AiohttpTransport(), policies=[QUICK]) as session:
        assert "retry" in str(session.pipeline.describe()).lower()
    with pytest.raises(TypeError, match="AiohttpTransport"):
        ResilientSession(object())  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError):
        ResilientSession(on_rejection="whatever")  # type: ignore[arg-type]
