"""Budgets on a server decide as `core/budget.py` does, whatever happens in whatever order; and money is conserved."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from resilient_llm.core.budget import Amount, BudgetLevel, Cap, Decision, Reservation
from resilient_llm.core.period import RollingPeriod
from resilient_llm.stores import RedisStore
from resilient_llm.stores._memory_values import MemoryBudgets
from resilient_llm.stores._redis_ledger import RedisLedger
from tests.stores.inside import told

DAY = RollingPeriod("day", 86_400.0, 24)
MONTH = RollingPeriod("month", 30 * 86_400.0, 30)
CAPS = (
    Cap("usd", DAY, 10.0, 0.8),
    Cap("usd", MONTH, 14.0, 0.5),
    Cap("tokens", DAY, 1_000.0, 0.9),
    Cap("tokens", MONTH, float("inf")),
)
LEASE = 900.0

amounts = st.builds(
    Amount, st.sampled_from([0.0, 0.0, 0.5, 3.0, 9.75, 10.0]), st.sampled_from([0.0, 0.0, 10.0, 990.0])
)
steps = st.one_of(
    st.tuples(st.just("reserve"), amounts, st.booleans()),
    st.tuples(st.just("settle"), st.integers(0, 5), amounts, st.booleans()),
    st.tuples(st.just("refund"), st.integers(0, 5)),
    st.tuples(st.just("look")),
    st.tuples(
        st.just("pass"),
        st.sampled_from([0.25, 600.0, 900.0, 3_600.0, 20_000.0, 86_400.0, 90_000.0, 700_000.0]),
    ),
)


def _same_levels(levels: tuple[BudgetLevel, ...], expected: tuple[BudgetLevel, ...]) -> None:
    assert [level.name for level in levels] == [level.name for level in expected]
    for level, other in zip(levels, expected, strict=True):
        assert level[1:] == pytest.approx(other[1:], abs=1e-6), level.name


def _same(decision: Decision, expected: Decision) -> None:
    _same_levels(decision.levels, expected.levels)
    assert (decision.reservation is None) == (expected.reservation is None)
    assert (decision.refused and decision.refused.name) == (expected.refused and expected.refused.name)
    if expected.retry_after is None:
        assert decision.retry_after is None
    else:
        assert decision.retry_after == pytest.approx(expected.retry_after, abs=1e-6)
    assert [level.name for level in decision.crossed] == [level.name for level in expected.crossed]


async def _compare(url: str, script: list[Any]) -> None:
    now = 1_700_000_000.0
    async with RedisStore(url, timeout=5.0, on_store_error="closed") as store:
        await store.runner.command("FLUSHALL")
        ledgers = [
            RedisLedger(store.runner, "p:", processes=lambda: 1, clock=lambda: now, lease=LEASE)
            for _ in range(2)
        ]
        reference = MemoryBudgets(lease=LEASE)
        open_: list[tuple[Reservation, Reservation]] = []
        for number, (step, *arguments) in enumerate(script):
            ledger = ledgers[number % 2]
            if step == "reserve":
                amount, enforce = arguments
                decision = await ledger.reserve("k", amount, CAPS, 0.0, enforce=enforce)
                expected = await reference.reserve("k", amount, CAPS, now, enforce=enforce)
                _same(decision, expected)
                if decision.reservation is not None and expected.reservation is not None:
                    open_.append((decision.reservation, expected.reservation))
            elif step == "pass":
                now += arguments[0]
            elif step != "look" and open_:
                mine, theirs = open_.pop(arguments[0] % len(open_))
                if step == "settle":
                    ledger.settle(mine, arguments[1], 0.0, estimated=arguments[2])
                    reference.settle(theirs, arguments[1], now, estimated=arguments[2])
                else:
                    ledger.refund(mine, 0.0)
                    reference.refund(theirs, now)
                await told(store)
            if step == "look" or number == len(script) - 1:  # which also forgets what has come back
                _same_levels(await ledger.levels("k", CAPS, 0.0), await reference.levels("k", CAPS, now))


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(script=st.lists(steps, min_size=8, max_size=50))
def test_it_decides_as_the_core_does(server: Any, script: list[Any]) -> None:
    asyncio.run(_compare(server.url, script))


@pytest.mark.anyio
@pytest.mark.realtime
async def test_money_is_conserved_under_random_cancellation(
    server: Any, make_store: Callable[..., RedisStore]
) -> None:
    rng = random.Random(6)
    stores = [make_store(server) for _ in range(4)]
    caps = (Cap("usd", DAY, 50.0),)
    spent = 0.0
    in_use = 0.0
    worst = 0.0

    async def call(store: RedisStore) -> None:
        nonlocal spent, in_use, worst
        with anyio.move_on_after(rng.choice([0.0005, 0.002, 5.0])):
            decision = await store.ledger.reserve("k", Amount(1.0), caps, 0.0)
            if decision.reservation is None:
                return
            in_use += 1.0
            worst = max(worst, in_use + spent)
            try:
                await anyio.sleep(rng.uniform(0, 0.01))
            finally:
                in_use -= 1.0
                if rng.random() < 0.3:
                    store.ledger.refund(decision.reservation, 0.0)
                else:
                    cost = rng.choice([0.25, 0.5])
                    spent += cost
                    store.ledger.settle(decision.reservation, Amount(cost), 0.0, estimated=False)

    for _ in range(40):
        async with anyio.create_task_group() as tasks:
            for _ in range(30):
                for store in stores:
                    tasks.start_soon(call, store)
        if spent > 49.0:
            break
    for store in stores:
        await told(store)
    (level,) = await stores[0].ledger.levels("k", caps, 0.0)
    assert level.spent == pytest.approx(spent)
    assert level.reserved == 0.0
    assert worst <= 50.0, "more than the cap at some time"
    assert spent > 25.0, "little of the cap was used"


@pytest.mark.anyio
@pytest.mark.realtime
async def test_totals_that_the_server_has_thrown_away_are_made_again(
    server: Any, make_store: Callable[..., RedisStore]
) -> None:
    store, caps = make_store(server), (Cap("usd", DAY, 10.0),)
    for _ in range(3):
        await store.ledger.reserve("k", Amount(2.0), caps, 0.0)
    with server.admin as admin:
        (account,) = admin.keys("*:budget:account")
        admin.delete(account)
    assert (await store.ledger.levels("k", caps, 0.0))[0].reserved == 6.0
    assert (await store.ledger.reserve("k", Amount(5.0), caps, 0.0)).reservation is None
    assert (await store.ledger.reserve("k", Amount(4.0), caps, 0.0)).reservation is not None
    assert (await store.ledger.levels("k", caps, 0.0))[0].reserved == 10.0


@pytest.mark.anyio
@pytest.mark.realtime
async def test_every_key_expires(server: Any, make_store: Callable[..., RedisStore]) -> None:
    store = make_store(server)
    first = await store.ledger.reserve("k", Amount(2.0, 5.0), CAPS, 0.0)
    assert first.reservation is not None
    store.ledger.settle(first.reservation, Amount(9.0, 5.0), 0.0, estimated=True)
    await store.ledger.reserve("k", Amount(0.5), CAPS, 0.0)
    await store.replies.put("k", b"v", 5.0)
    await told(store)
    with server.admin as admin:
        left = {key: admin.pttl(key) for key in admin.keys("*") if not key.endswith(b"processes")}
    assert len(left) == 5
    assert all(0 < milliseconds < 33 * 86_400_000 for milliseconds in left.values()), left
