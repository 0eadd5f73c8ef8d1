"""No policies, no difference: whatever a client sees through a bare transport, it sees through ours.

Each scenario runs twice over real sockets, through the library's own transport and through
`ResilientTransport` around it, and must give the same account of what happened.
"""

from __future__ import annotations

import asyncio
import gzip
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from types import ModuleType
from typing import Any

import httpx
import httpx2
import pytest

import resilient_llm.httpx
import resilient_llm.httpx2
from tests.client.raw_server import Handler, answer, raw_server

pytestmark = [pytest.mark.anyio, pytest.mark.realtime]

Scenario = Callable[[ModuleType, Any, str], Awaitable[list[object]]]
SCENARIOS: list[tuple[Scenario, Handler]] = []


def scenario(handler: Handler) -> Callable[[Scenario], Scenario]:
    def register(function: Scenario) -> Scenario:
        SCENARIOS.append((function, handler))
        return function

    return register


def account(response: Any) -> list[object]:
    headers = [pair for pair in response.headers.raw if pair[0].lower() != b"date"]
    return [response.status_code, headers, response.http_version, response.reason_phrase, response.is_closed]


async def echo(head: bytes, body: bytes, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    lines = [
        line for line in head.split(b"\r\n") if not line.lower().startswith((b"host:", b"content-type: mult"))
    ]
    writer.write(
        answer(b"\n".join([*lines, body]), b"Set-Cookie: a=1", b"Set-Cookie: b=2", b"X-Mixed-Case: Yes")
    )


@scenario(echo)
async def request_line_headers_cookies(library: ModuleType, client: Any, url: str) -> list[object]:
    first = await client.get(url + "/a%20b/%2F?q=1&q=2", headers={"X-One": "1", "x-two": "2"})
    second = await client.post(url + "/x", json={"n": 1})
    return [
        *account(first),
        first.content,
        *account(second),
        second.content,
        sorted(map(str, client.cookies.jar)),
    ]


@scenario(echo)
async def uploads(library: ModuleType, client: Any, url: str) -> list[object]:
    async def chunks() -> AsyncIterator[bytes]:
        for part in (b"one", b"two", b"three"):
            yield part

    generated = await client.post(url, content=chunks())
    return [generated.content, (await client.put(url, content=b"bytes")).content]


@scenario(echo)
async def multipart_reaches_the_server_whole(library: ModuleType, client: Any, url: str) -> list[object]:
    response = await client.post(
        url,
        files={"file": ("a.txt", b"x" * 100_000)},
        headers={"content-type": "multipart/form-data; boundary=B"},
    )
    return [response.status_code, response.content]


@scenario(echo)
async def hooks_auth_and_extensions(library: ModuleType, client: Any, url: str) -> list[object]:
    seen: list[str] = []

    async def trace(name: str, _info: object) -> None:
        seen.append(name)

    async def hook(response: Any) -> None:
        seen.append(f"hook {response.status_code}")

    client.event_hooks = {"response": [hook]}
    response = await client.get(url, auth=("user", "pass"), extensions={"trace": trace})
    return [seen, response.content, sorted(response.extensions)]


async def redirect(
    head: bytes, _body: bytes, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    if b" /start " in head:
        writer.write(answer(b"", b"location: /end", status=b"302 Found"))
    else:
        writer.write(answer(b"arrived"))


@scenario(redirect)
async def redirects(library: ModuleType, client: Any, url: str) -> list[object]:
    stay = await client.get(url + "/start")
    follow = await client.get(url + "/start", follow_redirects=True)
    return [*account(stay), follow.content, len(follow.history), follow.history[0].status_code]


async def drip(
    _head: bytes, _body: bytes, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
    for number in range(4):
        writer.write(b"%x\r\n%b\r\n" % (10, b"data: %03d\n" % number))
        await writer.drain()
        await asyncio.sleep(0.02)
    writer.write(b"0\r\nx-trailer: t\r\n\r\n")


@scenario(drip)
async def a_stream_arrives_chunk_by_chunk(library: ModuleType, client: Any, url: str) -> list[object]:
    async with client.stream("GET", url) as response:
        before = account(response)
        chunks = [chunk async for chunk in response.aiter_raw()]
    return [
        *before,
        chunks,
        response.is_closed,
        response.num_bytes_downloaded,
        response.elapsed.total_seconds() > 0.05,
    ]


@scenario(drip)
async def a_stream_left_early_is_closed(library: ModuleType, client: Any, url: str) -> list[object]:
    async with client.stream("GET", url) as response:
        async for _chunk in response.aiter_raw():
            break
    seen = [response.is_closed, response.is_stream_consumed]
    again = await client.get(url)
    return [*seen, again.content]


@scenario(drip)
async def reading_twice_fails_alike(library: ModuleType, client: Any, url: str) -> list[object]:
    async with client.stream("GET", url) as response:
        await response.aread()
        with pytest.raises(library.StreamConsumed):
            [chunk async for chunk in response.aiter_raw()]
    return [response.content]


async def packed(
    _head: bytes, _body: bytes, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    writer.write(answer(gzip.compress(b"hello " * 100, mtime=0), b"content-encoding: gzip"))


@scenario(packed)
async def http_01_encoded_bodies_pass_as_they_are(library: ModuleType, client: Any, url: str) -> list[object]:
    async with client.stream("GET", url) as response:
        raw = b"".join([chunk async for chunk in response.aiter_raw()])
    decoded = await client.get(url)
    return [raw, decoded.content, *account(decoded)]


async def empty(
    head: bytes, _body: bytes, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    if head.startswith(b"HEAD"):
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n")
    else:
        writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")


@scenario(empty)
async def replies_without_a_body(library: ModuleType, client: Any, url: str) -> list[object]:
    return [*account(await client.head(url)), *account(await client.delete(url))]


async def fail(
    _head: bytes, _body: bytes, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    writer.write(
        answer(b'{"error": {"message": "no"}}', b"retry-after: 1", status=b"503 Service Unavailable")
    )


@scenario(fail)
async def error_replies(library: ModuleType, client: Any, url: str) -> list[object]:
    response = await client.get(url)
    async with client.stream("GET", url) as streamed:
        chunks = [chunk async for chunk in streamed.aiter_raw()]
    return [*account(response), response.content, chunks]


async def cut(head: bytes, _body: bytes, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    if b" /headers " not in head:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nhalf")
        await writer.drain()
    writer.close()


async def failure(awaitable: Awaitable[object]) -> list[object]:
    try:
        await awaitable
    except Exception as error:  # noqa: BLE001 - whatever it is, it is compared
        chain: list[object] = []
        seen: BaseException | None = error
        while seen is not None:
            chain.append((type(seen), str(seen)))
            seen = seen.__cause__
        return [*chain, hasattr(error, "_request") and error._request is not None]
    return ["no failure"]


@scenario(cut)
async def broken_connections(library: ModuleType, client: Any, url: str) -> list[object]:
    return [await failure(client.get(url + "/headers")), await failure(client.get(url + "/body"))]


async def silent(
    _head: bytes, _body: bytes, _reader: asyncio.StreamReader, _writer: asyncio.StreamWriter
) -> None:
    await asyncio.sleep(60)


@scenario(silent)
async def timeouts(library: ModuleType, client: Any, url: str) -> list[object]:
    return await failure(client.get(url, timeout=library.Timeout(60, read=0.05)))


@scenario(echo)
async def refused_connections_and_bad_urls(library: ModuleType, client: Any, url: str) -> list[object]:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    refused = await failure(client.get(f"http://127.0.0.1:{port}"))
    return [*refused, *(await failure(client.get("ftp://127.0.0.1/")))]


async def upgrade(
    head: bytes, _body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    writer.write(b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: echo\r\n\r\n")
    await writer.drain()
    writer.write(await reader.readexactly(4))


@scenario(upgrade)
async def upgraded_connections(library: ModuleType, client: Any, url: str) -> list[object]:
    async with client.stream("GET", url, headers={"connection": "upgrade", "upgrade": "echo"}) as response:
        network = response.extensions["network_stream"]
        await network.write(b"ping")
        pong = await network.read(4)
    return [response.status_code, pong]


@pytest.mark.parametrize("library", [httpx, httpx2], ids=["httpx", "httpx2"])
@pytest.mark.parametrize(("run", "handler"), SCENARIOS, ids=[run.__name__ for run, _ in SCENARIOS])
async def test_same(library: ModuleType, run: Scenario, handler: Handler) -> None:
    ours = resilient_llm.httpx if library is httpx else resilient_llm.httpx2
    accounts: list[list[object]] = []
    for wrap in (False, True):
        transport: Any = library.AsyncHTTPTransport()
        if wrap:
            transport = ours.ResilientTransport(transport)
        async with raw_server(handler) as url, library.AsyncClient(transport=transport, timeout=60) as client:
            account_of_it = await run(library, client, url)
            accounts.append([_without(url, item) for item in account_of_it])
    assert accounts[0] == accounts[1]


def _without(url: str, item: object) -> object:
    return repr(item).replace(url.rpartition(":")[2], "PORT")


@pytest.mark.parametrize("library", [httpx, httpx2], ids=["httpx", "httpx2"])
async def test_the_transports_own_response_object_comes_back(library: ModuleType) -> None:
    ours = resilient_llm.httpx if library is httpx else resilient_llm.httpx2

    async def body() -> AsyncIterator[bytes]:
        yield b"x"

    made = library.Response(200, content=body(), extensions={"mine": object()})
    transport = ours.ResilientTransport(library.MockTransport(lambda _request: made))
    request = library.Request("GET", "http://x.example")
    response = await transport.handle_async_request(request)
    assert response is made
    assert await response.aread() == b"x"


@pytest.mark.parametrize("library", [httpx, httpx2], ids=["httpx", "httpx2"])
async def test_the_very_request_reaches_the_transport(library: ModuleType) -> None:
    ours = resilient_llm.httpx if library is httpx else resilient_llm.httpx2
    seen: list[object] = []

    def handler(request: object) -> Any:
        seen.append(request)
        return library.Response(200)

    transport = ours.ResilientTransport(library.MockTransport(handler))
    request = library.Request("GET", "http://x.example")
    await transport.handle_async_request(request)
    assert seen == [request]
    assert seen[0] is request


@pytest.mark.parametrize("library", [httpx, httpx2], ids=["httpx", "httpx2"])
async def test_a_synchronous_client_is_told_what_to_do(library: ModuleType) -> None:
    ours = resilient_llm.httpx if library is httpx else resilient_llm.httpx2
    with pytest.raises(TypeError, match=r"AsyncClient.*Pipeline"):
        library.Client(transport=ours.ResilientTransport()).get("http://x.example")
    with pytest.raises(TypeError, match=r"AsyncClient.*Pipeline"):
        ours.ResilientTransport(library.HTTPTransport())
    with pytest.raises(TypeError, match="must be an async transport of"):
        ours.ResilientTransport(object())


async def test_a_transport_of_the_other_library_is_refused() -> None:
    with pytest.raises(TypeError, match="must be an async transport of httpx2"):
        resilient_llm.httpx2.ResilientTransport(httpx.AsyncHTTPTransport())  # type: ignore[arg-type]
