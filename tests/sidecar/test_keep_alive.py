"""A connection over which nothing is asked is closed after its time, which begins anew with each answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from resilient_llm.sidecar.protocol import guarded

pytestmark = [pytest.mark.realtime, pytest.mark.anyio]

ASKED = b"GET / HTTP/1.1\r\nhost: here\r\n\r\n"
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@asynccontextmanager
async def served(
    *, keep_alive: int, takes: float = 0.0, app: ASGIApp | None = None, head_timeout: float = 60.0
) -> AsyncIterator[int]:
    """Serve an app, which takes so long for an answer unless it is another; gives the port."""

    async def usual(_scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await anyio.sleep(takes)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    protocol = guarded(max_head=65_536, head_timeout=head_timeout)
    config = uvicorn.Config(
        app or usual,
        port=0,
        http=protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        server_header=False,
        date_header=False,
        timeout_keep_alive=keep_alive,
    )
    server = uvicorn.Server(config)
    serving = asyncio.ensure_future(server.serve())
    with anyio.fail_after(10):
        while not server.started:  # noqa: ASYNC110 - uvicorn tells nobody
            await anyio.sleep(0.005)
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        await serving


async def test_it_is_closed_when_nothing_is_asked_for_as_long() -> None:
    async with served(keep_alive=1) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        clock = asyncio.get_running_loop().time
        for _ in range(3):  # the time of the first would be over before the last was answered
            writer.write(ASKED)
            asked = clock()
            with anyio.fail_after(20):
                assert await reader.readexactly(len(ANSWER)) == ANSWER
            await anyio.sleep(0.4)
        with anyio.fail_after(20):
            assert await reader.read() == b""
        assert clock() - asked > 0.99
        writer.close()


async def test_it_stays_while_an_answer_takes_longer() -> None:
    async with served(keep_alive=1, takes=1.5) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(2):  # at the second there is a time that has begun with the first
            writer.write(ASKED)
            with anyio.fail_after(20):
                assert await reader.readexactly(len(ANSWER)) == ANSWER
        writer.close()


@pytest.mark.parametrize("rest", [b"", b"half", b"the whole", b"the whole" + ASKED[:9]])
async def test_it_is_closed_whatever_comes_late_of_a_body_that_nobody_waited_for(rest: bytes) -> None:
    async def refuse(_scope: Scope, _receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    async with served(keep_alive=1, app=refuse, head_timeout=2.0) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST / HTTP/1.1\r\nhost: here\r\ncontent-length: 9\r\n\r\n")
        with anyio.fail_after(20):
            assert await reader.readexactly(len(ANSWER)) == ANSWER
            writer.write(rest)
            left = await reader.read()
        # The head that had begun has a time of its own.
        assert left.startswith(b"HTTP/1.1 408 ") is rest.endswith(ASKED[:9])
        writer.close()
