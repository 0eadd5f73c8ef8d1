"""Places in line: one that was granted is used, one of the dead is forgotten, and news of the store is heard."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_llm import AttemptError, Limit, RateLimit
from resilient_llm.core.shared_rate import (
    Change,
    RateCharge,
    RateDecision,
    RateLedger,
    RateLevel,
    Verdict,
)
from resilient_llm.outcome import Outcome
from resilient_llm.outcome import Verdict as Ending
from resilient_llm.policies._shared_buckets import BucketView
from resilient_llm.stores import MemoryStore
from resilient_llm.stores.memory import MemoryRates
from resilient_llm.stores.protocol import HearLevels
from tests.support import Door, Provider

CHARGE = RateCharge("k", 1.0, 4.0, 1.0, own=True)


class SlowRates(MemoryRates):
    """Decide at once, and take longer to say so than anybody was allowed to wait."""

    async def take(self, account: str, charges: Sequence[RateCharge], **options: Any) -> RateDecision:
        decision = await super().take(account, charges, **options)
        await anyio.sleep(0.02)
        return decision


@pytest.mark.anyio
async def test_a_place_is_used_however_long_the_answer_took() -> None:
    store = MemoryStore()
    store.rates = SlowRates()
    first, second = (
        Door(RateLimit(store=store, requests_per_minute=60, window=1, max_wait=0), provider=Provider())
        for _ in range(2)
    )
    began = anyio.current_time()
    await first(tenant="a")
    await anyio.sleep_until(began + 0.995)
    await second(tenant="a")
    assert anyio.current_time() - began < 1.1


def test_places_of_the_dead_are_forgotten_while_others_keep_places() -> None:
    ledger = RateLedger()
    assert ledger.take([CHARGE], 0.0).verdict is Verdict.TAKEN
    for _ in range(3):
        assert ledger.take([CHARGE], 0.0, most_wait=30.0, mode="h").verdict is Verdict.HELD
    now, mine, grants = 0.1, CHARGE, []
    while now < 12.0:
        decision = ledger.take([mine], now, most_wait=30.0, mode="h")
        mine = CHARGE._replace(held=decision.held[0], turn=decision.turn(0))
        if decision.verdict is Verdict.TAKEN:
            grants.append(now)
            now += 0.001
        else:
            now += decision.again + 1e-6
    assert sum(at >= 8.0 for at in grants) >= 15


@pytest.mark.parametrize("wait", [0.25, 20.0])
def test_places_of_the_living_are_not_forgotten_before_their_time(wait: float) -> None:
    charge = CHARGE._replace(rate=1 / wait)
    ledger = RateLedger()
    ledger.take([charge], 0.0)
    first = ledger.take([charge], 0.0, most_wait=100.0, mode="h")
    assert first.again == pytest.approx(wait)
    # Newcomers find it there until its turn, whatever else is looked at meanwhile.
    for step in range(100):
        at = wait * step / 100
        assert ledger.take([charge], at).wait == pytest.approx(2 * wait - at)
    assert ledger.take([charge._replace(held=1.0, turn=first.turn(0))], wait + 1e-6).verdict is Verdict.TAKEN


class BusyRates(MemoryRates):
    """Decide at once, and hand each answer over when it is told to: in another order, or to nobody any more."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: list[anyio.Event] = []
        self.undos: list[Callable[[], None]] = []
        self.asked = 0
        self.reached = anyio.Event()
        self.reached.set()

    def hold_back(self) -> anyio.Event:
        """Hold the answer back that is given next."""
        self.answers.append(anyio.Event())
        return self.answers[-1]

    async def take(
        self,
        account: str,
        charges: Sequence[RateCharge],
        *,
        undone: HearLevels | None = None,
        **options: Any,
    ) -> RateDecision:
        self.asked += 1
        await self.reached.wait()
        decision = await super().take(account, charges, **options)
        if self.answers:
            answer = self.answers.pop(0)
            try:
                await answer.wait()
            except BaseException:
                # As a server does: what it granted is given back once it turns out that nobody wants it.
                back = charges[0].amount if decision.verdict is Verdict.TAKEN else 0.0
                undo = Change(*charges[0][:3], back=back, freed=decision.held[0], turn=decision.turn(0))
                self.undos.append(lambda: self.settle(account, [undo], undone))
                raise
        return decision


