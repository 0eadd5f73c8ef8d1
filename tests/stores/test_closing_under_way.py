"""Closing a store while calls wait for it, hold something of it, or have just given it back."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from redis.asyncio import Redis

from resilient_llm import Bulkhead, Policy, RateLimit, StoreUnavailableError
from resilient_llm.core.leases import LeaseLimit
from resilient_llm.core.shared_rate import Change, RateCharge
from resilient_llm.stores import RedisStore
from resilient_llm.stores.protocol_leases import Lease
from tests.stores.conftest import Server
from tests.stores.inside import runner_of
from tests.support import A_HANG, Door, Provider, until

pytestmark = [pytest.mark.anyio, pytest.mark.realtime]

Make = Callable[..., RedisStore]

LONG = 600.0
WAITING = 6


def slots(store: RedisStore) -> Bulkhead:
    return Bulkhead(max_concurrent=1, max_wait=LONG, key=lambda _: "x", name="slots", store=store)


def requests(store: RedisStore) -> RateLimit:
    return RateLimit(requests_per_minute=1, key=None, max_wait=LONG, name="requests", store=store)


@pytest.mark.parametrize("kind", [slots, requests])
@pytest.mark.parametrize("mode", ["closed", "open"])
async def test_who_waits_learns_it_at_once(
    server: Server, make_store: Make, kind: Callable[[RedisStore], Policy], mode: str
) -> None:
    other = Door(kind(make_store(server)), provider=Provider(duration=LONG))
    store = make_store(server, on_store_error=mode)
    policy: Any = kind(store)
    door = Door(policy, provider=Provider())
    ended: Counter[str] = Counter()

    async def call() -> None:
        try:
            await door()
        except StoreUnavailableError as error:
            ended["refused" if "has been closed" in str(error) else str(error)] += 1
        else:
            ended["passed"] += 1

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(other)  # has all there is
        await until(lambda: _is_taken(server))
        for _ in range(WAITING):
            tasks.start_soon(call)
        await until(lambda: _all_wait(policy, door))
        await store.aclose()
        await until(lambda: ended.total() == WAITING)
        tasks.cancel_scope.cancel()
    assert ended == {"refused" if mode == "closed" else "passed": WAITING}
    assert policy.queued() == 0
    assert store.guard.lost == 0


def _is_taken(server: Server) -> bool:
    with server.admin as admin:
        return bool(list(admin.scan_iter("resilient_llm:{*}:*")))


def _all_wait(policy: Any, door: Door) -> bool:
    # Of a rate limit the first keeps a place in line at the store, and is in no queue here.
    return len(door.calls) == WAITING and policy.queued() >= WAITING - 1


async def test_who_waits_goes_on_with_this_process_s_share(server: Server, make_store: Make) -> None:
    other = Door(slots(make_store(server)), provider=Provider(duration=LONG))
    store = make_store(server, on_store_error="local")
    policy = slots(store)
    provider = Provider(duration=0.02)
    door = Door(policy, provider=provider)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(other)
        await until(lambda: _is_taken(server))
        async with anyio.create_task_group() as waiting:
            for _ in range(WAITING):
                waiting.start_soon(door)
            await until(lambda: policy.queued() == WAITING)
            await store.aclose()
            await until(lambda: len(provider.attempts) == WAITING)  # in turn: its share is one
        tasks.cancel_scope.cancel()
    assert provider.peak == 1


async def test_what_has_just_been_given_back_arrives(server: Server, make_store: Make) -> None:
    store = make_store(server)
    pool = store.leases.pool("p", lambda _: None)
    limit = [LeaseLimit("all", 50)]
    leases = [await pool.acquire(limit) for _ in range(50)]
    await store.rates.take("account", [RateCharge("k", 100.0, 1e-6, 50.0, own=True)])
    for lease in leases:
        assert isinstance(lease, Lease)
        pool.release(lease)
        store.rates.settle("account", [Change("k", 100.0, 1e-6, 1.0)])
    await store.aclose()
    with server.admin as admin:
        assert admin.zcard("resilient_llm:{p}:lease:all") == 0
        assert admin.zcard("resilient_llm:processes") == 0
    assert store.guard.lost == 0


async def test_what_is_given_back_later_ends_by_itself(server: Server, make_store: Make) -> None:
    store = make_store(server, lease=0.5)
    provider = Provider(duration=LONG)
    door = Door(slots(store), provider=provider)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(door)
        await until(lambda: provider.running == 1)
        await store.aclose()
        tasks.cancel_scope.cancel()  # the call ends, and does not fail for the store
    assert provider.running == 0
    assert store.guard.lost == 1, "the slot it could not give back"
    assert runner_of(store)._client is None, "and no connection was made for it"
    with server.admin as admin:
        assert admin.zcard("resilient_llm:{slots:x}:lease:all") == 1
    with anyio.fail_after(A_HANG):
        await Door(slots(make_store(server)), provider=Provider())()


@pytest.mark.parametrize("ready", [True, False])
async def test_cancelled_at_any_moment_it_leaves_nothing_open(server: Server, *, ready: bool) -> None:
    """A connection left open would be a `ResourceWarning`, and so an error."""
    for turns in range(12):
        client = Redis.from_url(server.url)
        store = RedisStore(client if ready else server.url, timeout=5.0, on_store_error="closed")
        pool = store.leases.pool("p", lambda _: None)
        lease = await pool.acquire([LeaseLimit("all", 1)])
        if isinstance(lease, Lease):
            pool.release(lease)
        closing = asyncio.ensure_future(store.aclose())
        for _ in range(turns):
            await anyio.lowlevel.checkpoint()
        closing.cancel()
        with anyio.fail_after(A_HANG):
            await asyncio.wait([closing])
        if turns:  # else it has not even begun
            assert not runner_of(store).sender.lanes
            with pytest.raises(StoreUnavailableError, match="has been closed"):
                await pool.acquire([LeaseLimit("all", 1)])
        await store.aclose()
        await client.aclose()


@pytest.mark.parametrize("outage", ["killed", "frozen"])
async def test_a_server_that_is_lost_meanwhile_does_not_hold_it_up(own_server: Server, outage: str) -> None:
    store = RedisStore(own_server.url, timeout=0.1, on_store_error="closed")
    for number in range(1_000):
        store.rates.settle(f"account {number}", [Change("k", 1e6, 1e-6, 1.0)])
    closing = asyncio.ensure_future(store.aclose())
    await anyio.lowlevel.checkpoint()
    if outage == "killed":
        own_server.kill()
        with anyio.fail_after(A_HANG):
            await closing
    else:
        with own_server.frozen(), anyio.fail_after(A_HANG):
            await closing
    assert not runner_of(store).sender.told
    assert store.guard.lost <= 1_000 + 2  # that this process was there, and that it leaves, among them
    with pytest.raises(StoreUnavailableError, match="has been closed"):
        await store.rates.take("account", [RateCharge("k", 1e6, 1e-6, 1.0, own=True)])
