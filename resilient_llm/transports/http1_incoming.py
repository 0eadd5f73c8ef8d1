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
    from resilient_llm.message import Headers, Offer
    from resilient_llm.transports.http1_connection import Connection
    from resilient_llm.transports.http1_parser import ReplyParser

__all__ = ["Body", "Incoming"]

_BUFFER = 131_072
"""Bytes of a body that may wait for who reads it; more stop the network."""


class Incoming:
    """Hold what came of one reply, until it is taken."""

    __slots__ = (
        "_error",
        "_paused",
        "_size",
        "_waiter",
        "chunks",
        "connection",
        "headers",
        "loop",
        "offer",
        "status",
        "whole",
    )

    def __init__(self, connection: Connection, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.status = 0
        self.headers: Headers = []
        self.chunks: list[bytes] = []
        """What came of the body, and is still to be taken."""
        self.connection: Connection | None = connection
        """Where more comes from; none where nothing will."""
        self.whole = False
        """Whether all is there."""
        self.offer: Offer | None = None
        """Is shown what comes for somebody who waits."""
        self._size = 0
        self._paused = False
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    def feed(self, found: ReplyParser, size: int) -> None:
        """Take what was found in so many bytes: the head, if there was none before, and parts of the body."""
        if not self.status:
            self.status = found.status
            self.headers = found.headers
        elif not found.chunks:
            return
        if found.chunks:  # else the network is not to wait: nobody takes what is not there
            waiter = self._waiter
            if self.offer is None or waiter is None or waiter.done():
                self.chunks += found.chunks
                found.chunks.clear()
            else:
                data = b"".join(found.chunks)
                found.chunks.clear()
                left = self.offer(data)
                if left is None:
                    return  # who waits may sleep on
                self.chunks.append(left)
            self._size += size
            if self._size > _BUFFER and not self._paused and self.connection is not None:
                self._paused = True
                self.connection.pause_reading()
        if self._waiter is not None:
            self._wake()

    def end(self, error: Exception | None = None) -> None:
        """Expect no more, for this reason if it is not whole; the connection is somebody else's."""
        connection, self.connection = self.connection, None
        if self._paused and connection is not None:
            connection.resume_reading()
        self._error = error
        self.whole = error is None
        if self._waiter is not None:
            self._wake()

    async def head(self) -> None:
        """Wait until the head is there; raises why it will not be."""
        if not self.status:
            if self.connection is not None:
                waiter = self.waiter()
                try:
                    await waiter
                except BaseException:
                    self.close()
                    raise
            if not self.status:
                self.check()

    def waiter(self) -> asyncio.Future[None]:
        """Give what is done once something comes, or nothing will; who is cancelled meanwhile has to `close`."""
        if self._waiter is not None:
            raise RuntimeError("another task reads this body already")
        self._waiter = waiter = self.loop.create_future()
        return waiter

    def check(self) -> None:
        """Raise what went wrong."""
        if self._error is not None:
            raise self._error

    def take(self) -> bytes:
        """Take all that is there of the body."""
        chunks = self.chunks
        data = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        chunks.clear()
        self._size = 0
        if self._paused:
            self._paused = False
            if self.connection is not None:
                self.connection.resume_reading()
        return data

    def close(self) -> None:
        """Close the connection at once, unless all is there."""
        connection = self.connection
        if connection is not None:
            self.chunks.clear()
            connection.fail(NetworkError("the connection was closed before the reply was whole"))

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
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
        while not incoming.chunks:  # what came before it broke is given first
            if incoming.connection is None:
                incoming.check()
                raise StopAsyncIteration
            waiter = incoming.waiter()
            try:
                await waiter
            except BaseException:
                incoming.close()
                raise
        return incoming.take()

    async def offering(self, offer: Offer) -> bytes:
        """Give what comes next, as iterating does, of what `offer` leaves of that which comes while this waits."""
        incoming = self._incoming
        incoming.offer = offer
        try:
            return await self.__anext__()
        finally:
            incoming.offer = None

    async def aclose(self) -> None:
        """Close the connection, unless all was received."""
        self._incoming.close()

    def __del__(self) -> None:
        # The event loop holds an open connection; who read its reply was the only one to let go.
        incoming = self._incoming
        if incoming.connection is not None:
            with suppress(RuntimeError):  # the event loop has ended, and with it the connection
                incoming.loop.call_soon_threadsafe(incoming.close)
