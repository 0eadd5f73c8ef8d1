"""Each transport that connects by itself, against real sockets.

Bytes as they are, every broken reply a failure, nothing left behind.
"""

from __future__ import annotations

import asyncio
import gc
import gzip
import importlib.util
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import anyio.lowlevel
import brotli  # type: ignore[import-untyped]
import pytest

from resilient_llm import Backoff, CircuitBreaker, ConfigurationError, Reply, Request, Retry
from resilient_llm.client import ClientDoor
from resilient_llm.message import Headers
from resilient_llm.providers import classify_exception
from resilient_llm.transports.request_head import upload
from resilient_llm.transports.stale import ROUND_TRIP
from tests.support import A_HANG, cancel_at_every_await, until
from tests.transports.engines import AIOHTTP, HTTP1, Engine, Transport
from tests.transports.wire import Connection, wire

LOOPS = ["asyncio"]
if importlib.util.find_spec("uvloop") is not None:
    LOOPS.append(pytest.param(("asyncio", {"use_uvloop": True}), id="uvloop"))  # type: ignore[arg-type]
pytestmark = [pytest.mark.anyio, pytest.mark.realtime, pytest.mark.parametrize("anyio_backend", LOOPS)]

OK = b"HTTP/1.1 200 OK\r\n"
CHAT = "/v1/chat/completions"
HELLO = OK + b"Content-Length: 5\r\n\r\nhello"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.fixture(params=[AIOHTTP, HTTP1], ids=lambda engine: engine.name)
def engine(request: pytest.FixtureRequest) -> Engine:
    found: Engine = request.param
    return found


def get(url: str, *headers: tuple[bytes, bytes], method: str = "GET") -> Request:
    return Request(method, url, list(headers))


def post(url: str, body: bytes = b"{}", *headers: tuple[bytes, bytes]) -> Request:
    return Request("POST", url, [*headers, (b"content-length", b"%d" % len(body))], body)


async def read(reply: Reply, got: list[bytes] | None = None) -> bytes:
    chunks = [] if got is None else got
    async for chunk in reply.stream:
        chunks.append(chunk)
    return b"".join(chunks)


def meaning(error: BaseException) -> str | None:
    outcome = classify_exception(error)
    assert outcome is not None, repr(error)
    return outcome.error_type


# What is sent.


async def test_nothing_is_added_and_nothing_changed(engine: Engine) -> None:
    seen: list[tuple[bytes, bytes]] = []

    async def script(connection: Connection) -> None:
        seen.append(await connection.request())
        await connection.send(HELLO)

    headers: Headers = [
        (b"Host", b"provider.example"),
        (b"X-One", b"1"),
        (b"authorization", b"Bearer secret"),
        (b"X-One", b"2 "),
        (b"X-Empty", b""),
        (b"x-utf8", "naïve".encode()),
        (b"Content-Length", b"4"),
        (b"content-type", b"application/json; charset=x"),
    ]
    async with wire(script) as server, engine.transport() as send:
        reply = await send(
            Request("POST", server.url + "//a%20b/%2F/../%7e;p=[1]?q=1&q=%e9+", headers, b"\x00\xff\r\n")
        )
        assert await read(reply) == b"hello"
    lines = [b"%b: %b" % header for header in headers]
    head = b"\r\n".join([b"POST //a%20b/%2F/../%7e;p=[1]?q=1&q=%e9+ HTTP/1.1", *lines, b"", b""])
    assert seen == [(head, b"\x00\xff\r\n")]


@pytest.mark.parametrize("method", ["GET", "HEAD", "DELETE", "OPTIONS"])
async def test_a_request_without_a_body_has_no_more_than_a_host(engine: Engine, method: str) -> None:
    seen: list[bytes] = []

    async def script(connection: Connection) -> None:
        seen.append(await connection.head())
        await connection.send(OK + b"Content-Length: 0\r\n\r\n")

    async with wire(script) as server, engine.transport() as send:
        await read(await send(get(server.url, method=method)))
        host = server.url.removeprefix("http://").encode()
    length = b"Content-Length: 0\r\n" if method == "DELETE" else b""
    assert seen == [method.encode() + b" / HTTP/1.1\r\nHost: " + host + b"\r\n" + length + b"\r\n"]


async def test_names_spelled_in_two_ways_are_both_sent(engine: Engine) -> None:
    seen: list[bytes] = []

    async def script(connection: Connection) -> None:
        seen.append(await connection.head())
        await connection.send(HELLO)

    async with wire(script) as server, engine.transport() as send:
        await read(await send(get(server.url, (b"X-A", b"1"), (b"x-a", b"2"))))
    spelled = b"X-A" if engine is AIOHTTP else b"x-a"  # aiohttp would take the last of two
    assert b"\r\nX-A: 1\r\n" + spelled + b": 2\r\n" in seen[0]


