"""Replies on a Redis or Valkey server: bytes under keys, each for its time.

How much is kept in all is the server's to say (`maxmemory`); which replies these are, the policies'.
"""

from __future__ import annotations

import math
from typing import Final

from resilient_llm.stores._redis_commands import Script
from resilient_llm.stores._redis_runner import Runner

__all__ = ["RedisReplies"]

_MAX_SIZE: Final = 8 * 1024 * 1024


class RedisReplies:
    """Keep replies on a server; see `policies.reply_store.ReplyStore`.

    One of more than `max_size` bytes is not kept, and neither is then the one it was to take the place of. All methods
    raise `StoreUnavailableError`, within the store's timeout: then a call goes on without what is kept.
    """

    def __init__(self, runner: Runner, prefix: str, *, max_size: int = _MAX_SIZE) -> None:
        self._runner = runner
        self._prefix = f"{prefix}value:"
        self._max_size = max_size
        self._get = Script.load("value_get")

    async def get(self, key: str) -> tuple[bytes, float] | None:
        """Give the value and the seconds until it expires; `None` without one."""
        reply = await self._runner.run(self._get, (self._prefix + key,))
        return None if reply is None else (reply[0], reply[1] / 1000)

    async def put(self, key: str, value: bytes, ttl: float) -> None:
        """Keep a value for `ttl` seconds, unless it is too large."""
        milliseconds = math.ceil(min(ttl, 1e10) * 1000) if ttl > 0 else 0
        if not milliseconds or len(value) > self._max_size:
            await self.delete(key)
            return
        await self._runner.command("SET", self._prefix + key, value, "PX", milliseconds)

    async def delete(self, key: str) -> None:
        """Forget a value, if there is one."""
        await self._runner.command("DEL", self._prefix + key)
