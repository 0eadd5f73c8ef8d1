"""What the processes of one sidecar tell each other: one JSON object a line, over a pair of sockets nobody else has.

How a message gets across. What it says, and what follows from it, is the supervisor's and the worker's.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Mapping
from typing import Any

__all__ = ["Channel"]

_MAX_LINE = 64 * 1024 * 1024
"""Bytes; metrics of many tenants and models are the longest there is."""


class Channel:
    """Send and receive messages."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def over(cls, sock: socket.socket) -> Channel:
        """Make the channel of one end of a pair of sockets, which it closes in the end."""
        return cls(*await asyncio.open_connection(sock=sock, limit=_MAX_LINE))

    async def send(self, message: Mapping[str, object]) -> None:
        """Send a message; one that nobody is left to receive is lost."""
        try:
            self._writer.write(json.dumps(message).encode() + b"\n")
            await self._writer.drain()
        except ConnectionError:
            pass

    async def receive(self) -> dict[str, Any] | None:
        """Give the next message; `None` when the other side is gone."""
        try:
            line = await self._reader.readline()
        except ConnectionError:
            return None
        if not line.endswith(b"\n"):
            return None
        message: dict[str, Any] = json.loads(line)
        return message

    def close(self) -> None:
        """Send nothing any more."""
        self._writer.close()
