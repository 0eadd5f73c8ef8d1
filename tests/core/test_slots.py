"""The slot pool: permits, hand-off, caps per tenant, resizing, and a noisy neighbour."""

import heapq
import itertools
from math import ceil
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient_llm.core.slots import AcquireResult, Slots
from resilient_llm.core.ticket import Ticket, TicketState
from resilient_llm.core.waiting_room import WaitingRoom


def pool(limit: int, *, max_queued: int = 100, max_per_tenant: int | None = None) -> Slots[str]:
    return Slots(limit, WaitingRoom(max_queued), max_per_tenant=max_per_tenant)


def queue(slots: Slots[str], tenant: str, *, cost: float = 1.0, deadline: float = 1e9) -> Ticket[str]:
    ticket = slots.acquire(tenant, 0.0, cost=cost, deadline=deadline)
    assert isinstance(ticket, Ticket)
    return ticket


def test_free_slots_are_granted_at_once_then_calls_queue_then_they_are_refused() -> None:
    slots = pool(2, max_queued=1)
    assert slots.acquire("a", 0.0) is AcquireResult.GRANTED
    assert slots.try_acquire("b")
    assert not slots.try_acquire("b")
    assert (slots.limit, slots.in_use) == (2, 2)
    ticket = queue(slots, "a")
    assert slots.acquire("a", 0.0) is AcquireResult.REFUSED
    assert len(slots.room) == 1
    assert list(slots.release("b", 1.0)) == [ticket]
    assert ticket.state is TicketState.GRANTED
    assert (slots.in_use, len(slots.room)) == (2, 0)
    assert list(slots.release("a", 2.0)) == []
    assert list(slots.release("a", 2.0)) == []
    assert slots.in_use == 0


def test_a_freed_slot_is_the_waiters_before_it_wakes() -> None:
    slots = pool(1)
    slots.try_acquire("a")
    ticket = queue(slots, "b")
    slots.release("a", 0.0)
    assert not slots.try_acquire("a"), "barged past the one the slot was passed to"
    assert ticket.state is TicketState.GRANTED


def test_a_cancel_after_the_grant_passes_the_permit_on() -> None:
    slots = pool(1)
    slots.try_acquire("a")
    first, second, third = queue(slots, "a"), queue(slots, "b"), queue(slots, "c")
    assert slots.cancel(second, 0.0) == ()
    assert list(slots.release("a", 0.0)) == [first]
    assert list(slots.cancel(first, 0.0)) == [third]
    assert first.state is TicketState.CANCELLED
    assert slots.cancel(first, 0.0) == (), "a second cancel changes nothing"
    assert slots.in_use == 1
    assert list(slots.cancel(third, 0.0)) == []
    assert slots.in_use == 0


def test_a_waiter_past_its_deadline_is_woken_without_a_permit() -> None:
    slots = pool(1)
    slots.try_acquire("a")
    late, in_time = queue(slots, "a", deadline=5.0), queue(slots, "a", deadline=6.0)
    assert set(slots.release("a", 5.0)) == {late, in_time}
    assert (late.state, in_time.state) == (TicketState.EXPIRED, TicketState.GRANTED)
    assert slots.cancel(late, 5.0) == ()
    assert slots.in_use == 1


def test_growing_grants_at_once_and_shrinking_drains() -> None:
    slots = pool(1)
    slots.try_acquire("a")
    tickets = [queue(slots, "a") for _ in range(5)]
    assert list(slots.resize(4, 0.0)) == tickets[:3]
    assert slots.resize(2, 0.0) == []
    assert slots.in_use == 4
    assert not slots.release("a", 0.0)
    assert not slots.release("a", 0.0)
    assert list(slots.release("a", 0.0)) == tickets[3:4]
    assert slots.resize(0, 0.0) == []
    assert not slots.release("a", 0.0)
    assert not slots.release("a", 0.0)
    assert slots.in_use == 0
    assert not slots.try_acquire("a"), "a limit of 0 grants nobody"
    assert list(slots.resize(1, 0.0)) == tickets[4:]


