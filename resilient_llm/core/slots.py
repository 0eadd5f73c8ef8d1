"""How many calls run at once, and the hand-off of a freed slot to whoever waits for it.

The pool behind bulkheads and concurrency limits: permits counted, passed on, resized. Who is next is the
waiting room's to say; sleeping, waking and what the limit should be must not enter here.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from enum import Enum
from math import inf
from typing import Any, Generic, TypeVar

from resilient_llm.core.ticket import Ticket, TicketState
from resilient_llm.core.waiting_room import WaitingRoom

__all__ = ["AcquireResult", "Slots"]

Tenant = TypeVar("Tenant", bound=Hashable)


class AcquireResult(Enum):
    """Say what came of `Slots.acquire` when there is nothing to wait for."""

    GRANTED = "granted"
    REFUSED = "refused"


_GRANTED = AcquireResult.GRANTED
_NOBODY: dict[Any, int] = {}
"""What tenants hold in a pool without `max_per_tenant`, where that is not kept; shared, for pools there are many."""


class Slots(Generic[Tenant]):
    """Grant at most `limit` permits at a time, in the order of a waiting room.

    A freed permit is counted for its next holder before that waiter wakes, so nobody barges past the queue:
    while a slot is free, nobody who could take it waits. With `max_per_tenant` a tenant that holds as many
    is passed over while others are served, and competes again as soon as it holds fewer. The room is the
    pool's own from then on.

    `release`, `cancel` and `resize` return the tickets whose wait they ended. Each must be woken; its `state`
    says whether it holds a permit (`GRANTED`) or met its deadline in the queue (`EXPIRED`). After `acquire` wake
    whom the room's `take_expired` returns, and where it `displaces`, its `take_displaced`.

    `limit` may be 0, which grants nobody. Raises `ValueError` for an option out of range.
    """

    __slots__ = ("_held", "_max_per_tenant", "_room", "in_use", "limit")

    def __init__(self, limit: int, room: WaitingRoom[Tenant], *, max_per_tenant: int | None = None) -> None:
        _check("limit", limit, 0)
        if max_per_tenant is not None:
            _check("max_per_tenant", max_per_tenant, 1)
        self.limit = limit
        """How many permits may be out; `resize` changes it."""
        self._room = room
        self._max_per_tenant = max_per_tenant
        self.in_use = 0
        """How many permits are out; more than `limit` only while a shrunk pool drains."""
        self._held: dict[Tenant, int] = _NOBODY if max_per_tenant is None else {}

    @property
    def held(self) -> dict[Tenant, int]:
        """Tell how many permits each tenant has that has any; nothing where there is no `max_per_tenant`."""
        return self._held.copy()

    @property
    def room(self) -> WaitingRoom[Tenant]:
        """Give the room the tickets wait in, to read queue depths from."""
        return self._room

    def try_acquire(self, tenant: Tenant) -> bool:
        """Take a permit if one is free for this tenant now."""
        if self.in_use >= self.limit:
            return False
        if self._max_per_tenant is not None:
            held = self._held.get(tenant, 0)
            if held >= self._max_per_tenant:
                return False
            self._held[tenant] = held + 1
        self.in_use += 1
        return True

    def acquire(
        self,
        tenant: Tenant,
        now: float,
        *,
        cost: float = 1.0,
        priority: int = 0,
        deadline: float = inf,
    ) -> Ticket[Tenant] | AcquireResult:
        """Take a permit at once (`GRANTED`), or else a ticket to wait with; `REFUSED` when the room is full.

        The options are those of `WaitingRoom.push`, which also says what it raises.
        """
        if self.try_acquire(tenant):
            return _GRANTED
        ticket = self._room.push(tenant, now, cost=cost, priority=priority, deadline=deadline)
        if ticket is None:
            return AcquireResult.REFUSED
        self._suspend_at_cap(tenant)
        return ticket

    def release(self, tenant: Tenant, now: float) -> Sequence[Ticket[Tenant]]:
        """Give a tenant's permit back and return the tickets to wake.

        Raises `RuntimeError` when no permit is out, or none that is counted for this tenant.
        """
        if not self.in_use:
            raise RuntimeError("release() without a permit: none is in use")
        if self._max_per_tenant is not None:
            held = self._held.get(tenant, 0)
            if not held:
                raise RuntimeError(f"release() without a permit: tenant {tenant!r} holds none")
            if held == 1:
                del self._held[tenant]
            else:
                self._held[tenant] = held - 1
            if held <= self._max_per_tenant:
                self._room.resume(tenant)
        self.in_use -= 1
        return self._hand_over(now) if self._room.size else ()

    def cancel(self, ticket: Ticket[Tenant], now: float) -> Sequence[Ticket[Tenant]]:
        """Give a ticket up and return the tickets to wake; a permit it was granted meanwhile is passed on.

        For a waiter that leaves before it has taken its grant up; after that, `release` gives the permit
        back. Idempotent.
        """
        if self._room.remove(ticket):
            return ()
        if ticket.state is not TicketState.GRANTED:
            return ()
        ticket.state = TicketState.CANCELLED
        return self.release(ticket.tenant, now)

    def resize(
        self, limit: int, now: float, *, max_per_tenant: int | None = None
    ) -> Sequence[Ticket[Tenant]]:
        """Change the limit, and the cap per tenant if given, and return the tickets to wake.

        Permits already out stay out: a shrunk pool grants again once it has drained below its limit. Raises
        `ValueError` for an option out of range, or for a cap where the pool was made without one.
        """
        _check("limit", limit, 0)
        if max_per_tenant is not None:
            _check("max_per_tenant", max_per_tenant, 1)
            if self._max_per_tenant is None:
                raise ValueError(
                    f"max_per_tenant={max_per_tenant!r}: this pool was made without a cap per tenant"
                )
            self._max_per_tenant = max_per_tenant
            for tenant, held in self._held.items():
                if held < max_per_tenant:
                    self._room.resume(tenant)
                else:
                    self._room.suspend(tenant)
        self.limit = limit
        return self._hand_over(now)

    def _take(self, tenant: Tenant) -> None:
        self.in_use += 1
        if self._max_per_tenant is not None:
            self._held[tenant] = self._held.get(tenant, 0) + 1

    def _suspend_at_cap(self, tenant: Tenant) -> None:
        if self._max_per_tenant is not None and self._held.get(tenant, 0) >= self._max_per_tenant:
            self._room.suspend(tenant)

    def _hand_over(self, now: float) -> Sequence[Ticket[Tenant]]:
        room = self._room
        woken: list[Ticket[Tenant]] = []
        while self.in_use < self.limit and room.head(now) is not None:
            ticket = room.pop()
            self._take(ticket.tenant)
            self._suspend_at_cap(ticket.tenant)
            woken.append(ticket)
        woken.extend(room.take_expired())
        return woken


def _check(option: str, value: int, least: int) -> None:
    if not isinstance(value, int) or value < least:
        raise ValueError(f"{option}={value!r}: allowed are integers from {least}")
