"""A full queue before slots that are kept in a store: who has more than its share of the places makes way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import anyio
import pytest

from resilient_llm import Bulkhead, ConcurrencyLimit, Policy, RejectedError
from resilient_llm.stores import MemoryStore, RedisStore
from resilient_llm.stores.protocol_leases import LeaseStore
from tests.support import Door, Provider, cancel_at_every_await, until

pytestmark = pytest.mark.anyio

PLACES = 6


def bulkhead(store: LeaseStore) -> Policy:
    return Bulkhead(
        max_concurrent=1, shared=1, max_queued=PLACES, max_queued_total=PLACES, max_wait=600, store=store
    )


def concurrency_limit(store: LeaseStore) -> Policy:
    return ConcurrencyLimit(
        initial=1, max=1, max_queued=PLACES, max_queued_total=PLACES, max_wait=600, store=store
    )


KINDS = pytest.mark.parametrize("kind", [bulkhead, concurrency_limit])


class Crowd:
    """Calls of tenants, and what became of them."""

    def __init__(self, policy: Any, duration: float) -> None:
        self.policy = policy
        self.provider = Provider(duration=duration)
        self.door = Door(policy, provider=self.provider)
        self.served: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.why: list[str] = []

    async def call(self, tenant: str) -> None:
        try:
            await self.door(tenant=tenant)
        except RejectedError as error:
            self.refused[tenant] += 1
            self.why.append(str(error))
        else:
            self.served[tenant] += 1


@KINDS
async def test_a_tenant_within_its_share_gets_a_place(kind: Callable[[Any], Policy]) -> None:
    crowd = Crowd(kind(MemoryStore()), duration=1.0)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(crowd.call, "first")
        await anyio.sleep(0.01)
        for _ in range(PLACES):
            tasks.start_soon(crowd.call, "noisy")
        await anyio.sleep(0.01)
        assert crowd.policy.queued() == PLACES
        for _ in range(2):
            tasks.start_soon(crowd.call, "quiet")
        await anyio.sleep(0.01)
        assert crowd.refused == {"noisy": 2}
        assert all("went to a tenant that had fewer" in why for why in crowd.why)
        assert crowd.policy.queued() == PLACES
        tasks.start_soon(crowd.call, "noisy")  # who has more than its share, and is refused itself
        await anyio.sleep(0.01)
        assert crowd.refused == {"noisy": 3}
    assert crowd.served == {"first": 1, "noisy": PLACES - 2, "quiet": 2}
    assert crowd.provider.peak == 1
    assert crowd.policy.queued() == 0


@pytest.mark.realtime
async def test_so_it_is_on_a_server(server: Any, make_store: Callable[..., RedisStore]) -> None:
    holder = Crowd(bulkhead(make_store(server)), duration=600.0)
    crowd = Crowd(bulkhead(make_store(server)), duration=0.01)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(holder.call, "first")
        await until(lambda: holder.provider.running)
        for number in range(PLACES):
            tasks.start_soon(crowd.call, "noisy")
            await until(lambda number=number: crowd.policy.queued() == number + 1)  # type: ignore[misc]
        tasks.start_soon(crowd.call, "quiet")
        await until(lambda: crowd.refused)
        assert crowd.refused == {"noisy": 1}
        tasks.cancel_scope.cancel()
    assert crowd.policy.queued() == 0
    with server.admin as admin:
        await until(lambda: not any(admin.zcard(key) for key in admin.keys("*lease*")))


@KINDS
async def test_whoever_displaces_or_is_displaced_may_be_cancelled_at_any_moment(
    kind: Callable[[Any], Policy],
) -> None:
    store = MemoryStore()
    crowd = Crowd(kind(store), duration=0.1)

    async def scenario() -> None:
        async with anyio.create_task_group() as tasks:
            for _ in range(PLACES + 1):
                tasks.start_soon(crowd.call, "noisy")
            await anyio.sleep(0.01)
            await crowd.call("quiet")

    async def check() -> None:
        assert crowd.policy.queued() == 0
        assert crowd.policy.in_use() == 0
        with anyio.fail_after(1.0):
            await crowd.door(tenant="after")  # every slot is back, and no place is left to wait behind

    assert await cancel_at_every_await(scenario, check) > 2
