"""Who waits for tokens, who gets them next, and when.

Calls that draw on the same shared buckets stand in one lane, so that a dry model holds up nobody who asks for another;
what a tenant is served counts over all lanes. How a waiter sleeps and wakes, and whose the buckets are, must not enter
here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from math import inf
from typing import Generic, TypeVar

from resilient_llm.core.alarms import Alarms
from resilient_llm.core.kept_levels import KeptLevels
from resilient_llm.core.quota import Delay, Reservation
from resilient_llm.core.rate_accounts import Accounts
from resilient_llm.core.rate_backlog import Backlog
from resilient_llm.core.rate_lane import Lane, Line
from resilient_llm.core.rate_order import LaneOrder
from resilient_llm.core.rate_scan import Scan
from resilient_llm.core.ticket import Ticket, TicketState
from resilient_llm.core.token_bucket import TokenBucket
from resilient_llm.core.waiting_room import WaitingRoom

__all__ = ["Delay", "RateQueue"]

Tenant = TypeVar("Tenant", bound=Hashable)

_NAP = 0.001
"""Seconds that are not worth leaving the line for."""


class RateQueue(Generic[Tenant]):
    """Serve calls that wait for tokens, fairly, and say when to look again.

    In a lane only the head is served, however little the others want; a tenant whose own buckets are dry is passed
    over until they are not. Where lanes share a bucket, whose tenant was served least goes first, by cost over weight
    and over all lanes; in a lane what it was served there counts as well. A lane that is not first takes of such a
    bucket what does not delay one before it.

    A lane stands in line at a bucket that it shares, and sleeps while it waits for others and keeps nothing of it: a
    look costs O(log lanes) for each that is served and each bucket that is dry.

    `advance` must be called at `next_at`, whenever something has been given back, and before anything is decided by who
    waits, where the queue `is_behind`. At most `max_queued` wait in
    all; the rooms that `make_room` makes say how many of one tenant, over all lanes, and what the tenants weigh. In a
    full queue everybody is turned away; if it `displaces`, a call within its tenant's share of the places takes that of
    the last call of the tenant that exceeds its own most, as `places` says.

    Sources: EASY backfilling (Lifka, "The ANL/IBM SP scheduling system", JSSPP 1995) between lanes; start-time fair
    queueing (Goyal, Vin & Cheng, SIGCOMM 1996) among tenants.
    """

    def __init__(
        self, make_room: Callable[[], WaitingRoom[Tenant]], max_queued: int, *, displaces: bool = False
    ) -> None:
        self.next_at = inf
        """When to look next, if nothing is given back before."""
        self._make_room = make_room
        rules = make_room()
        self.max_queued = max_queued
        """How many wait at most; it may change."""
        self._displaces = displaces
        self._max_queued_per_tenant = rules.max_queued_per_tenant
        self._lanes: dict[Hashable, Lane[Tenant]] = {}
        self._entries: dict[Ticket[Tenant], tuple[Lane[Tenant], Line[Tenant], Reservation]] = {}
        self._accounts: Accounts[Tenant] = Accounts(rules.weight)
        self._order: LaneOrder[Tenant] = LaneOrder()
        self.waiting: Collection[Ticket[Tenant]] = self._entries.keys()
        """The tickets of those who wait, to look at."""
        self._dry: dict[Tenant, dict[Lane[Tenant], None]] = {}  # where tenants may be passed over
        self._deadlines: Alarms[Ticket[Tenant]] = Alarms()
        self._backlog = Backlog()
        self._displaced: list[Ticket[Tenant]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def depth(self, tenant: Tenant) -> int:
        """Say how many calls of a tenant wait, over all lanes."""
        return self._accounts.waiting(tenant)

    def delay(
        self, key: Hashable, tenant: Tenant, reservation: Reservation, now: float, priority: int
    ) -> Delay:
        """Say how long a call has to wait at least, given what its tenant waits for already.

        Exact when it is alone in its lane and nothing is given back meanwhile.
        """
        return reservation.delay(now, self._own_ahead(key, tenant, priority))

    def delay_by_others(
        self, key: Hashable, tenant: Tenant, reservation: Reservation, now: float, priority: int
    ) -> Delay:
        """Say how long a call has to wait at least that cannot be served now, and for which of its charges.

        Whoever is to be served next in its lane goes before it, and nobody at all before `next_at`.
        """
        ahead = list(self._own_ahead(key, tenant, priority)) or [0.0] * len(reservation.charges)
        lane = self._lanes.get(key)
        if lane is not None and lane.head is not None and lane.head.tenant != tenant:
            first = lane.head.room.head(now)
            if first is not None:
                for index, amount in enumerate(self._entries[first][2].amounts[reservation.own :]):
                    ahead[reservation.own + index] += amount
        delay = reservation.delay(now, ahead)
        someone = self.next_at - now if self._entries else 0.0
        if someone > delay.seconds:
            charge = delay.charge if delay.seconds else self._backlog.scarcest(reservation, now)
            return Delay(someone, charge)
        return delay if delay.seconds else Delay(0.0, self._backlog.scarcest(reservation, now))

    def _own_ahead(self, key: Hashable, tenant: Tenant, priority: int) -> Sequence[float]:
        lane = self._lanes.get(key)
        line = None if lane is None else lane.lines.get(tenant)
        return () if line is None else line.ahead_of(priority)

    def is_behind(self, now: float) -> bool:
        """Tell whether somebody can be served, or has run out of time, who has not been told."""
        return now >= self.next_at or now >= self._deadlines.next_at()

    def push(
        self,
        key: Hashable,
        tenant: Tenant,
        reservation: Reservation,
        now: float,
        *,
        cost: float,
        priority: int = 0,
        deadline: float = inf,
        at_once: bool = False,
    ) -> Ticket[Tenant] | None:
        """Queue a call in the lane `key`; `None` when there is no room. Follow it up with `advance`.

        One that is to be served `at_once`, or else cancelled, needs no place.

        The options are those of `WaitingRoom.push`, which also says what it raises; a `cost` of 0 is that of a call for
        which its tenant was charged before. See to whoever made way for it: they are left for `take_displaced`.
        """
        if not at_once and self.depth(tenant) >= self._max_queued_per_tenant:
            return None
        displaced = None
        if not at_once and len(self._entries) >= self.max_queued:
            displaced = self._last_of_longest(tenant)
            if displaced is None:
                return None
        account = self._accounts.join(tenant)
        lane = self._lanes.get(key)
        if lane is None:
            lane = Lane(key, list(dict.fromkeys(bucket for bucket, _ in reservation.shared)))
        line = lane.line(tenant, account, self._make_room)
        ticket = line.room.push(tenant, now, cost=cost or 1.0, priority=priority, deadline=deadline)
        if ticket is None:
            return None
        ticket.cost = cost
        self._entries[ticket] = lane, line, reservation
        self._deadlines.set(ticket, deadline)
        self._backlog.add(reservation)
        self._accounts.count_in(tenant, account)
        if line.calls and priority > line.lowest_priority:
            # It may go first, and need less than the one its tenant is passed over for.
            lane.wake(tenant)
        lane.count_in(line, reservation.amounts, priority)
        if key not in self._lanes:
            self._lanes[key] = lane
            self._order.add(lane)
        elif lane.head is None or lane.number is not None:
            self._order.stand(lane)
        if displaced is not None:
            self.cancel(displaced)
            displaced.state = TicketState.DISPLACED
            self._displaced.append(displaced)
        return ticket

    def take_displaced(self) -> list[Ticket[Tenant]]:
        """Return the tickets taken out since the last time to make way for others."""
        displaced, self._displaced = self._displaced, []
        return displaced

    def _last_of_longest(self, tenant: Tenant) -> Ticket[Tenant] | None:
        """Choose which call makes way for one of a tenant's, over all lanes; `None` when it is turned away."""
        if not (self._displaces and self._entries):
            return None
        longest = self._accounts.who_makes_way(tenant, self.max_queued)
        if longest is None:
            return None
        own = [(ticket, line) for ticket, (_, line, _) in self._entries.items() if ticket.tenant == longest]
        return max(reversed(own), key=lambda each: each[1].room.rank(each[0]))[0]  # of equals, who came last

    def cancel(self, ticket: Ticket[Tenant]) -> bool:
        """Take a call out that waits no longer; `False` when it does not wait. Follow it up with `give_back`.

        Other calls of its tenant keep their place, and may need less than it did.
        """
        if ticket not in self._entries:
            return False
        lane, line, _ = self._entries[ticket]
        of_head = lane.head is line
        line.room.remove(ticket)
        self._forget(ticket)
        if of_head:
            self._order.stand(lane)
        return True

    def advance(self, now: float) -> list[Ticket[Tenant]]:
        """Serve whoever can be, and return the tickets whose wait is over.

        They are `GRANTED`, their reservations taken, or `EXPIRED`: their deadline has come or will have by the time
        it is their turn.
        """
        over = self._deadlines.due(now)
        for ticket in over:
            self.cancel(ticket)
            ticket.state = TicketState.EXPIRED
        kept = KeptLevels()
        self.next_at = inf
        self._order.wake_due(now)
        scan = Scan(self._order, kept)
        while (lane := scan.next(now)) is not None:
            if self._serve(lane, now, kept, over):
                scan.served(self._accounts.get(over[-1].tenant))
            else:
                scan.blocked()
        scan.finish()
        self.next_at = min(self.next_at, self._order.next_at())
        return over

    def give_back(
        self, tenant: Tenant, now: float, buckets: Sequence[TokenBucket] | None = None
    ) -> list[Ticket[Tenant]]:
        """Serve whoever can be now that a call of `tenant` has given something back; as `advance` otherwise.

        `buckets` are those that it was given to; all are looked at when that is not known.
        """
        for lane in self._dry.pop(tenant, ()):
            lane.wake(tenant)
            self._order.wake(lane)
        self._order.wake_at(list(self._order.buckets) if buckets is None else buckets)
        return self.advance(now)

    def clear(self) -> None:
        """Forget everybody."""
        self._entries.clear()
        self._lanes.clear()
        self._dry.clear()
        self._deadlines.clear()
        self._backlog.clear()
        self._accounts.clear()
        self._order.clear()
        self.next_at = inf

    def _serve(self, lane: Lane[Tenant], now: float, kept: KeptLevels, over: list[Ticket[Tenant]]) -> bool:
        """Grant a lane's head what it waits for; `False` when nobody in the lane can be served now."""
        lane.wake_due(now)
        while (line := lane.choose()) is not None:
            ticket = line.room.head(now)
            for expired in line.room.take_expired():
                self._forget(expired)
                over.append(expired)
            if ticket is None:
                continue
            reservation = self._entries[ticket][2]
            own = _wait(reservation.charges[: reservation.own], now)
            shared = reservation.shared
            wait = max(own, _wait(shared, now))
            if now + wait > ticket.deadline:
                line.room.remove(ticket)
                ticket.state = TicketState.EXPIRED
                self._forget(ticket)
                over.append(ticket)
            elif own:
                lane.pass_over(line, now + own)
                self._dry.setdefault(line.tenant, {})[lane] = None
            elif wait or not kept.leaves(shared, now):
                self._keep(lane, shared, now, wait, kept)
                return False
            else:
                reservation.take(now)
                line.room.pop()
                self._charge(lane, line, ticket.cost, shared, now)
                self._forget(ticket)
                lane.release()
                over.append(ticket)
                return True
        if lane.calls:
            self._order.sleep(lane, lane.asleep.next_at())
        return False

    def _keep(
        self,
        lane: Lane[Tenant],
        shared: Sequence[tuple[TokenBucket, float]],
        now: float,
        wait: float,
        kept: KeptLevels,
    ) -> None:
        """Keep for a lane what will not be refilled until it is served, or let it sleep while that is nothing."""
        nap = wait
        for bucket, amount in shared:
            needed = min(amount, bucket.capacity)
            kept.keep(bucket, max(0.0, needed - bucket.rate * wait))
            if self._order.is_contended(bucket):
                if bucket.wait(amount, now):
                    # What is left then may be enough for a small call, and not for the next of this size.
                    self._order.run_short(bucket, now + wait + needed / bucket.rate)
                nap = min(nap, wait - needed / bucket.rate)
                if kept.exhausts(bucket, now):
                    lane.place = bucket
        if wait:
            self.next_at = min(self.next_at, now + wait)
        if nap > _NAP or nap == wait > 0:
            self._order.sleep(lane, now + nap)

    def _charge(
        self,
        lane: Lane[Tenant],
        line: Line[Tenant],
        cost: float,
        shared: Sequence[tuple[TokenBucket, float]],
        now: float,
    ) -> None:
        """Charge a tenant for a call: over all lanes where these compete for what is short, else in its lane."""
        account = line.account
        start = line.key
        order = self._order
        if any(
            order.is_contended(bucket) and (bucket.wait(amount, now) or order.is_short(bucket, now))
            for bucket, amount in shared
        ):
            self._accounts.charge(account, cost)
        else:
            line.turn += cost / account.weight
        lane.move_on(line, start, cost)

    def _forget(self, ticket: Ticket[Tenant]) -> None:
        lane, line, reservation = self._entries.pop(ticket)
        self._deadlines.wake(ticket)
        self._backlog.remove(reservation)
        lane.count_out(line, reservation.amounts)
        if not lane.calls:
            del self._lanes[lane.key]
            self._order.remove(lane)
        self._accounts.count_out(line.account)
        if not line.account.calls:
            self._dry.pop(line.tenant, None)
        if not self._entries:
            self.clear()


def _wait(charges: Sequence[tuple[TokenBucket, float]], now: float) -> float:
    return max((bucket.wait(amount, now) for bucket, amount in charges), default=0.0)
