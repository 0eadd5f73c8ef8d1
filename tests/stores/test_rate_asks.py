"""How often those who wait ask the store: at their turn, before it when there is news, and never in a circle."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from random import Random
from typing import Any

import anyio
import pytest

from resilient_llm import Limit, RateLimit
from resilient_llm.core.shared_rate import RateCharge, RateDecision, Verdict
from resilient_llm.policies._shared_view import SharedView
from resilient_llm.stores import MemoryStore, RedisStore
from resilient_llm.stores.memory import MemoryRates
from resilient_llm.stores.protocol import RateStore
from tests.policies.rate_limiting import Answers
from tests.stores.conftest import on_both
from tests.support import Door

A_CIRCLE = 100
"""Asks of one waiter after which a test says that it goes round in one, which would have no end in virtual time."""


class Asks:
    """Who asked the store, when, and what it said."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.by_tenant: dict[object, list[tuple[float, Verdict]]] = defaultdict(list)
        ask = SharedView.ask

        async def noted(view: SharedView, call: Any, *args: Any, **options: Any) -> RateDecision:
            mine = self.by_tenant[call.tenant]
            assert len(mine) < A_CIRCLE, f"{call.tenant} asks again and again: {mine[-3:]}"
            mine.append((anyio.current_time(), Verdict.REFUSED))
            decision = await ask(view, call, *args, **options)
            mine[-1] = mine[-1][0], decision.verdict
            return decision

        monkeypatch.setattr(SharedView, "ask", noted)

    @property
    def total(self) -> int:
        """Count them."""
        return sum(map(len, self.by_tenant.values()))

    def in_vain(self, tenant: object) -> list[float]:
        """Give the seconds between one ask in vain of who had a place already, and its next."""
        asks = self.by_tenant[tenant]
        return [later - at for (at, verdict), (later, _) in pairwise(asks[1:]) if verdict is Verdict.HELD]


def one_limit_of_all(store: RateStore, *, rpm: float = 60.0) -> tuple[Answers, Door]:
    answers = Answers()
    limit = Limit(key=None, requests_per_minute=rpm, window=60 / rpm)
    return answers, Door(RateLimit(limits=[limit], max_wait=math.inf, store=store), provider=answers)


@pytest.mark.parametrize("tenants", [5, 10, 20])
@pytest.mark.anyio
async def test_whoever_waits_asks_when_it_comes_and_at_its_turn(
    tenants: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asks = Asks(monkeypatch)
    answers, door = one_limit_of_all(MemoryStore())
    async with anyio.create_task_group() as group:
        for tenant in range(tenants):
            group.start_soon(partial(door, tenant=str(tenant)))
    assert answers.times == pytest.approx(list(range(tenants)), abs=1e-3)
    assert asks.total == 2 * tenants - 1  # the first passes at once


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.anyio
async def test_whoever_is_cancelled_makes_nobody_ask_in_a_circle(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = Random(seed)
    asks = Asks(monkeypatch)
    answers, door = one_limit_of_all(MemoryStore(), rpm=rng.choice([60.0, 240.0]))
    tenants = rng.randrange(5, 21)
    gone = set(rng.sample(range(tenants), tenants // 3))

    async def call(tenant: int) -> None:
        await anyio.sleep(rng.choice([0.0, 0.3, 1.0, 2.7]))
        with anyio.move_on_after(rng.uniform(0.1, 6.0) if tenant in gone else math.inf):
            await door(tenant=str(tenant))

    async with anyio.create_task_group() as group:
        for tenant in range(tenants):
            group.start_soon(call, tenant)
    assert len(answers.attempts) >= tenants - len(gone)
    assert asks.total <= 4 * tenants
    for tenant in range(tenants):
        assert all(seconds > 0 for seconds in asks.in_vain(str(tenant)))


class Lying(MemoryRates):
    """Decide as it should, and say that there is more left than there is."""

    async def take(self, account: str, charges: Sequence[RateCharge], **options: Any) -> RateDecision:
        decision = await super().take(account, charges, **options)
        levels = [level._replace(level=level.level + 30.0) for level in decision.levels]
        return decision._replace(levels=levels)


@pytest.mark.anyio
async def test_whatever_is_known_here_nobody_asks_in_a_circle(monkeypatch: pytest.MonkeyPatch) -> None:
    asks = Asks(monkeypatch)
    store = MemoryStore()
    store.rates = Lying()
    answers, door = one_limit_of_all(store)
    async with anyio.create_task_group() as group:
        for tenant in range(10):
            group.start_soon(partial(door, tenant=str(tenant)))
    assert answers.times == pytest.approx(list(range(10)), abs=1e-3)
    for tenant in range(10):
        in_vain = asks.in_vain(str(tenant))
        assert all(seconds > 1 - 1e-3 for seconds in in_vain)
        assert len(asks.by_tenant[str(tenant)]) <= 9 + 2  # once a second at most, and when it came


@pytest.mark.anyio
@pytest.mark.realtime
@on_both
async def test_whoever_waits_for_a_server_asks_it_at_its_turn(
    server: Any, make_store: Callable[..., RedisStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    asks = Asks(monkeypatch)
    answers, door = one_limit_of_all(make_store(server), rpm=240.0)
    began = anyio.current_time()
    with anyio.fail_after(60):
        async with anyio.create_task_group() as group:
            for tenant in range(10):
                group.start_soon(partial(door, tenant=str(tenant)))
    assert answers.times[-1] >= 9 / 4 - 0.01
    assert len(answers.attempts) == 10
    # At its turn, and a time more for each second in which the machine stood still.
    assert asks.total <= 40 + 10 * (anyio.current_time() - began)