def busy(*script: Any, **options: Any) -> tuple[BusyRates, Door]:
    store = MemoryStore()
    store.rates = rates = BusyRates()
    return rates, Door(RateLimit(store=store, **options), provider=Provider(*script))


ONE_IN_100_S = {"requests_per_minute": 0.6, "window": 100, "max_wait": 9_000}


@pytest.mark.anyio
async def test_who_keeps_a_place_goes_as_soon_as_what_a_cancelled_call_had_taken_is_back() -> None:
    rates, limited = busy(**ONE_IN_100_S)
    began = anyio.current_time()
    async with anyio.create_task_group() as group:
        rates.hold_back()
        with anyio.move_on_after(1):
            await limited(tenant="a")  # taken, and nobody there to have it
        group.start_soon(partial(limited, tenant="a"))
        await anyio.sleep(1)
        rates.undos.pop()()
    assert anyio.current_time() - began < 3


@pytest.mark.anyio
async def test_an_answer_that_is_older_than_what_was_heard_meanwhile_puts_nobody_to_sleep() -> None:
    rates, limited = busy(**ONE_IN_100_S)
    began = anyio.current_time()
    async with anyio.create_task_group() as group:
        rates.hold_back()
        with anyio.move_on_after(1):
            await limited(tenant="a")
        answer = rates.hold_back()
        group.start_soon(partial(limited, tenant="a"))
        await anyio.sleep(1)
        rates.undos.pop()()  # decided after the answer, and heard before it
        answer.set()
    assert anyio.current_time() - began < 3


@pytest.mark.anyio
async def test_who_keeps_a_place_finds_what_another_process_has_given_back() -> None:
    rates, limited = busy(**ONE_IN_100_S)
    await limited(tenant="a")
    charge = RateCharge("tenant:requests:a", 1.0, 0.01, 1.0, own=True)
    asked = rates.asked
    began = anyio.current_time()
    async with anyio.create_task_group() as group:
        group.start_soon(partial(limited, tenant="a"))
        await anyio.sleep(30)
        rates.settle("rate_limit:a", [Change(*charge[:3], back=1.0)])
    assert anyio.current_time() - began < 30 + 100 / 8 + 0.1
    await limited(tenant="a")
    assert anyio.current_time() - began == pytest.approx(130, abs=13)
    assert rates.asked - asked < 20


@pytest.mark.anyio
async def test_nobody_waits_for_what_only_this_process_believes() -> None:
    rates, limited = busy(**ONE_IN_100_S)
    began = anyio.current_time()
    rates.hold_back()
    with anyio.move_on_after(1):
        await limited(tenant="a")
    with anyio.move_on_after(1):
        await limited(
            tenant="a"
        )  # keeps a place and gives it up: the process has heard that there is nothing
    charge = RateCharge("tenant:requests:a", 1.0, 0.01, 1.0, own=True)
    rates.settle("rate_limit:a", [Change(*charge[:3], back=1.0)])  # another process's doing
    await limited(tenant="a")
    assert anyio.current_time() - began < 3
    asked = rates.asked
    async with anyio.create_task_group() as group:
        for _ in range(5):
            group.start_soon(partial(limited, tenant="a"))
        await anyio.sleep(1)
        assert rates.asked == asked + 1  # the others wait behind whoever keeps the place
        group.cancel_scope.cancel()


@pytest.mark.anyio
async def test_who_waits_behind_a_call_that_never_reached_the_store_goes_when_it_is_cancelled() -> None:
    rates, limited = busy(**ONE_IN_100_S)
    began = anyio.current_time()
    rates.reached = anyio.Event()
    async with anyio.create_task_group() as group:
        with anyio.move_on_after(1):
            async with anyio.create_task_group() as first:
                first.start_soon(partial(limited, tenant="a"))
                await anyio.wait_all_tasks_blocked()
                group.start_soon(partial(limited, tenant="a"))
        rates.reached.set()
    assert anyio.current_time() - began < 3


