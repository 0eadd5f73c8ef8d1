"""The transport that speaks HTTP/1.1 itself, for neutral messages: bytes and headers as they are, in both directions.

Nothing is added, decoded, followed, stored or decided here; a message that cannot be sent as it is is refused. It knows
no proxies and no HTTP/2.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from resilient_llm.errors import ConfigurationError, EventLoopError
from resilient_llm.message import Headers, Reply, Request
from resilient_llm.streams import BufferedStream, LibraryErrors
from resilient_llm.transports.failures import NetworkError, ReadError, ReadTimeoutError, RemoteProtocolError
from resilient_llm.transports.http1_connector import Connector
from resilient_llm.transports.http1_incoming import Body
from resilient_llm.transports.http1_pool import Pool
from resilient_llm.transports.http1_request import place_of, written
from resilient_llm.transports.request_head import Upload, upload
from resilient_llm.transports.stale import may_be_done_twice

if TYPE_CHECKING:
    import ssl as tls

    from resilient_llm.transports.http1_connection import Connection

__all__ = ["Http1Transport", "upload"]

_AT_ONCE = 262_144
"""Bytes of a body that are written together with the head; more are written as the network takes them."""

_PIECE = 65_536


class Http1Transport:
    """Send neutral requests over connections of its own; works on asyncio only.

    Certificates are verified (`ssl` is another context), the number of connections has no limit, so that the pool is
    never the queue, each may be idle for `keepalive`, and finding the address, connecting and the TLS handshake take at
    most `connect_timeout`, both in seconds. Other time limits are the policies'.
    """

    errors = LibraryErrors(timed_out=ReadTimeoutError, broken=RemoteProtocolError)

    def __init__(
        self,
        *,
        ssl: tls.SSLContext | None = None,
        connect_timeout: float = 10.0,
        keepalive: float = 15.0,
    ) -> None:
        for name, value in (("connect_timeout", connect_timeout), ("keepalive", keepalive)):
            if not value > 0:
                raise ConfigurationError(f"{name}={value!r}: must be seconds above 0")
        self._ssl = ssl
        self._connect_timeout = connect_timeout
        self._keepalive = keepalive
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pool: Pool | None = None
        self._connector: Connector | None = None
        self._closed = False

    async def __call__(self, request: Request) -> Reply:
        """Send a request, and give the reply once its head is there.

        A request that met a connection which the server had just closed is sent again, once, on a new one: where word
        of that comes within a second, nothing else did, and it may be done twice. Raises the exceptions of
        `resilient_llm.transports.failures`, `EventLoopError` outside asyncio and its own event loop, and what an
        upload raises.
        """
        pool, place = self._here(), place_of(request.url)
        head, length = written(request, place)
        body = Upload(request, length) if request.body is None else request.body
        bodiless = request.method.upper() == "HEAD"
        connection = pool.take(place.origin) or pool.new(place.origin)
        while True:
            incoming = connection.expect(bodiless=bodiless)
            if connection.uses == 1:
                await self._connect(connection)
            if isinstance(body, Upload):
                connection.upload(head, body, is_chunked=length is None)
            elif len(body) > _AT_ONCE:
                connection.upload(head, _pieces(body), is_chunked=False)
            else:
                connection.send(head + body)
            try:
                await incoming.head()
                break
            except (ReadError, RemoteProtocolError):
                if not connection.is_stale or not may_be_done_twice(request):
                    raise
            connection = pool.new(place.origin)
        stream = BufferedStream(incoming.chunks) if incoming.whole else Body(incoming)
        return Reply(incoming.status, incoming.headers, stream, native=stream)

    async def _connect(self, connection: Connection) -> None:
        assert self._connector is not None  # noqa: S101 - made with the pool
        await self._connector.connect(connection)
        if self._closed:
            connection.abort()
            raise NetworkError("the transport was closed")

    def synthesise(self, status: int, headers: Headers, body: bytes) -> Reply:
        """Make a reply that no server has sent, for a `ClientDoor`."""
        stream = BufferedStream([body] if body else [])
        return Reply(status, headers, stream, native=stream, complete=True)

    async def aclose(self) -> None:
        """Close the connections, and break off whatever is being read from them."""
        self._closed = True
        if self._pool is not None:
            self._pool.close()

    def _here(self) -> Pool:
        """Give the connections, in the event loop they belong to."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            raise EventLoopError(
                "Http1Transport works on asyncio only; on trio use resilient_llm.httpx or resilient_llm.httpx2"
            ) from None
        if self._closed:
            raise RuntimeError("Http1Transport is closed")
        if self._pool is None:
            self._loop = loop
            self._connector = Connector(loop, ssl=self._ssl, timeout=self._connect_timeout)
            self._pool = Pool(loop, self._keepalive)
        elif self._loop is not loop:
            raise EventLoopError("Http1Transport belongs to another event loop; make one for each")
        return self._pool


async def _pieces(body: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(body), _PIECE):
        yield body[start : start + _PIECE]
