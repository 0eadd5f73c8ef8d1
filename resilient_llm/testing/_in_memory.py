"""The part of the in-memory transports that httpx and httpx2 share."""

from __future__ import annotations

from collections.abc import AsyncIterable, Mapping
from typing import ClassVar, get_args

import anyio
from starlette.types import ASGIApp

from resilient_llm._spawn import spawn

from ._checks import is_count, is_number
from ._exchange import AppErrors, Exchange, TransportErrors


class InMemoryServer:
    """Serve an ASGI app to clients in the same process, streaming, without sockets.

    The transports `resilient_llm.testing.httpx.ASGIStreamTransport` and
    `resilient_llm.testing.httpx2...` build on it and take its options:

    - `max_buffer`: bytes of a body that may wait to be read before `send` (or an upload) waits, as
      in a socket's buffer; 0 hands each message over and waits until it is taken.
    - `disconnect_grace`: seconds that the app has, once told of an `http.disconnect`, to end by
      itself before it is cancelled.
    - `app_errors`: what an exception of the app is to the client. "respond": a 500, as from a
      server; "raise": the exception itself; "disconnect": a closed connection
      (RemoteProtocolError). Once the response has started "respond" means "disconnect". All but
      "raise" are logged.
    - `connect_delay`: seconds until a connection is made, against the client's connect timeout.
    - `client`, `root_path`: for the ASGI scope.

    The client's connect, read and write timeouts are kept, on anyio's clock. Lifespan events are
    not sent.
    """

    errors: ClassVar[TransportErrors]

    def __init__(
        self,
        app: ASGIApp,
        *,
        max_buffer: int = 65536,
        disconnect_grace: float = 1.0,
        app_errors: AppErrors = "respond",
        connect_delay: float = 0.0,
        client: tuple[str, int] = ("127.0.0.1", 50000),
        root_path: str = "",
    ) -> None:
        if not (is_count(max_buffer) and max_buffer >= 0):
            raise ValueError(f"max_buffer must be >= 0 bytes, got {max_buffer!r}")
        if not (is_number(disconnect_grace) and disconnect_grace >= 0):
            raise ValueError(f"disconnect_grace must be >= 0 seconds, got {disconnect_grace!r}")
        if not (is_number(connect_delay) and connect_delay >= 0):
            raise ValueError(f"connect_delay must be >= 0 seconds, got {connect_delay!r}")
        if app_errors not in get_args(AppErrors):
            raise ValueError(f"app_errors must be one of {get_args(AppErrors)}, got {app_errors!r}")
        self.app = app
        self._max_buffer = max_buffer
        self._disconnect_grace = disconnect_grace
        self._app_errors = app_errors
        self._connect_delay = connect_delay
        self._client = client
        self._root_path = root_path
        self._exchanges: set[Exchange] = set()

    async def open(
        self,
        *,
        method: str,
        scheme: str,
        server: tuple[str, int | None],
        path: str,
        raw_path: bytes,
        headers: list[tuple[bytes, bytes]],
        body: AsyncIterable[bytes],
        timeouts: Mapping[str, float | None],
    ) -> Exchange:
        """Send a request to the app and return when the head of its response is there."""
        await self._connect(timeouts.get("connect"))
        target, _, query = raw_path.partition(b"?")
        scope = {
            "type": "http",
            "asgi": {
                "version": "3.0",
                "spec_version": "2.3",
            },  # as uvicorn: `send` after a disconnect does not raise
            "http_version": "1.1",
            "method": method,
            "scheme": scheme,
            "path": path,
            "raw_path": target,
            "query_string": query,
            "root_path": self._root_path,
            "headers": [(name.lower(), value) for name, value in headers],
            "client": self._client,
            "server": server,
        }
        exchange = Exchange(
            self.app,
            scope,
            self.errors,
            timeouts=timeouts,
            max_buffer=self._max_buffer,
            disconnect_grace=self._disconnect_grace,
            app_errors=self._app_errors,
        )
        self._start(exchange, name=f"ASGI app: {method} {path}")
        try:
            await exchange.upload(body)
            await exchange.wait_for_head()
        except BaseException:
            exchange.disconnect()
            raise
        return exchange

    async def aclose(self) -> None:
        """Cancel every app still running and wait for it to end."""
        exchanges = list(self._exchanges)
        for exchange in exchanges:
            exchange.cancel()
        for exchange in exchanges:
            await exchange.ended.wait()

    async def _connect(self, limit: float | None) -> None:
        with anyio.move_on_after(limit) as clock:
            if self._connect_delay:
                await anyio.sleep(self._connect_delay)
        if clock.cancelled_caught:
            raise self.errors.connect_timeout("timed out")

    def _start(self, exchange: Exchange, *, name: str) -> None:
        async def run() -> None:
            try:
                await exchange.run()
            finally:
                self._exchanges.discard(exchange)

        self._exchanges.add(exchange)
        spawn(run, name=name)
