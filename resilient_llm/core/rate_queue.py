"""Who waits for tokens, who gets them next, and when.

Calls that draw on the same shared buckets stand in one lane, served in the order of its waiting room, so that a dry
model holds up nobody who asks for another. How a waiter sleeps and wakes, and whose the buckets are, must not enter
here.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from heapq import heapify, heappop, heappush, heapreplace
from math import inf
from typing import Generic, NamedTuple, TypeVar

from resilient_llm.core.quota import Reservation
from resilient_llm.core.token_bucket import TokenBucket
from resilient_llm.core.waiting_room import Ticket, TicketState, WaitingRoom

__all__ = ["Delay", "RateQueue"]

Tenant = TypeVar("Tenant", bound=Hashable)

_NOTHING: tuple[float, ...] = ()
_MIN_ALARMS = 16


class Delay(NamedTuple):
    """How many seconds a call has to wait, and for which of its charges longest."""

    seconds: float
    charge: int


class _Backlog:
    """What one tenant's calls in one lane wait for, added up."""

    __slots__ = ("amounts", "calls", "lowest_priority")

    def __init__(self, priority: int, charges: int) -> None:
        self.amounts = [0.0] * charges
        self.calls = 0
        self.lowest_priority = priority


class _Lane(Generic[Tenant]):
    """Calls that draw on the same shared buckets."""

    __slots__ = ("_alarms", "_asleep", "_serial", "backlogs", "key", "number", "room", "turn")

    def __init__(self, key: Hashable, number: int, room: WaitingRoom[Tenant], turn: float) -> None:
        self.key = key
        self.number = number
        self.room = room
        self.turn = turn
        self.backlogs: dict[Tenant, _Backlog] = {}
        self._asleep: dict[Tenant, float] = {}
        # Alarms may be out of date; those that count are what `_asleep` says.
        self._alarms: list[tuple[float, int, Tenant]] = []
        self._serial = 0

    def pass_over(self, tenant: Tenant, until: float) -> None:
        """Serve others until then: the tenant's own buckets are dry."""
        self.room.suspend(tenant)
        self._asleep[tenant] = until
        self._serial += 1
        heappush(self._alarms, (until, self._serial, tenant))
        if len(self._alarms) > 2 * len(self._asleep) + _MIN_ALARMS:
            self._alarms = [(at, number, tenant) for number, (tenant, at) in enumerate(self._asleep.items())]
            heapify(self._alarms)

    def wake(self, tenant: Tenant) -> None:
        """Let a tenant that was passed over compete again."""
        if self._asleep.pop(tenant, None) is not None:
            self.room.resume(tenant)

    def wake_at(self, now: float) -> float:
        """Let those compete again whose time has come, and say when the next one's will."""
        while self._alarms:
            at, _, tenant = self._alarms[0]
            current = self._asleep.get(tenant) == at
            if current and at > now:
                return at
            heappop(self._alarms)
            if current:
                self.wake(tenant)
        return inf


