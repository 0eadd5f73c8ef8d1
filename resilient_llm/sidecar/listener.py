"""A socket, and uvicorn on it: what the sidecar's listeners have in common, and what they differ in.

What is answered is an app's. When a listener begins and ends is the service's.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

import uvicorn
from starlette.types import ASGIApp

from resilient_llm.sidecar.descriptors import highest_descriptor, room_for_connections
from resilient_llm.sidecar.protocol import GuardedProtocol, guarded
from resilient_llm.sidecar.tls_server import TLSServer

if TYPE_CHECKING:
    from resilient_llm.sidecar.config import Config
    from resilient_llm.sidecar.tls import Certificates

__all__ = ["Listener", "admin_listener", "bind", "main_listener", "url_of"]

_BACKLOG = 2048
_AT_ONCE = 8
"""Connections of callers that are taken together. libuv takes one for each descriptor that it watches, once a turn: of
many that came together the last would wait as many turns, and in each for all who are in already."""

_OPERATORS = 128
"""Their connections: a page in a browser has up to six, and a probe one."""

_SPARE = 16
"""Descriptors that callers leave: for connections to providers, and for operators."""

_LAST_SPARE = 4
"""Descriptors that operators leave."""


class Listener(uvicorn.Server):
    """A uvicorn server on a socket of its own, which leaves signals alone.

    It takes up to `at_once` new connections in one turn of the event loop. A TLS handshake has `handshake_timeout`
    seconds.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        sock: socket.socket,
        *,
        at_once: int = 1,
        handshake_timeout: float = 10.0,
    ) -> None:
        super().__init__(config)
        self._handshake_timeout = handshake_timeout
        self._at_once = at_once
        self.socket = sock
        self.is_ready = asyncio.Event()
        self._secure = config.ssl_context_factory is not None
        self.url = url_of(sock, secure=self._secure)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the process."""
        yield

    def listen(self) -> None:
        """Take connections, which are answered as soon as it serves.

        Raises `OSError` if another has the address since; uvloop would go on as if all were well.
        """
        with _naming(self.socket.getsockname()):
            self.socket.listen(_BACKLOG)

    async def take_connections(self) -> None:
        """Serve until told to stop, and close the socket."""
        more = 0 if self._secure else self._at_once - 1  # by TLS several are taken over one
        await self.serve([self.socket, *(self.socket.dup() for _ in range(more))])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and say so."""
        try:
            await super().startup([])  # which counts no handshakes, and knows of no time limits of TLS
            if not self.should_exit:
                self.servers = [await self._serving(sock) for sock in sockets or ()]  # type: ignore[misc]
        finally:
            self.is_ready.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End what is open, and break off what is not over in time."""
        await super().shutdown(sockets)
        if not self.force_exit:
            for connection in list(self.server_state.connections):
                cast("GuardedProtocol", connection).cut()

    async def _serving(self, sock: socket.socket) -> asyncio.Server | TLSServer:
        def protocol() -> GuardedProtocol:
            made = self.config.http_protocol_class(  # type: ignore[call-arg]  # uvicorn's has parameters
                config=self.config, server_state=self.server_state, app_state=self.lifespan.state
            )
            return cast("GuardedProtocol", made)

        if (context := self.config.ssl) is not None:
            return TLSServer(sock, context, protocol, handshake_timeout=self._handshake_timeout)
        # asyncio takes as many in one turn, and goes on where no descriptor is left, with a line in the log for each.
        server = await asyncio.get_running_loop().create_server(protocol, sock=sock, backlog=1)
        sock.listen(_BACKLOG)
        return server


def main_listener(
    app: ASGIApp, config: Config, sock: socket.socket, tls: Certificates | None = None
) -> Listener:
    """Make the listener for callers."""
    options = config.server
    room = room_for_connections()
    bounds = guarded(
        max_head=options.max_head,
        head_timeout=options.head_timeout,
        send_timeout=options.send_timeout,
        max_connections=options.max_connections or room,
        max_descriptor=highest_descriptor(spare=_SPARE),
    )
    settings = _settings(app, bounds, tls)
    settings.timeout_graceful_shutdown = max(1, round(options.drain_timeout))
    return Listener(settings, sock, at_once=_AT_ONCE, handshake_timeout=options.head_timeout)


def admin_listener(app: ASGIApp, sock: socket.socket, tls: Certificates | None = None) -> Listener:
    """Make the listener for operators."""
    bounds = guarded(
        max_head=16 * 1024,
        head_timeout=10.0,
        max_connections=_OPERATORS,
        max_descriptor=highest_descriptor(spare=_LAST_SPARE),
    )
    settings = _settings(app, bounds, tls)
    settings.timeout_graceful_shutdown = 1
    return Listener(settings, sock)


def _settings(app: ASGIApp, protocol: type[GuardedProtocol], tls: Certificates | None) -> uvicorn.Config:
    settings = uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,  # a provider's date is passed on
        proxy_headers=False,
        timeout_keep_alive=75,
        backlog=_BACKLOG,
    )
    if tls is not None:
        settings.ssl_context_factory = lambda _config, _default: tls.context
    return settings


def bind(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """Make a socket of an address, which does not listen yet; a `shared` address others may have too.

    Raises `OSError`, with the address for a file's name.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is named so that asyncio sets TCP_NODELAY.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        with _naming((host, port)):
            sock.bind((host, port))
    except BaseException:
        sock.close()
        raise
    return sock


@contextlib.contextmanager
def _naming(address: tuple[str, int]) -> Iterator[None]:
    """Have an `OSError` raised inside say which address it is about."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, f"{address[0]}, port {address[1]}") from error


def url_of(sock: socket.socket, *, secure: bool = False) -> str:
    """Give the URL of what listens on a socket."""
    host, port = sock.getsockname()[:2]
    return f"http{'s' * secure}://[{host}]:{port}" if ":" in host else f"http{'s' * secure}://{host}:{port}"
