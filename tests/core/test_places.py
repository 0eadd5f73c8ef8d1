"""A full room: a tenant with fewer places than its share gets one, of a tenant with more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient_llm.core.places import is_within_share, who_makes_way
from resilient_llm.core.quota import Reservation
from resilient_llm.core.rate_queue import RateQueue
from resilient_llm.core.slots import AcquireResult, Slots
from resilient_llm.core.ticket import Ticket, TicketState
from resilient_llm.core.token_bucket import TokenBucket
from resilient_llm.core.waiting_room import WaitingRoom

PLACES = 8
WEIGHTS = {"a": 1.0, "b": 1.0, "c": 2.0, "d": 0.25}
TENANTS = st.sampled_from("abcde")
AGEING = 2.0


def weight(tenant: str) -> float:
    return WEIGHTS.get(tenant, 1.0)


def share(tenant: str, waiting: Mapping[str, int]) -> float:
    """Give a tenant's share of the places, among those that have calls in the room and itself."""
    return PLACES * weight(tenant) / sum(weight(each) for each in {*waiting, tenant})


def room() -> WaitingRoom[str]:
    return WaitingRoom(PLACES, weights=WEIGHTS, ageing=AGEING, credit=3, displaces=True)


class Checked:
    """What any full room must do, told from outside: before and after each call that comes."""

    def __init__(self) -> None:
        self.waiting: list[Ticket[str]] = []

    def came(self, tenant: str, ticket: Ticket[str] | None, displaced: list[Ticket[str]]) -> None:
        before = Counter(each.tenant for each in self.waiting)
        full = len(self.waiting) == PLACES
        if ticket is None:
            assert full
            assert not displaced
            over = [
                each
                for each, calls in before.items()
                if calls > 1 and calls > share(each, before | {tenant: 1})
            ]
            assert before[tenant] + 1 > share(tenant, before) or not over
            return
        assert len(displaced) == full
        for each in displaced:
            self.left(tenant, each, before)
        self.waiting.append(ticket)

    def left(self, tenant: str, ticket: Ticket[str], before: Counter[str]) -> None:
        own = [each for each in self.waiting if each.tenant == ticket.tenant]
        assert ticket.state is TicketState.DISPLACED
        assert ticket.tenant != tenant
        assert len(own) > share(ticket.tenant, before | {tenant: 1}), "nobody within their share is displaced"
        assert before[tenant] + 1 <= share(tenant, before) + 1e-9, "by nobody who goes beyond it"
        assert len(own) > 1, "nor who is first"
        assert ticket is max(reversed(own), key=lambda each: each.enqueued_at - AGEING * each.priority)
        self.waiting.remove(ticket)


ARRIVALS = st.lists(
    st.tuples(TENANTS, st.sampled_from([0, 0, 0, 1, -2]), st.sampled_from("....psr")),
    min_size=10,
    max_size=60,
)


@settings(max_examples=150)
@given(ARRIVALS)
def test_who_makes_way_in_a_waiting_room(arrivals: list[tuple[str, int, str]]) -> None:
    waiting, checked = room(), Checked()
    for number, (tenant, priority, then) in enumerate(arrivals):
        now = float(number)
        full = waiting.is_full(tenant, now)
        ticket = waiting.push(tenant, now, priority=priority)
        assert (ticket is None) == full
        checked.came(tenant, ticket, waiting.take_displaced())
        if then == "p" and waiting.head(now) is not None:
            head = waiting.head(now)
            assert head is waiting.pop()
            assert head is not None
            checked.waiting.remove(head)
        elif then == "s":
            waiting.suspend(tenant)
        elif then == "r" and checked.waiting:
            waiting.remove(checked.waiting.pop(number % len(checked.waiting)))
        assert len(waiting) == len(checked.waiting) <= PLACES
        assert waiting.depths() == Counter(each.tenant for each in checked.waiting)
    for tenant in "abcde":
        waiting.resume(tenant)
    while waiting.head(100.0) is not None:
        checked.waiting.remove(waiting.pop())
    assert not checked.waiting, "whoever was not displaced is served"


