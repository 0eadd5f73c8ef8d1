"""Whose turn it is in a rate queue: who leaves takes no turn from those that stay, and nobody is passed for ever."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from itertools import count
from math import inf
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient_llm.core.quota import Reservation
from resilient_llm.core.rate_queue import RateQueue
from resilient_llm.core.token_bucket import TokenBucket
from resilient_llm.core.waiting_room import Ticket, TicketState, WaitingRoom

TENANTS = "abc"
LANES = "xy"
PLACES = 12
CAPACITY = 20.0


class Line:
    """A rate queue at a dry account, which serves about a call a second, and the names of those it served."""

    def __init__(self) -> None:
        self.queue = RateQueue[str](lambda: WaitingRoom(PLACES), PLACES, displaces=True)
        self.account = TokenBucket(CAPACITY, 1.0, 0.0)
        self.account.take(CAPACITY, 0.0)
        self.models = {lane: TokenBucket(1e9, 1e9, 0.0) for lane in LANES}
        self.now = 0.0
        self.names: dict[Ticket[str], str] = {}
        self.served: list[str] = []

    def come(
        self,
        name: str,
        *,
        lane: str = "x",
        amount: float = 1.0,
        priority: int = 0,
        deadline: float = inf,
    ) -> Ticket[str] | None:
        """Queue a call; its tenant is what stands before the dot."""
        model = self.models.setdefault(lane, TokenBucket(1e9, 1e9, 0.0))
        charges = [(model, amount), (self.account, amount)]
        ticket = self.queue.push(
            lane,
            name.partition(".")[0],
            Reservation(charges),
            self.now,
            cost=amount,
            priority=priority,
            deadline=deadline,
        )
        if ticket is not None:
            self.names[ticket] = name
            self.note(self.queue.take_displaced())
            self.note(self.queue.advance(self.now))
        return ticket

    def leave(self, ticket: Ticket[str]) -> None:
        """Give a call up; nothing happens when it does not wait."""
        if self.queue.cancel(ticket):
            del self.names[ticket]
        self.note(self.queue.give_back(ticket.tenant, self.now))

    def note(self, over: list[Ticket[str]]) -> None:
        for ticket in over:
            name = self.names.pop(ticket)
            if ticket.state is TicketState.GRANTED:
                self.served.append(name)

    def wait(self, seconds: float) -> None:
        until = self.now + seconds
        while self.queue.next_at <= until:
            self.now = self.queue.next_at
            self.note(self.queue.advance(self.now))
        self.now = until

    def waiting(self) -> list[tuple[str, Ticket[str]]]:
        return [(name, ticket) for ticket, name in self.names.items()]


@dataclass(frozen=True)
class Come:
    """A call comes and stays."""

    tenant: str
    lane: str
    amount: float


@dataclass(frozen=True)
class ComeAndGo:
    """A call comes to the tenant and lane of one that waits, and goes again at once."""

    who: int
    priority: int
    deadline: float


@dataclass(frozen=True)
class Wait:
    """Time passes."""

    seconds: float


EVENTS = st.lists(
    st.one_of(
        st.builds(
            Come,
            tenant=st.sampled_from(TENANTS),
            lane=st.sampled_from(LANES),
            amount=st.sampled_from([1.0, 1.0, 3.0]),
        ),
        st.builds(Wait, seconds=st.sampled_from([0.25, 1.0, 4.0])),
        st.builds(
            ComeAndGo,
            who=st.integers(0, PLACES),
            priority=st.sampled_from([0, 0, -1, 1]),
            deadline=st.sampled_from([inf, 5.0, 0.0]),
        ),
    ),
    max_size=60,
)


def order(events: list[Come | ComeAndGo | Wait], *, leavers: bool) -> list[str]:
    """Say in which order those are served that stay."""
    line, numbers = Line(), count()
    for event in events:
        if isinstance(event, Come):
            if len(line.queue) < PLACES - 1:
                line.come(
                    f"{event.tenant}.{next(numbers)}.{event.lane}", lane=event.lane, amount=event.amount
                )
        elif isinstance(event, Wait):
            line.wait(event.seconds)
        elif leavers and (waiting := line.waiting()):
            name, ticket = waiting[event.who % len(waiting)]
            leaver = line.come(
                f"{ticket.tenant}.leaver",
                lane=name[-1],
                amount=CAPACITY,  # more than there ever is while somebody waits
                priority=event.priority,
                deadline=line.now + event.deadline,
            )
            assert leaver is not None
            line.leave(leaver)
    line.wait(1_000.0)
    assert not line.names
    return line.served


@settings(max_examples=300)
@given(EVENTS)
def test_calls_that_come_and_leave_change_nothing_for_those_that_stay(
    events: list[Come | ComeAndGo | Wait],
) -> None:
    assert order(events, leavers=True) == order(events, leavers=False)


@dataclass(frozen=True)
class Second:
    """What comes and goes in a second in which one call is served."""

    newcomers: int
    returning: bool
    leavers: tuple[tuple[int, int, float], ...]  # of which tenant, with which priority and patience


SECONDS = st.lists(
    st.builds(
        Second,
        newcomers=st.sampled_from([0, 1, 1, 1, 2]),
        returning=st.booleans(),
        leavers=st.lists(
            st.tuples(
                st.sampled_from([0, 0, 1_000]),
                st.sampled_from([0, 0, -1, 1]),
                st.sampled_from([inf, 5.0, 0.0]),
            ),
            max_size=2,
        ).map(tuple),
    ),
    min_size=1,
    max_size=40,
)


class Crowd:
    """One tenant that always has a call waiting, and whoever comes beside it; counts how many are served before it."""

    def __init__(self, lanes: str) -> None:
        self.line = Line()
        self.lanes = lanes
        self.calls = count()
        self.newest = 0
        self.waiting = 0
        self.passed = 0

    def come(self, number: int, **options: Any) -> Ticket[str] | None:
        lane = {"one": "x", "two": LANES[number % 2], "each its own": str(number)}[self.lanes]
        return self.line.come(f"{number}.{next(self.calls)}", lane=lane, **options)

    def tenants(self) -> set[str]:
        return {ticket.tenant for ticket in self.line.names}

    def begin(self, second: Second) -> None:
        for _ in range(second.newcomers):
            if len(self.tenants()) < 6:
                self.newest += 1
                self.come(self.newest)
        if second.returning and self.newest and len(self.line.queue) < PLACES - 1:
            self.come(self.newest)
        for number, priority, patience in second.leavers:
            deadline = self.line.now + patience
            leaver = self.come(number, amount=CAPACITY, priority=priority, deadline=deadline)
            if leaver is not None:
                self.line.leave(leaver)

    def pass_by(self, most: int) -> None:
        self.waiting = max(self.waiting, len(self.tenants()))
        before = len(self.line.served)
        self.line.wait(1.0)
        for name in self.line.served[before:]:
            if name.startswith("0."):
                self.waiting = self.passed = 0
            else:
                self.passed += 1
                assert self.passed <= most * self.waiting
        if "0" not in self.tenants():
            self.come(0)


@settings(max_examples=100)
@given(SECONDS, st.integers(0, 5), st.sampled_from(["one", "two", "each its own"]))
def test_nobody_is_passed_by_for_ever_whoever_comes_and_leaves(
    seconds: list[Second], before: int, lanes: str
) -> None:
    """The next call of a tenant waits for twice as many as there are tenants waiting, at most.

    Three times as many where several lanes have several tenants each.
    """
    crowd = Crowd(lanes)
    crowd.begin(Second(before, returning=False, leavers=()))
    for _ in range(3):
        crowd.come(0)
    for second in itertools.islice(itertools.cycle(seconds), 60):
        crowd.begin(second)
        crowd.pass_by(3 if lanes == "two" else 2)


@pytest.mark.parametrize("end", ["cancelled", "expired", "displaced"])
def test_a_call_is_in_turn_whatever_becomes_of_others_of_its_tenant(end: str) -> None:
    line = Line()
    line.come("a.0")
    line.come("b.0")
    for number in range(40):
        line.come(f"n{number}.0")
        if end == "displaced":
            while len(line.queue) < PLACES:
                line.come("b.more")
            line.come(f"m{number}.0")
            assert "b.0" in [*line.names.values(), *line.served]
        else:
            leaver = line.come(
                "b.more",
                amount=CAPACITY,
                priority=int(end == "expired"),
                deadline=line.now + (5.0 if end == "expired" else inf),
            )
            assert leaver is not None
            if end == "cancelled":
                line.leave(leaver)
        line.wait(1.0)
    assert line.served[:2] == ["a.0", "b.0"]


def test_newcomers_without_end_do_not_pass_by_one_who_was_served_before() -> None:
    line = Line()
    for name in ("a.0", "b.0", "b.1"):
        line.come(name)
    for number in range(40):
        line.come(f"n{number}.0")
        line.wait(1.0)
    assert "b.1" in line.served[: 2 * 4 + 1]


def test_a_lane_is_in_turn_again_when_a_tenant_comes_back_to_it_that_was_served_less() -> None:
    line = Line()
    line.models["z"] = TokenBucket(1.0, 1e-6, 0.0)
    line.models["z"].take(1.0, 0.0)
    line.come("a.0", lane="z")  # waits for ever, so that a is known
    for name, lane, amount in [("c.0", "x", 10.0), ("c.1", "x", 10.0), ("b.0", "y", 5.0), ("b.1", "y", 5.0)]:
        line.come(name, lane=lane, amount=amount)
    line.wait(15.0)
    assert line.served == ["c.0", "b.0"]
    gone = line.come("a.1", lane="x")
    assert gone is not None
    line.leave(gone)
    line.come("a.2", lane="x")
    line.wait(10.0)
    assert line.served[2:] == ["a.2", "b.1"]


def test_who_waits_in_several_lanes_is_served_where_nobody_is_before_it() -> None:
    """In the other lane its turn would be used by another tenant, which was served more."""
    line = Line()
    line.models["z"] = TokenBucket(1.0, 1e-6, 0.0)
    line.models["z"].take(1.0, 0.0)
    line.come("a.0", lane="z")  # waits for ever, so that a is known
    for name, lane in [("b.0", "y"), ("c.0", "x"), ("b.1", "y")]:
        line.come(name, lane=lane, amount=5.0)
    line.wait(10.0)
    assert line.served == ["b.0", "c.0"]
    for name, lane in [("a.1", "y"), ("a.2", "x"), ("a.3", "x")]:  # behind b.1, and behind nobody
        line.come(name, lane=lane)
    line.wait(10.0)
    assert line.served[2:] == ["a.2", "a.3", "b.1", "a.1"]
