"""The scripts against the reference model, step by step, on a clock that the test turns.

`clock="client"` sends the time along, so that refills, pauses and places in line are compared exactly: any sequence
of takes, settlements, cancels and pauses ends in the same levels on the server as in `RateLedger`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from random import Random
from typing import Any, TypeVar
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from resilient_llm.core.shared_rate import (
    Change,
    RateCharge,
    RateDecision,
    RateLedger,
    RateLevel,
    TakeMode,
    Verdict,
)
from resilient_llm.stores import RedisStore

Result = TypeVar("Result")
Named = TypeVar("Named", RateCharge, Change)

SIZES = {"requests": (3.0, 0.5), "tokens": (1_000.0, 33.3), "burst": (1.0, 1.0), "account": (5.0, 0.1)}
KEYS = st.lists(st.sampled_from(sorted(SIZES)), min_size=1, unique=True)
NEAR = 1e-5


@pytest.fixture
def loop() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture
def machine(  # noqa: C901 - a class
    server: Any, loop: asyncio.Runner
) -> Iterator[type[RuleBasedStateMachine]]:
    now = [1_000_000.0]
    store = RedisStore(server.url, clock="client", timeout=5.0, on_store_error="closed")
    store.rates._clock = lambda: now[0]

    def told(tell: Callable[[Callable[[Sequence[RateLevel]], None]], None]) -> Sequence[RateLevel]:
        async def wait() -> Sequence[RateLevel]:
            heard: asyncio.Future[Sequence[RateLevel]] = asyncio.get_running_loop().create_future()
            tell(heard.set_result)
            return await heard

        return loop.run(wait())

    def run(awaitable: Awaitable[Result]) -> Result:
        async def wait() -> Result:
            return await awaitable

        return loop.run(wait())

    class Model(RuleBasedStateMachine):
        @initialize()
        def begin(self) -> None:
            self.account = uuid4().hex
            self.ledger = RateLedger()
            self.held: dict[str, float] = {}
            self.turns: dict[
                str, tuple[float, float]
            ] = {}  # theirs and ours, which differ by what is rounded
            self.taken: list[list[RateCharge]] = []

        def charges(self, keys: Sequence[str], share: float) -> list[RateCharge]:
            return [
                RateCharge(key, *SIZES[key], SIZES[key][0] * share, key != "account", self.held.get(key, 0.0))
                for key in keys
            ]

        def with_turns(self, whose: int, named: Sequence[Named]) -> list[Named]:
            return [each._replace(turn=self.turns.get(each.key, (0.0, 0.0))[whose]) for each in named]

        @rule(seconds=st.sampled_from([0.001, 0.3, 1.0, 1.7, 20.0, 100.0, -5.0, -90.0]))
        def time_passes(self, seconds: float) -> None:
            now[0] += seconds

        @rule(
            keys=KEYS,
            share=st.sampled_from([0.0, 0.2, 0.5, 1.0, 1.5]),
            most_wait=st.sampled_from([0.0, 1.0, 30.0]),
            mode=st.sampled_from(["n", "h", "d"]),
        )
        def take(self, keys: list[str], share: float, most_wait: float, mode: TakeMode) -> None:
            charges = self.charges(keys, share)
            asked = self.with_turns(0, charges)
            theirs = run(store.rates.take(self.account, asked, most_wait=most_wait, mode=mode))
            asked = self.with_turns(1, charges)
            ours = self.ledger.take(asked, now[0], most_wait=most_wait, mode=mode)
            alike(theirs, ours)
            for index, (key, held) in enumerate(zip(keys, ours.held, strict=True)):
                self.held[key] = held
                self.turns[key] = theirs.turn(index), ours.turn(index)
            if ours.verdict is Verdict.TAKEN:
                self.taken.append(charges)

        @rule(used=st.sampled_from([0.0, 0.3, 1.0, 2.5]), place=st.booleans())
        def settle(self, used: float, place: bool) -> None:
            if not self.taken:
                return
            changes = [
                Change(
                    charge.key,
                    charge.capacity,
                    charge.rate,
                    charge.amount * (1 - used),
                    self.held.pop(charge.key, 0.0) if place else 0.0,
                )
                for charge in self.taken.pop()
            ]
            theirs = self.with_turns(0, changes)
            said = told(lambda hear: store.rates.settle(self.account, theirs, hear))
            levels_alike(said, self.ledger.settle(self.with_turns(1, changes), now[0]))

        @rule(keys=KEYS, share=st.sampled_from([-3.0, 0.0, 0.4, 9.0]), pause=st.sampled_from([0.0, 2.0]))
        def lower(self, keys: list[str], share: float, pause: float) -> None:
            charges = self.charges(keys, share)
            pauses = [pause] * len(keys)
            said = told(lambda hear: store.rates.lower(self.account, charges, pauses, hear))
            levels_alike(said, self.ledger.lower(charges, pauses, now[0]))

    yield Model
    loop.run(store.aclose())


def levels_alike(theirs: Sequence[RateLevel], ours: Sequence[RateLevel]) -> None:
    for other, mine in zip(theirs, ours, strict=True):
        assert other.level == pytest.approx(mine.level, abs=NEAR * 100)
        assert other.pause == pytest.approx(mine.pause, abs=NEAR)


def alike(theirs: RateDecision, ours: RateDecision) -> None:
    assert theirs.verdict is ours.verdict
    assert theirs.wait == pytest.approx(ours.wait, abs=NEAR)
    assert theirs.again == pytest.approx(ours.again, abs=NEAR)
    assert list(theirs.waits) == pytest.approx(list(ours.waits), abs=NEAR)
    assert list(theirs.held) == list(ours.held)
    levels_alike(theirs.levels, ours.levels)


def test_the_scripts_do_what_the_reference_does(machine: type[RuleBasedStateMachine]) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=40,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
        ),
    )


@pytest.mark.parametrize("seed", range(3))
def test_places_are_kept_and_forgotten_as_by_the_reference(
    seed: int, server: Any, loop: asyncio.Runner
) -> None:
    rng, now, ledger = Random(seed), 1_000_000.0, RateLedger()
    store = RedisStore(server.url, clock="client", timeout=5.0, on_store_error="closed")
    store.rates._clock = lambda: now
    places: list[
        tuple[list[RateCharge], list[RateCharge]]
    ] = []  # as the server knows them, and as the ledger

    async def ask(theirs: list[RateCharge], ours: list[RateCharge]) -> None:
        said = await store.rates.take("account", theirs, most_wait=60.0, mode="h")
        expected = ledger.take(ours, now, most_wait=60.0, mode="h")
        alike(said, expected)
        if expected.verdict is Verdict.HELD:
            places.append((back_for(theirs, said), back_for(ours, expected)))

    def back_for(charges: list[RateCharge], decision: RateDecision) -> list[RateCharge]:
        return [
            charge._replace(held=held, turn=decision.turn(at))
            for at, (charge, held) in enumerate(zip(charges, decision.held, strict=True))
        ]

    async def go() -> None:
        nonlocal now
        for _ in range(400):
            now += rng.choice((0.0, 0.1, 0.7, 2.0))
            place = rng.randrange(len(places)) if places else None
            what = rng.random()
            if place is None or what < 0.35:
                keys = rng.sample(("requests", "account"), rng.randrange(1, 3))
                charges = [RateCharge(key, *SIZES[key], 1.0) for key in keys]
                await ask(charges, charges)
            elif what < 0.8:
                await ask(*places.pop(place))
            elif what < 0.9:
                theirs, ours = (
                    [Change(*each[:3], freed=each.held, turn=each.turn) for each in charges]
                    for charges in places.pop(place)
                )
                heard: asyncio.Future[Sequence[RateLevel]] = asyncio.get_running_loop().create_future()
                store.rates.settle("account", theirs, heard.set_result)
                levels_alike(await heard, ledger.settle(ours, now))
            else:
                places.pop(place)  # dies

    try:
        loop.run(go())
    finally:
        loop.run(store.aclose())
