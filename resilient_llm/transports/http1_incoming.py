"""A reply on its way: what came of it, who waits for more of it, and its body as callers read it.

Connections put bytes in. When to connect, what to send and what the bytes mean is known elsewhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import TYPE_CHECKING

from resilient_llm.transports.failures import NetworkError

if TYPE_CHECKING:
    from resilient_llm.message import Headers
    from resilient_llm.transports.http1_connection import Connection

__all__ = ["Body", "Incoming"]

_BUFFER = 131_072
"""Bytes of a body that may wait for who reads it; more stop the network."""


class Incoming:
    """Hold what came of one reply, until it is taken."""

    __slots__ = (
        "_chunks",
        "_connection",
        "_error",
        "_paused",
        "_size",
        "_waiter",
        "headers",
        "loop",
        "status",
    )

    def __init__(self, connection: Connection, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.status = 0
        self.headers: Headers = []
        self._chunks: list[bytes] = []
        self._size = 0
        self._paused = False
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._connection: Connection | None = connection

    @property
    def whole(self) -> bool:
        """Tell whether all is there."""
        return self._connection is None and self._error is None

    @property
    def open(self) -> bool:
        """Tell whether more may come."""
        return self._connection is not None

    def begin(self, status: int, headers: Headers) -> None:
        """Take a head."""
        self.status = status
        self.headers = headers
        self._wake()

    def feed(self, chunks: list[bytes]) -> None:
        """Take parts of the body."""
        self._chunks += chunks
        self._size += sum(map(len, chunks))
        if self._size > _BUFFER and not self._paused and self._connection is not None:
            self._paused = True
            self._connection.pause_reading()
        self._wake()

    def end(self, error: Exception | None = None) -> None:
        """Expect no more, for this reason if it is not whole; the connection is somebody else's."""
        connection, self._connection = self._connection, None
        if self._paused and connection is not None:
            connection.resume_reading()
        self._error = error
        self._wake()

    async def head(self) -> None:
        """Wait until the head is there; raises why it will not be."""
        if not self.status and self._connection is not None:
            await self.wait()
        if not self.status:
            self.check()

    async def wait(self) -> None:
        """Wait until something comes, or nothing will.

        Whoever is cancelled here closes the connection.
        """
        if self._waiter is not None:
            raise RuntimeError("another task reads this body already")
        self._waiter = self.loop.create_future()
        try:
            await self._waiter
        except BaseException:
            self.close()
            raise
        finally:
            self._waiter = None

    def check(self) -> None:
        """Raise what went wrong."""
        if self._error is not None:
            raise self._error

    def take(self) -> bytes:
        """Take all that is there of the body, which may be nothing."""
        chunks = self._chunks
        if not chunks:
            return b""
        data = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        chunks.clear()
        self._size = 0
        if self._paused:
            self._paused = False
            if self._connection is not None:
                self._connection.resume_reading()
        return data

    def rest(self) -> list[bytes]:
        """Take all that is there as a list, which may be empty."""
        data = self.take()
        return [data] if data else []

    def close(self) -> None:
        """Close the connection at once, unless all is there."""
        connection = self._connection
        if connection is not None:
            self._chunks.clear()
            connection.fail(NetworkError("the connection was closed before the reply was whole"))

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


class Body:
    """A reply's body on its way from the network."""

    __slots__ = ("__weakref__", "_incoming")

    def __init__(self, incoming: Incoming) -> None:
        self._incoming = incoming

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        incoming = self._incoming
        while True:
            data = incoming.take()
            if data:  # what came before it broke is given first
                return data
            if not incoming.open:
                incoming.check()
                raise StopAsyncIteration
            await incoming.wait()

    async def aclose(self) -> None:
        """Close the connection, unless all was received."""
        self._incoming.close()

    def __del__(self) -> None:
        # The event loop holds an open connection; who read its reply was the only one to let go.
        incoming = self._incoming
        if incoming.open:
            with suppress(RuntimeError):  # the event loop has ended, and with it the connection
                incoming.loop.call_soon_threadsafe(incoming.close)
