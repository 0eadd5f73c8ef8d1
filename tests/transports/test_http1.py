"""What only our own HTTP/1.1 client does: its pool, its addresses, and replies that are there at once."""

from __future__ import annotations

import asyncio
import errno
import importlib.util
import os
import socket
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import pytest

from resilient_llm import Reply, Request
from resilient_llm.providers import classify_exception
from resilient_llm.streams import BufferedStream
from resilient_llm.transports.failures import (
    ConnectError,
    NetworkError,
    ReadError,
    RemoteProtocolError,
    TransportError,
)
from resilient_llm.transports.http1 import Http1Transport
from resilient_llm.transports.http1_connector import Connector, _verifying
from resilient_llm.transports.http1_incoming import Body
from resilient_llm.transports.http1_pool import Pool
from resilient_llm.transports.http1_request import Origin
from resilient_llm.transports.open_files import limit_of_files
from resilient_llm.transports.request_head import upload
from tests.support import A_HANG, cancel_at_every_await, until
from tests.transports.engines import HTTP1
from tests.transports.wire import Connection, wire

LOOPS = ["asyncio"]
if importlib.util.find_spec("uvloop") is not None:
    LOOPS.append(pytest.param(("asyncio", {"use_uvloop": True}), id="uvloop"))  # type: ignore[arg-type]
pytestmark = [pytest.mark.anyio, pytest.mark.realtime, pytest.mark.parametrize("anyio_backend", LOOPS)]

OK = b"HTTP/1.1 200 OK\r\n"
HELLO = OK + b"Content-Length: 5\r\n\r\nhello"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"


@asynccontextmanager
async def transport(**options: object) -> AsyncIterator[Http1Transport]:
    """Make one that is seen to have given everything back when it is done with."""
    async with HTTP1.transport(**options) as it:
        assert isinstance(it, Http1Transport)
        yield it


def post(url: str, body: bytes = b"{}") -> Request:
    return Request("POST", url, [(b"content-length", b"%d" % len(body))], body)


async def read(reply: Reply) -> bytes:
    return b"".join([chunk async for chunk in reply.stream])


async def always(connection: Connection) -> None:
    """Say hello to each request."""
    while True:
        await connection.request()
        await connection.send(HELLO)


async def test_a_reply_that_came_with_its_head_is_whole_and_its_connection_free() -> None:
    async with wire(always) as server, transport() as send:
        for _ in range(3):
            reply = await send(post(server.url))
            assert isinstance(reply.stream, BufferedStream)
            assert reply.stream.whole
            assert reply.native is not None
            assert not HTTP1.busy(send)
            assert (await read(reply), await read(reply)) == (b"hello", b"hello")  # again and again
        assert len(server.connections) == 1


async def test_a_body_that_ended_before_it_was_read_has_left_its_connection() -> None:
    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(CHUNKED + b"5\r\nhello\r\n")
        await proceed.wait()
        await connection.send(b"6\r\n world\r\n0\r\n\r\n")
        await always(connection)

    proceed = asyncio.Event()
    async with wire(script) as server, transport() as send:
        reply = await send(post(server.url))
        assert isinstance(reply.stream, Body)
        assert HTTP1.busy(send) == 1
        proceed.set()
        await until(lambda: not HTTP1.busy(send))
        assert await read(await send(post(server.url))) == b"hello"
        assert await read(reply) == b"hello world"
        await reply.stream.aclose()
        assert await read(await send(post(server.url))) == b"hello"
        assert len(server.connections) == 1


async def test_the_connection_used_last_is_used_first() -> None:
    async def script(connection: Connection) -> None:
        while True:
            await connection.request()
            if not used:
                await server.has(3)
            used.append(connection.number)
            await connection.send(HELLO)

    used: list[int] = []
    async with wire(script) as server, transport() as send:
        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(send, post(server.url))
        last = used[-1]
        for _ in range(4):
            await send(post(server.url))
        assert len(set(used[3:])) == 1
        assert used[3] == last


async def test_a_connection_that_closes_among_many_idle_ones_is_missed_by_none() -> None:
    class Made(asyncio.Transport):
        def write(self, data: bytes | bytearray | memoryview) -> None:
            """Lose it."""

        def is_closing(self) -> bool:
            return False

        def abort(self) -> None:
            """Be closed already."""

    pool, origin = Pool(asyncio.get_running_loop(), 60.0), Origin(False, "127.0.0.1", 1)
    idle = [pool.new(origin) for _ in range(6)]
    for connection in idle:
        connection.connection_made(Made())
        connection.expect(bodiless=False)
        connection.send(b"GET / HTTP/1.1\r\n\r\n")
        connection.data_received(HELLO)
    for number in (3, 0, 5):
        idle[number].connection_lost(None)
    assert pool.in_use == 0
    assert [pool.take(origin) for _ in range(4)] == [idle[4], idle[2], idle[1], None]
    assert pool.in_use == 3
    pool.close()


