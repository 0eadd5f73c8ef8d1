"""What only the transport over aiohttp does: a session of the caller's own."""

from __future__ import annotations

import aiohttp
import pytest

from resilient_llm.transports.aiohttp import AiohttpTransport, Connector
from tests.transports.test_engines import exchange, post
from tests.transports.wire import Connection, wire

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.realtime,
    pytest.mark.parametrize("anyio_backend", ["asyncio"]),
]


async def test_a_session_of_ones_own_keeps_its_settings_and_is_not_closed() -> None:
    seen: list[bytes] = []

    async def script(connection: Connection) -> None:
        seen.append((await connection.request())[0])
        await connection.send(b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 3\r\n\r\nabc")

    async with (
        wire(script) as server,
        aiohttp.ClientSession(
            connector=Connector(limit=5), headers={"X-Mine": "1"}, timeout=aiohttp.ClientTimeout(total=60)
        ) as session,
    ):
        send = AiohttpTransport(session)
        assert await exchange(send, post(server.url)) == b"abc"
        await send.aclose()
        assert not session.closed
    assert b"X-Mine: 1" in seen[0]
    assert b"user-agent" not in seen[0].lower()


async def test_a_session_is_one_of_aiohttps() -> None:
    with pytest.raises(TypeError, match=r"aiohttp\.ClientSession"):
        AiohttpTransport(object())  # type: ignore[arg-type]
