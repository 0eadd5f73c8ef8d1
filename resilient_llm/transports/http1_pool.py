"""The connections of an HTTP/1.1 client that wait for another request, by whom they are to.

Their number has no limit, so that the pool is never the queue. How they are made, and what goes over them, is known
elsewhere.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from resilient_llm.transports.batched import Batch
from resilient_llm.transports.failures import NetworkError
from resilient_llm.transports.http1_connection import Connection
from resilient_llm.transports.http1_request import Origin

__all__ = ["Pool"]


class Pool:
    """Keep each connection for `keepalive` seconds after its last use; the one used last is used first."""

    def __init__(self, loop: asyncio.AbstractEventLoop, keepalive: float) -> None:
        self._loop = loop
        self._batch = Batch(loop)
        self._keepalive = keepalive
        self._open: set[Connection] = set()
        self._idle: dict[Origin, OrderedDict[Connection, None]] = {}
        """The longest idle comes first; a server that goes may close thousands at once, in any order."""
        self._sweep: asyncio.TimerHandle | None = None

    @property
    def in_use(self) -> int:
        """Count the connections that have a request."""
        return len(self._open) - sum(map(len, self._idle.values()))

    def new(self, origin: Origin) -> Connection:
        """Make a connection that is still to be connected, and is given back by itself."""
        return Connection(origin, self._batch, made=self._open.add, rest=self._put, gone=self._drop)

    def take(self, origin: Origin) -> Connection | None:
        """Take an idle connection; `None` where there is none that is fit."""
        idle = self._idle.get(origin)
        while idle:
            connection, _ = idle.popitem()
            if self._loop.time() - connection.idle_since < self._keepalive and connection.is_fit():
                return connection
            connection.abort()
        return None

    def _put(self, connection: Connection) -> None:
        connection.idle_since = now = self._loop.time()
        idle = self._idle.get(connection.origin)
        if idle is None:
            idle = self._idle[connection.origin] = OrderedDict()
        idle[connection] = None
        if self._sweep is None:
            self._sweep = self._loop.call_at(now + self._keepalive, self._close_old)

    def _drop(self, connection: Connection) -> None:
        self._open.discard(connection)
        idle = self._idle.get(connection.origin)
        if idle:
            idle.pop(connection, None)

    def _close_old(self) -> None:
        """Close what was idle for too long, and come back when the next will have been."""
        self._sweep = None
        now = self._loop.time()
        for origin, idle in list(self._idle.items()):
            while idle and now - next(iter(idle)).idle_since >= self._keepalive:
                idle.popitem(last=False)[0].abort()
            if not idle:
                del self._idle[origin]
        if self._idle:
            oldest = min([next(iter(idle)).idle_since for idle in self._idle.values()])
            self._sweep = self._loop.call_at(oldest + self._keepalive, self._close_old)

    def close(self) -> None:
        """Close all connections, and break off what is under way on them."""
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None
        self._idle.clear()
        for connection in list(self._open):
            connection.fail(NetworkError("the transport was closed"))