class RateQueue(Generic[Tenant]):
    """Serve calls that wait for tokens, fairly, and say when to look again.

    In a lane only the head of the waiting room is served, however little the others want; a tenant whose own buckets
    are dry is passed over until they are not. Lanes take turns by what they were served per tenant waiting, which
    matters only where they share a bucket. A lane that is not first takes of such a bucket what does not delay one
    before it.

    `advance` must be called at `next_at`, and whenever something has been given back. At most `max_queued` wait in
    all.

    Sources: EASY backfilling (Lifka, "The ANL/IBM SP scheduling system", JSSPP 1995) between lanes; in a lane see
    `WaitingRoom`.
    """

    def __init__(self, make_room: Callable[[], WaitingRoom[Tenant]], max_queued: int) -> None:
        self.next_at = inf
        """When something can be granted next, if nothing is given back before."""
        self._make_room = make_room
        self._max_queued = max_queued
        self._lanes: dict[Hashable, _Lane[Tenant]] = {}
        self._entries: dict[Ticket[Tenant], tuple[_Lane[Tenant], Reservation]] = {}
        self._serial = 0
        self._round = 0.0
        self._step = 0.0  # what the round moves on by when the next call is served

    def __len__(self) -> int:
        return len(self._entries)

    def delay(
        self, key: Hashable, tenant: Tenant, reservation: Reservation, now: float, priority: int
    ) -> Delay:
        """Say how long a call has to wait at least, given what its tenant waits for already.

        Exact when it is alone in its lane and nothing is given back meanwhile.
        """
        lane = self._lanes.get(key)
        backlog = None if lane is None else lane.backlogs.get(tenant)
        ahead = backlog.amounts if backlog is not None and priority <= backlog.lowest_priority else _NOTHING
        longest = Delay(0.0, 0)
        for index, (bucket, amount) in enumerate(reservation.charges):
            seconds = bucket.wait(amount, now, ahead[index] if ahead else 0.0)
            if seconds > longest.seconds:
                longest = Delay(seconds, index)
        return longest

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
    ) -> Ticket[Tenant] | None:
        """Queue a call in the lane `key`; `None` when there is no room. Follow it up with `advance`.

        The options are those of `WaitingRoom.push`, which also says what it raises.
        """
        if len(self._entries) >= self._max_queued:
            return None
        lane = self._lanes.get(key)
        if lane is None:
            self._serial += 1
            lane = _Lane(key, self._serial, self._make_room(), self._round)
        ticket = lane.room.push(tenant, now, cost=cost, priority=priority, deadline=deadline)
        if ticket is None:
            return None
        self._lanes[key] = lane
        self._entries[ticket] = lane, reservation
        backlog = lane.backlogs.get(tenant)
        if backlog is None:
            backlog = lane.backlogs[tenant] = _Backlog(priority, len(reservation.charges))
        elif priority > backlog.lowest_priority:
            # It may go first, and need less than the one its tenant is passed over for.
            lane.wake(tenant)
        backlog.calls += 1
        backlog.lowest_priority = min(backlog.lowest_priority, priority)
        for index, (_, amount) in enumerate(reservation.charges):
            backlog.amounts[index] += amount
        return ticket

    def cancel(self, ticket: Ticket[Tenant]) -> bool:
        """Take a call out that waits no longer; `False` when it does not wait. Follow it up with `advance`."""
        if ticket not in self._entries:
            return False
        lane, _ = self._entries[ticket]
        lane.room.remove(ticket)
        self._forget(ticket)
        return True

    def advance(self, now: float) -> list[Ticket[Tenant]]:
        """Serve whoever can be, and return the tickets whose wait is over.

        They are `GRANTED`, their reservations taken, or `EXPIRED`: their deadline has come or will have by the time
        it is their turn.
        """
        over: list[Ticket[Tenant]] = []
        kept: dict[TokenBucket, float] = {}  # of a bucket, for lanes before
        self.next_at = inf
        line = [(lane.turn, lane.number, lane) for lane in self._lanes.values() if lane.backlogs]
        heapify(line)
        while line:
            lane = line[0][2]
            if self._serve(lane, now, kept, over):
                heapreplace(line, (lane.turn, lane.number, lane))
            else:
                heappop(line)
        self._tidy()
        return over

    def give_back(self, tenant: Tenant, now: float) -> list[Ticket[Tenant]]:
        """Serve whoever can be now that a call of `tenant` has given something back; as `advance` otherwise."""
        for lane in self._lanes.values():
            lane.wake(tenant)
        return self.advance(now)

    def clear(self) -> None:
        """Forget everybody."""
        self._entries.clear()
        self._tidy()
        self.next_at = inf

    def _serve(
        self, lane: _Lane[Tenant], now: float, kept: dict[TokenBucket, float], over: list[Ticket[Tenant]]
    ) -> bool:
        """Grant a lane's head what it waits for; `False` when nobody in the lane can be served now."""
        room = lane.room
        lane.wake_at(now)
        while (ticket := self._head(lane, now, over)) is not None:
            reservation = self._entries[ticket][1]
            own = _wait(reservation.charges[: reservation.own], now)
            shared = reservation.charges[reservation.own :]
            wait = max(own, _wait(shared, now))
            if now + wait > ticket.deadline:
                room.remove(ticket)
                ticket.state = TicketState.EXPIRED
                self._forget(ticket)
                over.append(ticket)
            elif own:
                lane.pass_over(ticket.tenant, now + own)
            elif wait or any(
                bucket in kept and bucket.wait(amount, now, kept[bucket]) for bucket, amount in shared
            ):
                for bucket, amount in shared:
                    refilled = bucket.rate * wait
                    kept[bucket] = kept.get(bucket, 0.0) + max(0.0, min(amount, bucket.capacity) - refilled)
                if wait:
                    self.next_at = min(self.next_at, now + wait)
                return False
            else:
                reservation.take(now)
                room.pop()
                self._move_on(lane, ticket.cost)
                self._forget(ticket)
                over.append(ticket)
                return True
        self.next_at = min(self.next_at, lane.wake_at(now))
        return False

    def _head(self, lane: _Lane[Tenant], now: float, over: list[Ticket[Tenant]]) -> Ticket[Tenant] | None:
        ticket = lane.room.head(now)
        for expired in lane.room.take_expired():
            self._forget(expired)
            over.append(expired)
        return ticket

    def _move_on(self, lane: _Lane[Tenant], cost: float) -> None:
        """Charge a lane for a call; rounds are counted as in `WaitingRoom`, with a weight of 1 for each tenant."""
        start, lane.turn = lane.turn, lane.turn + cost / len(lane.backlogs)
        self._round = min(max(self._round + self._step, start), lane.turn)
        self._step = cost / sum(len(lane.backlogs) for lane in self._lanes.values())

    def _forget(self, ticket: Ticket[Tenant]) -> None:
        lane, reservation = self._entries.pop(ticket)
        backlog = lane.backlogs[ticket.tenant]
        backlog.calls -= 1
        if not backlog.calls:
            del lane.backlogs[ticket.tenant]
            lane.wake(ticket.tenant)
            return
        for index, (_, amount) in enumerate(reservation.charges):
            backlog.amounts[index] -= amount

    def _tidy(self) -> None:
        """Forget empty lanes, but for those that have had more than their turn while others wait."""
        if not self._entries:
            self._lanes.clear()
            self._round = self._step = 0.0
            return
        for key in [
            key for key, lane in self._lanes.items() if not lane.backlogs and lane.turn <= self._round
        ]:
            del self._lanes[key]


def _wait(charges: Sequence[tuple[TokenBucket, float]], now: float) -> float:
    return max((bucket.wait(amount, now) for bucket, amount in charges), default=0.0)
