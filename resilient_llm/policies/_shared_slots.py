"""A pool of slots that several processes share, with this process's waiters.

The store counts; here those who wait are kept in order, and the first of them alone asks, when it is told that a slot
may be free. How a store is reached, and what a slot is for, must not enter here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Hashable
from typing import TYPE_CHECKING

import anyio

from resilient_llm._loop import EventLoop
from resilient_llm.core.leases import LeaseAnswer, LeaseLimit
from resilient_llm.core.slots import Slots
from resilient_llm.core.ticket import Ticket, TicketState
from resilient_llm.core.waiting_room import WaitingRoom
from resilient_llm.errors import DeadlineExceededError, RejectedError, StoreUnavailableError
from resilient_llm.policies._keyed import OVERFLOW
from resilient_llm.policies._slots import _SMOOTHING, SlotPool
from resilient_llm.policies._store_events import tell_store
from resilient_llm.shared_keys import shared_key
from resilient_llm.telemetry.names import DRY_RUN, LIMITER_NAME, WAIT_QUEUE_DEPTH

if TYPE_CHECKING:
    from resilient_llm.call import Call
    from resilient_llm.stores.protocol_leases import Lease, LeaseStore
    from resilient_llm.telemetry import Telemetry, WaitOutcome

__all__ = ["SharedSlotPool", "observe_leases", "pool_name"]

_ALL = "all"


def pool_name(name: str, key: Hashable) -> str:
    """Give the name of the pool of one key of a policy, the same in every process."""
    return f"{shared_key(name)}:{'!more' if key is OVERFLOW else shared_key(key)}"


class SharedSlotPool(SlotPool):
    """Keep slots in a store, of which all processes together hold `limit` at most.

    A call that nobody waits before asks the store, once. Refused, it takes a ticket, and its process a place in line
    at the store, one for all that wait here: when it is told that there is a slot, the first of them by the waiting
    room asks again. So processes are served in turn, and each serves its own in its room's order. A tenant that holds
    `max_per_tenant` slots over all processes is passed over until one of them is free.

    While the store does not answer, its guard says what becomes of calls: refused, let through, or given slots of
    this process's share, which is rounded up. What runs then is counted when the store is back.
    """

    __slots__ = (
        "_asking",
        "_changes",
        "_in_flight",
        "_leases",
        "_max_per_tenant",
        "_out",
        "_passed",
        "_processes",
        "_store",
        "_untidy",
        "held",
    )

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
        self.slots: _StoredSlots = _StoredSlots(limit, room)
        self.held = 0
        """How many slots were held in all processes when the last one was granted here."""
        self._store = store
        self._leases = store.leases.pool(pool, self._on_free)
        self._max_per_tenant = max_per_tenant
        self._out: dict[Hashable, list[Lease]] = {}
        self._passed: dict[str, Hashable] = {}  # tenants that hold all they may, by the key that said so
        self._processes = 1  # when the store last decided: one that is back may have to count them again
        self._asking: Ticket[Hashable] | None = None  # the first in line, while it is
        self._untidy: set[Hashable] = set()  # tenants who may have places they need no more
        self._in_flight = 0  # requests of anybody
        # Of what a refusal was about: one that is on its way may be out of date when it arrives.
        self._changes = 0

    async def acquire(self, call: Call, tenant: Hashable = None, *, cost: float = 1.0) -> None:
        """Take a slot, waiting for it if need be, as `SlotPool.acquire` does.

        With a store that is to refuse calls while it does not answer it raises `StoreUnavailableError`, too.
        """
        since = call.loop.time()
        room = self.slots.room
        refused, changes = None, self._changes
        guard = self._store.guard
        asks = not room.depth(tenant) and self._head(since) is None
        if asks or (not guard.closed and guard.on_error != "local"):  # then there is nothing to wait for
            try:
                refused = await self._ask_store(call, tenant, wait=not room.is_full(tenant))
            except BaseException:
                self._tidy(tenant)
                raise
            if refused is None:
                self._kick()
                self._tidy(tenant)
                return
        deadline = min(since + self._max_wait, call.deadline)
        ticket = room.push(tenant, since, cost=cost, priority=call.priority, deadline=deadline)
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

    def release(self, now: float, *, since: float, tenant: Hashable = None) -> None:
        """Give back a slot that was held since then; the store says whom it is for."""
        held = now - since
        self._mean_hold += _SMOOTHING * (held - self._mean_hold) if self._mean_hold else held
        self._give_back(tenant)
        if not self._store.guard.closed:  # nobody else is going to say that it is free
            self._resume(_key_of(tenant))
            self._kick()

    def resize(self, limit: int, now: float, *, max_per_tenant: int | None = None) -> None:
        """Change how many slots there are, as far as this process is asked; those in use stay until released."""
        self.slots.resize(limit, now)
        if max_per_tenant is not None:
            self._max_per_tenant = max_per_tenant
        for key in list(self._passed):
            self._resume(key)
        self._kick()

    def idle(self, _now: float) -> bool:
        """Tell whether nobody holds a slot, waits for one or is asking for one."""
        return not self.slots.in_use and not len(self.slots.room) and not self._in_flight

    def _limits(self, tenant: Hashable) -> tuple[LeaseLimit, ...]:
        whole = LeaseLimit(_ALL, self.slots.limit)
        if self._max_per_tenant is None:
            return (whole,)
        return LeaseLimit(_key_of(tenant), self._max_per_tenant), whole

    async def _ask_store(self, call: Call, tenant: Hashable, *, wait: bool) -> LeaseAnswer | None:
        """Ask the store for a slot; `None` when it is granted, by the store or in its absence."""
        limits = self._limits(tenant)
        self._in_flight += 1
        try:
            got = await self._leases.acquire(limits, wait=wait)
        except StoreUnavailableError as error:
            got = self._decide_alone(call, tenant, limits, error)
        else:
            self._processes = self._store.processes
        finally:
            self._in_flight -= 1
            tell_store(call, self._store.guard)
        if isinstance(got, LeaseAnswer):
            return got
        self._take(tenant, got)
        return None

    def _take(self, tenant: Hashable, lease: Lease) -> None:
        self._out.setdefault(tenant, []).append(lease)
        self.slots.take()
        self.held = lease.held
        # A grant takes this process's places: whoever waits there asks again.
        self._changes += 1
        self._resume(_key_of(tenant))

    def _give_back(self, tenant: Hashable) -> None:
        self.slots.release(tenant, 0.0)
        leases = self._out[tenant]
        lease = leases.pop()
        if not leases:
            del self._out[tenant]
        self._leases.release(lease)

    def _decide_alone(
        self, call: Call, tenant: Hashable, limits: tuple[LeaseLimit, ...], error: StoreUnavailableError
    ) -> Lease | LeaseAnswer:
        """Decide without the store, as its guard was told to."""
        guard = self._store.guard
        guard.unguarded += 1
        if guard.on_error == "closed":
            call.telemetry.rejected(call, error)
            raise error
        processes = max(self._processes, self._store.processes)
        if guard.on_error == "local":
            here = [len(self._out.get(tenant, ())), self.slots.in_use][-len(limits) :]
            for (key, most), held in zip(limits, here, strict=True):
                if held >= -(-most // processes):
                    return LeaseAnswer(key, held)
        lease = self._leases.adopt(limits)
        lease.held = (self.slots.in_use + 1) * processes  # as good a guess as there is
        return lease

    async def _wait_in_line(self, call: Call, ticket: Ticket[Hashable], since: float, *, ask: bool) -> None:
        depth = len(self.slots.room)
        outcome: WaitOutcome = "cancelled"
        try:
            with anyio.CancelScope(deadline=ticket.deadline):
                await self._take_turns(call, ticket, ask=ask)
            outcome = "acquired" if ticket.state is TicketState.GRANTED else "timeout"
        finally:
            self.slots.room.remove(ticket)
            self._tidy(ticket.tenant)
            self._kick()
            call.telemetry.waited(
                call, self._name, since=since, outcome=outcome, unit="concurrency", depth=depth
            )
        if outcome == "timeout":
            if ticket.deadline == call.deadline:
                msg = f"the call's deadline passed while it waited for a slot of {self._name}"
                raise DeadlineExceededError(msg)
            raise self._refuse(call, ticket.tenant, self._too_long)

    async def _take_turns(self, call: Call, ticket: Ticket[Hashable], *, ask: bool) -> None:
        """Ask each time it is this one's turn to, until a slot is granted or the ticket ends otherwise."""
        while ticket.state is TicketState.WAITING:
            turn = anyio.Event()
            ticket.waiter = turn.set
            if not ask:
                await turn.wait()
            ask = False
            if self._asking is not None or ticket.state is not TicketState.WAITING:
                continue
            if self._head(call.loop.time()) is not ticket:
                self._kick()  # whose turn it has become meanwhile
                continue
            turn = anyio.Event()
            ticket.waiter = turn.set
            changes = self._changes
            self._asking = ticket
            try:
                refused = await self._ask_store(call, ticket.tenant, wait=True)
            finally:
                self._asking = None
            if refused is None and self._head(call.loop.time()) is ticket:
                self.slots.room.pop()
            elif refused is None:  # too late: its deadline has come
                self._give_back(ticket.tenant)
            elif changes != self._changes:
                ask = True
            else:
                self._pass_over(ticket.tenant, refused)
                self._tidy(ticket.tenant)

    async def _rehearse(self, call: Call, tenant: Hashable, cost: float) -> None:
        since = call.loop.time()
        room = self.slots.room
        self._in_flight += 1
        try:
            got = await self._leases.acquire(self._limits(tenant))
        except StoreUnavailableError:
            self._store.guard.unguarded += 1
            return
        finally:
            self._in_flight -= 1
            tell_store(call, self._store.guard)
        if not isinstance(got, LeaseAnswer):
            self._take(tenant, got)
            call.on_finish(lambda _: self.release(call.loop.time(), since=since, tenant=tenant))
            return
        ticket = room.push(tenant, since, cost=cost)
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
        if tenant is not None or key == _ALL:
            self._tidy(tenant)

    def _pass_over(self, tenant: Hashable, refused: LeaseAnswer) -> None:
        """Serve others meanwhile, when it is the tenant's own slots that are all taken."""
        if self._asking is not None and self._asking.tenant == tenant:
            return  # about to hear itself how things stand, and not to be taken out of its turn before
        if refused.refused is not None and refused.refused != _ALL:
            self._passed[refused.refused] = tenant
            self.slots.room.suspend(tenant)
            self._kick()

    def _resume(self, key: str) -> None:
        if key not in self._passed:
            return
        room = self.slots.room
        room.resume(self._passed.pop(key))
        if self._asking is None and (head := room.head(EventLoop.current().time())) is not None:
            # Whoever was to be next while this tenant was passed over may not be any longer: choose again.
            room.suspend(head.tenant)
            room.resume(head.tenant)

    def _head(self, now: float) -> Ticket[Hashable] | None:
        head = self.slots.room.head(now)
        self.wake(self.slots.room.take_expired())
        return head

    def _kick(self) -> None:
        """Have the first in the room ask."""
        if len(self.slots.room):
            head = self._head(EventLoop.current().time())
            if head is not None:
                self.wake((head,))

    def _tidy(self, tenant: Hashable) -> None:
        """Give up places that nobody here needs any more; nobody can say while somebody asks."""
        self._untidy.add(tenant)
        if self._in_flight:
            return
        room = self.slots.room
        unused: list[LeaseLimit] = []
        for each in self._untidy:
            if self._max_per_tenant is not None and not room.depth(each):
                key = _key_of(each)
                self._passed.pop(key, None)
                unused.append(LeaseLimit(key, self._max_per_tenant))
        self._untidy.clear()
        if not len(room) or self._head(EventLoop.current().time()) is None:
            unused.append(LeaseLimit(_ALL, self.slots.limit))
        if unused:
            self._leases.leave(unused)


class _StoredSlots(Slots[Hashable]):
    """Count the slots that are held here; whether there is another one, the store says."""

    __slots__ = ()

    def try_acquire(self, _tenant: Hashable) -> bool:
        """Take none: the store is to be asked."""
        return False

    def take(self) -> None:
        """Count one that the store granted."""
        self.in_use += 1

    def release(self, _tenant: Hashable, _now: float) -> tuple[()]:
        """Count one less, and hand it to nobody."""
        self.in_use -= 1
        return ()

    def resize(self, limit: int, _now: float, *, max_per_tenant: int | None = None) -> tuple[()]:  # noqa: ARG002
        """Take another number of slots to be right."""
        self.limit = limit
        return ()


def observe_leases(telemetry: Telemetry, store: LeaseStore) -> None:
    """Report the gauges of a store that keeps leases."""
    store.guard.observe(telemetry)
    store.leases.observe(telemetry)


def _key_of(tenant: Hashable) -> str:
    return f"of:{shared_key(tenant)}"
