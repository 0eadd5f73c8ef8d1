"""The public checks of circuits, run against both stores: the one on servers speaks RESP2 and RESP3."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from redis.asyncio import Redis

from resilient_llm.stores import MemoryStore, RedisStore
from resilient_llm.testing.stores_circuits import CIRCUIT_CHECKS, CircuitCheck
from tests.stores.conftest import on_both

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.parametrize("check", CIRCUIT_CHECKS, ids=lambda check: check.__name__),
]


async def test_the_memory_store_conforms(check: CircuitCheck) -> None:
    store = MemoryStore()
    await check(lambda: store)


@pytest.mark.realtime
@on_both
async def test_the_redis_store_conforms(
    check: CircuitCheck, server: Any, make_store: Callable[..., RedisStore]
) -> None:
    await check(lambda: make_store(server))


@pytest.mark.realtime
@pytest.mark.parametrize("clock", ["server", "client"])
async def test_it_conforms_over_a_client_that_decodes(
    check: CircuitCheck, server: Any, make_store: Callable[..., RedisStore], clock: str
) -> None:
    async with Redis.from_url(server.url, protocol=3, decode_responses=True) as client:
        await check(lambda: make_store(client, clock=clock))
