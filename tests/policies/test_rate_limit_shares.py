"""Shares of a rate limit by tokens and weights, here and in a store, whatever sizes calls have and what they use."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import anyio
import pytest

from resilient_llm import Call, Limit, Outcome, RateLimit, Reply, Usage, Verdict
from resilient_llm.core.shared_rate import RateCharge, RateDecision
from resilient_llm.stores import MemoryStore
from resilient_llm.stores.memory import MemoryRates
from tests.policies.rate_limiting import Answers, by_body
from tests.support import Door, Nothing

pytestmark = pytest.mark.anyio


class FarRates(MemoryRates):
    """A store to which it takes ten milliseconds, and as long back."""

    async def take(self, account: str, charges: Sequence[RateCharge], **options: Any) -> RateDecision:
        await anyio.sleep(0.01)
        decision = await super().take(account, charges, **options)
        await anyio.sleep(0.01)
        return decision


class Far(MemoryStore):
    def __init__(self) -> None:
        super().__init__()
        self.rates = FarRates()


WHERE = ["here", "stored", "stored far away"]


async def saturate(door: Door, offers: dict[str, tuple[int, bytes]], seconds: float) -> None:
    """Keep so many calls of so many tokens of each tenant waiting, for so long."""

    async def again_and_again(tenant: str, body: bytes) -> None:
        while True:
            await door(tenant=tenant, body=body)

    with anyio.move_on_after(seconds):
        async with anyio.create_task_group() as group:
            for tenant, (callers, body) in offers.items():
                for _ in range(callers):
                    group.start_soon(again_and_again, tenant, body)


class Mix:
    """Many small calls of one tenant, few large ones of another, and now and then one of a third.

    They use half of what was estimated, on average, so that much comes back while others wait.
    """

    def __init__(self, store: MemoryStore | None, models: str, *, patience: Sequence[float] = ()) -> None:
        limits = [
            Limit(key=None, tokens_per_minute=60_000, window=1),
            Limit(key="model", tokens_per_minute=60_000, window=1),
        ]
        limit = RateLimit(limits=limits, max_wait=1_000, estimate=by_body, store=store)
        self.door = Door(limit, provider=self.provide)
        self.taken: Counter[str] = Counter()
        self.used = 0
        self.waits: dict[str, list[float]] = {"small": [], "large": [], "third": []}
        self.models = models
        self.patience = patience
        self.draw = random.Random(1)

    async def provide(self, attempt: Call) -> Reply:
        estimate = int(by_body(attempt))
        used = self.draw.randint(0, estimate)
        self.taken[str(attempt.tenant)] += estimate
        self.used += used
        await anyio.sleep(self.draw.uniform(0.02, 0.2))
        attempt.finish(Outcome(verdict=Verdict.SUCCESS, usage=Usage(input_tokens=used, output_tokens=0)))
        return Reply(200, [], Nothing(), complete=True)

    async def call(self, tenant: str, tokens: int) -> None:
        began = anyio.current_time()
        leaves = bool(self.patience) and self.draw.random() < 0.3
        with anyio.move_on_after(self.draw.choice(self.patience) if leaves else 1_000) as scope:
            await self.door(tenant=tenant, model=self.draw.choice(self.models), body=b"%d" % tokens)
        self.door.calls.clear()
        if not scope.cancelled_caught:
            self.waits[tenant].append(anyio.current_time() - began)

    async def again_and_again(self, tenant: str, tokens: int) -> None:
        while True:
            await self.call(tenant, tokens)

    async def run(self, seconds: float) -> None:
        with anyio.move_on_after(seconds):
            async with anyio.create_task_group() as group:
                for _ in range(8):
                    group.start_soon(self.again_and_again, "large", 500)
                for _ in range(40):
                    group.start_soon(self.again_and_again, "small", 20)
                while True:
                    await anyio.sleep(self.draw.expovariate(0.5))
                    group.start_soon(self.call, "third", 100)


@pytest.mark.parametrize("make_store", [None, MemoryStore, Far], ids=WHERE)
@pytest.mark.parametrize("models", ["x", "xy"], ids=["one model", "two models"])
async def test_shares_are_by_tokens_also_where_calls_use_less_than_was_estimated(
    models: str, make_store: Callable[[], MemoryStore] | None
) -> None:
    """What comes back lets small calls through while a large one waits: that, too, is of its tenant's share."""
    mix = Mix(None if make_store is None else make_store(), models)
    await mix.run(60)
    assert 0.95 < mix.taken["small"] / mix.taken["large"] < 1.05
    assert mix.used > 0.98 * 60_000
    assert max(mix.waits["third"]) < 2.0, "a few of the large ones"


@pytest.mark.parametrize("make_store", [None, MemoryStore], ids=WHERE[:2])
async def test_who_gives_up_at_random_starves_nobody(make_store: Callable[[], MemoryStore] | None) -> None:
    mix = Mix(None if make_store is None else make_store(), "xy", patience=[0.05, 0.5, 3.0])
    await mix.run(60)
    assert 0.93 < mix.taken["small"] / mix.taken["large"] < 1.07
    assert max(mix.waits["third"]) < 2.0
    assert max(mix.waits["small"]) < 6.0
    assert max(mix.waits["large"]) < 20.0, "eight that take turns at half of the limit, in two lanes"


@pytest.mark.parametrize("make_store", [None, MemoryStore, Far], ids=WHERE)
@pytest.mark.parametrize(
    "bodies", [(b"10", b"10", b"10"), (b"40", b"10", b"5"), (b"5", b"10", b"40")], ids=str
)
async def test_shares_are_by_tokens_and_weights_under_saturation(
    bodies: tuple[bytes, ...], make_store: Callable[[], MemoryStore] | None
) -> None:
    provider = Answers()
    weights = {"a": 1.0, "b": 2.0, "c": 4.0}
    store = None if make_store is None else make_store()
    limit = RateLimit(
        key=None, tokens_per_minute=6_000, window=2, estimate=by_body, weights=weights, store=store
    )
    offers = {tenant: (8, body) for tenant, body in zip("abc", bodies, strict=True)}
    await saturate(Door(limit, provider=provider), offers, seconds=120)
    used = Counter[str]()
    for at, attempt in provider.attempts:
        if at >= 2:  # the bucket was full at first, for whoever came
            used[str(attempt.tenant)] += int(attempt.request.body or 0)
    total = sum(used.values())
    for tenant, weight in weights.items():
        assert used[tenant] / total == pytest.approx(weight / 7, rel=0.02)
    assert total == pytest.approx(6_000 * 118 / 60, rel=0.02), "at least 98 % of the limit"
