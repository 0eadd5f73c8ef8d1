"""What stands for a call that waits, and what becomes of it.

A ticket is all that whoever wakes the call has to do with; the order they are served in must not enter here.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from enum import Enum
from typing import Generic, TypeVar

__all__ = ["Ticket", "TicketState"]

Tenant = TypeVar("Tenant", bound=Hashable)


class TicketState(Enum):
    """Say what became of a ticket; every state but `WAITING` is final for the room."""

    WAITING = "waiting"
    GRANTED = "granted"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    DISPLACED = "displaced"
    """Its place went to a tenant that had fewer than its share of them."""


class Ticket(Generic[Tenant]):
    """Stand for one waiting call; made by `WaitingRoom.push`, written to only by the room and its pool.

    `waiter` is the shell's: whatever wakes the one who waits. The core carries it and never calls it.
    """

    __slots__ = ("cost", "deadline", "enqueued_at", "priority", "state", "tenant", "waiter")

    def __init__(
        self, tenant: Tenant, cost: float, priority: int, deadline: float, enqueued_at: float
    ) -> None:
        self.tenant = tenant
        self.cost = cost
        self.priority = priority
        self.deadline = deadline
        self.enqueued_at = enqueued_at
        self.state = TicketState.WAITING
        self.waiter: Callable[[], object] | None = None

    def __repr__(self) -> str:
        return (
            f"<Ticket {self.state.value} tenant={self.tenant!r} cost={self.cost:g} priority={self.priority}>"
        )
