"""The scripts on leases against the reference model, step by step, on a clock that the test turns.

`clock="client"` sends the time along, so that leases, places in line and votes end at the same moment in both: any
sequence of requests, releases and renewals has the same answers from the server as from `LeaseTable`, and the sets on
the server hold what the table does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from math import inf
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from resilient_llm.core.leases import LeaseLimit, LeaseTable
from resilient_llm.stores import RedisStore
from resilient_llm.stores._redis_scripts import Script

KEYS = ("one", "two", "three")
LASTS = 15.0
PLACE_LASTS = 3.0


@pytest.fixture
def loop() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture
def machine(server: Any, loop: asyncio.Runner) -> Iterator[type[RuleBasedStateMachine]]:  # noqa: C901 - a class
    now = [1_000_000.0]
    store = RedisStore(server.url, timeout=5.0, on_store_error="closed")
    scripts = {
        name: Script.load("_clock", "_lease", f"lease_{name}") for name in ("acquire", "release", "renew")
    }
    vote = Script.load("_clock", "_lease", "lease_vote")

    def run(script: Script, keys: Sequence[str], *args: object) -> Any:
        async def ask() -> Any:
            return await store.runner.run(script, keys, tuple(str(arg) for arg in args))

        return loop.run(ask())

    class Model(RuleBasedStateMachine):
        @initialize()
        def begin(self) -> None:
            self.table = LeaseTable()
            self.tag = f"{{{uuid4().hex}}}:"
            self.serial = 0
            self.out: list[tuple[str, list[LeaseLimit]]] = []

        def keys(self, limits: Sequence[LeaseLimit]) -> list[str]:
            return [self.tag + each for key, _ in limits for each in (key, f"{key}:queue", f"{key}:seen")]

        @rule(seconds=st.sampled_from([0.001, 0.5, 1.0, 2.9, 3.0, 7.0, 14.9, 15.0, 40.0]))
        def time_passes(self, seconds: float) -> None:
            now[0] = round(now[0] + seconds, 3)

        @rule(
            keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=2, unique=True),
            most=st.integers(0, 4),
            place=st.sampled_from(["a.1", "b.1", "c.1"]),
            wait=st.booleans(),
        )
        def acquire(self, keys: list[str], most: int, place: str, wait: bool) -> None:
            self.serial += 1
            name = f"x.{self.serial}"
            limits = [LeaseLimit(key, most) for key in keys]
            place_lasts = PLACE_LASTS if wait else 0.0
            ours = self.table.acquire(name, limits, now[0], lasts=LASTS, place=place, place_lasts=place_lasts)
            theirs = run(
                scripts["acquire"],
                self.keys(limits),
                name,
                place,
                LASTS,
                place_lasts,
                now[0],
                *([most] * len(keys)),
            )
            refused, held, again = theirs
            assert (keys[refused - 1] if refused else None) == ours.refused
            assert held == ours.held
            if ours.refused is None:
                self.out.append((name, limits))
            else:
                assert (inf if again < 0 else again / 1e6) == pytest.approx(ours.again, abs=1e-4)

        @rule(index=st.integers(0, 20), place=st.sampled_from(["", "a.1", "b.1"]), lease=st.booleans())
        def release(self, index: int, place: str, lease: bool) -> None:
            if not self.out:
                return
            name, limits = self.out[index % len(self.out)]
            if lease:
                self.out.remove((name, limits))
            name = name if lease else ""
            woken = self.table.release(limits, now[0], lease=name, place=place)
            reply = run(
                scripts["release"],
                self.keys(limits),
                name,
                place,
                "a",
                "none:",
                now[0],
                *(most for _, most in limits),
            )
            ours = [f"{each.place} {self.tag}{each.key}" for each in woken if each.place.startswith("a.")]
            assert [each.decode() for each in reply] == ours

        @rule(count=st.integers(1, 5))
        def renew(self, count: int) -> None:
            leases = [(key, name) for name, limits in self.out[:count] for key, _ in limits]
            if leases:
                lost = self.table.renew(leases, now[0], lasts=LASTS)
                reply = run(
                    scripts["renew"],
                    [self.tag + key for key, _ in leases],
                    LASTS,
                    now[0],
                    *(name for _, name in leases),
                )
                assert [leases[index - 1] for index in reply] == lost

        @rule(voter=st.sampled_from(["a", "b", "c"]), number=st.sampled_from([1.0, 7.0, 20.25]))
        def vote(self, voter: str, number: float) -> None:
            mean = self.table.vote("v", voter, number, now[0], lasts=LASTS)
            reply = run(vote, [self.tag + "votes", self.tag + "voters"], voter, number, LASTS, now[0])
            assert float(reply) == pytest.approx(mean)

        @invariant()
        def both_hold_the_same(self) -> None:
            if not hasattr(self, "table"):
                return
            with server.admin as admin:
                for key in KEYS:
                    assert admin.zcard(self.tag + key) == self.table.held(key)
                    assert admin.pttl(self.tag + key) != -1, "a key without an end"

    yield Model
    loop.run(store.aclose())


def test_the_scripts_keep_the_same_table(machine: type[RuleBasedStateMachine]) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=25,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=[HealthCheck.function_scoped_fixture],
        ),
    )