def test_a_tenant_at_its_cap_is_passed_over_and_served_when_it_frees() -> None:
    slots = pool(4, max_per_tenant=2)
    assert [slots.try_acquire("a") for _ in range(3)] == [True, True, False]
    capped = [queue(slots, "a") for _ in range(3)]
    assert slots.limit - slots.in_use == 2
    assert slots.acquire("b", 0.0) is AcquireResult.GRANTED, "no head-of-line blocking"
    assert slots.acquire("c", 0.0) is AcquireResult.GRANTED
    other = queue(slots, "d")
    assert list(slots.release("b", 0.0)) == [other]
    assert list(slots.release("a", 0.0)) == capped[:1], "its own slot frees, and it is below its cap again"
    assert slots.release("c", 0.0) == []
    assert list(slots.release("a", 0.0)) == capped[1:2]
    assert list(slots.resize(4, 0.0, max_per_tenant=3)) == capped[2:]
    more = queue(slots, "a")
    assert slots.resize(4, 0.0, max_per_tenant=1) == []
    assert slots.release("a", 0.0) == []
    assert slots.release("a", 0.0) == []
    assert list(slots.release("a", 0.0)) == [more]


def test_a_lowered_cap_holds_tenants_that_wait_for_the_pool() -> None:
    slots = pool(3, max_per_tenant=3)
    for tenant in "aab":
        slots.try_acquire(tenant)
    first, second = queue(slots, "a"), queue(slots, "c")
    slots.resize(3, 0.0, max_per_tenant=2)
    assert list(slots.release("b", 0.0)) == [second]
    assert list(slots.release("a", 0.0)) == [first]


def test_a_permit_that_was_not_granted_cannot_be_released() -> None:
    slots = pool(2)
    with pytest.raises(RuntimeError, match="none is in use"):
        slots.release("a", 0.0)
    capped = pool(2, max_per_tenant=1)
    capped.try_acquire("a")
    with pytest.raises(RuntimeError, match="tenant 'b' holds none"):
        capped.release("b", 0.0)
    assert capped.in_use == 1


def test_options_that_cannot_work_are_refused() -> None:
    with pytest.raises(ValueError, match="limit=-1: allowed are integers from 0"):
        pool(-1)
    with pytest.raises(ValueError, match="max_per_tenant=0: allowed are integers from 1"):
        pool(1, max_per_tenant=0)
    with pytest.raises(ValueError, match="limit=-2: allowed"):
        pool(1).resize(-2, 0.0)
    with pytest.raises(ValueError, match="max_per_tenant=0: allowed"):
        pool(1, max_per_tenant=1).resize(1, 0.0, max_per_tenant=0)
    with pytest.raises(ValueError, match="max_per_tenant=2: this pool was made without"):
        pool(1).resize(1, 0.0, max_per_tenant=2)


@settings(max_examples=40)
@given(
    cost_of=st.fixed_dictionaries({name: st.sampled_from([1.0, 50.0, 2_000.0]) for name in "abc"}),
    limit=st.integers(1, 8),
    seed=st.integers(0, 2**32),
)
def test_a_saturated_pool_is_shared_by_weight_and_cost(
    cost_of: dict[str, float], limit: int, seed: int
) -> None:
    weights = {"a": 1.0, "b": 2.0, "c": 4.0}
    random = Random(seed)
    slots = Slots(limit, WaitingRoom[str](100, weights=weights))
    running = [name for name in itertools.islice(itertools.cycle("abc"), limit) if slots.try_acquire(name)]
    for name in "abc" * 10:
        queue(slots, name, cost=cost_of[name])
    used = dict.fromkeys("abc", 0.0)
    for _ in range(400):
        done = running.pop(random.randrange(len(running)))
        (ticket,) = slots.release(done, 0.0)
        used[ticket.tenant] += ticket.cost / weights[ticket.tenant]
        running.append(ticket.tenant)
        queue(slots, ticket.tenant, cost=ticket.cost)
        assert len(running) == slots.in_use == limit
    largest = max(cost_of[name] / weights[name] for name in "abc")
    assert max(used.values()) - min(used.values()) <= 2 * largest


