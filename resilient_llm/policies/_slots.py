"""A pool of slots with its waiters: the shell that bulkheads and concurrency limits share.

Sleeps until a slot is handed over, wakes whom a free slot is for, and says what became of a wait. How many
slots there are, and what a call must do to deserve one, its policy says.
"""

from __future__ import annotations

from collections.abc import Awaitable, Hashable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import anyio

from resilient_llm.context import is_held_above
from resilient_llm.core.slots import AcquireResult, Slots
from resilient_llm.core.ticket import Ticket, TicketState
from resilient_llm.core.waiting_room import WaitingRoom
from resilient_llm.errors import ConfigurationError, DeadlineExceededError, RejectedError
from resilient_llm.policies._wait_outcome import wait_outcome
from resilient_llm.telemetry.names import DRY_RUN, LIMITER_NAME, WAIT_QUEUE_DEPTH

if TYPE_CHECKING:
    from resilient_llm.call import Call
    from resilient_llm.outcome import Outcome
    from resilient_llm.telemetry import WaitOutcome

__all__ = ["SlotPool"]

_SMOOTHING = 0.1
_FULL = "its queue is full"
_DISPLACED = "its place in the queue went to a tenant that had fewer of them"


class SlotPool:
    """Keep `limit` slots, those who wait for one, and how long a slot is usually held.

    `name` is its policy's, `max_wait` the seconds anyone waits at most, `error` what a refusal is. With
    `max_per_tenant` one tenant holds no more slots than that, and others pass it by meanwhile.
    """

    __slots__ = ("_error", "_max_wait", "_mean_hold", "_name", "slots")

    def __init__(
        self,
        limit: int,
        room: WaitingRoom[Hashable],
        *,
        name: str,
        max_wait: float,
        error: type[RejectedError],
        max_per_tenant: int | None = None,
    ) -> None:
        self.slots = Slots(limit, room, max_per_tenant=max_per_tenant)
        self._name = name
        self._max_wait = max_wait
        self._error = error
        self._mean_hold = 0.0

    def check_nesting(self) -> None:
        """Raise `ConfigurationError` where code asks for a slot that runs under a call which holds one already."""
        if is_held_above(self):
            raise ConfigurationError(
                f"a call asks for a slot of {self._name} inside of another that holds one: calls that hold all of its "
                "slots would wait for their own calls to get one; make two of them"
            )

    async def acquire(self, call: Call, tenant: Hashable = None, *, cost: float = 1.0) -> None:
        """Take a slot, waiting for it if need be; `cost` is what the wait counts for among tenants.

        `slots.try_acquire(tenant)` does the same where a slot is free, without a coroutine. Raises the pool's
        error when the room is full or `max_wait` over, and `DeadlineExceededError`.
        """
        since = call.loop.time()
        ticket = self._ask(call, tenant, since, cost)
        if ticket is AcquireResult.REFUSED:
            raise self._refuse(call, tenant, _FULL)
        if isinstance(ticket, Ticket):
            await self._wait(call, ticket, since)

    def _ask(self, call: Call, tenant: Hashable, now: float, cost: float) -> Ticket[Hashable] | AcquireResult:
        deadline = min(now + self._max_wait, call.deadline)
        got = self.slots.acquire(tenant, now, cost=cost, priority=call.priority, deadline=deadline)
        self.wake_those_out()
        return got

    async def _wait(self, call: Call, ticket: Ticket[Hashable], since: float) -> None:
        depth = len(self.slots.room)
        turn = anyio.Event()
        ticket.waiter = partial(call.loop.tell, turn.set)
        outcome: WaitOutcome = "cancelled"
        try:
            with anyio.CancelScope(deadline=ticket.deadline):
                await turn.wait()
            outcome = wait_outcome(ticket.state)
        finally:
            if outcome != "acquired":
                self.wake(self.slots.cancel(ticket, call.loop.time()))
            call.telemetry.waited(
                call, self._name, since=since, outcome=outcome, unit="concurrency", depth=depth
            )
        self._raise_unless_acquired(call, ticket, outcome)

    def _raise_unless_acquired(self, call: Call, ticket: Ticket[Hashable], outcome: WaitOutcome) -> None:
        if outcome == "rejected":
            raise self._refuse(call, ticket.tenant, _DISPLACED)
        if outcome == "timeout":
            if ticket.deadline == call.deadline:
                msg = f"the call's deadline passed while it waited for a slot of {self._name}"
                raise DeadlineExceededError(msg)
            raise self._refuse(call, ticket.tenant, self._too_long)

    def rehearse(self, call: Call, tenant: Hashable = None, *, cost: float = 1.0) -> Awaitable[None] | None:
        """Take a call through the pool as it would have gone, and report what would have become of it.

        It neither waits nor is refused; when it ends, its slot or its place in the queue is free. A pool that has to
        ask somebody gives what is to be awaited.
        """
        since = call.loop.time()
        got = self._ask(call, tenant, since, cost)
        if got is AcquireResult.REFUSED:
            call.telemetry.rejected(call, self.full(_FULL, tenant), dry_run=True)
            return None
        if isinstance(got, Ticket):
            depth = len(self.slots.room)
            call.telemetry.event(
                call, "would_wait", {LIMITER_NAME: self._name, WAIT_QUEUE_DEPTH: depth, DRY_RUN: True}
            )
        call.on_finish(lambda _: self._leave(call, tenant, got, since))
        return None

    def _leave(
        self, call: Call, tenant: Hashable, got: Ticket[Hashable] | AcquireResult, since: float
    ) -> None:
        now = call.loop.time()
        if not isinstance(got, Ticket) or got.state is TicketState.GRANTED:
            self.release(now, since, tenant)
            return
        if got.state is TicketState.DISPLACED:
            call.telemetry.rejected(call, self.full(_DISPLACED, tenant), dry_run=True)
        elif got.deadline <= now and got.deadline < call.deadline:
            call.telemetry.rejected(call, self.full(self._too_long, tenant), dry_run=True)
        self.wake(self.slots.cancel(got, now))

    @property
    def _too_long(self) -> str:
        return f"it waited {self._max_wait:g} s for a slot"

    def _refuse(self, call: Call, tenant: Hashable, why: str) -> RejectedError:
        error = self.full(why, tenant)
        call.telemetry.rejected(call, error)
        return error

    def full(self, why: str, tenant: Hashable = None) -> RejectedError:
        """Make the error of a refusal, with a guess at when a slot will be free for one who comes then."""
        room = self.slots.room
        # In turn with the others, a tenant waits for its own calls and for about as many of each of them.
        ahead = min(len(room), max(1, room.depth(tenant)) * room.tenants) + 1
        return self._error(
            f"{self._name} is full ({self.slots.in_use} calls running) and {why}",
            retry_after=max(1.0, self._mean_hold * ahead / max(1, self.slots.limit)),
            name=self._name,
        )

    def hold(self, call: Call, tenant: Hashable) -> None:
        """Keep a slot that was taken until the call ends."""
        call.taken += (self,)
        call.on_finish(partial(self._give_back, call, tenant, call.loop.time()))

    def _give_back(self, call: Call, tenant: Hashable, since: float, _outcome: Outcome) -> None:
        self.release(call.ended, since, tenant)

    def release(self, now: float, since: float, tenant: Hashable = None) -> None:
        """Give back a slot that was held since then, and wake whom it is for."""
        held = now - since
        self._mean_hold += _SMOOTHING * (held - self._mean_hold) if self._mean_hold else held
        if woken := self.slots.release(tenant, now):
            self.wake(woken)

    def resize(self, limit: int, now: float, *, max_per_tenant: int | None = None) -> None:
        """Change the number of slots and wake whom new ones are for; those in use stay in use until released."""
        self.wake(self.slots.resize(limit, now, max_per_tenant=max_per_tenant))

    def wake(self, tickets: Sequence[Ticket[Hashable]]) -> None:
        """Wake those whose wait is over."""
        for ticket in tickets:
            if ticket.waiter is not None:
                ticket.waiter()

    def wake_those_out(self) -> None:
        """Wake those whom the room has dropped, to make way or since their time was up."""
        room = self.slots.room
        for tickets in (room.take_displaced(), room.take_expired()):
            self.wake(tickets)

    def idle(self, _now: float) -> bool:
        """Tell whether nobody holds a slot or waits for one."""
        return not self.slots.in_use and not len(self.slots.room)
