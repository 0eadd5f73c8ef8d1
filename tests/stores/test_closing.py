"""Closing a store where it was never used, or not in the loop it was used in."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import anyio
import pytest

from resilient_llm import Bulkhead, Pipeline
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
    store = RedisStore(server.url, on_store_error="closed", timeout=2.0)
    pipeline = Pipeline([Bulkhead(max_concurrent=1, max_wait=5, store=store)])

    async def work() -> None:
        await asyncio.sleep(0.05)

    async def calls() -> None:
        await asyncio.gather(*(pipeline.run(work) for _ in range(3)))

    asyncio.run(calls())
    assert store.leases._listener is not None
    asyncio.run(store.aclose())
    gc.collect()