async def test_a_connection_for_each_scheme_host_and_port() -> None:
    async with wire(always) as one, wire(always) as two, transport() as send:
        for _ in range(2):
            for url in (one.url, two.url, one.url.replace("127.0.0.1", "localhost")):
                assert await read(await send(post(url))) == b"hello"
        assert (len(one.connections), len(two.connections)) == (2, 1)


async def test_a_connection_that_was_idle_for_too_long_is_not_used() -> None:
    async with wire(always) as server, transport(keepalive=0.05) as send:
        await send(post(server.url))
        await anyio.sleep(0.06)
        await send(post(server.url))
        assert len(server.connections) == 2


async def test_connections_are_closed_in_the_order_of_their_last_use() -> None:
    async def script(connection: Connection) -> None:
        await connection.request()
        if connection.number < 3:
            await server.has(3)
        await connection.send(HELLO)
        await connection.until_gone()

    async with wire(script) as server, transport(keepalive=0.2) as send:
        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(send, post(server.url))
        await until(lambda: all(connection.gone.is_set() for connection in server.connections))
        assert send._pool is not None
        assert not send._pool._idle
        assert send._pool._sweep is None  # nothing is left to come back for


async def test_what_is_said_before_the_request_is_its_answer() -> None:
    async def script(connection: Connection) -> None:
        await connection.send(b"HTTP/1.1 503 Full\r\nConnection: close\r\nContent-Length: 4\r\n\r\nfull")

    async with wire(script) as server, transport() as send:
        for body in (b"{}", bytes(1_000_000)):
            reply = await send(post(server.url, body))
            assert (reply.status, await read(reply)) == (503, b"full")


async def test_a_connection_answered_before_all_was_sent_is_not_used_again() -> None:
    async def script(connection: Connection) -> None:
        await connection.head()
        await connection.send(HELLO)
        await connection.until_gone()

    async with wire(script) as server, transport() as send:
        for number in (1, 2):
            assert await read(await send(post(server.url, bytes(50_000_000)))) == b"hello"
            assert len(server.connections) == number
        assert await server.gone()


async def test_an_upload_that_fails_after_the_head_breaks_off_the_body() -> None:
    class CallerGoneError(Exception):
        pass

    async def body() -> AsyncIterator[bytes]:
        yield b"one"
        await proceed.wait()
        raise CallerGoneError

    async def script(connection: Connection) -> None:
        await connection.head()
        await connection.send(CHUNKED + b"5\r\nhello\r\n")
        await connection.until_gone()

    proceed = asyncio.Event()
    async with wire(script) as server, transport() as send:
        reply = await send(upload("POST", server.url, [], body()))
        proceed.set()
        with pytest.raises(CallerGoneError):
            await read(reply)
        assert await server.gone()


async def test_an_upload_goes_on_while_its_reply_is_read() -> None:
    async def body() -> AsyncIterator[bytes]:
        yield b"one"
        await proceed.wait()
        yield b"two"

    async def script(connection: Connection) -> None:
        await connection.reader.readuntil(b"one\r\n")
        await connection.send(CHUNKED + b"5\r\nhello\r\n")
        assert await connection.reader.readuntil(b"0\r\n\r\n") == b"3\r\ntwo\r\n0\r\n\r\n"
        await connection.send(b"0\r\n\r\n")
        await connection.until_gone()

    proceed = asyncio.Event()
    async with wire(script) as server, transport() as send:
        reply = await send(upload("POST", server.url, [], body()))
        proceed.set()
        assert await read(reply) == b"hello"


async def test_two_tasks_do_not_read_one_body() -> None:
    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(CHUNKED)
        await connection.until_gone()

    async with wire(script) as server, transport() as send:
        reply = await send(post(server.url))
        async with anyio.create_task_group() as group:
            group.start_soon(read, reply)
            await anyio.sleep(0.01)
            with pytest.raises(RuntimeError, match="another task"):
                await read(reply)
            group.cancel_scope.cancel()
        with pytest.raises(NetworkError):
            await read(reply)


