"""What an idle key costs: a million tenants seen must not be a gigabyte for each policy."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable

import pytest

from resilient_llm import Bulkhead, CircuitBreaker, ConcurrencyLimit, Limit, Policy, RateLimit
from tests.policies.rate_limiting import Answers
from tests.support import Door

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", ["asyncio"])]

KEYS = 1_500
KILOBYTE = 1_000


def _rate(scope: str) -> Limit:
    return Limit(key="tenant", scope=scope, requests_per_minute=60, tokens_per_minute=60_000, burst=2)


def six_buckets() -> RateLimit:
    return RateLimit(limits=[_rate("a"), _rate("b")])


POLICIES: dict[str, Callable[[], Policy]] = {
    "circuit": lambda: CircuitBreaker(key="tenant"),
    "concurrency": lambda: ConcurrencyLimit(key="tenant"),
    "bulkhead": lambda: Bulkhead(max_concurrent=2),
    "six buckets": six_buckets,
}


@pytest.mark.parametrize("make", POLICIES.values(), ids=list(POLICIES))
async def test_an_idle_key_costs_less_than_a_kilobyte(make: Callable[[], Policy]) -> None:
    provider = Answers()
    door = Door(make(), provider=provider)

    async def see(tenants: list[str]) -> None:
        for tenant in tenants:
            await door(tenant=tenant)
            door.calls.clear()
            provider.attempts.clear()

    await see([f"warm {number}" for number in range(100)])
    tenants = [f"tenant {number}" for number in range(KEYS)]
    gc.collect()
    tracemalloc.start()
    try:
        await see(tenants)
        gc.collect()
        cost = tracemalloc.get_traced_memory()[0] / KEYS
    finally:
        tracemalloc.stop()
    assert 200 < cost < KILOBYTE, "beside its name; were it much less, nothing would be measured"
