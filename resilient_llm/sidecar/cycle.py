"""uvicorn's side of one request, with a response that is looked at and written as a whole.

uvicorn looks at each header by itself, twice, and writes the head before it has seen the body: two packets, and two
times that the client is woken. What is written, and in what order things may be sent, is uvicorn's.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from uvicorn.protocols.http.httptools_impl import (
    HEADER_RE,
    HEADER_VALUE_RE,
    STATUS_LINE,
    RequestResponseCycle,
)

if TYPE_CHECKING:
    from uvicorn._types import ASGISendEvent, HTTPResponseStartEvent

__all__ = ["Cycle"]

_BODILESS = (204, 304)
_SIZES = frozenset(map(len, (b"connection", b"content-length", b"transfer-encoding")))


class Cycle(RequestResponseCycle):
    """Answer one request."""

    _head = b""
    """What has not been written yet: it goes out together with the body that usually comes at once, or by itself."""

    async def send(self, message: ASGISendEvent) -> None:
        """Send a part of the response."""
        starts = message["type"] == "http.response.start"
        known = starts or message["type"] == "http.response.body"
        if self.access_log or self.response_complete or starts is self.response_started or not known:
            await super().send(message)  # uvicorn has its own ways, and words for what comes out of turn
            return
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        if self.disconnected:
            return
        if message["type"] == "http.response.start":
            self._begin(message)
        elif message["type"] == "http.response.body":
            self._go_on(message.get("body", b""), more=message.get("more_body", False))

    def _begin(self, message: HTTPResponseStartEvent) -> None:
        self.response_started = True
        self.waiting_for_100_continue = False
        status = message["status"]
        headers = [*self.default_headers, *message.get("headers", ())]
        if HEADER_RE.search(b"".join([name for name, _value in headers])):
            raise RuntimeError("Invalid HTTP header name.")
        if HEADER_VALUE_RE.search(b"".join([value for _name, value in headers])):
            raise RuntimeError("Invalid HTTP header value.")
        lines = [b"%b: %b\r\n" % (name.lower(), value) for name, value in headers]
        lines += self._framing(headers, status)
        self._head = b"".join([STATUS_LINE[status], *lines, b"\r\n"])
        asyncio.get_running_loop().call_soon(self._write_head)

    def _write_head(self) -> None:
        """Write the head by itself, if no body has come that it could have gone with."""
        head, self._head = self._head, b""
        if head and not self.transport.is_closing():
            self.transport.write(head)

    def _go_on(self, body: bytes, *, more: bool) -> None:
        if self.scope["method"] == "HEAD":
            self.expected_content_length = 0
            body = b""
        elif self.chunked_encoding:
            body = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
            if not more:
                body += b"0\r\n\r\n"
        else:
            self.expected_content_length -= len(body)
            if self.expected_content_length < 0:
                raise RuntimeError("Response content longer than Content-Length")
        head, self._head = self._head, b""
        if head:
            self.transport.writelines((head, body))
        else:
            self.transport.write(body)
        if not more:
            self._end()

    def _end(self) -> None:
        if self.expected_content_length:
            raise RuntimeError("Response content shorter than Content-Length")
        self.response_complete = True
        self.message_event.set()
        if not self.keep_alive:
            self.transport.close()
        self.on_response()

    def _framing(self, headers: list[tuple[bytes, bytes]], status: int) -> list[bytes]:
        """Find out how the body ends, and the connection; gives the lines that say so and are missing."""
        closes = False
        for name, value in headers:
            if len(name) not in _SIZES:
                continue
            name = name.lower()  # noqa: PLW2901 - the same
            if name == b"content-length" and self.chunked_encoding is None:
                self.expected_content_length = int(value)
                self.chunked_encoding = False
            elif name == b"transfer-encoding" and value.lower() == b"chunked":
                self.expected_content_length = 0
                self.chunked_encoding = True
            elif name == b"connection" and b"close" in [one.strip().lower() for one in value.split(b",")]:
                self.keep_alive = False
                closes = True
        lines: list[bytes] = []
        if not self.keep_alive and not closes:
            lines.append(b"connection: close\r\n")
        if self.chunked_encoding is None and self.scope["method"] != "HEAD" and status not in _BODILESS:
            self.chunked_encoding = True
            lines.append(b"transfer-encoding: chunked\r\n")
        return lines