@pytest.mark.parametrize("ending", [b"", b"Content-Length: 9\r\n", b"Transfer-Encoding: chunked\r\n"])
@pytest.mark.parametrize("reset", [True, False])
async def test_what_came_with_the_head_is_given_before_the_failure(ending: bytes, reset: bool) -> None:
    async def script(connection: Connection) -> None:
        await connection.request()
        part = b"5\r\nhello\r\n" if b"chunked" in ending else b"hello"
        await connection.send(OK + ending + b"\r\n" + part)
        await proceed.wait()
        if reset:
            connection.reset()

    proceed = asyncio.Event()
    async with wire(script) as server, transport() as send:
        reply = await send(post(server.url))
        proceed.set()
        got: list[bytes] = []
        try:
            async for chunk in reply.stream:
                got.append(chunk)  # noqa: PERF401 - what came before it fails
        except (ReadError, RemoteProtocolError):
            assert ending or reset
        else:
            assert not ending
            assert not reset
        assert got == [b"hello"]


async def test_a_head_and_a_broken_body_in_one_piece() -> None:
    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(CHUNKED + b"5\r\nhello\r\nzzz\r\n")
        await connection.until_gone()

    async with wire(script) as server, transport() as send:
        reply = await send(post(server.url))
        chunks = reply.stream.__aiter__()
        assert await anext(chunks) == b"hello"
        for _ in range(2):  # and it stays so
            with pytest.raises(RemoteProtocolError):
                await anext(chunks)
        assert await server.gone()


async def test_the_next_address_is_tried_when_one_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    async with wire(always) as server, transport() as send:
        port = int(server.url.rpartition(":")[2])
        asked: list[object] = []
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))  # and refuses connections

            async def getaddrinfo(host: str, *_args: object, **_options: object) -> list[Any]:
                asked.append(host)
                places = [taken.getsockname(), ("127.0.0.1", port)]
                return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", place) for place in places]

            loop = asyncio.get_running_loop()
            patched = _Loop(loop, getaddrinfo)
            await send(post(server.url))
            assert send._connector is not None
            monkeypatch.setattr(send._connector, "_loop", patched)
            for _ in range(2):
                request = post(f"http://provider.example:{port}/")
                request.headers.append((b"connection", b"close"))
                assert await read(await send(request)) == b"hello"
                forget_idle(send)
        assert asked == ["provider.example"]  # and is remembered


class _Loop:
    """An event loop that knows other addresses."""

    def __init__(self, loop: asyncio.AbstractEventLoop, getaddrinfo: object) -> None:
        self._loop = loop
        self.getaddrinfo = getaddrinfo

    def __getattr__(self, name: str) -> object:
        return getattr(self._loop, name)


async def test_an_address_of_ip_version_6() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n{}"))
        writer.write(HELLO)
        writer.close()

    heads: list[bytes] = []
    try:
        server = await asyncio.start_server(answer, "::1", 0)
    except OSError:
        pytest.skip("this machine has no IPv6")
    port = server.sockets[0].getsockname()[1]
    async with server, transport() as send:
        assert await read(await send(post(f"http://[::1]:{port}/"))) == b"hello"
    assert b"\r\nHost: [::1]:%d\r\n" % port in heads[0]


async def test_a_transport_that_is_closed_while_it_connects() -> None:
    async def script(connection: Connection) -> None:
        await connection.until_gone()

    async with wire(script) as server:
        send = Http1Transport()
        async with anyio.create_task_group() as group:

            async def one() -> None:
                with pytest.raises(TransportError):
                    await send(post(server.url.replace("http:", "https:")))

            group.start_soon(one)
            await server.has(1)
            await send.aclose()
            for connection in server.connections:  # whose handshake fails with it
                connection.writer.close()


def forget_idle(send: Http1Transport) -> None:
    """Let the next request have a connection of its own."""
    for connection in list(send._pool._open) if send._pool is not None else []:
        connection.abort()


async def test_who_is_cancelled_when_the_time_to_connect_is_over_is_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = asyncio.get_running_loop()
    connector = Connector(loop, ssl=None, timeout=0.01)
    connection = Pool(loop, 1.0).new(Origin(tls=False, host="a", port=80))

    async def connect(_connection: object) -> None:
        loop.call_later(0.02, task.cancel)
        time.sleep(0.03)  # noqa: ASYNC251 - so that both are due at once
        await asyncio.Event().wait()

    monkeypatch.setattr(connector, "_connect", connect)
    task = asyncio.create_task(connector.connect(connection))
    with pytest.raises(asyncio.CancelledError):
        await task
    assert connection.closed


