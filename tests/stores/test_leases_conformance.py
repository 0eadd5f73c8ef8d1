"""The public checks on leases, run against both stores: the one on servers speaks RESP2 and RESP3."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.asyncio.cluster import RedisCluster

from resilient_llm.stores import MemoryStore, RedisStore
from resilient_llm.testing.stores_leases import LEASE_CHECKS, LeaseCheck
from tests.stores.conftest import on_both

CHECKS = pytest.mark.parametrize("check", LEASE_CHECKS, ids=lambda check: check.__name__)


@CHECKS
@pytest.mark.anyio
async def test_the_memory_store_conforms(check: LeaseCheck) -> None:
    store = MemoryStore()
    await check(lambda: store)


@CHECKS
@pytest.mark.anyio
@pytest.mark.realtime
@on_both
async def test_the_redis_store_conforms(
    check: LeaseCheck, server: Any, make_store: Callable[..., RedisStore]
) -> None:
    await check(lambda: make_store(server))


@CHECKS
@pytest.mark.anyio
@pytest.mark.realtime
@pytest.mark.parametrize(("protocol", "decode"), [(2, True), (3, False)])
async def test_it_conforms_over_any_client(
    check: LeaseCheck, server: Any, make_store: Callable[..., RedisStore], protocol: int, decode: bool
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


@pytest.fixture
def cluster(cluster_of: Callable[[str], Any]) -> Any:
    """Give one of three servers."""
    return cluster_of("valkey9")[0]


@CHECKS
@pytest.mark.anyio
@pytest.mark.realtime
async def test_it_conforms_on_a_cluster(
    check: LeaseCheck, cluster: Any, make_store: Callable[..., RedisStore]
) -> None:
    clients: list[RedisCluster] = []

    def make() -> RedisStore:
        clients.append(RedisCluster(host="127.0.0.1", port=cluster.port))
        return make_store(clients[-1])

    try:
        await check(make)
    finally:
        for client in clients:
            await client.aclose()
