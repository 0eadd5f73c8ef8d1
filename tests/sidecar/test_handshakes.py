"""Connections by TLS: they count from when they are taken, and a last word is followed by an end that clients see."""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import socket
import ssl
import time
import weakref
from asyncio.sslproto import SSLProtocol
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import pytest
from anyio import to_thread
from starlette.types import Receive, Scope, Send

import resilient_llm.sidecar.listener as listening
from resilient_llm.sidecar.app import Sidecar
from resilient_llm.sidecar.config import parse
from resilient_llm.sidecar.counted import AT_THE_DOOR
from resilient_llm.sidecar.listener import Listener, admin_listener, bind, main_listener
from resilient_llm.sidecar.protocol import LAST_STAGE, GuardedProtocol
from resilient_llm.sidecar.service import Service
from resilient_llm.sidecar.tls import Certificates
from resilient_llm.transports.http1 import Http1Transport
from tests.sidecar.certificates import Authority
from tests.sidecar.support import logged
from tests.support import A_HANG, until

LOOPS: list[object] = [pytest.param(asyncio.new_event_loop, id="asyncio")]
if importlib.util.find_spec("uvloop") is not None:
    import uvloop

    LOOPS.append(pytest.param(uvloop.new_event_loop, id="uvloop"))

pytestmark = [pytest.mark.realtime, pytest.mark.parametrize("loop", LOOPS)]

MOST = 3
CONFIG = f"""[server]
head_timeout = HEAD_TIMEOUT
max_connections = {MOST}
max_body = 1000
tls = {{ certificate = "server.crt", key = "server.key" }}
[admin]
tls = {{ certificate = "server.crt", key = "server.key" }}
[targets.a]
url = 'http://127.0.0.1:9/v1'
"""
HEALTH = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
LARGE = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000000\r\n\r\n"

Loop = Callable[[], asyncio.AbstractEventLoop]


class Served(NamedTuple):
    """A listener that takes connections by TLS, where it is, and what its clients trust."""

    listener: Listener
    address: tuple[str, int]
    context: ssl.SSLContext

    def taken(self) -> int:
        return len(self.listener.server_state.connections)

    async def has(self, count: int) -> None:
        await until(lambda: self.taken() == count)

    def connect(self) -> socket.socket:
        return socket.create_connection(self.address, timeout=A_HANG)

    def secure(self, sock: socket.socket) -> ssl.SSLSocket:
        return self.context.wrap_socket(sock, server_hostname="127.0.0.1")

    def ask(self, sent: bytes = HEALTH, *, then: bytes = b"") -> bytes:
        """Send something by TLS, and give all that comes up to the end of the connection."""
        with self.connect() as sock, self.secure(sock) as secure:
            secure.sendall(sent)
            received = secure.recv(65536)
            if then:
                time.sleep(0.1)
                with suppress(OSError):
                    secure.sendall(then)
            while more := secure.recv(65536):
                received += more
            return received


