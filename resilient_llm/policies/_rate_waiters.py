"""Those who wait for a rate limit: the shell around the rate queue.

Nobody polls and no task runs in the background: one waiter, the driver, sleeps until the next moment at which anything
can be granted, the others until they are woken. What a call needs of which limit must not enter here.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import anyio

from resilient_llm._loop import ROUNDING
from resilient_llm.core.rate_queue import Delay, RateQueue
from resilient_llm.core.waiting_room import Ticket, TicketState, WaitingRoom
from resilient_llm.errors import DeadlineExceededError, RateLimitedError
from resilient_llm.policies._rate_rehearsal import RateRehearsal
from resilient_llm.policies._wait_outcome import wait_outcome

if TYPE_CHECKING:
    from resilient_llm.call import Call
    from resilient_llm.core.quota import Reservation
    from resilient_llm.policies._quotas import QuotaSet
    from resilient_llm.telemetry import WaitOutcome

__all__ = ["RateWaiters"]

logger = logging.getLogger("resilient_llm")

_DISPLACED = "it waited, and its place in the queue went to a tenant that had fewer of them"
_LONG_WAIT = 60.0
"""A wait of so many seconds is worth a line in the log when it begins."""


class _Waiter:
    """One who waits: how to wake it, and how long it sleeps otherwise."""

    __slots__ = ("deadline", "scope", "turn")

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self.turn = anyio.Event()
        self.scope: anyio.CancelScope | None = None


class RateWaiters:
    """Wait for reservations, each for at most `max_wait` seconds, and look after the queue while anybody does.

    `max_queued` calls of one tenant wait, and `max_queued_total` of all, those included that are `away`. `name` is the
    policy's.
    """

    __slots__ = (
        "_away",
        "_away_by_tenant",
        "_driver",
        "_max_queued",
        "_max_queued_total",
        "_max_wait",
        "_name",
        "_quotas",
        "_rehearsal",
        "_waiters",
        "queue",
    )

    def __init__(
        self,
        quotas: QuotaSet,
        make_room: Callable[[], WaitingRoom[Hashable]],
        *,
        max_queued: int,
        max_queued_total: int,
        max_wait: float,
        name: str,
    ) -> None:
        self.queue: RateQueue[Hashable] = RateQueue(make_room, max_queued_total, displaces=True)
        self._max_queued = max_queued
        self._max_queued_total = max_queued_total
        self._away = 0
        self._away_by_tenant: Counter[Hashable] = Counter()
        self._rehearsal = RateRehearsal(max_queued, max_queued_total)
        self._quotas = quotas
        self._max_wait = max_wait
        self._name = name
        # Ordered: in a plain dict the first of many is hard to find once those before it are gone.
        self._waiters: OrderedDict[Ticket[Hashable], _Waiter] = OrderedDict()
        self._driver: _Waiter | None = None

    async def take(
        self, call: Call, reservation: Reservation, now: float, *, since: float | None = None
    ) -> None:
        """Take what a call needs when it is its turn; its turn comes as if it had waited `since` then.

        Raises `RateLimitedError`, at once when it would take too long, and `DeadlineExceededError`.
        """
        since = now if since is None else since
        delay = self.delay(call, reservation, now)
        deadline = self.deadline(call, since)
        if now + delay.seconds > deadline:
            raise self.refuse(call, reservation, now, delay, since=since)
        if self._is_full_for(call.tenant):
            raise self.no_place(call, reservation, now)
        ticket = self.queue.push(
            self._quotas.lane(call),
            call.tenant,
            reservation,
            since,
            cost=self._quotas.share(reservation),
            priority=call.priority,
            deadline=deadline,
        )
        if ticket is None:
            raise self.no_place(call, reservation, now)
        self._wake(self.queue.take_displaced())
        self.advance(now)
        if ticket.state is TicketState.GRANTED:
            return
        if delay.seconds >= _LONG_WAIT:
            logger.info("%s: a call waits for %.0f s or more", self._name, delay.seconds)
        if not await self._wait(call, ticket, reservation, since=now):
            now = call.loop.time()
            if ticket.state is TicketState.DISPLACED:
                why = f"{_DISPLACED} (max_queued_total={self._max_queued_total})"
                raise self.no_place(call, reservation, now, why=why)
            if now >= call.deadline:
                raise DeadlineExceededError(f"the call's deadline passed while it waited for {self._name}")
            raise self.refuse(call, reservation, now, self.delay(call, reservation, now), since=since)

    def has_room(self, tenant: Hashable) -> bool:
        """Tell whether one more call of a tenant may wait, with nobody making way for it."""
        return not self._is_full_for(tenant) and self.queued < self._max_queued_total

    def _is_full_for(self, tenant: Hashable) -> bool:
        return self.queue.depth(tenant) + self._away_by_tenant[tenant] >= self._max_queued

    @property
    def queued(self) -> int:
        """Count those who wait."""
        return len(self.queue) + self._away

    @property
    def _waiting(self) -> int:
        return self.queued + len(self._rehearsal)  # in a dry run, those who would

    @contextmanager
    def away(self, tenant: Hashable) -> Iterator[None]:
        """Count a call of a tenant that waits elsewhere: it takes a place of those in the queue."""
        tenants = self._away_by_tenant
        tenants[tenant] += 1
        self._count_away(1)
        try:
            yield
        finally:
            if tenants is self._away_by_tenant:  # else it waited in an event loop that has ended
                tenants[tenant] -= 1
                if not tenants[tenant]:
                    del tenants[tenant]
                self._count_away(-1)

    def _count_away(self, more: int) -> None:
        self._away += more
        self.queue.max_queued = self._max_queued_total - self._away

    def no_place(
        self,
        call: Call,
        reservation: Reservation,
        now: float,
        *,
        why: str | None = None,
        dry_run: bool = False,
    ) -> RateLimitedError:
        """Refuse a call for want of a place: none is free before somebody is served, unless somebody gives up."""
        delay = self.delay(call, reservation, now)
        place_free = self.queue.next_at - now if len(self.queue) else 0.0
        delay = Delay(max(delay.seconds, place_free), delay.charge)
        if why is None:
            full = f"max_queued_total={self._max_queued_total}"
            if self._is_full_for(call.tenant) or self._rehearsal.waiting(call.tenant) >= self._max_queued:
                full = f"max_queued={self._max_queued} for its tenant"
            why = f"it has to wait, and there is no place: {self._waiting} calls wait ({full})"
        return self._refused(call, reservation, now, delay, why, dry_run=dry_run)

    def would_take(self, call: Call, reservation: Reservation, now: float) -> float | None:
        """Take what a call needs now, into debt, and say how long it would have waited; `None` when it is refused."""
        delay = self.delay(call, reservation, now)
        if now + delay.seconds > self.deadline(call, now):
            self.refuse(call, reservation, now, delay, since=now, dry_run=True)
            return None
        if delay.seconds and not self.would_wait(call, now, delay.seconds):
            self.no_place(call, reservation, now, dry_run=True)
            return None
        reservation.take(now)
        return delay.seconds

    def would_wait(self, call: Call, now: float, seconds: float) -> bool:
        """Keep a place for so many seconds as if a call waited in it; `False` when there is none."""
        if not self._rehearsal.has_room(call.tenant, now):
            return False
        self._rehearsal.wait(call.tenant, now + seconds)
        return True

    def delay(self, call: Call, reservation: Reservation, now: float) -> Delay:
        """Say how long a call that comes now has to wait at least."""
        return self.queue.delay(self._quotas.lane(call), call.tenant, reservation, now, call.priority)

    def refuse(
        self,
        call: Call,
        reservation: Reservation,
        now: float,
        delay: Delay,
        *,
        since: float,
        dry_run: bool = False,
    ) -> RateLimitedError:
        """Refuse a call that came then, as it would have to wait for too long."""
        by_deadline = call.deadline < since + self._max_wait
        left = "its deadline" if by_deadline else f"max_wait={self._max_wait:g}"
        why = f"that takes {delay.seconds:.3g} s, more than {left} leaves it, and {self._waiting} calls wait"
        return self._refused(call, reservation, now, delay, why, dry_run=dry_run)

    def _refused(
        self, call: Call, reservation: Reservation, now: float, delay: Delay, why: str, *, dry_run: bool
    ) -> RateLimitedError:
        """Make and report the error of a refusal."""
        error = self._quotas.refusal(reservation, delay, now, why=why, name=self._name)
        call.telemetry.rejected(call, error, dry_run=dry_run)
        return error

    def advance(self, now: float) -> None:
        """Grant what can be granted, and wake whom it is granted to."""
        self._wake(self.queue.advance(now))

    def give_back(self, tenant: Hashable, now: float, reservation: Reservation | None = None) -> None:
        """Grant what can be granted now that a call of `tenant` may have given something of a `reservation` back."""
        if self._waiters:
            buckets = None if reservation is None else [bucket for bucket, _ in reservation.charges]
            self._wake(self.queue.give_back(tenant, now, buckets))

    def forget(self) -> None:
        """Start afresh: whoever waited did so in an event loop that has ended."""
        self.queue.clear()
        self._away_by_tenant = Counter()
        self._count_away(-self._away)
        self._rehearsal.clear()
        self._waiters.clear()
        self._driver = None

    async def _wait(
        self, call: Call, ticket: Ticket[Hashable], reservation: Reservation, *, since: float
    ) -> bool:
        """Wait until a ticket is granted; `False` when it is not, and will not be by its deadline.

        Cancelled, it leaves nothing behind: what was granted meanwhile is given back.
        """
        depth = self.queued
        waiter = self._waiters[ticket] = _Waiter(ticket.deadline)
        reservation.hold()
        outcome: WaitOutcome = "cancelled"
        try:
            await self._sleep(ticket, waiter, call.loop.time)
            outcome = wait_outcome(ticket.state)
        finally:
            reservation.release()
            if outcome != "acquired":
                self._leave(ticket, waiter, reservation, call.loop.time())
            unit = "tokens" if self._quotas.counts_tokens else "requests"
            call.telemetry.waited(call, self._name, since=since, outcome=outcome, unit=unit, depth=depth)
        return outcome == "acquired"

    async def _sleep(self, ticket: Ticket[Hashable], waiter: _Waiter, time: Callable[[], float]) -> None:
        while ticket.state is TicketState.WAITING:
            with anyio.CancelScope(deadline=waiter.deadline) as waiter.scope:
                self._appoint()
                await waiter.turn.wait()
            now = time()
            if ticket.state is TicketState.WAITING:
                self.advance(now)
                if now >= waiter.deadline:
                    return

    def _leave(self, ticket: Ticket[Hashable], waiter: _Waiter, reservation: Reservation, now: float) -> None:
        self._waiters.pop(ticket, None)
        if self._driver is waiter:
            self._driver = None
        if not self.queue.cancel(ticket) and ticket.state is TicketState.GRANTED:
            reservation.cancel(now)
        self.give_back(ticket.tenant, now, reservation)

    def _wake(self, tickets: Iterable[Ticket[Hashable]]) -> None:
        for ticket in tickets:
            waiter = self._waiters.pop(ticket, None)
            if waiter is not None:
                waiter.turn.set()
                if waiter is self._driver:
                    self._driver = None
        self._appoint()

    def _appoint(self) -> None:
        """See to it that one waiter sleeps no longer than until something can be granted."""
        driver = self._driver
        if driver is None:
            driver = self._driver = next(iter(self._waiters.values()), None)
        if driver is not None and driver.scope is not None:
            driver.scope.deadline = min(driver.deadline, self.queue.next_at)

    def deadline(self, call: Call, now: float) -> float:
        """Say until when a call that comes now may wait."""
        return min(now + self._max_wait, call.deadline) + ROUNDING
