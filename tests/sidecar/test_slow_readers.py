"""Clients that read slowly, by TLS or not: all of an answer is theirs, and it is known when they have it."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import pytest
from anyio import to_thread
from starlette.types import Receive, Scope, Send

from resilient_llm.sidecar.config import parse
from resilient_llm.sidecar.disconnect import connection_of
from resilient_llm.sidecar.listener import Listener, bind, main_listener
from resilient_llm.sidecar.tls import Certificates
from tests.sidecar.certificates import Authority
from tests.sidecar.support import Log, logged
from tests.support import A_HANG, until

LOOPS: list[object] = [pytest.param(asyncio.new_event_loop, id="asyncio")]
if importlib.util.find_spec("uvloop") is not None:
    import uvloop

    LOOPS.append(pytest.param(uvloop.new_event_loop, id="uvloop"))

SECURE = pytest.mark.parametrize("secure", [False, True], ids=["plain", "TLS"])

pytestmark = [pytest.mark.realtime, pytest.mark.parametrize("loop", LOOPS)]

STAGE = 0.3
"""Seconds that a client has for what is left when a connection is being closed."""
LARGE = bytes(range(256)) * 40_000
"""More than the system holds of it for a client that does not read."""
REQUEST = "GET / HTTP/{version}\r\nhost: localhost\r\n{more}\r\n"

Loop = Callable[[], asyncio.AbstractEventLoop]


class Large:
    """An app whose answers are large, and what it knows of the client of each once it has sent it."""

    def __init__(self) -> None:
        self.behind: list[bool] = []
        self.taken: list[bool] = []

    async def __call__(self, scope: Scope, _receive: Receive, send: Send) -> None:
        headers = [(b"content-length", b"%d" % len(LARGE))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": LARGE})
        connection = connection_of(scope)
        assert connection is not None
        self.behind.append(connection.is_behind())
        self.taken.append(await connection.taken())


class Served(NamedTuple):
    """What clients are answered by, and over what."""

    listener: Listener
    app: Large
    log: Log
    connect: Callable[[], socket.socket]

    def ask(self, version: str = "1.1", *more: str) -> socket.socket:
        sock = self.connect()
        sock.sendall(REQUEST.format(version=version, more="".join(f"{one}\r\n" for one in more)).encode())
        return sock


def run(loop: Loop, main: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(main)


@asynccontextmanager
async def serving(folder: Path, *, secure: bool, send_timeout: float = A_HANG) -> AsyncIterator[Served]:
    authority = Authority(folder)
    authority.sign("server")
    trusted = ssl.create_default_context(cafile=str(authority.file))
    tls = 'tls = { certificate = "server.crt", key = "server.key" }' if secure else ""
    config = parse(
        f"[server]\nsend_timeout = {send_timeout}\ndrain_timeout = {A_HANG}\n{tls}\n"
        "[targets.a]\nurl = 'http://127.0.0.1:9/v1'\n"
    )
    app = Large()
    with bind("127.0.0.1", 0) as sock, logged() as log:
        listener = main_listener(
            app, config, sock, Certificates.of("server", config, folder / "gateway.toml")
        )

        def connect() -> socket.socket:
            client = socket.socket()
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.settimeout(A_HANG)
            client.connect(address)
            return trusted.wrap_socket(client, server_hostname=address[0]) if secure else client

        address = sock.getsockname()
        listener.listen()
        running = asyncio.create_task(listener.take_connections())
        await listener.is_ready.wait()
        yield Served(listener, app, log, connect)
        listener.should_exit = True
        with anyio.fail_after(A_HANG):
            await running
    bad = [line for line in log.lines if "Exception" in line or '"error"' in line]
    assert not bad


def read(sock: socket.socket) -> bytes:
    """Give all that comes up to the end of the connection."""
    received = bytearray()
    while part := sock.recv(1 << 20):
        received += part
    return bytes(received)


@SECURE
@pytest.mark.parametrize("ends", ["it was asked to", "HTTP/1.0", "the next is bad", "it drains"])
def test_a_client_that_is_slow_has_all_of_the_last_answer(
    ends: str, secure: bool, loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("protocol", "tls_server"):
        monkeypatch.setattr(f"resilient_llm.sidecar.{module}.LAST_STAGE", STAGE)

    async def main() -> None:
        async with serving(tmp_path, secure=secure) as served:
            version = "1.0" if ends == "HTTP/1.0" else "1.1"
            more = ["connection: close"] if ends == "it was asked to" else []
            with closing(await to_thread.run_sync(served.ask, version, *more)) as sock:
                if ends == "the next is bad":
                    await to_thread.run_sync(sock.sendall, b"NONSENSE\r\n\r\n")
                await until(lambda: bool(served.app.behind))
                served.listener.should_exit = ends == "it drains"
                await anyio.sleep(3 * STAGE)
                head, _, body = (await to_thread.run_sync(read, sock)).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 ")
            assert body[: len(LARGE)] == LARGE
            assert body[len(LARGE) :].startswith(b"HTTP/1.1 400 " if ends == "the next is bad" else b"")
            await until(lambda: served.app.taken == [True])

    run(loop, main())


@SECURE
def test_it_is_known_whether_an_answer_was_taken(secure: bool, loop: Loop, tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, secure=secure) as served:
            first, second = [await to_thread.run_sync(served.ask) for _ in range(2)]
            await until(lambda: len(served.app.behind) == 2)
            assert served.app.behind == [True, True]
            assert not served.app.taken
            first.close()
            await until(lambda: served.app.taken == [False])
            received = 0
            while received < len(LARGE):
                received += len(await to_thread.run_sync(second.recv, 1 << 20))
            await until(lambda: served.app.taken == [False, True])
            second.close()

    run(loop, main())


@SECURE
def test_one_that_is_slow_is_told_from_one_that_takes_nothing(
    secure: bool, loop: Loop, tmp_path: Path
) -> None:
    async def main() -> None:
        async with serving(tmp_path, secure=secure, send_timeout=0.5) as served:

            def slow() -> int:
                received, began = 0, time.monotonic()
                with closing(served.ask("1.1", "connection: close")) as sock:
                    while part := sock.recv(1 << 16):
                        received += len(part)
                        ahead = received / rate - (time.monotonic() - began)
                        time.sleep(max(0.0, ahead))
                return received

            rate = len(LARGE) / 3.0  # it needs six times as long as one may take nothing

            assert await to_thread.run_sync(slow) > len(LARGE)
            assert served.app.taken == [True]
            with closing(await to_thread.run_sync(served.ask)):
                await until(lambda: served.app.taken == [True, False])

    run(loop, main())


def test_where_there_are_no_descriptors_few_words_are_made_of_it(
    loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """asyncio would go on, and say so, as often as there may be connections that wait."""

    async def main() -> None:
        if not isinstance(asyncio.get_running_loop(), asyncio.SelectorEventLoop):
            pytest.skip("libuv takes connections in its own way")
        async with serving(tmp_path, secure=False) as served:
            accept = socket.socket.accept
            address = served.listener.socket.getsockname()
            said: list[logging.LogRecord] = []
            failing = True

            def kept(record: logging.LogRecord) -> bool:
                said.append(record)
                return False

            def none_left(sock: socket.socket) -> tuple[socket.socket, Any]:
                if failing and sock.getsockname() == address:
                    raise OSError(24, "Too many open files")
                return accept(sock)

            logging.getLogger("asyncio").addFilter(kept)
            monkeypatch.setattr(socket.socket, "accept", none_left)
            with closing(await to_thread.run_sync(served.connect)) as client:
                await until(lambda: bool(said))
                await anyio.sleep(0.1)
                assert len(said) <= 8
                failing = False
                client.sendall(REQUEST.format(version="1.0", more="").encode())
                assert (await to_thread.run_sync(read, client)).endswith(LARGE)

    filters = list(logging.getLogger("asyncio").filters)
    try:
        run(loop, main())
    finally:
        logging.getLogger("asyncio").filters[:] = filters
