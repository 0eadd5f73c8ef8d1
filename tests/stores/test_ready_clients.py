"""Clients that are made elsewhere and given to a store: what they do not notice, the store does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from redis.asyncio import Redis, RedisCluster

from integrations.redis.store import close, store_of
from resilient_llm.core.leases import LeaseLimit
from resilient_llm.core.shared_rate import RateCharge, Verdict
from resilient_llm.errors import StoreUnavailableError
from resilient_llm.stores import RedisStore
from resilient_llm.stores.protocol_leases import Lease
from tests.stores.conftest import Server
from tests.support import until

pytestmark = [pytest.mark.anyio, pytest.mark.realtime]

Make = Callable[..., RedisStore]

KEYS = [f"k{number}" for number in range(12)]
"""Enough to lie on all servers of a cluster."""


async def use(store: RedisStore) -> None:
    """Ask for something of each kind, on each server."""
    for key in KEYS:
        charge = RateCharge(key, 1_000.0, 1e-3, 1.0, own=True)
        assert (await store.rates.take(f"account of {key}", [charge])).verdict is Verdict.TAKEN
        pool = store.leases.pool(f"pool of {key}", lambda _: None)
        lease = await pool.acquire([LeaseLimit("all", 1)])
        assert isinstance(lease, Lease)
        pool.release(lease)
        await store.replies.put(key, b"value", 60.0)
        assert await store.replies.get(key) is not None


async def lose_connections(*servers: Server) -> None:
    """Have servers close the connections of all others, as after a long time without use."""
    await anyio.sleep(0.1)
    for server in servers:
        with server.admin as admin:
            admin.client_kill_filter(_type="normal", skipme=True)
    await anyio.sleep(0.1)  # at least, so that they are idle ones, and the news of it has come


@pytest.mark.parametrize("protocol", [2, 3])
async def test_a_client_whose_idle_connections_were_killed(
    server: Server, make_store: Make, protocol: int
) -> None:
    async with Redis.from_url(server.url, protocol=protocol) as client:
        store = make_store(client)
        for _ in range(4):
            await use(store)
            await lose_connections(server)
        assert (store.guard.transitions, store.guard.lost) == (0, 0)
        await store.aclose()


async def test_a_client_with_maintenance_notifications(server: Server, make_store: Make) -> None:
    notifications = pytest.importorskip("redis.maint_notifications")
    config = notifications.MaintNotificationsConfig(enabled="auto")
    async with Redis.from_url(server.url, protocol=3, maint_notifications_config=config) as client:
        store = make_store(client)
        for _ in range(4):
            await use(store)
            await lose_connections(server)
        assert (store.guard.transitions, store.guard.lost) == (0, 0)
        await store.aclose()


@pytest.mark.parametrize("ready_made", [True, False])
async def test_a_cluster_whose_idle_connections_were_killed(
    cluster_of: Callable[[str], list[Server]], *, ready_made: bool
) -> None:
    nodes = cluster_of("valkey9")
    options: dict[str, Any] = {"on_store_error": "closed", "timeout": 10.0}
    if ready_made:
        store = store_of(f"redis+cluster://127.0.0.1:{nodes[0].port}", **options)
    else:  # with retries and all
        store = RedisStore(RedisCluster(host="127.0.0.1", port=nodes[0].port), **options)
    for _ in range(4):
        await use(store)
        await lose_connections(*nodes)
    assert (store.guard.transitions, store.guard.lost) == (0, 0)
    await close(store)


async def test_a_server_that_was_restarted_meanwhile(own_server: Server, make_store: Make) -> None:
    async with Redis.from_url(own_server.url) as client:
        store = make_store(client)
        for _ in range(3):
            await use(store)
            own_server.kill()
            own_server.start()
            await anyio.sleep(0.1)
        assert store.guard.transitions == 0
        await store.aclose()


async def test_what_was_granted_is_never_granted_twice_as_connections_are_killed(
    server: Server, make_store: Make
) -> None:
    """Under load a connection may be lost with a decision on it: that call fails, and at most its grant is lost."""
    async with Redis.from_url(server.url) as client:
        store = make_store(client)
        charge = RateCharge("k", 1e6, 1e-6, 1.0, own=True)  # more than it can come to
        granted = failed = 0
        done = False

        async def draw() -> None:
            nonlocal granted, failed
            while not done:
                try:
                    granted += (await store.rates.take("account", [charge])).verdict is Verdict.TAKEN
                except StoreUnavailableError:
                    failed += 1
                await anyio.sleep(0.001)

        async with anyio.create_task_group() as tasks:
            for _ in range(8):
                tasks.start_soon(draw)
            for _ in range(10):
                before = granted
                with server.admin as admin:
                    admin.client_kill_filter(_type="normal", skipme=True)
                with suppress(StoreUnavailableError):
                    await until(lambda before=before: granted > before + 10)  # type: ignore[misc]
            done = True
        await until(lambda: store.guard.closed or not store.guard.retry_after())
        level = (await store.rates.take("account", [charge._replace(amount=0.0)])).levels[0].level
        assert 1e6 - granted - failed - 0.1 <= level <= 1e6 - granted + 0.1
        await store.aclose()


@pytest.mark.parametrize("ready", [True, False])
async def test_cancelled_at_any_moment_while_its_connection_is_found_dead_it_takes_nothing(
    server: Server, make_store: Make, *, ready: bool
) -> None:
    client = Redis.from_url(server.url)
    store = make_store(client if ready else server)
    charge = RateCharge("k", 1_000.0, 1e-6, 1.0, own=True)
    taken = 0

    async def is_left() -> bool:
        decision = await store.rates.take("account", [charge._replace(amount=0.0)])
        return abs(decision.levels[0].level - (1_000.0 - taken)) < 0.1

    for turns in range(24):
        await lose_connections(server)
        call = asyncio.ensure_future(store.rates.take("account", [charge]))
        for _ in range(turns):
            await anyio.lowlevel.checkpoint()
        call.cancel()
        with suppress(asyncio.CancelledError):
            await call
            taken += 1
        await until(is_left)
    assert (store.guard.transitions, store.guard.lost) == (0, 0)
    await store.aclose()
    await client.aclose()


async def test_one_server_of_a_cluster_is_not_taken_for_all_of_it(
    cluster_of: Callable[[str], list[Server]], make_store: Make
) -> None:
    store = make_store(cluster_of("valkey9")[0].url)
    with pytest.raises(StoreUnavailableError, match="give the store a RedisCluster"):
        await use(store)