@pytest.mark.parametrize("kind", ["whole", "chunks", "upload", "large", "reused"])
async def test_cancelled_at_every_await_it_leaves_nothing(kind: str) -> None:
    async def script(connection: Connection) -> None:
        while True:
            await connection.request()
            parts = [CHUNKED, b"5\r\nhello\r\n", b"0\r\n\r\n"] if kind == "chunks" else [HELLO]
            await connection.send(*parts, pause=0.001)

    async def pieces() -> AsyncIterator[bytes]:
        yield b"one"
        await anyio.sleep(0.001)
        yield b"two"

    async with wire(script) as server, transport() as send:
        before = asyncio.all_tasks()

        async def scenario() -> None:
            request = post(server.url, bytes(2_000_000 if kind == "large" else 2))
            if kind == "upload":
                request = upload("POST", server.url, [], pieces())
            assert await read(await send(request)) == b"hello"

        async def check() -> None:
            await HTTP1.settled(send, before)
            if kind != "reused":
                forget_idle(send)

        assert await cancel_at_every_await(scenario, check) >= (1 if kind == "reused" else 3)
        assert await read(await send(post(server.url))) == b"hello"


async def test_cancelled_at_every_await_over_tls(tls: ssl.SSLContext, certificate: Path) -> None:
    known = ssl.create_default_context(cafile=str(certificate))
    async with wire(always, tls=tls) as server, transport(ssl=known) as send:
        before = asyncio.all_tasks()

        async def scenario() -> None:
            assert await read(await send(post(server.url))) == b"hello"

        async def check() -> None:
            await HTTP1.settled(send, before)
            forget_idle(send)

        with anyio.fail_after(A_HANG):
            assert await cancel_at_every_await(scenario, check) >= 3
        assert await read(await send(post(server.url))) == b"hello"


