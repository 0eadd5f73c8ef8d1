"""Connections to one server that belong to a store alone, and how commands go over them.

Half the price of a client's own way for a command, which takes a connection from a pool and gives it back each time.
What is sent, and when, must not enter here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final, TypeAlias

from redis.asyncio import Redis
from redis.exceptions import ResponseError

__all__ = ["Line"]

Connection: TypeAlias = Any
"""What a pool of redis-py makes; its base class has had several names."""

_STALE: Final = 0.01
"""Seconds after which an idle connection is looked at, for the server may have closed it."""


class Line:
    """Keep as many connections as are used at a time, made as a client's pool makes them."""

    def __init__(self, client: Redis) -> None:
        self._pool = client.connection_pool
        self._free: list[tuple[float, Connection]] = []

    async def exchange(self, commands: Sequence[Sequence[bytes | str | int | float]]) -> list[Any]:
        """Send commands at once and give their replies, exceptions among them; strings are bytes.

        When the connection breaks, what was answered before is given, and the error for the rest. Cancelled, it
        closes the connection: nobody is left the reply of another.
        """
        now = asyncio.get_running_loop().time
        since, connection = self._free.pop() if self._free else (now(), self._made())
        replies: list[Any] = []
        try:
            if now() - since > _STALE and await self._ended(connection):
                await connection.disconnect(nowait=True)
            if not connection.is_connected:
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

    async def disconnect(self) -> None:
        """Close the connections that are not in use; they are opened again when they are."""
        free, self._free = self._free, []
        for _, connection in free:
            await connection.disconnect(nowait=True)

    def _made(self) -> Connection:
        return self._pool.make_connection()  # type: ignore[no-untyped-call]

    async def _ended(self, connection: Connection) -> bool:
        """Tell whether the server has closed a connection, or left something on it that nobody asked for."""
        look = getattr(connection, "can_read", None) or connection.can_read_destructive
        try:
            return connection.is_connected and bool(await look())
        except Exception:  # noqa: BLE001 - it is of no use, whatever the reason
            return True


def _pack(commands: Sequence[Sequence[bytes | str | int | float]]) -> bytes:
    """Write commands as arrays of bulk strings (RESP): a third of what a client's general way costs."""
    parts: list[bytes] = []
    for words in commands:
        parts.append(b"*%d\r\n" % len(words))
        for word in words:
            data = word if isinstance(word, bytes) else str(word).encode()
            parts.append(b"$%d\r\n%b\r\n" % (len(data), data))
    return b"".join(parts)
