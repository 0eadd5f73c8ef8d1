"""Which requests go without aiohttp's own objects, and that both ways bring the same bytes to the server."""

from __future__ import annotations

import aiohttp
import pytest

from resilient_llm.message import Headers, Request
from resilient_llm.streams import read_up_to
from resilient_llm.transports.aiohttp import AiohttpTransport, Connector
from resilient_llm.transports.aiohttp_direct import DirectResponse
from tests.transports.wire import Connection, wire

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.realtime,
    pytest.mark.parametrize("anyio_backend", ["asyncio"]),
]

LENGTH = b"content-length"


async def sent(request_of: Request, transport: AiohttpTransport) -> tuple[bytes, object]:
    """Send a request to a place of its path, and give what came there and what stands for the reply."""
    seen: list[bytes] = []

    async def script(connection: Connection) -> None:
        head, body = await connection.request()
        seen.append(head + body)
        await connection.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

    async with wire(script) as server:
        place = server.url.removeprefix("http://")
        url = request_of.url.replace("place", place)
        reply = await transport(Request(request_of.method, url, request_of.headers, request_of.body))
        body, _ = await read_up_to(reply.stream, 10)
        assert body == b"ok"
    return seen[0].replace(place.encode(), b"place"), reply.native


@pytest.mark.parametrize(
    ("method", "headers", "body"),
    [
        ("POST", [(b"Host", b"other"), (b"X-A", b"1"), (LENGTH, b"5")], b"hello"),
        ("POST", [(b"x-a", b"1"), (b"X-A", b"2")], b"hello"),
        ("post", [], b"hello"),
        ("POST", [], b""),
        ("POST", [(LENGTH, b"0")], b""),
        ("PUT", [], b""),
        ("GET", [], b""),
        ("GET", [(b"accept", "\u00e9".encode())], b""),
        ("DELETE", [(b"transfer-encoding", b"chunked")], b"kept"),
        ("OPTIONS", [], b""),
    ],
)
async def test_both_ways_are_the_same_to_the_server(method: str, headers: Headers, body: bytes) -> None:
    request = Request(method, "http://place/a%2fb?c=%e9&d", headers, body)
    connector = Connector(limit=0)
    async with aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar()) as session:
        through, native = await sent(request, AiohttpTransport(session))
    assert isinstance(native, aiohttp.ClientResponse)
    transport = AiohttpTransport()
    directly, native = await sent(request, transport)
    await transport.aclose()
    assert isinstance(native, DirectResponse)
    assert sorted(directly.split(b"\r\n")) == sorted(through.split(b"\r\n"))
    assert directly.partition(b"\r\n\r\n")[2] == body


@pytest.mark.parametrize(
    ("url", "size"),
    [("http://place/", 65_537), ("http://user:password@place/", 1), ("http://:password@place/", 1)],
    ids=["large", "credentials", "password"],
)
async def test_what_wants_more_goes_through_the_session(url: str, size: int) -> None:
    transport = AiohttpTransport()
    seen, native = await sent(Request("POST", url, [], bytes(size)), transport)
    await transport.aclose()
    assert isinstance(native, aiohttp.ClientResponse)
    assert (b"\r\nAuthorization: Basic " in seen) is ("@" in url)
