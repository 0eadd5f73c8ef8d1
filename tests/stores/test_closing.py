"""Closing a store where it was never used, or not in the loop it was used in."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import anyio
import pytest

from resilient_llm import Bulkhead, Pipeline, RateLimit, StoreUnavailableError
from resilient_llm.stores import RedisStore

pytestmark = pytest.mark.realtime


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_store_that_was_not_used_closes_anywhere(backend: str) -> None:
    store = RedisStore("redis://127.0.0.1:1")
    Pipeline([Bulkhead(max_concurrent=1, store=store)])
    anyio.run(store.aclose, backend=backend)


# The connections of a loop that has ended cannot be closed any more: Python does, and says so.
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_it_closes_in_another_loop_after_somebody_waited_in_one_that_has_ended(server: Any) -> None:
    store = RedisStore(server.url, on_store_error="closed", timeout=5.0)
    pipeline = Pipeline([Bulkhead(max_concurrent=1, max_wait=5, store=store)])

    async def work() -> None:
        await asyncio.sleep(0.05)

    async def calls() -> None:
        await asyncio.gather(*(pipeline.run(work) for _ in range(3)))

    asyncio.run(calls())
    assert store.leases.wakeups._listener is not None
    asyncio.run(store.aclose())
    gc.collect()


async def _use_after_closing(server: Any, on_store_error: Any) -> object:
    store = RedisStore(server.url, on_store_error=on_store_error, timeout=5.0)
    pipeline = Pipeline([RateLimit(requests_per_minute=60, key=None, store=store, name="after")])

    async def work() -> str:
        return "done"

    await pipeline.run(work)
    await store.aclose()
    return await pipeline.run(work)


def test_a_closed_store_is_asked_nothing_more(server: Any) -> None:
    with pytest.raises(StoreUnavailableError, match="has been closed"):
        asyncio.run(_use_after_closing(server, "closed"))
    assert asyncio.run(_use_after_closing(server, "open")) == "done"


def test_in_another_loop_it_may_be_used_again(server: Any) -> None:
    store = RedisStore(server.url, on_store_error="closed", timeout=5.0)
    pipeline = Pipeline([RateLimit(requests_per_minute=60, key=None, store=store, name="again")])

    async def work() -> str:
        return "done"

    async def once() -> str:
        try:
            return await pipeline.run(work)
        finally:
            await store.aclose()

    assert asyncio.run(once()) == asyncio.run(once()) == "done"