@pytest.mark.parametrize(
    "headers",
    [
        [(b"x-a", b"1\r\nx-b: 2")],
        [(b"x-a", b"1\nx-b: 2")],
        [(b"x-a", b"1\rx-b: 2")],
        [(b"x-a", b"1\x00")],
        [(b"x-a", b"\x7f")],
        [(b"x-a\r\nx-b", b"1")],
        [(b"x-a: 1\nx-b", b"1")],
        [(b"content-length ", b"2")],
        [(b"", b"1")],
        [(b"host", b"a"), (b"Host", b"b")],
        [(b"content-length", b"2"), (b"Content-Length", b"2")],
        [(b"content-length", b"3")],
        [(b"content-length", b"1")],
        [(b"content-length", b"+2")],
        [(b"content-length", b"2, 2")],
        [(b"content-length", b"\xef\xbc\x92")],
        [(b"transfer-encoding", b"chunked"), (b"content-length", b"2")],
        [(b"transfer-encoding", b"gzip, chunked")],
        [(b"transfer-encoding", b"chunked"), (b"transfer-encoding", b"chunked")],
    ],
)
async def test_what_could_be_read_as_another_request_is_not_sent(engine: Engine, headers: Headers) -> None:
    async def script(connection: Connection) -> None:
        raise AssertionError(await connection.reader.read(100))

    async with wire(script) as server, engine.transport() as send:
        with pytest.raises(engine.local) as raised:
            await send(Request("POST", server.url, headers, b"{}"))
        assert meaning(raised.value) == "local_protocol_error"
        assert not server.connections


async def test_a_value_that_is_no_utf8_is_sent_as_it_is_or_not_at_all(engine: Engine) -> None:
    seen: list[bytes] = []

    async def script(connection: Connection) -> None:
        seen.append((await connection.request())[0])
        await connection.send(HELLO)

    async with wire(script) as server, engine.transport() as send:
        request = Request("POST", server.url, [(b"x-a", b"\xff\xfe")], b"{}")
        if engine is AIOHTTP:  # which has no way to send it
            with pytest.raises(engine.local) as raised:
                await send(request)
            assert meaning(raised.value) == "local_protocol_error"
            assert not server.connections
        else:
            assert await exchange(send, request) == b"hello"
            assert b"\r\nx-a: \xff\xfe\r\n" in seen[0]


@pytest.mark.parametrize("method", ["GET /x HTTP/1.1\r\n", "", "GE T", "CONNECT", "G\x00"])
async def test_a_method_that_is_none_is_not_sent(engine: Engine, method: str) -> None:
    async with engine.transport() as send:
        with pytest.raises(engine.local):
            await send(get("http://127.0.0.1:1", method=method))


@pytest.mark.parametrize(
    ("url", "error_type"),
    [
        ("/a b", "invalid_url"),
        ("/a\r\nx: 1", "invalid_url"),
        ("/\x00", "invalid_url"),
        ("/é", "invalid_url"),
        (":99999/", "invalid_url"),
    ],
)
async def test_a_url_that_is_none_is_not_sent(engine: Engine, url: str, error_type: str) -> None:
    async with engine.transport() as send:
        with pytest.raises(engine.invalid_url) as raised:
            await send(get("http://127.0.0.1" + url))
    assert meaning(raised.value) == error_type


@pytest.mark.parametrize(
    ("url", "error_type"),
    [("ftp://a/", "unsupported_protocol"), ("//a/", "unsupported_protocol"), ("http:///a", "invalid_url")],
)
async def test_a_url_without_a_place_is_not_sent(engine: Engine, url: str, error_type: str) -> None:
    async with engine.transport() as send:
        with pytest.raises(engine.error) as raised:
            await send(get(url))
    assert meaning(raised.value) == error_type


@pytest.mark.parametrize("size", [1, 100_000, 5_000_000])
async def test_a_body_is_sent_as_often_as_it_is_asked_for(engine: Engine, size: int) -> None:
    body = bytes(range(256)) * (size // 256 + 1)
    seen: list[bytes] = []

    async def script(connection: Connection) -> None:
        while True:
            seen.append((await connection.request())[1])
            await connection.send(HELLO)

    async with wire(script) as server, engine.transport() as send:
        request = post(server.url, body)
        for _ in range(2):
            assert await read(await send(request)) == b"hello"
    assert seen == [body, body]


async def test_a_chunked_body_that_was_kept_is_sent_with_its_length(engine: Engine) -> None:
    seen: list[tuple[bytes, bytes]] = []

    async def script(connection: Connection) -> None:
        seen.append(await connection.request())
        await connection.send(HELLO)

    async with wire(script) as server, engine.transport() as send:
        await read(await send(Request("POST", server.url, [(b"transfer-encoding", b"chunked")], b"abc")))
    head = seen[0][0].lower()
    assert seen[0][1] == b"abc"
    assert b"content-length: 3\r\n" in head
    assert b"transfer-encoding" not in head


async def pieces(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ([], b"3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n"),
        ([(b"transfer-encoding", b"chunked")], b"3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n"),
        ([(b"content-length", b"6")], b"onetwo"),
    ],
)
async def test_uploads(engine: Engine, headers: Headers, body: bytes) -> None:
    seen: list[tuple[bytes, bytes]] = []

    async def script(connection: Connection) -> None:
        seen.append(await connection.request())
        await connection.send(HELLO)

    async with wire(script) as server, engine.transport() as send:
        request = upload("POST", server.url, headers, pieces(b"one", b"", b"two"))
        assert await read(await send(request)) == b"hello"
    head = seen[0][0].lower()
    assert seen[0][1] == body
    assert head.count(b"transfer-encoding: chunked\r\n") == (0 if b"content-length" in head else 1)


@pytest.mark.parametrize("declared", [b"5", b"7"])
async def test_an_upload_of_another_length_than_it_says_is_broken_off(
    engine: Engine, declared: bytes
) -> None:
    async def script(connection: Connection) -> None:
        await connection.until_gone()

    async with wire(script) as server, engine.transport() as send:
        with pytest.raises(engine.local):
            await send(upload("POST", server.url, [(b"content-length", declared)], pieces(b"one", b"two")))
        assert await server.gone()


