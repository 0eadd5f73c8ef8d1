"""uvicorn's side of one request, with a response that is looked at and written as a whole.

uvicorn looks at each header by itself, twice, and writes the head before it has seen the body: two packets, and two
times that the client is woken. What is written, and in what order things may be sent, is uvicorn's.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from uvicorn.protocols.http.httptools_impl import (
    HEADER_RE,
    STATUS_LINE,
    RequestResponseCycle,
)

from resilient_llm.message import has_controls, lines_of

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterable

    from uvicorn._types import ASGIReceiveEvent, ASGISendEvent

__all__ = ["Cycle"]

_BODILESS = (204, 304)
_FRAMING = frozenset({b"connection", b"content-length", b"transfer-encoding"})


class Cycle(RequestResponseCycle):
    """Answer one request."""

    loop: asyncio.AbstractEventLoop
    """The event loop of its connection."""
    close: Callable[[], None]
    """Closes its connection, once all is written."""
    _head = b""
    """What has not been written yet: it goes out together with the body that usually comes at once, or by itself."""
    _read = False
    """Whether the app has had all of the body."""

    async def receive(self) -> ASGIReceiveEvent:
        """Give a part of the body; all of it at once, where it is at hand."""
        at_hand = not (self.more_body or self._read or self.waiting_for_100_continue)
        if not at_hand or self.disconnected or self.response_complete:
            message = await super().receive()
            self._read = not self.more_body
            return message
        self._read = True
        self.message_event.clear()  # whoever asks again waits for the end
        if self.flow.read_paused:
            self.flow.resume_reading()
        body, self.body = bytes(self.body), bytearray()
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(self, message: ASGISendEvent) -> None:
        """Send a part of the response."""
        starts = message["type"] == "http.response.start"
        known = starts or message["type"] == "http.response.body"
        if self.response_complete or starts is self.response_started or not known:
            await super().send(message)  # uvicorn has its own ways, and words for what comes out of turn
            return
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        if self.disconnected:
            return
        if message["type"] == "http.response.start":
            self._begin(message["status"], message.get("headers", ()))
            self.loop.call_soon(self._write_head)
        elif message["type"] == "http.response.body":
            self._go_on(message.get("body", b""), more=message.get("more_body", False))

    def answer(self, status: int, headers: Iterable[tuple[bytes, bytes]], body: bytes) -> bool:
        """Send all of the response at once, as two messages would; tells whether it was.

        Not where there is anything to wait for, nor where the connection ends with it: that takes messages.
        """
        if self.response_started or self.flow.write_paused or self.disconnected or not self.keep_alive:
            return False
        self._begin(status, headers)
        self._go_on(body, more=False)
        return True

    def is_ready(self) -> bool:
        """Tell whether a part of the body can be sent at once."""
        if not self.chunked_encoding or self._head or self.response_complete:
            return False
        return not (self.flow.write_paused or self.disconnected or self.transport.is_closing())

    def put(self, data: bytes) -> None:
        """Send a part of the body at once, if this is ready."""
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def _begin(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        self.response_started = True
        self.waiting_for_100_continue = False
        headers = [*self.default_headers, *headers]
        names, values = zip(*headers, strict=True) if headers else ((), ())
        form = _form(names)
        if has_controls(b"".join(values)):
            raise RuntimeError("Invalid HTTP header value.")
        more = self._framing(form, values, status)
        self._head = b"%b%b%b\r\n" % (STATUS_LINE[status], form.lines % values, more)

    def _go_on(self, body: bytes, *, more: bool) -> None:
        if self.scope["method"] == "HEAD":
            self.expected_content_length = 0
            body = b""
        elif self.chunked_encoding:
            end = b"" if more else b"0\r\n\r\n"
            body = b"%x\r\n%b\r\n%b" % (len(body), body, end) if body else end
        else:
            self._count(len(body))
        if self._head:
            head, self._head = self._head, b""
            self.transport.writelines((head, body))
        else:
            self.transport.write(body)
        if not more:
            self._end()

    def _write_head(self) -> None:
        """Write the head by itself, if no body has come that it could have gone with."""
        head, self._head = self._head, b""
        if head and not self.transport.is_closing():
            self.transport.write(head)

    def _count(self, size: int) -> None:
        self.expected_content_length -= size
        if self.expected_content_length < 0:
            raise RuntimeError("Response content longer than Content-Length")

    def _end(self) -> None:
        if self.expected_content_length:
            raise RuntimeError("Response content shorter than Content-Length")
        self.response_complete = True
        self.message_event.set()
        if not self.keep_alive:
            self.close()
        self.on_response()

    def _framing(self, form: _Form, values: tuple[bytes, ...], status: int) -> bytes:
        """Find out how the body ends, and the connection; gives the lines that say so and are missing."""
        closes = False
        for name, index in form.framing:
            value = values[index]
            if name == b"content-length" and self.chunked_encoding is None:
                self.expected_content_length = 0 if status in _BODILESS else int(value)
                self.chunked_encoding = False
            elif name == b"transfer-encoding" and value.lower() == b"chunked":
                self.expected_content_length = 0
                self.chunked_encoding = True
            elif name == b"connection" and b"close" in [one.strip().lower() for one in value.split(b",")]:
                self.keep_alive = False
                closes = True
        lines = b""
        if not self.keep_alive and not closes:
            lines = b"connection: close\r\n"
        if self.chunked_encoding is None and self.scope["method"] != "HEAD" and status not in _BODILESS:
            self.chunked_encoding = True
            lines += b"transfer-encoding: chunked\r\n"
        return lines


class _Form(NamedTuple):
    """What heads have in common whose headers have the same names."""

    lines: bytes
    """The headers, to be filled in with the values."""
    framing: tuple[tuple[bytes, int], ...]
    """Those of them that say how the body ends, or the connection, and where they are."""


@lru_cache(maxsize=128)
def _form(names: tuple[bytes, ...]) -> _Form:
    if HEADER_RE.search(b"".join(names)):
        raise RuntimeError("Invalid HTTP header name.")
    lower = [name.lower() for name in names]
    return _Form(
        lines_of(lower),
        tuple((name, index) for index, name in enumerate(lower) if name in _FRAMING),
    )