def run(loop: Loop, main: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(main)


async def nothing(_scope: Scope, _receive: Receive, send: Send) -> None:
    """Say that there is nothing."""
    await send({"type": "http.response.start", "status": 404, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body"})


@asynccontextmanager
async def serving(folder: Path, which: str = "main", *, patience: float = 30.0) -> AsyncIterator[Served]:
    authority = Authority(folder)
    authority.sign("server")
    config = parse(CONFIG.replace("HEAD_TIMEOUT", str(patience)))
    file = folder / "gateway.toml"
    with bind("127.0.0.1", 0) as sock, bind("127.0.0.1", 0) as other:
        sidecar = Sidecar(config, Http1Transport())
        main = main_listener(sidecar, config, sock, Certificates.of("server", config, file))
        admin = admin_listener(nothing, other, Certificates.of("admin", config, file))
        service = Service(sidecar, main, admin)
        await service.start()
        listener, at = (main, sock) if which == "main" else (admin, other)
        yield Served(listener, at.getsockname(), ssl.create_default_context(cafile=str(authority.file)))
        service.drain()
        with anyio.fail_after(A_HANG):
            await service.ended()


def over(sock: socket.socket) -> bool:
    """Tell whether the other side has closed a connection over which it has said nothing."""
    sock.settimeout(A_HANG)
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize("which", ["main", "admin"])
def test_those_who_never_begin_take_places_and_no_more_than_there_are(
    which: str, loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "_OPERATORS", MOST)

    async def main() -> None:
        async with serving(tmp_path, which) as served:
            with logged() as log:
                silent = [served.connect() for _ in range(MOST + AT_THE_DOOR + 30)]
                await until(lambda: len(log.lines) == 30)
            assert all(f"Service Unavailable, {MOST} connections are open" in line for line in log.lines)
            assert served.taken() == MOST + AT_THE_DOOR
            for sock in silent[MOST + AT_THE_DOOR :]:
                assert await to_thread.run_sync(over, sock)
            with pytest.raises(OSError, match=r"."):
                await to_thread.run_sync(served.ask)
            for sock in silent:
                sock.close()
            await served.has(0)
            assert (await to_thread.run_sync(served.ask)).startswith(b"HTTP/1.1 ")
            await served.has(0)

    run(loop, main())


def test_who_is_one_too_many_is_told_so_by_tls(loop: Loop, tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as served:
            silent = [served.connect() for _ in range(MOST)]
            await served.has(MOST)
            refused = await to_thread.run_sync(served.ask)
            assert refused.startswith(b"HTTP/1.1 503 ")
            silent.pop().close()
            await served.has(MOST - 1)
            assert (await to_thread.run_sync(served.ask)).startswith(b"HTTP/1.1 200 ")
            for sock in silent:
                sock.close()

    run(loop, main())


@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01", HEALTH], ids=["nothing", "some of it", "no TLS"])
def test_what_comes_to_nothing_leaves_nothing(sent: bytes, loop: Loop, tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, patience=0.2) as served:
            with served.connect() as client:
                await served.has(1)
                (protocol,) = served.listener.server_state.connections
                left = weakref.ref(protocol)
                del protocol
                client.sendall(sent)
                await served.has(0)
                assert await to_thread.run_sync(over, client) or sent == HEALTH
            gc.collect()  # a failed handshake holds itself in asyncio, and in uvloop
            assert left() is None

    run(loop, main())


def test_one_that_failed_keeps_no_buffer_until_cycles_are_looked_for(loop: Loop, tmp_path: Path) -> None:
    """asyncio's has 256 KiB, of which a few hundred would have been more than all else."""

    def kept() -> int:
        return sum(isinstance(one, SSLProtocol) for one in gc.get_objects())

    async def main() -> None:
        async with serving(tmp_path, patience=0.2) as served:
            gc.collect()
            gc.disable()
            try:
                before = kept()
                with served.connect() as client:
                    await served.has(1)
                    client.sendall(HEALTH)
                    await served.has(0)
                await until(lambda: kept() == before)
            finally:
                gc.enable()

    run(loop, main())


def test_one_that_is_not_over_does_not_keep_it_from_ending(loop: Loop, tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as served:
            client = served.connect()
            await served.has(1)
        assert await to_thread.run_sync(over, client)  # long before it had to be
        assert served.taken() == 0
        client.close()

    run(loop, main())


def test_a_last_word_is_followed_by_an_end(loop: Loop, tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as served:
            began = time.monotonic()
            assert (await to_thread.run_sync(served.ask, LARGE)).startswith(b"HTTP/1.1 413 ")
            await served.has(0)
            assert time.monotonic() - began < LAST_STAGE / 2

    run(loop, main())


def test_who_is_still_sending_has_all_of_it(loop: Loop, tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as served:
            answer = await to_thread.run_sync(lambda: served.ask(LARGE, then=bytes(500_000)))
            head, _, body = answer.partition(b"\r\n\r\n")
            assert b"content-length: %d\r\n" % len(body) in head + b"\r\n"
            await served.has(0)

    run(loop, main())


def test_who_never_stops_is_let_go(loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resilient_llm.sidecar.protocol.LAST_STAGE", 0.3)

    async def main() -> None:
        async with serving(tmp_path) as served:
            with served.connect() as sock, await to_thread.run_sync(served.secure, sock) as secure:
                secure.sendall(LARGE)
                assert b" 413 " in await to_thread.run_sync(secure.recv, 65536)
                await served.has(0)

    run(loop, main())


def test_no_more_waits_for_a_slow_client_than_without_tls(loop: Loop, tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as served:
            with served.connect() as sock, await to_thread.run_sync(served.secure, sock):
                await until(
                    lambda: all(one.transport is not None for one in served.listener.server_state.connections)
                )
                (protocol,) = served.listener.server_state.connections
                assert isinstance(protocol, GuardedProtocol)
                assert protocol.transport.get_write_buffer_limits() == (0, 1)  # beside what waits below

    run(loop, main())


def test_where_there_are_no_descriptors_it_says_so_and_tries_again(
    loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("resilient_llm.sidecar.tls_server._PAUSE", 0.1)

    async def main() -> None:
        async with serving(tmp_path) as served:
            accept = socket.socket.accept
            failures = iter([OSError(24, "Too many open files"), ConnectionAbortedError()])

            def failing(sock: socket.socket) -> tuple[socket.socket, Any]:
                if sock.getsockname() == served.address and (failure := next(failures, None)) is not None:
                    raise failure
                return accept(sock)

            with monkeypatch.context() as patch, logged() as log:
                patch.setattr(socket.socket, "accept", failing)
                assert (await to_thread.run_sync(served.ask)).startswith(b"HTTP/1.1 200 ")
            assert sum("no connection can be taken: Too many open files" in line for line in log.lines) == 1

    run(loop, main())