@pytest.mark.anyio
async def test_who_keeps_a_place_goes_when_another_that_would_have_taken_it_never_reached_the_store() -> None:
    fails = anyio.Event()
    never_sent = Outcome(verdict=Ending.FAILURE, error_type="connection_error", retryable=True)
    limits = [
        Limit(key="tenant", requests_per_minute=60),
        Limit(key=None, requests_per_minute=0.6, window=100),
    ]
    rates, limited = busy([fails, never_sent], limits=limits, max_wait=9_000)
    began = anyio.current_time()

    async def first() -> None:
        with pytest.raises(AttemptError):
            await limited(tenant="a")

    async with anyio.create_task_group() as group:
        group.start_soon(first)
        await anyio.wait_all_tasks_blocked()
        group.start_soon(partial(limited, tenant="b"))
        await anyio.wait_all_tasks_blocked()
        rates.reached = anyio.Event()
        with anyio.move_on_after(1):
            async with anyio.create_task_group() as others:
                others.start_soon(partial(limited, tenant="c"))
                await anyio.wait_all_tasks_blocked()
                fails.set()
        rates.reached.set()
    assert anyio.current_time() - began < 3


@pytest.mark.anyio
async def test_a_place_that_is_given_up_is_heard_of_by_those_who_wait_behind_it() -> None:
    _, limited = busy(**ONE_IN_100_S)
    await limited(tenant="a")
    began = anyio.current_time()
    async with anyio.create_task_group() as group:
        with anyio.move_on_after(1):
            async with anyio.create_task_group() as first:
                first.start_soon(partial(limited, tenant="a"))
                await anyio.wait_all_tasks_blocked()
                group.start_soon(partial(limited, tenant="a"))  # behind it, in 200 s
    assert anyio.current_time() - began == pytest.approx(100, abs=0.1)


@given(
    amounts=st.lists(st.integers(1, 5), min_size=1, max_size=8),
    backs=st.lists(st.integers(1, 5), max_size=8),
    data=st.data(),
)
def test_whatever_the_order_in_which_answers_come_the_view_is_right_in_the_end(
    amounts: list[int], backs: list[int], data: st.DataObject
) -> None:
    capacity, ledger, view = 30.0, RateLedger(), BucketView(30.0, 1e-9, 0.0)
    asks = [RateCharge("k", capacity, 1e-9, float(amount)) for amount in amounts]
    for ask in asks:  # all are on their way
        view.take(ask.amount, 0.0)
        view.pending += ask.amount
    changes = [Change("k", capacity, 1e-9, float(back)) for back in backs]
    work: list[RateCharge | Change] = data.draw(st.permutations([*asks, *changes]))
    answers: list[tuple[RateLevel, float]] = []
    for at, each in enumerate(work):
        if isinstance(each, RateCharge):
            answers.append((ledger.take([each], at * 1e-6, mode="d", most_wait=1e12).levels[0], each.amount))
        else:
            answers.append((ledger.settle([each], at * 1e-6)[0], 0.0))
    for level, answered in data.draw(st.permutations(answers)):
        view.pending -= answered
        view.hear(level, 0.0, answered=answered)
    assert view.level(0.0) == pytest.approx(answers[-1][0].level, abs=1e-6)


def test_a_clock_of_the_store_that_was_far_ahead_makes_nobody_deaf() -> None:
    view = BucketView(10.0, 1.0, 0.0)
    view.hear(RateLevel(3.0, at=1e9), 0.0)
    view.hear(RateLevel(7.0, at=1e9 - 5), 0.0)
    assert view.level(0.0) == 3.0
    view.hear(RateLevel(7.0, at=5e8), 0.0)
    assert view.level(0.0) == 7.0
