"""uvicorn's protocol, with bounds on the head of a request: its size, and how long it may take to come.

uvicorn bounds neither with httptools, whose parser keeps what it is sent; what comes after the head is the app's.
"""

from __future__ import annotations

import asyncio
from typing import ClassVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

__all__ = ["GuardedProtocol", "guarded"]

_LINES = {408: b"Request Timeout", 431: b"Request Header Fields Too Large"}


class GuardedProtocol(HttpToolsProtocol):
    """Refuse heads of more than `max_head` bytes (431), or that are not there `head_timeout` seconds after they began.

    A connection that sends nothing at all has as long.
    """

    max_head: ClassVar[int] = 64 * 1024
    head_timeout: ClassVar[float] = 10.0

    _size = 0
    _in_head = True
    _timer: asyncio.TimerHandle | None = None
    _refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a head."""
        super().connection_made(transport)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no longer."""
        self._unwatch()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take what the client sends, until it is refused."""
        if self._refused:
            return
        if self._in_head:
            self._watch()
            self._size += len(data)
        super().data_received(data)
        if self._in_head and self._size > self.max_head:
            self._refuse(431)

    def on_message_begin(self) -> None:
        """Wait for the rest of a head, also of one that came with the end of another request."""
        super().on_message_begin()
        self._watch()

    def on_headers_complete(self) -> None:
        """Let the app have the request, if its head is within bounds."""
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self.max_head:
            self._refuse(431)
            raise ValueError
        self._in_head = False
        self._size = 0
        self._unwatch()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Expect another head."""
        super().on_message_complete()
        self._in_head = True

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP, unless an answer is on its way already."""
        self._unwatch()
        if self._refused:
            return
        self._refused = True
        if self._is_answering():
            self.transport.close()
        else:
            super().send_400_response(msg)

    def _watch(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self.head_timeout, self._refuse, 408)

    def _unwatch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refuse(self, status: int) -> None:
        self._unwatch()
        if self._refused or self.transport.is_closing():
            return
        self._refused = True
        phrase = _LINES[status]
        self.logger.warning("%s, %d bytes of a head", phrase.decode(), self._size)
        if not self._is_answering():
            self.transport.write(
                b"HTTP/1.1 %d %s\r\nconnection: close\r\ncontent-length: 0\r\n\r\n" % (status, phrase)
            )
        self.transport.close()

    def _is_answering(self) -> bool:
        """Tell whether a response has begun, in whose midst nothing else can be said."""
        cycle = self.cycle
        return cycle is not None and cycle.response_started and not cycle.response_complete


def guarded(*, max_head: int, head_timeout: float) -> type[GuardedProtocol]:
    """Make the protocol with these bounds."""
    return type("Guarded", (GuardedProtocol,), {"max_head": max_head, "head_timeout": head_timeout})
