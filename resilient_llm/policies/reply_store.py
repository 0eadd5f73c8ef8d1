"""Where replies are kept: in this process, or wherever an application puts another `ReplyStore`.

A store keeps bytes under keys for a time. Which replies these are, and who gets them, their policy says.
"""

from __future__ import annotations

from typing import Protocol

import anyio

from resilient_llm._loop import LoopBound
from resilient_llm._options import at_least, offers
from resilient_llm.core.ttl_cache import TTLCache

__all__ = ["MemoryReplyStore", "ReplyStore", "check_reply_store"]


class ReplyStore(Protocol):
    """Keep values of bytes under keys, each for its time.

    Any of these may raise, or be slow: then the call goes on without it. A store that is shared by processes goes by
    its own clock. What is kept holds answers of models, in the clear.
    """

    async def get(self, key: str) -> tuple[bytes, float] | None:
        """Give the value and the seconds until it expires; `None` without one."""
        ...

    async def put(self, key: str, value: bytes, ttl: float) -> None:
        """Keep a value for `ttl` seconds, in place of any other, or not at all where there is no room."""
        ...

    async def delete(self, key: str) -> None:
        """Forget a value, if there is one."""
        ...


class MemoryReplyStore:
    """Keep replies in this process, in at most `max_size` bytes; those used longest ago make room for others.

    What it keeps ends with its event loop, whose clock it goes by: one that takes over begins with nothing.
    """

    def __init__(self, *, max_size: int = 64 * 1024 * 1024) -> None:
        at_least(1, max_size=max_size)
        self._cache = TTLCache(max_size)
        self._loop = LoopBound("reply store", self._cache.clear)

    def __len__(self) -> int:
        return len(self._cache)

    @property
    def size(self) -> int:
        """Give the bytes in use."""
        return self._cache.size

    async def get(self, key: str) -> tuple[bytes, float] | None:
        """Give the value and the seconds until it expires; `None` without one."""
        self._loop.bind()
        return self._cache.get(key, anyio.current_time())

    async def put(self, key: str, value: bytes, ttl: float) -> None:
        """Keep a value for `ttl` seconds, unless it is larger than the whole store."""
        self._loop.bind()
        self._cache.put(key, value, anyio.current_time(), ttl)

    async def delete(self, key: str) -> None:
        """Forget a value, if there is one."""
        self._loop.bind()
        self._cache.delete(key)


def check_reply_store(**options: object) -> None:
    """Raise `ConfigurationError` unless every option is something that could be a `ReplyStore`."""
    offers(("get", "put", "delete"), "stores of replies", none=False, **options)
