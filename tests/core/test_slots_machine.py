"""The waiting room and the pool under any sequence of events, beside models that are nothing but lists."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from resilient_llm.core.slots import AcquireResult, Slots
from resilient_llm.core.ticket import Ticket, TicketState
from resilient_llm.core.waiting_room import WaitingRoom

TENANTS = st.sampled_from("abcd")
COSTS = st.sampled_from([1.0, 5.0, 1_000.0])
PRIORITIES = st.sampled_from([0, 0, 0, -1, 2])
PATIENCE = st.sampled_from([float("inf"), float("inf"), 1.0, 5.0])
AGEING = 3.0
MAX_QUEUED = 12
MAX_QUEUED_PER_TENANT = 6
WEIGHTS = {"a": 1.0, "b": 2.0, "c": 4.0}


def first_of(tickets: list[Ticket[str]], tenant: str) -> Ticket[str]:
    """Give who is first in a tenant: the list is by arrival, and `min` takes the first of equals."""
    own = [ticket for ticket in tickets if ticket.tenant == tenant]
    return min(own, key=lambda ticket: ticket.enqueued_at - AGEING * ticket.priority)


def _is_full(tickets: list[Ticket[str]], tenant: str) -> bool:
    own = sum(ticket.tenant == tenant for ticket in tickets)
    return len(tickets) == MAX_QUEUED or own == MAX_QUEUED_PER_TENANT


class WaitingMachine(RuleBasedStateMachine):
    """What both machines share: time, and a list of who waits, in order of arrival."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.room = WaitingRoom[str](
            MAX_QUEUED, max_queued_per_tenant=MAX_QUEUED_PER_TENANT, weights=WEIGHTS, ageing=AGEING, credit=2
        )
        self.waiting: list[Ticket[str]] = []
        self.every: list[Ticket[str]] = []

    def arrived(self, ticket: Ticket[str]) -> None:
        assert ticket.state is TicketState.WAITING
        self.waiting.append(ticket)
        self.every.append(ticket)

    def expired(self, ticket: Ticket[str]) -> None:
        assert ticket.state is TicketState.EXPIRED
        assert ticket.deadline <= self.now
        self.waiting.remove(ticket)

    def alive(self) -> list[Ticket[str]]:
        return [ticket for ticket in self.waiting if ticket.deadline > self.now]

    def full_for(self, tenant: str) -> bool:
        """Tell whether there is no place, not even that of somebody whose time is up."""
        return _is_full(self.waiting, tenant) and _is_full(self.alive(), tenant)

    def dropped(self, tenant: str) -> None:
        """See who was dropped, where that was to make room for one of a tenant's who has not been let in yet."""
        crowded = _is_full(self.waiting, tenant)
        for ticket in self.room.take_expired():
            assert crowded, "nobody is dropped while there are places"
            self.expired(ticket)
        assert not crowded or self.waiting == self.alive()

    @rule(seconds=st.sampled_from([0.5, 1.0, 4.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def the_room_holds_whom_the_list_holds(self) -> None:
        assert self.room.depths() == Counter(ticket.tenant for ticket in self.waiting)
        assert len(self.room) == len(self.waiting)
        assert self.room.tenants == len({ticket.tenant for ticket in self.waiting})
        assert self.waiting or not (self.room._queues or self.room._away)

    @invariant()
    def the_rooms_own_books_are_right(self) -> None:
        room = self.room
        line = [queue for _, _, queue in room._line]
        queues = list(room._queues.values())
        assert len(set(map(id, line))) == len(line)
        assert {id(queue) for queue in queues if queue.in_line} == set(map(id, line))
        assert all(queue.in_line or queue.suspended for queue in queues)
        assert room._line_weight == pytest.approx(sum(queue.weight for queue in line))
        assert room._idle == sum(not queue.size for queue in queues)
        assert not any(queue.entries for queue in queues if not queue.size)
        assert room._away.keys().isdisjoint(room._queues)


class RoomMachine(WaitingMachine):
    """The room by itself, as a rate limiter uses it: a head that is committed to, and suspensions."""

    def __init__(self) -> None:
        super().__init__()
        self.suspended: set[str] = set()
        self.committed: Ticket[str] | None = None

    def settle_model(self) -> None:
        self.suspended &= {ticket.tenant for ticket in self.waiting}
        if self.committed not in self.waiting:
            self.committed = None

    @rule(tenant=TENANTS, cost=COSTS, priority=PRIORITIES, patience=PATIENCE)
    def push(self, tenant: str, cost: float, priority: int, patience: float) -> None:
        full = self.full_for(tenant)
        ticket = self.room.push(tenant, self.now, cost=cost, priority=priority, deadline=self.now + patience)
        assert (ticket is None) == full
        self.dropped(tenant)
        if ticket is not None:
            self.arrived(ticket)
        self.settle_model()

    @rule()
    def head(self) -> None:
        head = self.room.head(self.now)
        for ticket in self.room.take_expired():
            self.expired(ticket)
        self.settle_model()
        if head is None:
            assert not [ticket for ticket in self.alive() if ticket.tenant not in self.suspended]
        elif self.committed is not None:
            assert head is self.committed
        else:
            assert head.tenant not in self.suspended
            assert head is first_of(self.alive(), head.tenant)
        self.committed = head

    @precondition(lambda self: self.committed is not None)
    @rule()
    def pop(self) -> None:
        ticket = self.room.pop()
        assert ticket is self.committed
        assert ticket.state is TicketState.GRANTED
        self.waiting.remove(ticket)
        self.settle_model()

    @precondition(lambda self: self.every)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(self.every))
        waited = ticket in self.waiting
        assert self.room.remove(ticket) == waited
        if waited:
            self.waiting.remove(ticket)
        self.settle_model()

    @rule(tenant=TENANTS)
    def suspend(self, tenant: str) -> None:
        self.room.suspend(tenant)
        self.suspended.add(tenant)
        if self.committed is not None and self.committed.tenant == tenant:
            self.committed = None
        self.settle_model()

    @rule(tenant=TENANTS)
    def resume(self, tenant: str) -> None:
        self.room.resume(tenant)
        self.suspended.discard(tenant)

    def teardown(self) -> None:
        for tenant in "abcd":
            self.room.resume(tenant)
        self.suspended.clear()
        for _ in range(len(self.waiting) + 1):
            self.head()
            if self.committed is not None:
                self.pop()
        assert not self.waiting
        self.the_room_holds_whom_the_list_holds()


class SlotsMachine(WaitingMachine):
    """The pool over the room: permits, hand-off, caps, resizing."""

    def __init__(self) -> None:
        super().__init__()
        self.holders: list[str] = []  # permits in the hands of calls that run
        self.granted: list[Ticket[str]] = []  # permits passed on to waiters that have not woken yet
        self.slots = Slots(2, self.room)
        self.cap: int | None = None
        self.highest = 2

    @initialize(limit=st.integers(0, 4), cap=st.sampled_from([None, None, 1, 2]))
    def open(self, limit: int, cap: int | None) -> None:
        self.slots = Slots(limit, self.room, max_per_tenant=cap)
        self.cap = cap
        self.highest = limit

    def held(self) -> Counter[str]:
        return Counter(self.holders) + Counter(ticket.tenant for ticket in self.granted)

    def at_cap(self, tenant: str) -> bool:
        return self.cap is not None and self.held()[tenant] >= self.cap

    def woken(self, tickets: list[Ticket[str]]) -> None:
        for ticket in tickets:
            if ticket.state is not TicketState.GRANTED:
                self.expired(ticket)
        for ticket in tickets:
            if ticket.state is TicketState.GRANTED:
                assert len(self.holders) + len(self.granted) < self.slots.limit
                assert not self.at_cap(ticket.tenant)
                assert ticket is first_of(self.alive(), ticket.tenant)
                self.waiting.remove(ticket)
                self.granted.append(ticket)

    @rule(tenant=TENANTS, cost=COSTS, priority=PRIORITIES, patience=PATIENCE)
    def acquire(self, tenant: str, cost: float, priority: int, patience: float) -> None:
        free = self.slots.in_use < self.slots.limit and not self.at_cap(tenant)
        full = self.full_for(tenant)
        got = self.slots.acquire(tenant, self.now, cost=cost, priority=priority, deadline=self.now + patience)
        assert (got is AcquireResult.GRANTED) == free
        assert (got is AcquireResult.REFUSED) == (full and not free)
        if not free:
            self.dropped(tenant)
        if got is AcquireResult.GRANTED:
            assert not [ticket for ticket in self.alive() if ticket.tenant == tenant], "barged past its own"
            self.holders.append(tenant)
        elif isinstance(got, Ticket):
            self.arrived(got)

    @precondition(lambda self: self.granted)
    @rule(data=st.data())
    def take_up(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(self.granted))
        self.granted.remove(ticket)
        self.every.remove(ticket)
        self.holders.append(ticket.tenant)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        tenant = data.draw(st.sampled_from(self.holders))
        self.holders.remove(tenant)
        self.woken(list(self.slots.release(tenant, self.now)))

    @precondition(lambda self: self.every)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(self.every))
        passes_on = ticket in self.granted
        if passes_on:
            self.granted.remove(ticket)
        elif ticket in self.waiting:
            self.waiting.remove(ticket)
        tickets = list(self.slots.cancel(ticket, self.now))
        assert passes_on or not tickets
        self.woken(tickets)
        assert self.slots.cancel(ticket, self.now) == ()

    @rule(limit=st.integers(0, 5), cap=st.sampled_from([None, 1, 2, 3]))
    def resize(self, limit: int, cap: int | None) -> None:
        if self.cap is None or cap is None:
            cap = None
        else:
            self.cap = cap
        self.highest = max(limit, self.slots.in_use)
        self.woken(list(self.slots.resize(limit, self.now, max_per_tenant=cap)))

    @invariant()
    def permits_are_neither_lost_nor_made(self) -> None:
        assert self.slots.in_use == len(self.holders) + len(self.granted)
        assert self.slots.in_use <= self.highest
        # Once a shrunk pool has drained it never grows past its limit again.
        self.highest = max(self.slots.limit, self.slots.in_use)

    @invariant()
    def no_slot_stands_free_while_somebody_could_take_it(self) -> None:
        if self.slots.in_use < self.slots.limit:
            assert not [ticket for ticket in self.alive() if not self.at_cap(ticket.tenant)]

    def teardown(self) -> None:
        limit = max(self.slots.limit, 1)
        self.highest = max(limit, self.slots.in_use)
        self.woken(list(self.slots.resize(limit, self.now)))
        for _ in range(200):
            for ticket in self.granted:
                self.holders.append(ticket.tenant)
            self.granted.clear()
            if not self.holders:
                break
            self.woken(list(self.slots.release(self.holders.pop(), self.now)))
        assert not self.alive()
        assert self.slots.in_use == 0
        assert self.slots._held == {}


TestRoomMachine = RoomMachine.TestCase
TestRoomMachine.settings = settings(max_examples=150, stateful_step_count=50)
TestSlotsMachine = SlotsMachine.TestCase
TestSlotsMachine.settings = settings(max_examples=100, stateful_step_count=50)
