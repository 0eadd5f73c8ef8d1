"""A store whose answers overtake one another, and callers that come, wait and go as they like: what is left is found.

Nothing refills while it lasts. A process that goes by an answer that something later has made untrue, or that hears of
something nobody told it of, waits for what is there all the time.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections import Counter
from collections.abc import Sequence

import anyio
from anyio import get_cancelled_exc_class
from anyio.abc import TaskGroup
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient_llm import AttemptError, Limit, RateLimit, StoreUnavailableError
from resilient_llm.core.shared_rate import Change, RateCharge, RateDecision, RateLedger, TakeMode, Verdict
from resilient_llm.outcome import Outcome
from resilient_llm.outcome import Verdict as Ending
from resilient_llm.stores.guard import OnStoreError, StoreGuard
from resilient_llm.stores.protocol import HearLevels
from resilient_llm.testing import run_virtual
from tests.support import Door, Provider

UNREACHABLE = Outcome(verdict=Ending.FAILURE, error_type="connection_error", retryable=True)
"""Never sent, so that what was taken for it is given back."""

DAYS = 1e6
"""Seconds in which one more comes back."""


class SlowStore:
    """A store whose requests and answers take their time, and overtake one another."""

    processes = 1

    def __init__(self, tasks: TaskGroup, rng: random.Random) -> None:
        self.guard = StoreGuard("slow", "closed", clock=anyio.current_time)
        self.rates = self
        self.ledger = RateLedger()
        self.tasks = tasks
        self.rng = rng
        self.lost = 0.0
        """Of how many requests the answer comes too late for who asked, if at all."""

    async def aclose(self) -> None:
        """Close nothing."""

    async def pass_on(self) -> None:
        """Take the time that something is on its way."""
        await anyio.sleep(self.rng.random() * 0.01)

    async def take(
        self,
        _account: str,
        charges: Sequence[RateCharge],
        *,
        most_wait: float = 0.0,
        mode: TakeMode = "n",
        undone: HearLevels | None = None,
    ) -> RateDecision:
        admission = self.guard.admit()
        decision = None
        try:
            if self.rng.random() < self.lost:
                self.tasks.start_soon(self._too_late, charges, most_wait, mode, undone)
                await self.pass_on()
                self.guard.failed(admission, "no answer")
                raise self.guard.error("no answer")
            await self.pass_on()
            decision = self.ledger.take(charges, anyio.current_time(), most_wait=most_wait, mode=mode)
            await self.pass_on()
        except get_cancelled_exc_class():
            self.guard.dropped(admission)
            if decision is not None:
                self._undo(charges, decision, undone)
            else:  # nobody comes back for what was held, and the store never heard that somebody would
                self.settle(
                    "", [Change(*each[:3], freed=each.held, turn=each.turn) for each in charges], undone
                )
            raise
        self.guard.succeeded(admission)
        return decision

    async def _too_late(
        self, charges: Sequence[RateCharge], most_wait: float, mode: TakeMode, undone: HearLevels | None
    ) -> None:
        await self.pass_on()
        await self.pass_on()
        decision = self.ledger.take(charges, anyio.current_time(), most_wait=most_wait, mode=mode)
        self._undo(charges, decision, undone)

    def _undo(self, charges: Sequence[RateCharge], decision: RateDecision, undone: HearLevels | None) -> None:
        taken = decision.verdict is Verdict.TAKEN
        undo = [
            Change(*each[:3], each.amount if taken else 0.0, held, decision.turn(index))
            for index, (each, held) in enumerate(zip(charges, decision.held, strict=True))
        ]
        if decision.verdict is not Verdict.REFUSED:
            self.settle("", undo, undone)

    def settle(self, _account: str, changes: Sequence[Change], heard: HearLevels | None = None) -> None:
        async def tell() -> None:
            await self.pass_on()
            levels = self.ledger.settle(changes, anyio.current_time())
            await self.pass_on()
            if heard is not None:
                heard(levels)

        self.tasks.start_soon(tell)

    def lower(self, *_ignored: object, **_also: object) -> None:
        raise NotImplementedError

    def left(self) -> float:
        """Give what remains for newcomers."""
        look = RateCharge("tenant:requests:a", 3.0, 1 / DAYS, 0.0)
        return self.ledger.take([look], anyio.current_time()).levels[0].level

    def there(self, key: str, capacity: float) -> float:
        """Give what is in a bucket, whoever it is held for."""
        bucket = self.ledger._buckets.get(key)
        return capacity if bucket is None else capacity - bucket.missing


def _limit(store: SlowStore) -> RateLimit:
    return RateLimit(store=store, requests_per_minute=60 / DAYS, window=3 * DAYS, max_wait=1_000 * DAYS)


@settings(max_examples=200)
@given(
    seed=st.integers(0, 2**32),
    processes=st.integers(1, 3),
    calls=st.integers(1, 25),
    cancelled=st.sampled_from([0.3, 0.8]),
    failed=st.sampled_from([0.0, 0.5]),
)
def test_who_comes_when_all_is_quiet_finds_what_is_left(
    seed: int, processes: int, calls: int, cancelled: float, failed: float
) -> None:
    async def main() -> None:
        rng = random.Random(seed)
        upstreams: list[Provider] = []
        doors: list[Door] = []

        async def call() -> None:
            await anyio.sleep(rng.random() * 0.2)
            with (
                contextlib.suppress(AttemptError),
                anyio.move_on_after(rng.random() * 0.03 if rng.random() < cancelled else 0.5),
            ):
                await rng.choice(doors)(tenant="a")

        async with anyio.create_task_group() as background:
            store = SlowStore(background, rng)
            for _ in range(processes):
                script = [
                    UNREACHABLE if rng.random() < failed else Outcome(verdict=Ending.SUCCESS)
                    for _ in range(99)
                ]
                upstreams.append(Provider(*script))
                doors.append(Door(_limit(store), provider=upstreams[-1]))
            async with anyio.create_task_group() as tasks:
                for _ in range(calls):
                    tasks.start_soon(call)
            await anyio.sleep(1)  # for what is still under way
            left = store.left()
            assert left > -1e-3, "a place is still held"
            for upstream in upstreams:
                upstream.script.clear()
            for _ in range(math.floor(left + 1e-3)):
                with anyio.fail_after(1):
                    await rng.choice(doors)(tenant="a")
            with anyio.move_on_after(1) as waits:
                await rng.choice(doors)(tenant="a")
            assert waits.cancelled_caught, "nothing is left"

    run_virtual(main)


@settings(max_examples=300)
@given(
    seed=st.integers(0, 2**32),
    calls=st.integers(4, 30),
    failed=st.sampled_from([0.3, 0.6]),
    tenants=st.sampled_from(["a", "abc"]),
    lost=st.sampled_from([0.0, 0.2]),
    on_error=st.sampled_from(["closed", "local"]),
)
def test_nobody_waits_while_there_is_something_that_their_process_gave_back(  # noqa: PLR0917 - all drawn
    seed: int, calls: int, failed: float, tenants: str, lost: float, on_error: OnStoreError
) -> None:
    async def main() -> None:
        rng = random.Random(seed)
        waiting: Counter[str] = Counter()

        async def call() -> None:
            await anyio.sleep(rng.random() * 0.2)
            tenant = rng.choice(tenants)
            waiting[tenant] += 1
            with (
                contextlib.suppress(AttemptError, StoreUnavailableError),
                anyio.move_on_after(rng.random() * 0.03 if rng.random() < 0.4 else math.inf),
            ):
                await door(tenant=tenant)
            waiting[tenant] -= 1

        async with anyio.create_task_group() as background:
            store = SlowStore(background, rng)
            store.guard, store.lost = StoreGuard("slow", on_error, clock=anyio.current_time), lost
            script = [
                UNREACHABLE if rng.random() < failed else Outcome(verdict=Ending.SUCCESS) for _ in range(99)
            ]
            both = [
                Limit(key="tenant", requests_per_minute=60 / DAYS, window=3 * DAYS),
                Limit(key=None, requests_per_minute=60 / DAYS, window=5 * DAYS),
            ]
            limit = RateLimit(store=store, limits=both, max_wait=1_000 * DAYS)
            door = Door(limit, provider=Provider(*script, duration=0.01))
            async with anyio.create_task_group() as tasks:
                for _ in range(calls):
                    tasks.start_soon(call)
                await anyio.sleep(2)  # all have come, and nothing is under way any more
                store.lost = 0.0
                await anyio.sleep(60)  # until it is asked again where it was given up on
                with anyio.move_on_after(1), contextlib.suppress(AttemptError):
                    await door(tenant="who finds out that it is back")
                await anyio.sleep(1)
                for tenant in filter(waiting.__getitem__, tenants):
                    own, shared = (
                        store.there(f"tenant:requests:{tenant}", 3),
                        store.there("account:requests:!none", 5),
                    )
                    assert min(own, shared) < 1, (
                        f"{tenant} waits, {own:g} of its own and {shared:g} of all are there"
                    )
                tasks.cancel_scope.cancel()

    run_virtual(main)
