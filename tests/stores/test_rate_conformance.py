"""The public conformance suite, run against both stores: the one on servers speaks RESP2 and RESP3."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
from redis.asyncio import Redis

from resilient_llm.stores import MemoryStore, RedisStore
from resilient_llm.testing.stores import RATE_CHECKS, RateCheck
from tests.stores.conftest import ALL, on_both

CHECKS = pytest.mark.parametrize("check", RATE_CHECKS, ids=lambda check: check.__name__)


@CHECKS
@pytest.mark.anyio
async def test_the_memory_store_conforms(check: RateCheck) -> None:
    store = MemoryStore()
    await check(lambda: store)


@CHECKS
@pytest.mark.anyio
@pytest.mark.realtime
@on_both
async def test_the_redis_store_conforms(
    check: RateCheck, server: Any, make_store: Callable[..., RedisStore]
) -> None:
    await check(lambda: make_store(server))


@CHECKS
@pytest.mark.anyio
@pytest.mark.realtime
@pytest.mark.parametrize(
    ("protocol", "decode"), list(product([2, 3], [False, True])) if ALL else [(2, True), (3, False)]
)
async def test_it_conforms_over_any_client(
    check: RateCheck, server: Any, make_store: Callable[..., RedisStore], protocol: int, decode: bool
) -> None:
    clients: list[Redis] = []

    def make() -> RedisStore:
        clients.append(Redis.from_url(server.url, protocol=protocol, decode_responses=decode))
        return make_store(clients[-1])

    try:
        await check(make)
    finally:
        for client in clients:
            await client.aclose()
