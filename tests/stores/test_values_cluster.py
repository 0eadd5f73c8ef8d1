"""Circuits, replies and budgets on a cluster of three: what belongs together is in one place, whatever its keys are."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from redis.asyncio.cluster import RedisCluster
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from resilient_llm.stores import RedisStore
from resilient_llm.testing.stores_circuits import CIRCUIT_CHECKS
from resilient_llm.testing.stores_values import LEDGER_CHECKS, REPLY_CHECKS
from tests.stores.conftest import Server

CHECKS: list[Callable[[Any], Awaitable[None]]] = [*CIRCUIT_CHECKS, *REPLY_CHECKS, *LEDGER_CHECKS]


@pytest.fixture
def cluster(cluster_of: Callable[[str], list[Server]]) -> int:
    """Give one of three servers."""
    return cluster_of("valkey9")[0].port


@pytest.mark.anyio
@pytest.mark.realtime
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_a_cluster_conforms(
    check: Callable[[Any], Awaitable[None]], cluster: int, make_store: Callable[..., RedisStore]
) -> None:
    async with RedisCluster(host="127.0.0.1", port=cluster, retry=Retry(NoBackoff(), 0)) as client:
        await check(lambda: make_store(client))