async def test_what_an_upload_raises_is_not_the_servers_failure(engine: Engine) -> None:
    class CallerGoneError(Exception):
        pass

    async def body() -> AsyncIterator[bytes]:
        yield b"one"
        await anyio.sleep(0.01)
        raise CallerGoneError

    async def script(connection: Connection) -> None:
        await connection.until_gone()

    async with wire(script) as server, engine.transport() as send:
        with pytest.raises(CallerGoneError):
            await send(upload("POST", server.url, [], body()))
        assert await server.gone()


async def test_an_upload_is_read_no_faster_than_it_is_sent(engine: Engine) -> None:
    taken = 0

    async def body() -> AsyncIterator[bytes]:
        nonlocal taken
        while True:
            taken += 65_536
            yield bytes(65_536)

    async def script(connection: Connection) -> None:
        await connection.head()
        await anyio.sleep(0.2)  # reads nothing more
        await connection.until_gone()

    async with wire(script) as server, engine.transport() as send:
        with anyio.move_on_after(0.1):
            await send(upload("POST", server.url, [], body()))
        assert taken < 16_000_000


async def test_an_answer_before_the_upload_has_ended_is_given(engine: Engine) -> None:
    async def body() -> AsyncIterator[bytes]:
        yield b"one"
        await anyio.sleep(60)

    async def script(connection: Connection) -> None:
        await connection.head()
        await connection.send(b"HTTP/1.1 413 Too Large\r\nContent-Length: 3\r\nConnection: close\r\n\r\nbig")
        await connection.until_gone()

    async with wire(script) as server, engine.transport() as send:
        reply = await send(upload("POST", server.url, [], body()))
        assert (reply.status, await read(reply)) == (413, b"big")
        assert await server.gone()


async def test_a_big_body_is_kept_up_to_a_limit_for_a_second_attempt(engine: Engine) -> None:
    request = upload("POST", "http://a/", [(b"x-a", b"1")], pieces(b"one", b"two", b"three"))
    assert request.buffer_upload is not None
    kept = await request.buffer_upload(100)
    assert kept.body == b"onetwothree"
    request = upload("POST", "http://a/", [], pieces(b"one", b"two", b"three"))
    assert request.buffer_upload is not None
    rest = await request.buffer_upload(4)
    assert rest.body is None
    assert isinstance(rest.template, object)
    seen: list[bytes] = []

    async def script(connection: Connection) -> None:
        seen.append((await connection.request())[1])
        await connection.send(HELLO)

    async with wire(script) as server, engine.transport() as send:
        await read(await send(rest.replace(url=server.url)))
    assert seen == [b"3\r\none\r\n3\r\ntwo\r\n5\r\nthree\r\n0\r\n\r\n"]


async def test_a_request_without_a_body_to_send_says_so(engine: Engine) -> None:
    async with engine.transport() as send:
        with pytest.raises(TypeError, match=r"upload\(method"):
            await send(Request("POST", "http://127.0.0.1:1", [], None))


