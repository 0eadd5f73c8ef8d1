"""Connections to one server that belong to a store alone, and how commands go over them.

Half the price of a client's own way for a command, which takes a connection from a pool and gives it back each time;
and one that the server has closed meanwhile is noticed before it is used, which not every client of redis-py does.
What is sent, and when, must not enter here.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, TypeAlias

import anyio
import anyio.lowlevel
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ResponseError

from resilient_llm.stores._redis_commands import Word
from resilient_llm.stores._redis_errors import NeverSentError, describe

__all__ = ["Connection", "Line", "before_sending"]

Connection: TypeAlias = Any
"""What a pool of redis-py makes; its base class has had several names."""

_STALE: Final = 0.01
"""Seconds after which an idle connection is looked at, for the server may have closed it."""

_NEVER: Final = Retry(NoBackoff(), 0)


class Line:
    """Keep as many connections as are used at a time, each made by `make` as the client makes its own.

    Each has `patience` seconds to get to the server.
    """

    def __init__(self, make: Callable[[], Connection], patience: float) -> None:
        self._make = make
        self._patience = patience
        self._free: list[tuple[float, Connection]] = []

    async def exchange(self, commands: Sequence[Sequence[Word]]) -> list[Any]:
        """Send commands at once and give their replies, exceptions among them; strings are bytes.

        When the connection breaks, what was answered before is given, and the error for the rest. Cancelled, it
        closes the connection: nobody is left the reply of another. Raises `NeverSentError` when there is none.
        """
        now = asyncio.get_running_loop().time
        since, connection = self._free.pop() if self._free else (now(), self._made())
        replies: list[Any] = []
        try:
            if now() - since > _STALE and await _ended(connection):
                await connection.disconnect(nowait=True)
            if not connection.is_connected:
                async with before_sending(self._patience):
                    await connection.connect()
            await connection.send_packed_command(_pack(commands), check_health=False)
            for _ in commands:
                try:
                    replies.append(await connection.read_response(disable_decoding=True))
                except ResponseError as error:
                    replies.append(error)
        except BaseException as error:
            await connection.disconnect(nowait=True)
            if not replies or not isinstance(error, Exception):
                raise
            replies += [error] * (len(commands) - len(replies))
        finally:
            self._free.append((now(), connection))
        return replies

    def _made(self) -> Connection:
        connection = self._make()
        connection.retry = _NEVER  # who waits has no time for it
        return connection

    async def disconnect(self) -> None:
        """Close the connections that are not in use; they are opened again when they are."""
        free, self._free = self._free, []
        for _, connection in free:
            await connection.disconnect(nowait=True)


@asynccontextmanager
async def before_sending(patience: float) -> AsyncIterator[None]:
    """Do what comes before a command is sent: that it failed, or took too long, says that nothing was."""
    try:
        async with asyncio.timeout(patience) as limit:
            yield
    except Exception as error:
        why = f"no connection within {patience:.3g} s" if limit.expired() else describe(error)
        raise NeverSentError(why) from error


async def _ended(connection: Connection) -> bool:
    """Tell whether the server has closed a connection, or left something on it that nobody asked for."""
    for _ in range(2):  # as many turns as the event loop takes to hear of what has come meanwhile
        await anyio.lowlevel.checkpoint()
    look = getattr(connection, "can_read", None) or connection.can_read_destructive
    try:
        return connection.is_connected and bool(await look())
    except Exception:  # noqa: BLE001 - it is of no use, whatever the reason
        return True


def _pack(commands: Sequence[Sequence[Word]]) -> bytes:
    """Write commands as arrays of bulk strings (RESP): a third of what a client's general way costs."""
    parts: list[bytes] = []
    for words in commands:
        parts.append(b"*%d\r\n" % len(words))
        for word in words:
            data = word if isinstance(word, bytes) else str(word).encode()
            parts.append(b"$%d\r\n%b\r\n" % (len(data), data))
    return b"".join(parts)
