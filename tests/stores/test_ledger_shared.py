"""Budgets of several processes: one that is killed, calls that take long, calendars, and a server that fails."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import anyio
import pytest

from resilient_llm import Budget, BudgetExceededError, StoreUnavailableError
from resilient_llm.core.budget import Amount, Cap
from resilient_llm.core.period import RollingPeriod
from resilient_llm.policies._calendar import CalendarPeriod
from resilient_llm.stores import RedisStore
from tests.support import Door, Provider, until

pytestmark = [pytest.mark.anyio, pytest.mark.realtime]

Make = Callable[..., RedisStore]
CAPS = (Cap("tokens", RollingPeriod("day", 86_400.0, 24), 100.0),)

RESERVES_AND_HANGS = """
import asyncio, sys
from resilient_llm.core.budget import Amount, Cap
from resilient_llm.core.period import RollingPeriod
from resilient_llm.stores import RedisStore

async def main():
    store = RedisStore(sys.argv[1], timeout=5.0)
    store.ledger.lease = float(sys.argv[2])
    caps = (Cap("tokens", RollingPeriod("day", 86_400.0, 24), 100.0),)
    decision = await store.ledger.reserve("k", Amount(0.0, 80.0), caps, 0.0)
    print(decision.reservation is not None, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


async def level(store: RedisStore, key: Any = "k", caps: Any = CAPS) -> tuple[float, float]:
    (found,) = await store.ledger.levels(key, caps, 0.0)
    return found.spent, found.reserved


async def becomes(store: RedisStore, expected: tuple[float, float], key: Any = "k", caps: Any = CAPS) -> None:
    async def has_become() -> bool:
        return await level(store, key, caps) == expected

    await until(has_become)


async def test_what_a_killed_process_had_reserved_comes_back_after_its_time_and_not_before(
    server: Any, make_store: Make
) -> None:
    store = make_store(server)
    began = anyio.current_time()
    process = subprocess.Popen(  # noqa: ASYNC220 - it takes no time here
        [sys.executable, "-c", RESERVES_AND_HANGS, server.url, "4"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == "True\n"
        has_reserved = anyio.current_time()
        process.kill()
        process.wait()

    async def comes_back() -> bool:
        return (await store.ledger.reserve("k", Amount(0.0, 80.0), CAPS, 0.0)).reservation is not None

    if not await comes_back():
        await until(comes_back)
        assert anyio.current_time() - began > 4.0
    else:
        assert anyio.current_time() - has_reserved > 3.0, "it came back at once"


async def test_a_call_that_outlives_its_reservation_is_charged_all_the_same(
    server: Any, make_store: Make
) -> None:
    store = make_store(server)
    store.ledger.lease = 0.1
    first = await store.ledger.reserve("k", Amount(0.0, 80.0), CAPS, 0.0)
    assert first.reservation is not None
    await becomes(store, (0.0, 0.0))
    store.ledger.settle(first.reservation, Amount(0.0, 70.0), 0.0, estimated=False)
    await becomes(store, (70.0, 0.0))


async def test_a_calendar_day_ends_by_the_clock_of_the_application(server: Any, make_store: Make) -> None:
    time = datetime(2026, 3, 1, 23, 59, tzinfo=UTC)
    caps = (Cap("tokens", CalendarPeriod("day", lambda: time), 100.0),)
    # A clock that is a minute behind: its yesterday is today for all once one has said so.
    behind = (Cap("tokens", CalendarPeriod("day", lambda: time - timedelta(minutes=1)), 100.0),)
    store = make_store(server)
    first = await store.ledger.reserve("k", Amount(0.0, 80.0), caps, 0.0)
    assert first.reservation is not None
    store.ledger.settle(first.reservation, Amount(0.0, 80.0), 0.0, estimated=False)
    await becomes(store, (80.0, 0.0), caps=caps)
    refused = await store.ledger.reserve("k", Amount(0.0, 30.0), caps, 0.0)
    assert refused.retry_after == pytest.approx(60.0)
    time += timedelta(minutes=1.5)
    second = await store.ledger.reserve("k", Amount(0.0, 30.0), caps, 0.0)
    assert second.reservation is not None
    assert second.levels[0].spent == 0.0
    store.ledger.settle(second.reservation, Amount(0.0, 30.0), 0.0, estimated=False)
    await becomes(store, (30.0, 0.0), caps=caps)
    late = await store.ledger.reserve("k", Amount(0.0, 5.0), behind, 0.0)
    assert late.levels[0].spent == 30.0


# Through the policy


class Service:
    def __init__(self, store: RedisStore, tokens: float = 10.0, **options: Any) -> None:
        self.budget = Budget(
            tokens_per_day=100, estimate=lambda _call: tokens, ledger=store.ledger, **options
        )
        self.provider = Provider()
        self.door = Door(self.budget, provider=self.provider)

    async def spent(self) -> tuple[float, float]:
        (found,) = await self.budget.spent("acme")
        return found.spent, found.reserved


async def test_processes_share_a_budget(server: Any, make_store: Make) -> None:
    one, other = (Service(make_store(server), tokens=30.0) for _ in range(2))
    for service in (one, other, one):
        await service.door(tenant="acme")
    with pytest.raises(BudgetExceededError, match=r"tokens_per_day is 100 tokens, of which .* spent"):
        await other.door(tenant="acme")
    await other.door(tenant="beta")
    assert sum(await one.spent()) == 90.0


async def test_closed_refuses_without_the_store(own_server: Any, make_store: Make) -> None:
    service = Service(make_store(own_server, on_store_error="closed"))
    await service.door(tenant="acme")
    own_server.kill()
    with pytest.raises(StoreUnavailableError):
        await service.door(tenant="acme")
    assert len(service.provider.attempts) == 1


async def test_a_dry_run_refuses_nothing_without_the_store(own_server: Any, make_store: Make) -> None:
    service = Service(make_store(own_server, on_store_error="closed"), dry_run=True)
    own_server.kill()
    await service.door(tenant="acme")


async def test_open_lets_through_and_the_server_hears_of_it_later(own_server: Any, make_store: Make) -> None:
    store = make_store(own_server, on_store_error="open")
    service = Service(store, tokens=60.0)
    await service.door(tenant="acme")
    own_server.kill()
    for _ in range(8):
        await service.door(tenant="acme")
    assert store.guard.unguarded == 8
    own_server.start()

    async def has_heard() -> bool:
        with suppress(StoreUnavailableError):
            # Those that were sent into a dying connection are lost, and counted.
            return (await service.spent())[0] >= 60.0 * 4
        return False

    await until(has_heard)
    with pytest.raises(BudgetExceededError):
        await service.door(tenant="acme")


async def test_local_gives_of_this_processs_share_of_what_was_left(own_server: Any, make_store: Make) -> None:
    stores = [make_store(own_server, on_store_error="local") for _ in range(2)]
    services = [Service(store, tokens=20.0) for store in stores]
    for service in services:
        await service.door(tenant="acme")

    async def knows_of_the_other() -> bool:
        await stores[0].ledger.levels("k", CAPS, 0.0)
        return stores[0].processes == 2

    await until(knows_of_the_other)
    own_server.kill()
    granted = 0
    for _ in range(10):
        try:
            await services[0].door(tenant="acme")
        except BudgetExceededError:
            break
        granted += 1
    # 100 less 0 that was spent when it last heard, by two: two calls of 20.
    assert granted == 2
    own_server.start()

    async def has_no_share_any_more() -> bool:
        with suppress(BudgetExceededError, StoreUnavailableError):
            await services[0].door(tenant="acme")
        return stores[0].guard.closed and stores[0].ledger._own is None

    await until(has_no_share_any_more)
