"""Replies to clients of HTTP/1.0, who know no chunks: the body ends with the connection (RFC 9112, 6.1 and 6.3).

uvicorn sends chunks to whoever asks. nginx, for one, asks by HTTP/1.0 unless it is told otherwise.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from contextlib import suppress

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

__all__ = ["close_delimited"]


def close_delimited(app: ASGIApp) -> ASGIApp:
    """Have uvicorn send an app's replies without chunks; it closes the connection after them by itself."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        cycle = getattr(send, "__self__", None)
        if not isinstance(cycle, RequestResponseCycle):
            raise TypeError(f"uvicorn's own send is expected, got {send!r}")
        sized = True

        async def sending(message: Message) -> None:
            nonlocal sized
            if message["type"] == "http.response.start":
                sized = any(name.lower() == b"content-length" for name, _ in message["headers"])
                if not sized:
                    cycle.chunked_encoding = False
            elif not sized:  # what comes is what it may expect
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        try:
            await app(scope, receive, sending)
        except BaseException:
            whole = cycle.response_complete and not cycle.flow.write_paused
            if cycle.response_started and not (sized or whole):
                _reset(cycle.transport)
            raise

    return answer


def _reset(transport: asyncio.Transport) -> None:
    """Break a connection off so that nobody takes it for the end of a reply."""
    sock = transport.get_extra_info("socket")
    if sock is not None:
        with suppress(OSError):  # a client that has left has closed it
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()