@pytest.mark.parametrize("answers", [True, False])
async def test_the_body_waits_for_no_100_continue(engine: Engine, answers: bool) -> None:
    seen: list[tuple[bytes, bytes]] = []

    async def script(connection: Connection) -> None:
        if answers:
            await connection.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        seen.append(await connection.request())
        await connection.send(b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n", HELLO)

    async with wire(script) as server, engine.transport() as send:
        reply = await send(post(server.url, b"{}", (b"expect", b"100-continue")))
        assert (reply.status, reply.headers) == (200, [(b"Content-Length", b"5")])
        assert await read(reply) == b"hello"
    assert b"expect" not in seen[0][0]


# What comes back.

REPEATED: Headers = [
    (b"Content-Length", b"0"),
    (b"Set-Cookie", b"a=1; Path=/"),
    (b"X-Mixed-CASE", b"Yes"),
    (b"set-cookie", b"b=2"),
    (b"X-Latin", b"\xe9\xff"),
    (b"X-Empty", b""),
    (b"Location", b"/elsewhere"),
]


@pytest.mark.parametrize("status", [200, 301, 302, 307, 308, 401, 407, 429, 503, 599])
async def test_replies_come_as_they_are_and_redirects_are_not_followed(engine: Engine, status: int) -> None:
    async def script(connection: Connection) -> None:
        while True:
            await connection.request()
            lines = b"".join(b"%b: %b\r\n" % header for header in REPEATED)
            await connection.send(b"HTTP/1.1 %d Whatever\r\n%b\r\n" % (status, lines))

    async with wire(script) as server, engine.transport() as send:
        for _ in range(2):  # no cookie comes back
            reply = await send(post(server.url))
            assert (reply.status, reply.headers, await read(reply)) == (status, REPEATED, b"")
        assert len(server.connections) == 1


async def test_cookies_are_not_kept(engine: Engine) -> None:
    heads: list[bytes] = []

    async def script(connection: Connection) -> None:
        while True:
            heads.append(await connection.head())
            await connection.send(OK + b"Content-Length: 0\r\nSet-Cookie: a=1\r\n\r\n")

    async with wire(script) as server, engine.transport() as send:
        for _ in range(2):
            await read(await send(get(server.url.replace("127.0.0.1", "localhost"))))
    assert heads[0] == heads[1]


PLAIN = b'{"choices": []}' * 50


@pytest.mark.parametrize(
    ("encoding", "body"),
    [
        (b"gzip", gzip.compress(PLAIN, mtime=0)),
        (b"br", brotli.compress(PLAIN)),
        (b"zstd", b"\x28\xb5\x2f\xfd not really"),
        (b"gzip", b"not gzip at all"),
        (b"deflate", gzip.compress(PLAIN, mtime=0)[:20]),
        (b"nonsense", PLAIN),
    ],
)
async def test_HTTP_01_nothing_is_decoded(engine: Engine, encoding: bytes, body: bytes) -> None:  # noqa: N802 - a case's id
    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(
            OK + b"Content-Encoding: %b\r\nContent-Length: %d\r\n\r\n" % (encoding, len(body)), body
        )

    async with wire(script) as server, engine.transport() as send:
        reply = await send(post(server.url, b"{}", (b"accept-encoding", b"gzip, br, zstd")))
        assert reply.header(b"content-encoding") == encoding
        assert await read(reply) == body


WHOLE = {
    "content-length": (HELLO, True),
    "chunks": (CHUNKED + b"2\r\nhe\r\n3;ext=1\r\nllo\r\n0\r\n\r\n", True),
    "chunks with trailers": (CHUNKED + b"5\r\nhello\r\n0\r\nX-Trailer: 1\r\n\r\n", True),
    "until the end": (OK + b"\r\nhello", False),
    "http/1.0": (b"HTTP/1.0 200 OK\r\n\r\nhello", False),
    "http/1.0 with a length": (b"HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\nhello", False),
    "connection: close": (OK + b"Connection: close\r\nContent-Length: 5\r\n\r\nhello", False),
    "no reason": (b"HTTP/1.1 200\r\nContent-Length: 5\r\n\r\nhello", True),
}


@pytest.mark.parametrize("pause", [None, 0.0005])
@pytest.mark.parametrize("name", WHOLE)
async def test_every_way_a_body_is_framed(engine: Engine, name: str, pause: float | None) -> None:
    raw, stays = WHOLE[name]

    async def script(connection: Connection) -> None:
        await connection.request()
        parts = [raw] if pause is None else [raw[i : i + 1] for i in range(len(raw))]
        await connection.send(*parts, pause=pause or 0)
        if stays:
            await connection.until_gone()

    async with wire(script) as server, engine.transport() as send:
        reply = await send(post(server.url))
        assert await read(reply) == b"hello"
        await engine.settled(send, asyncio.all_tasks())
        assert server.connections[0].gone.is_set() is False


@pytest.mark.parametrize(
    ("method", "raw"),
    [
        ("HEAD", OK + b"Content-Length: 5\r\n\r\n"),
        ("HEAD", CHUNKED),
        ("GET", b"HTTP/1.1 204 No Content\r\n\r\n"),
        ("GET", b"HTTP/1.1 204 No Content\r\nContent-Length: 5\r\n\r\n"),
        ("GET", b"HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n"),
    ],
)
async def test_replies_that_have_no_body(engine: Engine, method: str, raw: bytes) -> None:
    async def script(connection: Connection) -> None:
        while True:
            await connection.head()
            await connection.send(raw)

    async with wire(script) as server, engine.transport() as send:
        for _ in range(3):
            reply = await send(get(server.url, method=method))
            with anyio.fail_after(A_HANG):
                assert await read(reply) == b""


async def test_big_heads(engine: Engine) -> None:
    async def script(connection: Connection) -> None:
        head = await connection.request()
        assert b"y" * 30_000 in head[0]
        await connection.send(OK + b"X-Big: " + b"x" * 60_000 + b"\r\nContent-Length: 0\r\n\r\n")

    async with wire(script) as server, engine.transport() as send:
        reply = await send(post(server.url, b"{}", (b"x-big", b"y" * 30_000)))
        assert reply.header(b"x-big") == b"x" * 60_000
        await read(reply)


# What breaks.

BROKEN_HEADS = {
    "nothing": (b"", "remote_protocol_error"),
    "half a head": (b"HTTP/1.1 200 OK\r\nContent-Le", "remote_protocol_error"),
    "not http": (b"SSH-2.0-OpenSSH_9.6\r\n\r\n", "remote_protocol_error"),
    "two lengths": (OK + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello!", "remote_protocol_error"),
    "length and chunks": (
        OK + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\nhello",
        "remote_protocol_error",
    ),
    "bad length": (OK + b"Content-Length: five\r\n\r\nhello", "remote_protocol_error"),
    "only 100": (b"HTTP/1.1 100 Continue\r\n\r\n", "remote_protocol_error"),
    "101": (
        b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n",
        "remote_protocol_error",
    ),
    "endless header": (OK + b"X-A: " + b"x" * 200_000, "remote_protocol_error"),
    "a bare cr in a header": (OK + b"X-A: 1\rX-B: 2\r\nContent-Length: 0\r\n\r\n", "remote_protocol_error"),
    "a zero in a header": (OK + b"X-A: 1\x002\r\nContent-Length: 0\r\n\r\n", "remote_protocol_error"),
}


@pytest.mark.parametrize("name", BROKEN_HEADS)
async def test_heads_that_are_none(engine: Engine, name: str) -> None:
    raw, error_type = BROKEN_HEADS[name]

    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(raw)

    async with wire(script) as server, engine.transport() as send:
        with pytest.raises(engine.error) as raised, anyio.fail_after(A_HANG):
            await send(post(server.url))
        assert meaning(raised.value) == error_type
        outcome = classify_exception(raised.value)
        assert outcome is not None
        assert outcome.ambiguous
        assert len(server.connections) == 1


BROKEN_BODIES = {
    "content-length": (OK + b"Content-Length: 10\r\n\r\nhello", b"hello"),
    "chunk": (CHUNKED + b"5\r\nhello\r\n7\r\nwor", b"hellowor"),
    "no last chunk": (CHUNKED + b"5\r\nhello\r\n", b"hello"),
    "trailers": (CHUNKED + b"5\r\nhello\r\n0\r\nX-Trai", b"hello"),
    "no chunk": (CHUNKED + b"5\r\nhello\r\nzzz\r\n", b"hello"),
    "longer chunk": (CHUNKED + b"5\r\nhello world\r\n", b"hello"),
}


@pytest.mark.parametrize(
    ("name", "ending"),
    [
        *((name, ending) for name in BROKEN_BODIES for ending in ("end", "reset")),
        ("no chunk", "stays"),  # what came is wrong already
        ("longer chunk", "stays"),
    ],
)
async def test_a_cut_body_is_a_failure_after_what_came(engine: Engine, name: str, ending: str) -> None:
    raw, whole = BROKEN_BODIES[name]

    async def script(connection: Connection) -> None:
        await connection.request()
        head, separator, body = raw.partition(b"\r\n\r\n")
        await connection.send(head + separator, body, pause=0.01)
        if ending == "reset":
            await anyio.sleep(0.02)
            connection.reset()
        elif ending == "stays":
            await connection.until_gone()

    async with wire(script) as server, engine.transport() as send:
        reply = await send(post(server.url))
        await anyio.sleep(0.06)  # until it has broken, unread
        got: list[bytes] = []
        with pytest.raises(engine.error) as raised, anyio.fail_after(A_HANG):
            await read(reply, got)
        assert b"".join(got) == whole
        assert meaning(raised.value) in ("remote_protocol_error", "read_error")


@pytest.mark.parametrize("name", ["content-length", "chunks", "chunks with trailers"])
async def test_wherever_a_reply_is_cut_it_is_no_whole_one(engine: Engine, name: str) -> None:
    raw, _stays = WHOLE[name]
    outcomes: list[tuple[bool, bytes]] = []

    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(raw[: connection.number])

    async with wire(script) as server, engine.transport() as send:
        for _ in range(len(raw) + 1):
            got: list[bytes] = []
            try:
                await read(await send(post(server.url)), got)
            except engine.error:
                outcomes.append((False, b"".join(got)))
            else:
                outcomes.append((True, b"".join(got)))
    *cut, whole = outcomes
    assert whole == (True, b"hello")
    assert not any(ended for ended, _got in cut)
    assert all(b"hello".startswith(got) for _ended, got in cut)
    assert b"he" in [got for _ended, got in cut]  # what came before is not lost


async def test_the_reset_of_a_body_without_a_length_is_no_end(engine: Engine) -> None:
    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(OK + b"\r\nhello")
        await anyio.sleep(0.02)
        connection.reset()

    async with wire(script) as server, engine.transport() as send:
        reply = await send(post(server.url))
        got: list[bytes] = []
        with pytest.raises(engine.error) as raised:
            await read(reply, got)
        assert got == [b"hello"]
        assert meaning(raised.value) == "read_error"


@pytest.mark.parametrize("reset", [True, False])
@pytest.mark.parametrize("method", ["GET", "POST", "PUT"])
async def test_a_new_connection_that_breaks_is_not_tried_again(
    engine: Engine, method: str, reset: bool
) -> None:
    async def script(connection: Connection) -> None:
        await connection.head()
        if reset:
            connection.reset()

    async with wire(script) as server, engine.transport() as send:
        with pytest.raises(engine.error) as raised:
            await send(Request(method, server.url, [], b""))
        assert meaning(raised.value) == ("read_error" if reset else "remote_protocol_error")
        assert len(server.connections) == 1


async def test_refused_and_unknown_hosts(engine: Engine) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        async with engine.transport() as send:
            for host in (f"127.0.0.1:{port}", "nowhere.invalid"):
                with pytest.raises(engine.error) as raised:
                    await send(post(f"http://{host}/"))
                outcome = classify_exception(raised.value)
                assert outcome is not None
                assert (outcome.error_type, outcome.ambiguous, outcome.retryable) == (
                    "connect_error",
                    False,
                    True,
                )


async def test_a_certificate_nobody_vouches_for_is_refused(
    engine: Engine, tls: ssl.SSLContext, certificate: Path
) -> None:
    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(HELLO)
        await connection.until_gone()

    async with wire(script, tls=tls) as server, engine.transport() as send:
        with pytest.raises(engine.certificate) as raised:
            await send(post(server.url))
        assert meaning(raised.value) == "connect_error"
    known = ssl.create_default_context(cafile=str(certificate))
    async with wire(script, tls=tls) as server, engine.transport(ssl=known) as send:
        assert await read(await send(post(server.url))) == b"hello"
        with pytest.raises(engine.certificate):  # a name it is not for
            await send(post(server.url.replace("127.0.0.1", "localhost")))


# Connections.


async def test_HTTP_06_a_connection_closed_while_it_was_idle_is_not_used(engine: Engine) -> None:  # noqa: N802
    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(HELLO)

    async with wire(script) as server, engine.transport() as send:
        for number in range(1, 4):
            assert await read(await send(post(server.url))) == b"hello"
            assert len(server.connections) == number
            await anyio.sleep(0.01)


@pytest.mark.parametrize("how", ["end", "reset"])
@pytest.mark.parametrize("size", [2, 3_000_000])
async def test_HTTP_06_a_post_that_met_a_closed_connection_is_sent_once_more(  # noqa: N802
    engine: Engine, how: str, size: int
) -> None:
    answered: list[tuple[int, bytes]] = []

    async def script(connection: Connection) -> None:
        if connection.number < 2:
            await connection.request()
            await server.has(2)  # of which the second try must take neither
            await connection.send(HELLO)
            await connection.reader.read(1)
            if how == "reset":
                connection.reset()
            return
        answered.append((connection.number, (await connection.request())[1]))
        await connection.send(HELLO)
        await connection.until_gone()

    body = b"x" * size
    async with wire(script) as server, engine.transport() as send:
        async with anyio.create_task_group() as group:
            for _ in range(2):
                group.start_soon(lambda: exchange(send, post(server.url)))
        assert await read(await send(post(server.url + CHAT, body))) == b"hello"
        assert answered == [(2, body)]


LASTING = {
    "a batch": ("/v1/batches", b"{}"),
    "a file": ("/v1/files", b"file"),
    "a stored response": ("/v1/responses", b'{"model": "gpt-4o", "input": "hi", "store": true}'),
}


@pytest.mark.parametrize("what", LASTING)
@pytest.mark.parametrize("how", ["end", "reset"])
async def test_what_makes_something_that_lasts_is_not_sent_again(engine: Engine, what: str, how: str) -> None:
    path, body = LASTING[what]

    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(HELLO)
        await connection.request()
        if how == "reset":
            connection.reset()

    async with wire(script) as server, engine.transport() as send:
        await exchange(send, post(server.url))
        with pytest.raises(engine.error):
            await exchange(send, post(server.url + path, body))
        assert len(server.connections) == 1


async def exchange(send: Transport, request: Request) -> bytes:
    return await read(await send(request))


@pytest.mark.parametrize("how", ["end", "reset"])
async def test_what_was_worked_on_for_longer_than_word_of_a_closed_connection_takes_is_not_sent_again(
    engine: Engine, how: str
) -> None:
    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(HELLO)
        await connection.request()
        await anyio.sleep(ROUND_TRIP + 0.1)  # it may have created something by now
        if how == "reset":
            connection.reset()

    async with wire(script) as server, engine.transport() as send:
        await exchange(send, post(server.url))
        with pytest.raises(engine.error):
            await exchange(send, post(server.url))
        assert len(server.connections) == 1


@pytest.mark.parametrize(
    "said", [b"H", b"HTTP/1.1 100 Continue\r\n\r\n", OK + b"Content-Length: 9\r\n\r\nhalf"]
)
@pytest.mark.parametrize("how", ["end", "reset"])
async def test_HTTP_06_what_was_answered_in_part_is_not_sent_again(  # noqa: N802
    engine: Engine, said: bytes, how: str
) -> None:
    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(HELLO)
        await connection.request()
        await connection.send(said)
        if how == "reset":
            await anyio.sleep(0.01)
            connection.reset()

    async with wire(script) as server, engine.transport() as send:
        await exchange(send, post(server.url))
        with pytest.raises(engine.error):
            await exchange(send, post(server.url))
        assert len(server.connections) == 1


async def test_HTTP_06_an_upload_is_not_sent_again_and_a_second_failure_is_told(engine: Engine) -> None:  # noqa: N802
    async def script(connection: Connection) -> None:
        await connection.request()
        if connection.number == 0:
            await connection.send(HELLO)
            await connection.head()

    async with wire(script) as server, engine.transport() as send:
        await exchange(send, post(server.url))
        with pytest.raises(engine.error):
            await send(upload("POST", server.url + CHAT, [], pieces(b"one")))
        assert len(server.connections) == 1
    async with wire(script) as server, engine.transport() as send:
        await exchange(send, post(server.url))
        with pytest.raises(engine.broken):
            await send(post(server.url + CHAT))
        assert len(server.connections) == 2


@pytest.mark.parametrize(
    ("extra", "at_once"),
    [
        (HELLO.replace(b"hello", b"other"), True),
        (HELLO.replace(b"hello", b"other"), False),
        (b"HTTP/1.1 200 O", False),
        (b"?", False),  # at once it makes the whole of it no answer
    ],
)
async def test_an_answer_nobody_asked_for_is_nobodys(engine: Engine, extra: bytes, at_once: bool) -> None:
    said = 0

    async def script(connection: Connection) -> None:
        nonlocal said
        await connection.request()
        if at_once:
            await connection.send(HELLO + extra)
        else:
            await connection.send(HELLO)
            await anyio.sleep(0.02)
            await connection.send(extra)
        said += 1
        await connection.until_gone()

    async with wire(script) as server, engine.transport() as send:
        for turn in (1, 2):
            assert await exchange(send, post(server.url)) == b"hello"
            await until(lambda turn=turn: said == turn)  # type: ignore[misc]  # typed by use
            for _ in range(5):  # turns of the event loop, in which it comes
                await anyio.sleep(0.005)
        assert len(server.connections) == 2


async def test_the_pool_is_never_the_queue(engine: Engine) -> None:
    async def script(connection: Connection) -> None:
        await connection.request()
        await server.has(150)
        await connection.send(HELLO)
        await connection.until_gone()

    async with wire(script) as server, engine.transport() as send, anyio.create_task_group() as group:
        for _ in range(150):  # aiohttp's own limit is 100
            group.start_soon(lambda: exchange(send, post(server.url)))


async def test_connections_that_are_idle_for_long_are_closed(engine: Engine) -> None:
    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(HELLO)
        await connection.until_gone()

    async with wire(script) as server, engine.transport(keepalive=0.5) as send:
        began = anyio.current_time()
        async with anyio.create_task_group() as group:
            for _ in range(20):
                group.start_soon(lambda: exchange(send, post(server.url)))
        gone = await server.gone(0.02)
        assert not gone or anyio.current_time() - began > 0.5
        assert await server.gone(A_HANG)


# Streams.


async def test_a_stream_is_read_as_it_comes_and_no_faster_than_it_is_read(engine: Engine) -> None:
    sent = 0

    async def script(connection: Connection) -> None:
        nonlocal sent
        await connection.request()
        await connection.send(CHUNKED)
        for _ in range(1024):
            await connection.send(b"4000\r\n" + bytes(16_384) + b"\r\n")
            sent += 16_384
        await connection.send(b"0\r\n\r\n")
        await connection.until_gone()

    async with wire(script) as server, engine.transport() as send:
        reply = await send(post(server.url))
        iterator = reply.stream.__aiter__()
        got = len(await iterator.__anext__())
        await anyio.sleep(0.2)
        assert engine.waiting(reply) <= 512 * 1024
        assert sent < 12_000_000  # 16 MB: the rest waits in the server
        biggest = 0
        async for chunk in iterator:
            got += len(chunk)
            biggest = max(biggest, len(chunk))
        assert got == 1024 * 16_384
        assert biggest <= 512 * 1024


async def test_each_event_is_given_when_it_comes(engine: Engine) -> None:
    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(CHUNKED)
        for number in range(5):
            event = b"data: %d\n\n" % number
            await connection.send(b"%x\r\n%b\r\n" % (len(event), event), pause=0.02)
        await connection.send(b"0\r\n\r\n")
        await connection.until_gone()

    async with wire(script) as server, engine.transport() as send:
        reply = await send(post(server.url))
        assert [chunk async for chunk in reply.stream] == [b"data: %d\n\n" % number for number in range(5)]


async def test_200_streams_at_once(engine: Engine) -> None:
    async def script(connection: Connection) -> None:
        while True:
            head, _body = await connection.request()
            number = head.split(b" ")[1][1:]
            await connection.send(CHUNKED)
            for event in range(20):
                data = b"%b-%d\n" % (number, event)
                await connection.send(b"%x\r\n%b\r\n" % (len(data), data), pause=0.005)
            await connection.send(b"0\r\n\r\n")

    got: dict[int, bytes] = {}

    async def one(number: int) -> None:
        got[number] = await exchange(send, post(f"{server.url}/{number}"))

    async with wire(script) as server, engine.transport() as send:
        async with anyio.create_task_group() as group:
            for number in range(200):
                group.start_soon(one, number)
        assert len(server.connections) <= 200
    assert got == {n: b"".join(b"%d-%d\n" % (n, event) for event in range(20)) for n in range(200)}


# Cancellation.

STAGES = ["head", "half a head", "body", "chunked body", "upload", "big body", "handshake"]


@pytest.mark.parametrize("stage", STAGES)
async def test_a_cancelled_request_has_closed_its_connection_at_once(
    engine: Engine, stage: str, tls: ssl.SSLContext
) -> None:
    async def script(connection: Connection) -> None:
        if stage == "handshake":
            await connection.reader.read(1)
        else:
            await connection.head()
        if stage in ("upload", "big body"):
            connection.writer.transport.pause_reading()  # type: ignore[attr-defined]
            await anyio.sleep(0.1)
            connection.writer.transport.resume_reading()  # type: ignore[attr-defined]
        if stage == "half a head":
            await connection.send(OK)
        if stage == "body":
            await connection.send(OK + b"Content-Length: 10\r\n\r\nhello")
        if stage == "chunked body":
            await connection.send(CHUNKED + b"5\r\nhello\r\n")
        await connection.until_gone()

    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield bytes(65_536)

    async with wire(script) as server, engine.transport() as send:
        url = server.url.replace("http:", "https:") if stage == "handshake" else server.url
        request = post(url, bytes(20_000_000)) if stage == "big body" else post(url)
        if stage == "upload":
            request = upload("POST", url, [], endless())
        with anyio.move_on_after(0.05) as scope:
            await exchange(send, request)
        assert scope.cancelled_caught
        assert await server.gone()
        await engine.settled(send, asyncio.all_tasks())


async def test_a_closed_tls_stream_says_no_long_good_bye(
    engine: Engine, tls: ssl.SSLContext, certificate: Path
) -> None:
    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(CHUNKED + b"5\r\nhello\r\n")
        await connection.until_gone()

    known = ssl.create_default_context(cafile=str(certificate))
    async with wire(script, tls=tls) as server, engine.transport(ssl=known) as send:
        reply = await send(post(server.url))
        await reply.stream.__aiter__().__anext__()
        await reply.stream.aclose()
        assert await server.gone()


async def test_a_stream_closed_by_another_task_sends_its_reader_away(engine: Engine) -> None:
    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(CHUNKED + b"5\r\nhello\r\n")
        await connection.until_gone()

    async with wire(script) as server, engine.transport() as send:
        reply = await send(post(server.url))

        async def reader() -> None:
            with pytest.raises(engine.broken):
                await read(reply)

        async with anyio.create_task_group() as group:
            group.start_soon(reader)
            await anyio.sleep(0.02)
            await reply.stream.aclose()
        assert await server.gone()
        await reply.stream.aclose()


async def test_a_stream_that_is_forgotten_is_closed(engine: Engine) -> None:
    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(CHUNKED + b"5\r\nhello\r\n")
        await connection.until_gone()

    async with wire(script) as server, engine.transport() as send:
        await send(post(server.url))
        gc.collect()
        assert await server.gone()


async def test_cancelled_at_every_await_it_leaves_nothing(engine: Engine) -> None:
    async def script(connection: Connection) -> None:
        with anyio.move_on_after(60):
            while not connection.reader.at_eof():
                await connection.request()
                await connection.send(CHUNKED, b"5\r\nhello\r\n", b"0\r\n\r\n", pause=0.001)
        connection.gone.set()

    async with wire(script) as server, engine.transport() as send:
        before = asyncio.all_tasks()

        async def scenario() -> None:
            await exchange(send, upload("POST", server.url, [], pieces(b"one", b"two")))

        async def check() -> None:
            await engine.settled(send, before)

        assert await cancel_at_every_await(scenario, check) >= 3
        assert await exchange(send, post(server.url)) == b"hello"


async def test_HTTP_08_waves_of_cancelled_requests_take_no_place(engine: Engine) -> None:  # noqa: N802
    async def script(connection: Connection) -> None:
        while True:
            await connection.request()
            await anyio.sleep(0.002)
            await connection.send(HELLO)

    async with wire(script) as server, engine.transport() as send:
        for turns in range(7):
            async with anyio.create_task_group() as group:
                for _ in range(20):
                    group.start_soon(lambda: exchange(send, post(server.url)))
                for _ in range(turns):
                    await anyio.lowlevel.checkpoint()
                group.cancel_scope.cancel()
        await engine.settled(send, asyncio.all_tasks())
        assert await exchange(send, post(server.url)) == b"hello"


async def test_closing_breaks_off_what_is_under_way(engine: Engine) -> None:
    async def script(connection: Connection) -> None:
        await connection.request()
        if connection.number:
            await connection.send(CHUNKED + b"5\r\nhello\r\n")
        await connection.until_gone()

    failures: list[str | None] = []

    async def one() -> None:
        try:
            await exchange(send, post(server.url))
        except engine.error as error:
            failures.append(meaning(error))

    async with wire(script) as server:
        send = engine.make()
        with anyio.fail_after(A_HANG):
            async with anyio.create_task_group() as group:
                for _ in range(2):
                    group.start_soon(one)
                await server.has(2)
                for _ in range(20):  # turns of the event loop, in which one of them is answered
                    await anyio.sleep(0.005)
                await send.aclose()
        assert await server.gone()
        # aiohttp does not say who closed a connection that had not been answered.
        unanswered = "remote_protocol_error" if engine is AIOHTTP else "network_error"
        assert sorted(map(str, failures)) == ["network_error", unanswered]
        with pytest.raises(RuntimeError, match="closed"):
            await send(post(server.url))
        await send.aclose()


# Where it stands.


async def test_under_a_door_a_failure_is_tried_again_and_a_refusal_is_answered(engine: Engine) -> None:
    async def script(connection: Connection) -> None:
        await connection.request()
        if connection.number == 1:
            await connection.send(
                OK + b'Content-Type: application/json\r\nContent-Length: 12\r\n\r\n{"data": []}'
            )

    async with wire(script) as server, engine.transport() as send:
        breaker = CircuitBreaker(consecutive_failures=1)
        door = ClientDoor(
            send,
            synthesise=send.synthesise,
            errors=send.errors,
            policies=[Retry(max_attempts=2, backoff=Backoff(initial=0.01))],
        )
        request = Request("GET", server.url + "/v1/models", [])
        reply = await door.handle(request)
        assert (reply.status, await read(reply)) == (200, b'{"data": []}')
        failing = ClientDoor(send, synthesise=send.synthesise, errors=send.errors, policies=[breaker])
        with pytest.raises(engine.broken):
            await failing.handle(request)
        refused = await failing.handle(request)
        assert refused.status == 503
        assert b"circuit_open" in await read(refused)
        assert refused.header(b"x-should-retry") == b"false"


@pytest.mark.parametrize("option", [{"connect_timeout": 0}, {"keepalive": -1.0}])
async def test_options_are_checked(engine: Engine, option: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(option))):
        engine.make(**option)


async def test_connecting_takes_so_long_at_most(engine: Engine) -> None:
    async def script(connection: Connection) -> None:
        await connection.until_gone()

    async with wire(script) as server, engine.transport(connect_timeout=0.1) as send:
        with pytest.raises(engine.connect_timeout) as raised:
            await send(post(server.url.replace("http:", "https:")))
        assert meaning(raised.value) == "connect_timeout"
        assert await server.gone()
