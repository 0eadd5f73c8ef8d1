"""A small request over a connection of aiohttp's, without the objects that aiohttp makes of each request and reply.

They cost as much as all that is done with them. Connections, their pool, their parser and its errors are aiohttp's as
ever; requests that want more than a body of bytes go through a session.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import aiohttp
from aiohttp.http import HttpProcessingError

from resilient_llm.transports.aiohttp_request import DROPPED

if TYPE_CHECKING:
    from aiohttp.client_reqrep import ClientRequest
    from aiohttp.connector import Connection
    from aiohttp.streams import StreamReader
    from yarl import URL

    from resilient_llm.message import Request
    from resilient_llm.transports.aiohttp_connector import Connector

__all__ = ["DirectResponse", "is_direct", "send"]

_MOST = 65_536
"""Bytes of a body that is written at once, whether or not the network takes it."""

_BODILESS = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})
"""Methods by which no body is expected, so that one of no length need not be announced (RFC 9110, 8.6)."""


class DirectResponse:
    """Hold a reply's head, and the connection that its body comes over."""

    __slots__ = ("_connection", "_loop", "closed", "content", "raw_headers", "status")

    def __init__(
        self,
        connection: Connection,
        loop: asyncio.AbstractEventLoop,
        status: int,
        raw_headers: tuple[tuple[bytes, bytes], ...],
        content: StreamReader,
    ) -> None:
        self._connection: Connection | None = connection
        self._loop = loop
        self.status = status
        self.raw_headers = raw_headers
        self.content = content
        self.closed = False
        """Whether nothing comes any more."""
        content.on_eof(self._ended)

    def _ended(self) -> None:
        connection = self._connection
        if connection is not None and not (connection.protocol is not None and connection.protocol.upgraded):
            self._connection, self.closed = None, True
            connection.release()

    def close(self) -> None:
        """Close the connection, unless all was received."""
        self.closed = True
        connection, self._connection = self._connection, None
        if connection is not None:
            if self.content.exception() is None:
                self.content.set_exception(aiohttp.ClientConnectionError("Connection closed"))
            connection.close()


def is_direct(request: Request, url: URL) -> bool:
    """Tell whether a request is small and has no credentials that aiohttp would make a header of."""
    body = request.body
    if body is None or len(body) > _MOST:
        return False
    return url.raw_user is None and url.raw_password is None


async def send(
    connector: Connector,
    place: ClientRequest,
    request: Request,
    url: URL,
    *,
    timeout: aiohttp.ClientTimeout,  # noqa: ASYNC109 - aiohttp's, for connecting only
    buffer: int,
    max_head: int,
) -> DirectResponse:
    """Send a request that `is_direct`, and give the reply once its head is there.

    `place` is any request to the same place. Raises aiohttp's exceptions.
    """
    try:
        connection = await connector.connect(place, [], timeout)
    except TimeoutError as error:
        raise aiohttp.ConnectionTimeoutError(f"Connection timeout to host {url.origin()}") from error
    try:
        protocol = connection.protocol
        assert protocol is not None  # noqa: S101 - it has just been given
        protocol.set_response_params(
            skip_payload=request.method.upper() == "HEAD",
            read_until_eof=True,
            auto_decompress=False,
            read_bufsize=buffer,
            max_line_size=max_head,
            max_field_size=max_head,
        )
        transport = protocol.transport
        if transport is None or transport.is_closing():
            raise aiohttp.ServerDisconnectedError("The connection was closed while nobody used it")  # noqa: TRY301
        transport.write(_written(request, url))
        while True:
            message, content = await protocol.read()
            if message.code == 101 or not 100 <= message.code <= 199:
                break
    except HttpProcessingError as error:
        connection.close()
        raise aiohttp.ClientResponseError(
            place.request_info, (), status=error.code, message=error.message, headers=error.headers
        ) from error
    except BaseException as error:
        connection.close()
        if isinstance(error, OSError) and not isinstance(error, aiohttp.ClientError | TimeoutError):
            raise aiohttp.ClientOSError(*error.args) from error
        raise
    return DirectResponse(connection, connector._loop, message.code, message.raw_headers, content)


def _written(request: Request, url: URL) -> bytes:
    """Write a request, with the host and the length of its body where they are not among the headers."""
    body = request.body or b""
    method = request.method.upper()
    lines = [f"{method} {url.raw_path_qs} HTTP/1.1\r\n".encode()]
    names = [name.lower() for name, _value in request.headers]
    if b"host" not in names:
        lines.append(f"Host: {url.host_port_subcomponent}\r\n".encode())
    spelled: dict[bytes, bytes] = {}  # as aiohttp has it: all of a name like the first
    lines += [
        b"%b: %b\r\n" % (spelled.setdefault(name, raw), value)
        for name, (raw, value) in zip(names, request.headers, strict=True)
        if name not in DROPPED
    ]
    if b"content-length" not in names and (body or method not in _BODILESS):
        lines.append(b"Content-Length: %d\r\n" % len(body))
    lines += (b"\r\n", body)
    return b"".join(lines)
