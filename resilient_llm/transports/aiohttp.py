"""The transport over aiohttp, for neutral messages: bytes and headers as they are, in both directions.

Nothing is added, decoded, followed, stored or decided here; a message that cannot be sent as it is is refused.
"""

from __future__ import annotations

import asyncio
import io
import re
import ssl as tls
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import TYPE_CHECKING
from weakref import WeakSet

import aiohttp

from resilient_llm._options import instance_of, seconds
from resilient_llm.errors import EventLoopError
from resilient_llm.message import Headers, Reply, Request
from resilient_llm.streams import BufferedStream, LibraryErrors
from resilient_llm.transports import failures
from resilient_llm.transports.aiohttp_connector import Connector, Exchange, current
from resilient_llm.transports.aiohttp_request import LocalProtocolError, headers_of, url_of
from resilient_llm.transports.request_head import Upload, check_head, length_of, upload
from resilient_llm.transports.stale import may_be_done_twice

if TYPE_CHECKING:
    from yarl import URL

__all__ = ["AiohttpTransport", "Connector", "LocalProtocolError", "upload"]

_SPLITS = re.compile(rb"[\r\n\x00]")
_BUFFER = 65_536
"""Bytes of a body that may wait for who reads it; twice as many stop the network."""

_MAX_HEADER = 65_536
_WRITTEN_AT_ONCE = 1_048_576
_OUR_OWN = ("accept", "accept-encoding", "content-type", "user-agent")
"""Headers that aiohttp would add."""


class AiohttpTransport:
    """Send neutral requests through an `aiohttp.ClientSession`; works on asyncio only.

    By default a session of its own: certificates are verified (`ssl` is another context), the number of
    connections has no limit, so that the pool is never the queue, each may be idle for `keepalive`, and
    finding the address, connecting and the TLS handshake take at most `connect_timeout`, both in seconds.
    Other time limits are the policies'. A `session` has its own settings and is closed by who made it.
    """

    errors = LibraryErrors(timed_out=aiohttp.SocketTimeoutError, broken=aiohttp.ClientPayloadError)

    def __init__(
        self,
        session: aiohttp.ClientSession | None = None,
        *,
        ssl: tls.SSLContext | None = None,
        connect_timeout: float = 10.0,
        keepalive: float = 15.0,
    ) -> None:
        if session is not None and not isinstance(session, aiohttp.ClientSession):
            raise TypeError(f"session must be an aiohttp.ClientSession, not {session!r}")
        instance_of(tls.SSLContext, none=True, ssl=ssl)
        seconds(connect_timeout=connect_timeout, keepalive=keepalive, infinite=True)
        self._given = session
        self._ssl = ssl
        self._timeout = aiohttp.ClientTimeout(total=None, connect=connect_timeout)
        self._keepalive = keepalive
        self._session = session
        self._loop: asyncio.AbstractEventLoop | None = None
        self._bodies: WeakSet[_Body] = WeakSet()
        self._closed = False

    async def __call__(self, request: Request) -> Reply:
        """Send a request, and give the reply once its head is there.

        A request that met a connection which the server had just closed is sent again, once, on a new one: where word
        of that comes within a second, nothing else did, and it may be done twice. Raises `LocalProtocolError` and
        `aiohttp.InvalidURL` for a request that cannot be sent, `EventLoopError` outside asyncio and its own event
        loop, what an upload raises, and aiohttp's exceptions.
        """
        try:
            return await self._answered(self._here(), request, url_of(request.url))
        except failures.LocalProtocolError as error:
            raise LocalProtocolError(*error.args) from None

    async def _answered(self, session: aiohttp.ClientSession, request: Request, url: URL) -> Reply:
        length = length_of(request, *check_head(request))
        headers = headers_of(request)
        source = None if request.body is not None else Upload(request, length)
        exchange = Exchange()
        token = current.set(exchange)
        try:
            try:
                response = await self._request(session, request, url, headers, source)
            except aiohttp.ClientConnectionError as error:
                if isinstance(error, TimeoutError) or not exchange.stale or not may_be_done_twice(request):
                    raise
                exchange.fresh = True
                response = await self._request(session, request, url, headers, None)
        except aiohttp.ClientConnectionError:
            if source is not None and source.error is not None:
                raise source.error from None
            raise
        finally:
            current.reset(token)
        return self._reply(response)

    async def _request(
        self,
        session: aiohttp.ClientSession,
        request: Request,
        url: URL,
        headers: list[tuple[str, str]],
        source: Upload | None,
    ) -> aiohttp.ClientResponse:
        body = request.body
        data: object = source if body is None else body or None
        if body is not None and len(body) > _WRITTEN_AT_ONCE:
            data = io.BytesIO(body)  # written in pieces, without a copy
        return await session.request(
            request.method,
            url,
            headers=headers,
            data=data,
            skip_auto_headers=_OUR_OWN,
            allow_redirects=False,
            raise_for_status=False,
            auto_decompress=False,
            read_bufsize=_BUFFER,
        )

    def _reply(self, response: aiohttp.ClientResponse) -> Reply:
        headers = list(response.raw_headers)
        values = b"".join([value for _name, value in headers])
        if response.status == 101 or _SPLITS.search(values):
            response.close()
            raise aiohttp.ClientPayloadError("The reply is none that may be passed on")
        body = _Body(response)
        self._bodies.add(body)
        return Reply(response.status, headers, body, native=response)

    def synthesise(self, status: int, headers: Headers, body: bytes) -> Reply:
        """Make a reply that no server has sent, for a `ClientDoor`."""
        stream = BufferedStream([body] if body else [])
        return Reply(status, headers, stream, native=stream, complete=True)

    async def aclose(self) -> None:
        """Close the connections, and break off whatever is being read from them."""
        self._closed = True
        for body in list(self._bodies):
            await body.aclose()
        if self._session is not None and self._given is None:
            await self._session.close()

    def _here(self) -> aiohttp.ClientSession:
        """Give the session, in the event loop it belongs to."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            raise EventLoopError(
                "AiohttpTransport works on asyncio only; on trio use resilient_llm.httpx or resilient_llm.httpx2"
            ) from None
        if self._closed:
            raise RuntimeError("AiohttpTransport is closed")
        if self._loop is None:
            self._loop = loop
        elif self._loop is not loop:
            raise EventLoopError("AiohttpTransport belongs to another event loop; make one for each")
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=Connector(
                    limit=0, keepalive_timeout=self._keepalive, ssl=True if self._ssl is None else self._ssl
                ),
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=self._timeout,
                max_line_size=_MAX_HEADER,
                max_field_size=_MAX_HEADER,
            )
            # Who tries again is for the policies to say.
            self._session._retry_connection = False
        return self._session


class _Body:
    """A reply's body on its way from the network."""

    __slots__ = ("__weakref__", "_closed", "_content", "_response")

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self._content = response.content
        self._closed = False

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        content = self._content
        try:
            chunk = await content.readany()
        except BaseException as error:
            if isinstance(error, aiohttp.ClientError) and not self._closed and content._buffer:
                return content._read_nowait(-1)  # what came before it broke
            self._response.close()
            raise
        if not chunk:
            raise StopAsyncIteration
        return chunk

    async def aclose(self) -> None:
        """Close the connection, unless all was received."""
        self._closed = True
        self._response.close()

    def __del__(self) -> None:
        # An open connection and its response hold each other; who read it was the only one to let go.
        response = self._response
        if not response.closed:
            with suppress(RuntimeError):  # the event loop has ended, and with it the connection
                response._loop.call_soon_threadsafe(response.close)
