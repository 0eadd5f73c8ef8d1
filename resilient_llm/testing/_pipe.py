"""Bytes on their way from one task to another, with backpressure. It knows nothing of HTTP or ASGI."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import anyio


class BytePipe:
    """One direction of an in-memory connection: one writer and one reader, each in a task of its own.

    `write` returns at once while at most `max_buffer` bytes wait to be read, like a socket's send
    buffer; with 0 it returns when the reader has taken the bytes.
    """

    def __init__(self, max_buffer: int) -> None:
        self._max_buffer = max_buffer
        self._chunks: deque[bytes] = deque()
        self._buffered = 0
        self._ended = False
        self._closed = False
        self._error: Callable[[], Exception] | None = None
        self._changed: anyio.Event | None = None  # made by whoever has to wait: most of the time nobody has

    @property
    def at_end(self) -> bool:
        """Whether everything was read and the writer has ended."""
        return self._ended and not self._chunks

    async def write(self, chunk: bytes) -> None:
        """Hand `chunk` over; once the reader has closed, drop it."""
        if self._closed or not chunk:
            return
        self._chunks.append(chunk)
        self._buffered += len(chunk)
        self._notify()
        while self._buffered > self._max_buffer and not self._closed:
            await self._change()

    async def read(self) -> bytes:
        """Take the next chunk, at once if there is one; b"" at the end.

        Raises the writer's error once all before it has been read.
        """
        while not self._chunks:
            if self._error is not None:
                raise self._error()
            if self._ended:
                return b""
            await self._change()
        chunk = self._chunks.popleft()
        self._buffered -= len(chunk)
        self._notify()
        return chunk

    def end(self, error: Callable[[], Exception] | None = None) -> None:
        """End as the writer, cleanly or with an error for the reader. Only the first end counts."""
        if not self._ended:
            self._ended = True
            self._error = error
            self._notify()

    def close(self) -> None:
        """Go away as the reader: what is or will be written is dropped, and nobody waits for it."""
        self._closed = True
        self._chunks.clear()
        self._buffered = 0
        self._notify()

    async def _change(self) -> None:
        if self._changed is None:
            self._changed = anyio.Event()
        await self._changed.wait()

    def _notify(self) -> None:
        if self._changed is not None:
            self._changed.set()
            self._changed = None