class Door:
    """Calls that come at given times to a pool of ten and run for a second each, give or take a fifth.

    Time is also counted in releases: what a fair queue can promise is the order in which they are passed on.
    """

    def __init__(self, arrivals: list[tuple[float, str]], random: Random, *, credit: int = 0) -> None:
        self.slots = Slots(10, WaitingRoom[str](100_000, credit=credit))
        self.random = random
        self.count = itertools.count()
        self.events = [(time, next(self.count), "comes", tenant) for time, tenant in arrivals]
        heapq.heapify(self.events)
        self.releases: list[float] = []
        self.waits: dict[str, list[float]] = {}
        self.came: dict[Ticket[str], int] = {}
        self.granted: dict[Ticket[str], int] = {}

    def run(self) -> None:
        while self.events:
            now, _, what, tenant = heapq.heappop(self.events)
            if what == "comes":
                got = self.slots.acquire(tenant, now)
                if isinstance(got, Ticket):
                    self.came[got] = len(self.releases)
                else:
                    assert got is AcquireResult.GRANTED
                    self.start(tenant, 0.0, now)
            else:
                self.releases.append(now)
                for ticket in self.slots.release(tenant, now):
                    self.granted[ticket] = len(self.releases)
                    self.start(ticket.tenant, now - ticket.enqueued_at, now)
            assert self.slots.in_use <= 10

    def start(self, tenant: str, waited: float, now: float) -> None:
        self.waits.setdefault(tenant, []).append(waited)
        heapq.heappush(self.events, (now + self.random.uniform(0.8, 1.2), next(self.count), "ends", tenant))


def p99(values: list[float]) -> float:
    return sorted(values)[ceil(0.99 * len(values)) - 1]


NOISY = [(i / 250, "noisy") for i in range(40 * 250)]  # fifty times its share of five a second


def test_a_noisy_neighbour_costs_a_quiet_tenant_no_more_than_one_slot_release() -> None:
    """Quiet offers half its share, never two calls at once."""
    random = Random(7)
    quiet = [(5 + 0.4 * i + random.uniform(0.0, 0.1), "quiet") for i in range(400)]
    door = Door(NOISY + quiet, random)
    door.run()
    between = [later - earlier for earlier, later in itertools.pairwise(door.releases)]
    assert p99(door.waits["quiet"]) <= p99(between)
    assert len(door.waits["quiet"]) == 400
    assert len(door.waits["noisy"]) == len(NOISY), "nobody starves and nobody is lost"


@pytest.mark.parametrize("load_ratio", [0.5, 0.9, 2.0])
def test_a_bursty_tenant_is_served_as_by_a_pool_of_its_share(load_ratio: float) -> None:
    """At random times it may queue behind its own calls, but it has every second release when it needs it."""
    random = Random(3)
    times = itertools.accumulate(random.expovariate(5 * load_ratio) for _ in range(150))
    door = Door(NOISY + [(5 + time, "bursty") for time in times], random)
    door.run()
    done = 0
    for ticket, came in door.came.items():  # in order of arrival
        if ticket.tenant == "bursty":
            done = max(came, done) + 2
            assert door.granted[ticket] <= done


@pytest.mark.parametrize("load_ratio", [0.2, 0.5, 0.7])
def test_with_credit_a_bursty_tenant_under_its_share_is_served_as_if_it_always_came_first(
    load_ratio: float,
) -> None:
    """No call waits for more releases than it found calls of its own before it, and one for itself."""
    random = Random(5)
    times = list(itertools.accumulate(random.expovariate(5 * load_ratio) for _ in range(120)))
    noisy = [(i / 250, "noisy") for i in range(int(times[-1] + 10) * 20)]
    door = Door(noisy + [(5 + time, "bursty") for time in times], random, credit=16)
    door.run()
    own = [(came, door.granted[ticket]) for ticket, came in door.came.items() if ticket.tenant == "bursty"]
    late = [
        granted
        for number, (came, granted) in enumerate(own)
        if granted - came > 1 + sum(before > came for _, before in own[:number])
    ]
    assert len(own) > 100
    assert len(late) <= 0.01 * len(own) + 1, "and its very first call, which nobody knew it by"
