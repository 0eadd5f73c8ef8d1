"""Those who wait for a rate limit, and those who may not: the shell around the rate queue.

What a call needs of which limit must not enter here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from resilient_llm._loop import ROUNDING
from resilient_llm.core.rate_queue import Delay, RateQueue
from resilient_llm.core.waiting_room import Ticket, TicketState, WaitingRoom
from resilient_llm.errors import DeadlineExceededError, RateLimitedError
from resilient_llm.policies._kept_places import KeptPlaces
from resilient_llm.policies._rate_sleepers import Sleepers
from resilient_llm.policies._wait_outcome import wait_outcome

if TYPE_CHECKING:
    from resilient_llm.call import Call
    from resilient_llm.core.quota import Reservation
    from resilient_llm.policies._quotas import QuotaSet
    from resilient_llm.telemetry import WaitOutcome

__all__ = ["RateWaiters"]

logger = logging.getLogger("resilient_llm")

_DISPLACED = "it waited, and its place in the queue went to a tenant that had fewer of them"
_SOONEST = 0.001
"""Seconds after which a call may come back at the soonest, when those before it have just been served."""
_LONG_WAIT = 60.0
"""A wait of so many seconds is worth a line in the log when it begins."""


class RateWaiters:
    """Wait for reservations, each for at most `max_wait` seconds, and look after the queue while anybody does.

    `max_queued` calls of one tenant wait, and `max_queued_total` of all, those included that are `away`. `name` is the
    policy's.
    """

    __slots__ = (
        "_away",
        "_max_queued",
        "_max_queued_total",
        "_max_wait",
        "_name",
        "_quotas",
        "_rehearsal",
        "_sleepers",
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
        self._away = KeptPlaces()
        self._rehearsal = KeptPlaces()  # of those who would wait, in a dry run that lets nobody wait
        self._quotas = quotas
        self._max_wait = max_wait
        self._name = name
        self._sleepers = Sleepers(lambda: self.queue.next_at)

    async def take(
        self,
        call: Call,
        reservation: Reservation,
        now: float,
        *,
        since: float | None = None,
        again: bool = False,
    ) -> None:
        """Take what a call needs when it is its turn; its turn comes as if it had waited `since` then.

        One that had its turn in vain and comes `again` counts for nothing more among tenants. Raises
        `RateLimitedError`, at once when it would take too long, and `DeadlineExceededError`.
        """
        since = now if since is None else since
        self.catch_up(now)
        delay = self.delay(call, reservation, now)
        deadline = self.deadline(call, since)
        if now + delay.seconds > deadline:
            raise self.refuse(call, reservation, now, delay if delay.seconds else None, since=since)
        push = partial(
            self.queue.push,
            self._quotas.lane(call),
            call.tenant,
            reservation,
            since,
            cost=0.0 if again else self._quotas.share(reservation),
            priority=call.priority,
            deadline=deadline,
        )
        if not self.has_room(call.tenant, now) and self._passes_at_once(push, reservation, now):
            return
        ticket = None if self._is_full_for(call.tenant) else push()
        if ticket is None:
            raise self.no_place(call, reservation, now)
        self._sleepers.wake(self.queue.take_displaced())
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
            raise self.refuse(call, reservation, now, None, since=since)

    def _passes_at_once(
        self, push: Callable[..., Ticket[Hashable] | None], reservation: Reservation, now: float
    ) -> bool:
        """Take what a call needs if it is its turn: those who wait may do so for what it does not need."""
        if reservation.wait(now):
            return False
        ticket = push(at_once=True)
        self.advance(now)
        if ticket is None or ticket.state is TicketState.GRANTED:
            return ticket is not None
        self.queue.cancel(ticket)
        self.give_back(ticket.tenant, now, reservation)
        return False

    def catch_up(self, now: float) -> None:
        """Serve who can be, and let those go whose time is up, before anything is decided by who waits.

        They are woken on time, but may come to it later than others.
        """
        self._rehearsal.catch_up(now)
        self._away.catch_up(now)
        self._leave_room_for_away()
        if self.queue.is_behind(now):
            self.advance(now)

    def has_room(self, tenant: Hashable, now: float) -> bool:
        """Tell whether one more call of a tenant may wait, with nobody making way for it."""
        self.catch_up(now)
        return not self._is_full_for(tenant) and self.queued < self._max_queued_total

    def _is_full_for(self, tenant: Hashable) -> bool:
        return self.queue.depth(tenant) + self._away.of(tenant) >= self._max_queued

    @property
    def queued(self) -> int:
        """Count those who wait."""
        return len(self.queue) + len(self._away)

    @property
    def _waiting(self) -> int:
        return self.queued + len(self._rehearsal)  # in a dry run, those who would

    @contextmanager
    def away(self, tenant: Hashable, until: float) -> Iterator[None]:
        """Count a call of a tenant that waits elsewhere until then: it takes a place of those in the queue."""
        place = self._away.keep(tenant, until)
        self._leave_room_for_away()
        try:
            yield
        finally:
            self._away.give_up(place)
            self._leave_room_for_away()

    def _leave_room_for_away(self) -> None:
        self.queue.max_queued = self._max_queued_total - len(self._away)

    def no_place(
        self,
        call: Call,
        reservation: Reservation,
        now: float,
        *,
        delay: Delay | None = None,
        why: str | None = None,
        dry_run: bool = False,
    ) -> RateLimitedError:
        """Refuse a call for want of a place: none is free before somebody is served, unless somebody gives up.

        `delay` is how long it would have waited, where that is known.
        """
        self.catch_up(now)
        if delay is None:
            delay = self._delay_by_others(call, reservation, now)
        if why is None:
            full = f"max_queued_total={self._max_queued_total}"
            if self._is_full_for(call.tenant) or self._rehearsal.of(call.tenant) >= self._max_queued:
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
        """Keep a place for so many seconds as if a call waited in it; `False` when there is none.

        Nobody is displaced: who comes last into a full queue finds no place.
        """
        rehearsal = self._rehearsal
        rehearsal.catch_up(now)
        if rehearsal.of(call.tenant) >= self._max_queued or len(rehearsal) >= self._max_queued_total:
            return False
        rehearsal.keep(call.tenant, now + seconds)
        return True

    def delay(self, call: Call, reservation: Reservation, now: float) -> Delay:
        """Say how long a call that comes now has to wait at least."""
        return self.queue.delay(self._quotas.lane(call), call.tenant, reservation, now, call.priority)

    def _delay_by_others(self, call: Call, reservation: Reservation, now: float) -> Delay:
        """Say how long a call has to wait at least that comes now and cannot be served."""
        lane = self._quotas.lane(call)
        delay = self.queue.delay_by_others(lane, call.tenant, reservation, now, call.priority)
        return delay._replace(seconds=max(delay.seconds, _SOONEST))

    def refuse(
        self,
        call: Call,
        reservation: Reservation,
        now: float,
        delay: Delay | None,
        *,
        since: float,
        dry_run: bool = False,
    ) -> RateLimitedError:
        """Refuse a call that came then, as it would have to wait for too long: at least as long as others take."""
        self.catch_up(now)
        takes = "that takes"
        if delay is None:
            delay = self._delay_by_others(call, reservation, now)
            if delay.seconds > self.delay(call, reservation, now).seconds:
                takes = "others come first, and that takes at least"
        by_deadline = call.deadline < since + self._max_wait
        left = "its deadline" if by_deadline else f"max_wait={self._max_wait:g}"
        why = f"{takes} {delay.seconds:.3g} s, more than {left} leaves it, and {self._waiting} calls wait"
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
        self._sleepers.wake(self.queue.advance(now))

    def give_back(self, tenant: Hashable, now: float, reservation: Reservation | None = None) -> None:
        """Grant what can be granted now that a call of `tenant` may have given something of a `reservation` back."""
        if self._sleepers:
            buckets = None if reservation is None else [bucket for bucket, _ in reservation.charges]
            self._sleepers.wake(self.queue.give_back(tenant, now, buckets))

    def forget(self) -> None:
        """Start afresh: whoever waited did so in an event loop that has ended."""
        self.queue.clear()
        self._away.clear()
        self._leave_room_for_away()
        self._rehearsal.clear()
        self._sleepers.forget()

    async def _wait(
        self, call: Call, ticket: Ticket[Hashable], reservation: Reservation, *, since: float
    ) -> bool:
        """Wait until a ticket is granted; `False` when it is not, and will not be by its deadline.

        Cancelled, it leaves nothing behind: what was granted meanwhile is given back.
        """
        depth = self.queued
        reservation.hold()
        outcome: WaitOutcome = "cancelled"
        try:
            await self._sleepers.sleep(ticket, call.loop, self.advance)
            outcome = wait_outcome(ticket.state)
        finally:
            reservation.release()
            if outcome != "acquired":
                self._leave(ticket, reservation, call.loop.time())
            unit = "tokens" if self._quotas.counts_tokens else "requests"
            call.telemetry.waited(call, self._name, since=since, outcome=outcome, unit=unit, depth=depth)
        return outcome == "acquired"

    def _leave(self, ticket: Ticket[Hashable], reservation: Reservation, now: float) -> None:
        if not self.queue.cancel(ticket) and ticket.state is TicketState.GRANTED:
            reservation.cancel(now)
        self.give_back(ticket.tenant, now, reservation)

    def deadline(self, call: Call, now: float) -> float:
        """Say until when a call that comes now may wait."""
        return min(now + self._max_wait, call.deadline) + ROUNDING