@settings(max_examples=100)
@given(ARRIVALS, st.integers(1, 3))
def test_who_makes_way_in_a_rate_queue_over_all_lanes(
    arrivals: list[tuple[str, int, str]], lanes: int
) -> None:
    make_room = lambda: WaitingRoom[str](PLACES, weights=WEIGHTS, ageing=AGEING)  # noqa: E731
    queue, checked = RateQueue(make_room, PLACES, displaces=True), Checked()
    buckets = [TokenBucket(10.0, 0.001, 0.0) for _ in range(lanes)]
    account = TokenBucket(10.0, 0.001, 0.0)
    for bucket in (*buckets, account):
        bucket.take(10.0, 0.0)
    for number, (tenant, priority, then) in enumerate(arrivals):
        now, lane = float(number), number % lanes
        reservation = Reservation([(buckets[lane], 1.0), (account, 1.0)])
        ticket = queue.push(lane, tenant, reservation, now, cost=1.0, priority=priority)
        checked.came(tenant, ticket, queue.take_displaced())
        assert queue.advance(now) == []
        if then == "r" and checked.waiting:
            assert queue.cancel(checked.waiting.pop(number % len(checked.waiting)))
        elif then == "p":
            for bucket in (*buckets, account):
                bucket.give_back(1.0, now)
            for served in queue.give_back(tenant, now):
                checked.waiting.remove(served)
        assert len(queue) == len(checked.waiting) <= PLACES
    for served in serve_all(queue, [*buckets, account]):
        checked.waiting.remove(served)
    assert not checked.waiting, "whoever was not displaced is served"
    assert not queue._lanes


def serve_all(queue: RateQueue[str], buckets: list[TokenBucket]) -> list[Ticket[str]]:
    served: list[Ticket[str]] = []
    for _ in range(20):
        for bucket in buckets:
            bucket.give_back(10.0, 100.0)
        served += queue.give_back("a", 100.0)
    return served


def test_a_quiet_tenant_gets_its_place_in_a_pool_that_a_noisy_one_has_filled() -> None:
    slots = Slots(1, room())
    assert slots.acquire("a", 0.0) is AcquireResult.GRANTED
    noisy = [slots.acquire("a", 0.0) for _ in range(PLACES)]
    assert slots.acquire("a", 0.0) is AcquireResult.REFUSED
    for place in range(1, PLACES // 2 + 1):
        ticket = slots.acquire("b", 1.0)
        assert isinstance(ticket, Ticket)
        assert slots.room.take_displaced() == [noisy[-place]]
    assert slots.acquire("b", 1.0) is AcquireResult.REFUSED
    last = noisy[-1]
    assert isinstance(last, Ticket)
    assert slots.cancel(last, 1.0) == (), "it leaves nothing behind"
    assert slots.release("a", 1.0) == [noisy[0]]


def test_without_it_everybody_is_turned_away() -> None:
    waiting = WaitingRoom[str](2)
    assert waiting.push("a", 0.0)
    assert waiting.push("a", 0.0)
    assert waiting.push("b", 0.0) is None
    assert waiting.take_displaced() == []


@pytest.mark.parametrize("tenants", [50, 8])
def test_who_invents_names_takes_no_place_of_those_within_their_share(tenants: int) -> None:
    waiting = room()
    mine = [waiting.push("me", 0.0)]
    for number in range(tenants):
        waiting.push(f"made up {number}", 0.0)
    assert len(waiting) == PLACES
    assert [ticket.state for ticket in mine if ticket] == [TicketState.WAITING]


@given(
    st.dictionaries(TENANTS, st.tuples(st.integers(1, 6), st.sampled_from([0.25, 1.0, 3.0])), min_size=1),
    st.sampled_from([0.25, 1.0, 3.0]),
)
def test_where_one_is_within_its_share_of_a_full_room_another_exceeds_theirs(
    tenants: dict[str, tuple[int, float]], new: float
) -> None:
    places = sum(calls for calls, _ in tenants.values())
    weights = new + sum(each for _, each in tenants.values())
    if is_within_share(1, new, weights, places):
        over = max(calls / each for calls, each in tenants.values())
        assert over * weights > places
        spare = any(
            calls > 1 and calls * weights > places * each * 1.000001 for calls, each in tenants.values()
        )
        chosen = who_makes_way(((name, *it) for name, it in tenants.items()), weights, places)
        assert (chosen is not None) == spare
