"""An in-memory streaming transport for httpx2 clients. Everything it does is in `InMemoryServer`."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx2

from ._exchange import Exchange, TransportErrors
from ._in_memory import InMemoryServer

__all__ = ["ASGIStreamTransport"]


class ASGIStreamTransport(InMemoryServer, httpx2.AsyncBaseTransport):
    """Call an ASGI app from a httpx2 client without sockets, streaming as a server would.

    Unlike httpx2's own `ASGITransport` it hands the response over while the app is still sending
    it, tells the app when the client goes away, and keeps the client's timeouts, in virtual time
    too. Options: see `InMemoryServer`.
    """

    errors = TransportErrors(
        connect_timeout=httpx2.ConnectTimeout,
        read_timeout=httpx2.ReadTimeout,
        write_timeout=httpx2.WriteTimeout,
        read_error=httpx2.ReadError,
        remote_protocol_error=httpx2.RemoteProtocolError,
    )

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send the request to the app and return its response when the response starts."""
        if not isinstance(request.stream, httpx2.AsyncByteStream):
            raise TypeError(
                f"an async transport needs an async request body, got {type(request.stream).__name__}"
            )
        exchange = await self.open(
            method=request.method,
            scheme=request.url.scheme,
            server=(request.url.host, request.url.port),
            path=request.url.path,
            raw_path=request.url.raw_path,
            headers=request.headers.raw,
            body=request.stream,
            timeouts=request.extensions.get("timeout", {}),
        )
        return httpx2.Response(
            exchange.status,
            headers=exchange.headers,
            stream=_Body(exchange),
            extensions={"http_version": b"HTTP/1.1"},
        )


class _Body(httpx2.AsyncByteStream):
    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        # No generator: one that is left unfinished would be trio's to complain of.
        if chunk := await self._exchange.read():
            return chunk
        raise StopAsyncIteration

    async def aclose(self) -> None:
        self._exchange.disconnect()
