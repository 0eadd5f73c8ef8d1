"""Replies in a store that may be slow or out of order: no call fails of it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import anyio

from resilient_llm.core.stored_reply import StoredReply
from resilient_llm.policies.reply_store import MemoryReplyStore
from resilient_llm.telemetry.names import LIMITER_NAME

if TYPE_CHECKING:
    from resilient_llm.call import Call
    from resilient_llm.policies.reply_store import ReplyStore

__all__ = ["KeptReplies"]

logger = logging.getLogger("resilient_llm")


class KeptReplies:
    """Look for replies in a store, and put them there, for at most `timeout` seconds each time."""

    def __init__(self, store: ReplyStore, *, name: str, timeout: float) -> None:
        self._store = store
        self._name = name
        self._timeout = timeout
        self._failing = False

    async def get(self, call: Call, key: str) -> tuple[StoredReply, float] | None:
        """Give the reply that is kept, and how old it is."""
        since = call.loop.time()
        try:
            if isinstance(self._store, MemoryReplyStore):  # that takes no time, and saves what a scope costs
                return await self._look(key)
            with anyio.fail_after(self._timeout):
                found = await self._look(key)
            self._failing = False
        except Exception as error:  # noqa: BLE001 - whatever it is
            self._failed(call, error)
            return None
        finally:
            call.telemetry.step(call, "cache", since=since)
        return found

    async def _look(self, key: str) -> tuple[StoredReply, float] | None:
        found = await self._store.get(key)
        if found is None:
            return None
        data, remaining = found
        stored = StoredReply.decode(data)
        if stored is None:  # another version's
            await self._store.delete(key)
            return None
        return stored, max(0.0, stored.ttl - remaining)

    async def put(self, call: Call, key: str, stored: StoredReply) -> None:
        """Keep a reply for its `ttl`."""
        store = self._store
        try:
            if isinstance(store, MemoryReplyStore):
                await store.put(key, stored.encode(), stored.ttl)
            else:
                with anyio.fail_after(self._timeout):
                    await store.put(key, stored.encode(), stored.ttl)
        except Exception as error:  # noqa: BLE001 - whatever it is
            self._failed(call, error)

    def _failed(self, call: Call, error: Exception) -> None:
        if not self._failing:
            self._failing = True
            logger.warning("the store of %s failed; calls go on without it", self._name, exc_info=error)
        call.telemetry.event(call, "cache.store_failed", {LIMITER_NAME: self._name})
