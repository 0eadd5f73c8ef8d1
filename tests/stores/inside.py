"""What of a store tests look into that its users do not. No test itself."""

from __future__ import annotations

import anyio.lowlevel

from resilient_llm.stores import RedisStore
from resilient_llm.stores._redis_scripts import ScriptRunner

__all__ = ["runner_of", "told"]


def runner_of(store: RedisStore) -> ScriptRunner:
    """Return what `store` asks its one server with; the store is not of a cluster."""
    assert isinstance(store.runner, ScriptRunner), store.runner
    return store.runner


async def told(store: RedisStore) -> None:
    """Wait until the server has answered all that it was told."""
    sender = runner_of(store).sender
    while sender.told or sender.lanes:
        await anyio.lowlevel.checkpoint()
