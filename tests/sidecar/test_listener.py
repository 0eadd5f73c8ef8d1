"""How a process begins to listen, and what becomes of it when it cannot, or is stopped before it does."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from pathlib import Path

import anyio
import pytest
from starlette.types import Receive, Scope, Send

from resilient_llm.sidecar.app import Sidecar
from resilient_llm.sidecar.config import parse
from resilient_llm.sidecar.event_loop import run
from resilient_llm.sidecar.listener import Listener, admin_listener, bind, main_listener
from resilient_llm.sidecar.service import Service
from resilient_llm.sidecar.tls import Certificates
from resilient_llm.transports.http1 import Http1Transport
from tests.sidecar.certificates import Authority
from tests.support import A_HANG

pytestmark = pytest.mark.realtime

CONFIG = parse("[targets.a]\nurl = 'http://127.0.0.1:9/v1'\n")


async def nothing(_scope: Scope, _receive: Receive, _send: Send) -> None:
    """Answer nobody."""


def service(*socks: socket.socket) -> tuple[Service, list[Listener]]:
    sidecar = Sidecar(CONFIG, Http1Transport())
    main, *others = socks
    listeners = [main_listener(sidecar, CONFIG, main), *(admin_listener(nothing, other) for other in others)]
    return Service(sidecar, *listeners), listeners


@pytest.mark.parametrize("taken", ["main", "admin"])
def test_an_address_that_somebody_took_meanwhile_is_told(taken: str) -> None:
    """Two that start at the same time both bind, since neither listens yet; uvloop hides what listen says then."""

    async def main() -> None:
        with bind("127.0.0.1", 0) as sock, bind("127.0.0.1", 0) as other:
            port = (sock if taken == "main" else other).getsockname()[1]
            with bind("127.0.0.1", port) as faster:
                faster.listen()
                starting, listeners = service(sock, other)
                with pytest.raises(OSError, match="Address already in use") as refused:
                    await starting.start()
                assert refused.value.filename == f"127.0.0.1, port {port}"
                assert not any(listener.started for listener in listeners)

    run(main())


def test_a_signal_before_it_listens_leaves_nothing_running() -> None:
    async def main() -> None:
        with bind("127.0.0.1", 0) as sock, bind("127.0.0.1", 0) as other:
            starting, listeners = service(sock, other)
            before = asyncio.all_tasks()
            task = asyncio.create_task(starting.start())
            await asyncio.sleep(0)  # it has begun to wait for the listeners
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert asyncio.all_tasks() - {task} == before - {task}
            assert all(listener.should_exit for listener in listeners)

    run(main())


@pytest.mark.parametrize("host", ["no host", "192.0.2.1"])
def test_an_address_that_cannot_be_had_is_named(host: str) -> None:
    with pytest.raises(OSError, match=r".") as refused:
        bind(host, 8080)
    assert refused.value.filename == f"{host}, port 8080"
    assert refused.value.strerror


def test_connections_that_come_together_are_taken_together() -> None:
    """One a turn of the event loop would make the last of many wait for all that the others ask meanwhile."""

    async def main() -> None:
        with bind("127.0.0.1", 0) as sock, bind("127.0.0.1", 0) as other, contextlib.ExitStack() as clients:
            starting, (listener, _admin) = service(sock, other)
            await starting.start()
            for _ in range(40):  # the kernel has them in line before the loop has another turn
                clients.enter_context(socket.create_connection(sock.getsockname()))
            turns = 0
            with anyio.fail_after(A_HANG):
                while len(listener.server_state.connections) < 40:
                    await asyncio.sleep(0)
                    turns += 1
            clients.close()
            starting.drain()
            await starting.ended()
            assert sock.fileno() == -1
        assert turns < 20

    run(main())


@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01"], ids=["nothing", "some of it"])
def test_a_handshake_that_does_not_come_is_waited_for_as_long_as_a_head(sent: bytes, tmp_path: Path) -> None:
    Authority(tmp_path).sign("server")
    more = """[server]
head_timeout = 0.2
tls = { certificate = "server.crt", key = "server.key" }
"""
    config = parse(more + "[targets.a]\nurl = 'http://127.0.0.1:9/v1'\n")

    async def main() -> None:
        with bind("127.0.0.1", 0) as sock:
            sidecar = Sidecar(config, Http1Transport())
            tls = Certificates.of("server", config, tmp_path / "gateway.toml")
            starting = Service(sidecar, main_listener(sidecar, config, sock, tls))
            await starting.start()
            reader, writer = await asyncio.open_connection(*sock.getsockname())
            writer.write(sent)
            with anyio.fail_after(A_HANG), contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
            writer.close()
            starting.drain()
            await starting.ended()

    run(main())
