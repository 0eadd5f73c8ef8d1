"""uvicorn's side of one request, with a head of a response that is looked at and written as a whole.

uvicorn looks at each header by itself, twice, which is most of what a reply with many of them costs it. What is
written, and in what order things may be sent, is uvicorn's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from uvicorn.protocols.http.httptools_impl import (
    HEADER_RE,
    HEADER_VALUE_RE,
    STATUS_LINE,
    RequestResponseCycle,
)

if TYPE_CHECKING:
    from uvicorn._types import ASGISendEvent

__all__ = ["Cycle"]

_BODILESS = (204, 304)
_SIZES = frozenset(map(len, (b"connection", b"content-length", b"transfer-encoding")))


class Cycle(RequestResponseCycle):
    """Answer one request."""

    async def send(self, message: ASGISendEvent) -> None:
        """Send a part of the response."""
        if message["type"] != "http.response.start" or self.response_started or self.access_log:
            await super().send(message)
            return
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        if self.disconnected:
            return
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
        self.transport.write(b"".join([STATUS_LINE[status], *lines, b"\r\n"]))

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
