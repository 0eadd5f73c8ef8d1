"""Field cases of transports, over real sockets.

Those of the headers and bodies that a proxy writes (HTTP-03, HTTP-05, HTTP-12) are a proxy's. HTTP-07 is in
`test_http_07_goaway`, HTTP-01 in `tests/streams/test_hold.py`.
"""

from __future__ import annotations

import asyncio
import random

import anyio
import httpx2
import pytest

from resilient_llm import Backoff, Bulkhead, Retry
from resilient_llm.httpx2 import ResilientTransport
from resilient_llm.testing import FakeModel, FakeProvider, Latency, serve
from tests.client.raw_server import answer, raw_server
from tests.support import A_HANG

pytestmark = [pytest.mark.anyio, pytest.mark.realtime]

QUICK = Backoff(initial=0.01, maximum=0.01, jitter="none")
CHAT = "/v1/chat/completions"
ASK = {"model": "gpt-4o", "messages": [{"role": "user", "content": "hi"}]}
ANSWER = b'{"choices": [{"message": {"content": "hi"}, "finish_reason": "stop"}]}'
JSON = b"content-type: application/json"


async def test_http_06_a_connection_that_was_closed_while_idle() -> None:
    """The request is sent on it, and nothing comes back: it goes out again on another one."""
    requests = 0

    async def once_each(
        _head: bytes, _body: bytes, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        nonlocal requests
        requests += 1
        if requests == 2:
            writer.close()  # the second request on the first connection
        else:
            writer.write(answer(ANSWER, JSON))

    async with (
        raw_server(once_each) as url,
        httpx2.AsyncClient(transport=ResilientTransport(policies=[Retry(backoff=QUICK)])) as client,
    ):
        assert (await client.post(url + CHAT, json=ASK)).status_code == 200
        assert (await client.post(url + CHAT, json=ASK)).status_code == 200
    assert requests == 3


async def test_http_06_half_a_body_is_tried_again_whole() -> None:
    requests = 0

    async def half(
        _head: bytes, _body: bytes, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        nonlocal requests
        requests += 1
        whole = answer(ANSWER, JSON)
        writer.write(whole if requests > 1 else whole[:-20])
        if requests == 1:
            writer.close()

    async with (
        raw_server(half) as url,
        httpx2.AsyncClient(transport=ResilientTransport(policies=[Retry(backoff=QUICK)])) as client,
    ):
        assert (await client.post(url + CHAT, json=ASK)).content == ANSWER
    assert requests == 2


@pytest.mark.parametrize("streams", [True, False])
async def test_http_08_cancelled_calls_leave_no_connection_behind(streams: bool) -> None:
    provider = FakeProvider(FakeModel(latency=Latency(headers=0.01, per_token=0.01)))
    rng = random.Random(7)
    inner = httpx2.AsyncHTTPTransport(limits=httpx2.Limits(max_connections=10))
    # Fewer calls than connections: then nobody waits in the pool, where a cancelled wait may keep its place.
    transport = ResilientTransport(inner, policies=[Bulkhead(max_concurrent=8), Retry(backoff=QUICK)])
    async with serve(provider) as url, httpx2.AsyncClient(transport=transport, timeout=60) as client:

        async def leave(turns: int) -> None:
            with anyio.CancelScope() as scope:

                async def ask() -> None:
                    await client.post(url + CHAT, json={**ASK, "stream": streams})

                async with anyio.create_task_group() as group:
                    group.start_soon(ask)
                    for _ in range(turns):
                        await anyio.lowlevel.checkpoint()
                    if turns % 2:
                        await anyio.sleep(rng.random() * 0.05)
                    scope.cancel()

        for _ in range(5):
            async with anyio.create_task_group() as wave:
                for _ in range(20):
                    wave.start_soon(leave, rng.randrange(7))
        with anyio.fail_after(A_HANG):
            for _ in range(8):
                assert (await client.post(url + CHAT, json=ASK)).status_code == 200
            await provider.wait_until_idle()


async def test_http_10_repeated_headers_stay_as_they_are() -> None:
    async def twice(
        _head: bytes, _body: bytes, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        headers = [
            b"Set-Cookie: a=1",
            b"Set-Cookie: b=2",
            b"WWW-Authenticate: A",
            b"WWW-Authenticate: B",
            JSON,
        ]
        writer.write(answer(b"{}", *headers, status=b"401 Unauthorized"))

    async with (
        raw_server(twice) as url,
        httpx2.AsyncClient(transport=ResilientTransport(policies=[Retry(backoff=QUICK)])) as client,
    ):
        response = await client.post(url + CHAT, json=ASK)
    assert response.status_code == 401
    assert response.headers.get_list("set-cookie") == ["a=1", "b=2"]
    assert response.headers.get_list("www-authenticate") == ["A", "B"]