async def test_the_system_s_certificates_hold_and_http_1_1_is_offered(
    tls: ssl.SSLContext, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named: list[str | None] = []
    agreed: list[str | None] = []
    tls.set_alpn_protocols(["h2", "http/1.1"])
    tls.sni_callback = lambda _socket, name, _context: named.append(name)

    async def script(connection: Connection) -> None:
        agreed.append(connection.writer.get_extra_info("ssl_object").selected_alpn_protocol())
        await always(connection)

    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    _verifying.cache_clear()
    try:
        async with wire(script, tls=tls) as server, transport() as send:
            assert await read(await send(post(server.url))) == b"hello"
            with pytest.raises(ConnectError):  # a name that the certificate is not for
                await send(post(server.url.replace("127.0.0.1", "localhost")))
    finally:
        _verifying.cache_clear()
    assert agreed == ["http/1.1"]
    assert named == [None, "localhost"]


async def test_a_connection_that_was_given_up_before_it_was_made_is_not_kept() -> None:
    """A loop may call `connection_made` once more after the one who waited for it has been cancelled."""

    class Made(asyncio.Transport):
        aborted = False

        def abort(self) -> None:
            self.aborted = True

    pool, made = Pool(asyncio.get_running_loop(), 1.0), Made()
    connection = pool.new(Origin(False, "127.0.0.1", 1))
    connection.abort()
    connection.connection_made(made)
    assert made.aborted
    assert pool.in_use == 0


@pytest.mark.parametrize("says_good_bye", [True, False])
async def test_a_body_that_tls_does_not_end_is_cut_off(
    tls: ssl.SSLContext, certificate: Path, says_good_bye: bool
) -> None:
    def answer() -> None:
        accepted, _ = server.accept()
        with tls.wrap_socket(accepted, server_side=True) as secured:
            secured.recv(65_536)
            secured.sendall(OK + b"\r\nhello")
            if says_good_bye:
                with suppress(OSError):  # the client does not say it, too
                    secured.unwrap()

    known = ssl.create_default_context(cafile=str(certificate))
    with socket.create_server(("127.0.0.1", 0)) as server:
        async with transport(ssl=known) as send, anyio.create_task_group() as group:
            group.start_soon(anyio.to_thread.run_sync, answer)
            with anyio.fail_after(A_HANG):
                reply = await send(post(f"https://127.0.0.1:{server.getsockname()[1]}/"))
                if says_good_bye:
                    assert await read(reply) == b"hello"
                else:
                    with pytest.raises(RemoteProtocolError):
                        await read(reply)


async def test_what_came_while_nobody_asked_is_no_answer_to_the_next_request() -> None:
    """Also while it is still the system that has it, and the event loop has not had a turn to read it."""
    near, far = socket.socketpair()
    near.setblocking(False)
    loop = asyncio.get_running_loop()
    pool = Pool(loop, 60.0)
    connection = pool.new(Origin(False, "127.0.0.1", 1))
    with far:
        transport, _ = await loop.create_connection(lambda: connection, sock=near)
        incoming = connection.expect(bodiless=False)
        connection.send(b"GET / HTTP/1.1\r\n\r\n")
        far.sendall(HELLO)
        await incoming.head()
        assert incoming.chunks == [b"hello"]
        assert pool.take(connection.origin) is connection
        connection.expect(bodiless=False)
        connection.send(b"GET / HTTP/1.1\r\n\r\n")
        far.sendall(HELLO)
        await until(lambda: pool.in_use == 0)
        far.sendall(HELLO)  # a second answer
        assert pool.take(connection.origin) is None
        assert connection.closed
        await until(transport.is_closing)


async def test_who_reads_is_woken_by_the_body_and_not_by_what_surrounds_it() -> None:
    connection = Pool(asyncio.get_running_loop(), 60.0).new(Origin(False, "127.0.0.1", 1))
    incoming = connection.expect(bodiless=False)
    waiter = incoming.waiter()
    connection.data_received(CHUNKED)
    assert waiter.done()
    waiter = incoming.waiter()
    for part in (b"5", b"\r\n"):
        connection.data_received(part)
        assert not waiter.done()
    connection.data_received(b"hel")
    assert waiter.done()
    assert incoming.take() == b"hel"
    waiter = incoming.waiter()
    connection.data_received(b"lo\r\n0\r\n\r\n")
    assert waiter.done()
    assert incoming.take() == b"lo"
    assert incoming.whole
    connection.abort()


@pytest.mark.parametrize("after", [b"5;" + b"x" * 200_000, b"0\r\n" + b"Name: value\r\n" * 15_000])
async def test_the_network_does_not_wait_for_a_reader_who_waits_for_it(after: bytes) -> None:
    """A read may hold a head and a lot that is no body: there is nothing to take, so nobody would read on."""
    connection = Pool(asyncio.get_running_loop(), 60.0).new(Origin(False, "127.0.0.1", 1))
    near, far = socket.socketpair()
    with near, far:
        transport, _ = await asyncio.get_running_loop().create_connection(lambda: connection, sock=near)
        incoming = connection.expect(bodiless=False)
        connection.data_received(CHUNKED + after)
        assert transport.is_reading()
        assert not incoming.chunks
        connection.abort()
        await until(transport.is_closing)


async def test_a_second_reader_of_a_body_is_sent_away_and_the_first_reads_on() -> None:
    proceed = asyncio.Event()

    async def serve(connection: Connection) -> None:
        await connection.request()
        await connection.send(CHUNKED)
        await proceed.wait()
        await connection.send(b"5\r\nhello\r\n0\r\n\r\n")

    async with wire(serve) as server, transport() as send:
        reply = await send(post(server.url))
        first = asyncio.create_task(read(reply))
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="another task reads this body already"):
            await anext(aiter(reply.stream))
        proceed.set()
        with anyio.fail_after(A_HANG):
            assert await first == b"hello"


async def test_an_upload_that_is_cancelled_by_its_own_body_fails() -> None:
    async def body() -> AsyncIterator[bytes]:
        yield b"some"
        raise asyncio.CancelledError

    async with wire(Connection.until_gone) as server, transport() as send:
        with anyio.fail_after(A_HANG), pytest.raises(NetworkError):
            await send(upload("POST", server.url, [], body()))


async def test_that_there_are_no_descriptors_is_said_once_in_a_while(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def none_left(*_given: object, **_more: object) -> socket.socket:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    async with wire(always) as server, transport() as send:
        with monkeypatch.context() as patch:
            patch.setattr("aiohappyeyeballs.start_connection", none_left)
            for quiet, said in ((60.0, 1), (60.0, 1), (0.0, 2)):
                patch.setattr("resilient_llm.transports.http1_connector._QUIET", quiet)
                with pytest.raises(ConnectError) as refused:
                    await send(post(server.url))
                outcome = classify_exception(refused.value)
                assert outcome is not None
                assert outcome.error_type == "too_many_open_files"
                lines = [line for line in caplog.messages if "no connection can be opened: Too many" in line]
                assert len(lines) == said
            limit = limit_of_files()
            assert f"ulimit -n is {'unlimited' if limit is None else limit}" in lines[0]
        assert await read(await send(post(server.url))) == b"hello"
