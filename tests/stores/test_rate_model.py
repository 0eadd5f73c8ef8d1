"""The scripts against the reference model, step by step, on a clock that the test turns.

`clock="client"` sends the time along, so that refills, pauses and places in line are compared exactly: any sequence
of takes, settlements, cancels and pauses ends in the same levels on the server as in `RateLedger`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
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
            self.taken: list[list[RateCharge]] = []

        def charges(self, keys: Sequence[str], share: float) -> list[RateCharge]:
            return [
                RateCharge(key, *SIZES[key], SIZES[key][0] * share, key != "account", self.held.get(key, 0.0))
                for key in keys
            ]

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
            theirs = run(store.rates.take(self.account, charges, most_wait=most_wait, mode=mode))
            ours = self.ledger.take(charges, now[0], most_wait=most_wait, mode=mode)
            alike(theirs, ours)
            for key, held in zip(keys, ours.held, strict=True):
                self.held[key] = held
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
            said = told(lambda hear: store.rates.settle(self.account, changes, hear))
            levels_alike(said, self.ledger.settle(changes, now[0]))

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
