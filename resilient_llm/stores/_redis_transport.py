"""How a batch of requests gets to a server and its replies back: within a time, and a script that is not known in full.

Connections are `_redis_line`'s. What is in a batch, and who waits for it, must not enter here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from redis.exceptions import NoScriptError, ReadOnlyError

from resilient_llm.stores._redis_commands import Reply, Request, Word
from resilient_llm.stores._redis_line import Connection, Line

__all__ = ["Transport"]


class Transport:
    """Send batches over a line, each for at most `patience` seconds.

    A script that the server does not know is sent in full, once; nothing else is sent twice here.
    """

    def __init__(self, make: Callable[[], Connection], patience: float) -> None:
        self._patience = patience
        self._to_connect = patience * 0.9  # what fails by then has certainly not been sent
        self.line = self._line_of(make)

    async def exchange(self, batch: Sequence[Request]) -> Sequence[Reply]:
        """Send requests and give their replies, of which some, or all, may be exceptions."""
        try:
            async with asyncio.timeout(self._patience):
                replies = await self._execute([request.command() for request in batch])
                unknown = [index for index, reply in enumerate(replies) if isinstance(reply, NoScriptError)]
                if unknown:
                    again = await self._execute([batch[index].command(by_source=True) for index in unknown])
                    for index, reply in zip(unknown, again, strict=True):
                        replies[index] = reply
        except Exception as error:  # noqa: BLE001 - whatever a client raises, the server has not answered
            return [error] * len(batch)
        if any(isinstance(reply, ReadOnlyError) for reply in replies):
            await self.line.disconnect()  # it is a primary no more: its name may lead to another one by now
        return replies

    def _line_of(self, make: Callable[[], Connection]) -> Line:
        return Line(make, self._to_connect)

    async def disconnect(self) -> None:
        """Close what connections there are."""
        await self.line.disconnect()

    async def _execute(self, commands: Sequence[Sequence[Word]]) -> list[Reply]:
        return await self.line.exchange(commands)
