"""A server that has no memory left, and answers to all that needs none: it is given up on once, and asked seldom."""

from __future__ import annotations

from collections.abc import Callable

import anyio
import pytest

from resilient_llm import Bulkhead, CircuitBreaker, ConcurrencyLimit, Policy, RateLimit, StoreUnavailableError
from resilient_llm.core.leases import LeaseLimit
from resilient_llm.core.shared_rate import RateCharge
from resilient_llm.stores import RedisStore
from resilient_llm.stores.protocol_leases import Lease
from tests.stores.conftest import Server
from tests.support import Door, Provider, until

pytestmark = [pytest.mark.anyio, pytest.mark.realtime]

Make = Callable[..., RedisStore]


def fill(server: Server, *, full: bool) -> None:
    with server.admin as admin:
        admin.config_set("maxmemory-policy", "noeviction")
        admin.config_set("maxmemory", "1mb" if full else "0")


def everything(store: RedisStore) -> list[Policy]:
    return [
        RateLimit(requests_per_minute=1e7, store=store),
        Bulkhead(max_concurrent=4, store=store),
        ConcurrencyLimit(store=store),
        CircuitBreaker(store=store),  # which goes on reading
    ]


def slots(store: RedisStore) -> list[Policy]:
    return [Bulkhead(max_concurrent=4, store=store)]


@pytest.mark.parametrize("policies", [everything, slots])
async def test_it_is_one_outage_however_long_it_lasts(
    own_server: Server, make_store: Make, policies: Callable[[RedisStore], list[Policy]]
) -> None:
    store = make_store(own_server, on_store_error="open")
    door = Door(*policies(store), provider=Provider())
    done = False

    async def calls() -> None:
        while not done:
            await door(tenant="a")
            await store.replies.get("nothing") if store.guard.closed else None
            await anyio.sleep(0.002)

    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(calls)
        await until(lambda: len(door.calls) > 50)
        fill(own_server, full=True)
        await until(lambda: not store.guard.closed)
        asked = own_server.scripts_run()
        before = len(door.calls)
        await anyio.sleep(4.0)  # at least: several pauses, which grow
        assert store.guard.transitions == 1
        assert not store.guard.closed
        assert own_server.scripts_run() - asked < 60, "it is asked now and then"
        assert len(door.calls) > before
        fill(own_server, full=False)
        await until(lambda: store.guard.closed)
        done = True
    assert store.guard.transitions == 2


async def test_what_needs_no_memory_goes_on(own_server: Server, make_store: Make) -> None:
    store = make_store(own_server)
    pool = store.leases.pool("p", lambda _: None)
    limit = [LeaseLimit("all", 1)]
    lease = await pool.acquire(limit)
    assert isinstance(lease, Lease)
    fill(own_server, full=True)
    for _ in range(4):
        with pytest.raises(StoreUnavailableError, match="maxmemory"):
            await store.rates.take("account", [RateCharge("k", 10.0, 1.0, 1.0, own=True)])
        assert await store.replies.get("nothing") is None
    pool.release(lease)

    def is_free() -> bool:
        with own_server.admin as admin:
            return not admin.zcard("resilient_llm:{p}:lease:all")

    await until(is_free)
    with pytest.raises(StoreUnavailableError, match="maxmemory"):
        await store.rates.take("account", [RateCharge("k", 10.0, 1.0, 1.0, own=True)])
    assert not store.guard.closed, "five in a row: what went on in between proves nothing"
    fill(own_server, full=False)


async def test_a_replica_that_goes_on_reading_is_one_outage(
    own_server: Server, make_server: Callable[..., Server], make_store: Make
) -> None:
    primary = make_server(own_server.kind)
    store = make_store(own_server, on_store_error="open")
    door = Door(
        RateLimit(requests_per_minute=1e7, store=store), CircuitBreaker(store=store), provider=Provider()
    )
    await door(tenant="a")
    with own_server.admin as admin:
        admin.replicaof("127.0.0.1", primary.port)

        async def given_up_on() -> bool:
            await door(tenant="a")
            return not store.guard.closed

        await until(given_up_on)
        for _ in range(300):
            await door(tenant="a")
            await anyio.sleep(0.01)
        assert store.guard.transitions == 1
        admin.replicaof("NO", "ONE")

        async def asked_again() -> bool:
            await door(tenant="a")
            return store.guard.closed

        await until(asked_again)
    assert store.guard.transitions == 2
