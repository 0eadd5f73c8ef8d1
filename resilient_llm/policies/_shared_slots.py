"""A pool of slots that several processes share, with this process's waiters.

The store counts; here those who wait are kept in order, and the first of them alone asks, when it is told that a slot
may be free. How a store is reached, and what a slot is for, must not enter here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Hashable
from functools import partial
from math import inf
from typing import TYPE_CHECKING

import anyio

from resilient_llm._loop import EventLoop
from resilient_llm.core.leases import LeaseAnswer
from resilient_llm.core.ticket import Ticket, TicketState
from resilient_llm.core.waiting_room import WaitingRoom
from resilient_llm.errors import RejectedError, StoreUnavailableError
from resilient_llm.policies._slots import SlotPool
from resilient_llm.policies._stored_slots import ALL, StoredSlots, key_of
from resilient_llm.policies._wait_outcome import wait_outcome
from resilient_llm.shared_keys import shared_key
from resilient_llm.telemetry.names import DRY_RUN, LIMITER_NAME, WAIT_QUEUE_DEPTH

if TYPE_CHECKING:
    from resilient_llm.call import Call
    from resilient_llm.stores.protocol_leases import LeaseStore
    from resilient_llm.telemetry import Telemetry, WaitOutcome

__all__ = ["SharedSlotPool", "observe_leases", "pool_name"]


def pool_name(name: str, key: Hashable) -> str:
    """Give the name of the pool of one key of a policy, the same in every process."""
    return f"{shared_key(name)}:{shared_key(key)}"


class SharedSlotPool(SlotPool):
    """Keep slots in a store, of which all processes together hold `limit` at most.

    A call that nobody waits before asks the store, once. Refused, it takes a ticket, and its process a place in line
    at the store, one for all that wait here: when it is told that there is a slot, the first of them by the waiting
    room asks again. So processes are served in turn, and each serves its own in its room's order. A tenant that holds
    `max_per_tenant` slots over all processes is passed over until one of them is free.

    While the store does not answer, its guard says what becomes of calls: refused, let through, or given slots of
    this process's share, which is rounded up. What runs then is counted when the store is back.
    """

    __slots__ = ("_asking", "_changes", "_guard", "_passed", "_untidy")

    def __init__(
        self,
        limit: int,
        room: WaitingRoom[Hashable],
        *,
        store: LeaseStore,
        pool: str,
        name: str,
        max_wait: float,
        error: type[RejectedError],
        max_per_tenant: int | None = None,
    ) -> None:
        super().__init__(limit, room, name=name, max_wait=max_wait, error=error)
        self.slots: StoredSlots = StoredSlots(
            limit, room, store=store, pool=pool, on_free=self._on_free, max_per_tenant=max_per_tenant
        )
        self._guard = store.guard
        self._passed: dict[str, Hashable] = {}  # tenants that hold all they may, by the key that said so
        self._asking: Ticket[Hashable] | None = None  # the first in line, while it is
        self._untidy: set[Hashable] = set()  # tenants who may have places they need no more
        # Of what a refusal was about: one that is on its way may be out of date when it arrives.
        self._changes = 0

    @property
    def held(self) -> int:
        """Tell how many slots were held in all processes when the last one was granted here."""
        return self.slots.held_by_all

    async def acquire(self, call: Call, tenant: Hashable = None, *, cost: float = 1.0) -> None:
        """Take a slot, waiting for it if need be, as `SlotPool.acquire` does.

        With a store that is to refuse calls while it does not answer it raises `StoreUnavailableError`, too.
        """
        since = call.loop.time()
        room = self.slots.room
        refused, changes = None, self._changes
        asks = not room.depth(tenant) and self._head(since) is None
        # While the store is away there is only something to wait for where this process has a share of the slots.
        if asks or (not self._guard.closed and self._guard.on_error != "local"):
            try:
                refused = await self._ask_store(call, tenant, wait=not room.is_full(tenant, since))
            except BaseException:
                self._tidy(tenant)
                raise
            if refused is None:
                self._kick()
                self._tidy(tenant)
                return
        deadline = min(since + self._max_wait, call.deadline)
        ticket = self._push(call, tenant, since, cost=cost, deadline=deadline)
        if ticket is None:
            self._tidy(tenant)
            raise self._refuse(call, tenant, "its queue is full")
        stale = asks and changes != self._changes
        if refused is not None and not stale:
            self._pass_over(tenant, refused)
            self._tidy(tenant)
        await self._wait_in_line(call, ticket, since, ask=stale)

    def rehearse(self, call: Call, tenant: Hashable = None, *, cost: float = 1.0) -> Awaitable[None]:
        """Ask for a slot and report what would have become of the call, as `SlotPool.rehearse` does.

        What would wait is not served when a slot is free, and counts for nothing in the store.
        """
        return self._rehearse(call, tenant, cost)

    def release(self, now: float, since: float, tenant: Hashable = None) -> None:
        """Give back a slot that was held since then; the store says whom it is for."""
        super().release(now, since, tenant)
        if not self._guard.closed:  # nobody else is going to say that it is free
            self._resume(key_of(tenant))
            self._kick()

    def resize(self, limit: int, now: float, *, max_per_tenant: int | None = None) -> None:
        """Change how many slots there are, as far as this process is asked; those in use stay until released."""
        self.slots.resize(limit, now, max_per_tenant=max_per_tenant)
        for key in list(self._passed):
            self._resume(key)
        self._kick()

    def idle(self, _now: float) -> bool:
        """Tell whether nobody holds a slot, waits for one or is asking for one."""
        return not self.slots.in_use and not len(self.slots.room) and not self.slots.in_flight

    def _push(
        self, call: Call, tenant: Hashable, now: float, *, cost: float, deadline: float = inf
    ) -> Ticket[Hashable] | None:
        room = self.slots.room
        ticket = room.push(tenant, now, cost=cost, priority=call.priority, deadline=deadline)
        self.wake_those_out()
        return ticket

    async def _ask_store(
        self, call: Call, tenant: Hashable, *, wait: bool = False, alone: bool = True
    ) -> LeaseAnswer | None:
        """Ask the store for a slot; `None` when it is granted, by the store or (`alone`) in its absence."""
        refused = await self.slots.ask(call, tenant, wait=wait, alone=alone)
        if refused is None:
            # A grant takes this process's places: whoever waits there asks again.
            self._changes += 1
            self._resume(key_of(tenant))
        return refused

    async def _wait_in_line(self, call: Call, ticket: Ticket[Hashable], since: float, *, ask: bool) -> None:
        depth = len(self.slots.room)
        outcome: WaitOutcome = "cancelled"
        try:
            with anyio.CancelScope(deadline=ticket.deadline):
                await self._take_turns(call, ticket, ask=ask)
            outcome = wait_outcome(ticket.state)
        finally:
            self.slots.room.remove(ticket)
            self._tidy(ticket.tenant)
            self._kick()
            call.telemetry.waited(
                call, self._name, since=since, outcome=outcome, unit="concurrency", depth=depth
            )
        self._raise_unless_acquired(call, ticket, outcome)

    async def _take_turns(self, call: Call, ticket: Ticket[Hashable], *, ask: bool) -> None:
        """Ask each time it is this one's turn to, until a slot is granted or the ticket ends otherwise."""
        while ticket.state is TicketState.WAITING:
            turn = anyio.Event()
            ticket.waiter = partial(call.loop.tell, turn.set)
            if not ask:
                await turn.wait()
            ask = False
            if self._asking is not None or ticket.state is not TicketState.WAITING:
                continue
            if self._head(call.loop.time()) is not ticket:
                self._kick()  # whose turn it has become meanwhile
                continue
            turn = anyio.Event()
            ticket.waiter = partial(call.loop.tell, turn.set)
            changes = self._changes
            self._asking = ticket
            try:
                refused = await self._ask_store(call, ticket.tenant, wait=True)
            finally:
                self._asking = None
            if refused is None and self._head(call.loop.time()) is ticket:
                self.slots.room.pop()
            elif refused is None:  # too late: its deadline has come, or it has made way
                self.slots.release(ticket.tenant, call.loop.time())
            elif changes != self._changes:
                ask = True
            else:
                self._pass_over(ticket.tenant, refused)
                self._tidy(ticket.tenant)

    async def _rehearse(self, call: Call, tenant: Hashable, cost: float) -> None:
        since = call.loop.time()
        room = self.slots.room
        try:
            refused = await self._ask_store(call, tenant, alone=False)
        except StoreUnavailableError:
            return
        if refused is None:
            call.on_finish(lambda _: self.release(call.ended, since, tenant))
            return
        ticket = self._push(call, tenant, since, cost=cost)
        if ticket is None:
            call.telemetry.rejected(call, self.full("its queue is full", tenant), dry_run=True)
            return
        call.telemetry.event(
            call, "would_wait", {LIMITER_NAME: self._name, WAIT_QUEUE_DEPTH: len(room), DRY_RUN: True}
        )

        def leave(_outcome: object) -> None:
            room.remove(ticket)

        call.on_finish(leave)

    def _on_free(self, key: str) -> None:
        """Hear that a slot may be free at a key where this process keeps a place."""
        self._changes += 1
        tenant = self._passed.get(key)
        self._resume(key)
        self._kick()
        if tenant is not None or key == ALL:
            self._tidy(tenant)

    def _pass_over(self, tenant: Hashable, refused: LeaseAnswer) -> None:
        """Serve others meanwhile, when it is the tenant's own slots that are all taken."""
        if self._asking is not None and self._asking.tenant == tenant:
            return  # about to hear itself how things stand, and not to be taken out of its turn before
        if refused.refused is not None and refused.refused != ALL:
            self._passed[refused.refused] = tenant
            self.slots.room.suspend(tenant)
            self._kick()

    def _resume(self, key: str) -> None:
        if key not in self._passed:
            return
        room = self.slots.room
        room.resume(self._passed.pop(key))
        now = _now()
        if self._asking is None and now is not None and (head := room.head(now)) is not None:
            # Whoever was to be next while this tenant was passed over may not be any longer: choose again.
            room.suspend(head.tenant)
            room.resume(head.tenant)

    def _head(self, now: float) -> Ticket[Hashable] | None:
        head = self.slots.room.head(now)
        self.wake(self.slots.room.take_expired())
        return head

    def _kick(self) -> None:
        """Have the first in the room ask."""
        if len(self.slots.room) and (now := _now()) is not None:
            head = self._head(now)
            if head is not None:
                self.wake((head,))

    def _tidy(self, tenant: Hashable) -> None:
        """Give up places that nobody here needs any more; nobody can say while somebody asks."""
        self._untidy.add(tenant)
        if self.slots.in_flight:
            return
        room = self.slots.room
        unused = [each for each in self._untidy if not room.depth(each)]
        self._untidy.clear()
        for each in unused:
            self._passed.pop(key_of(each), None)
        now = _now()
        nobody = not len(room) or now is None or self._head(now) is None
        self.slots.leave(unused, everyone=nobody)


def _now() -> float | None:
    """Give the time; `None` where no event loop runs: who waited did so in one that has ended."""
    try:
        return EventLoop.current().time()
    except RuntimeError:
        return None


def observe_leases(telemetry: Telemetry, store: LeaseStore) -> None:
    """Report the gauges of a store that keeps leases."""
    store.guard.observe(telemetry)
    store.leases.observe(telemetry)
