"""Where what several processes share is kept: in memory, on Redis or Valkey, or in a store of your own.

A store has parts, each behind a protocol in `protocol`; it knows no calls and no policies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from resilient_llm.stores.memory import MemoryStore

if TYPE_CHECKING:
    from resilient_llm.stores.redis import RedisStore

__all__ = ["MemoryStore", "RedisStore"]


def __getattr__(name: str) -> object:
    if name == "RedisStore":  # loads the extra, on use
        from resilient_llm.stores.redis import RedisStore  # noqa: PLC0415

        return RedisStore
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
