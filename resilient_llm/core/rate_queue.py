"""Who waits for tokens, who gets them next, and when.

Calls that draw on the same shared buckets stand in one lane, so that a dry model holds up nobody who asks for another;
what a tenant is served counts over all lanes. How a waiter sleeps and wakes, and whose the buckets are, must not enter
here.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from heapq import heappop, heappush, heapreplace
from itertools import count
from math import inf
from typing import Generic, NamedTuple, TypeVar

from resilient_llm.core.quota import Reservation
from resilient_llm.core.rate_lane import Account, Alarms, Lane, Line
from resilient_llm.core.token_bucket import TokenBucket
from resilient_llm.core.waiting_room import Ticket, TicketState, WaitingRoom

__all__ = ["Delay", "RateQueue"]

Tenant = TypeVar("Tenant", bound=Hashable)

_NOTHING: tuple[float, ...] = ()
_MIN_REMEMBERED = 64
_NAP = 0.001
"""Seconds that are not worth leaving the line for."""
_INSTANT = 1e-6
"""Seconds of refill that serve nobody."""


class Delay(NamedTuple):
    """How many seconds a call has to wait, and for which of its charges longest."""

    seconds: float
    charge: int


class _File(Generic[Tenant]):
    """Lanes that stand at one bucket and are one tenant's, by number; a lane of several tenants stands alone."""

    __slots__ = ("account", "key", "lanes")

    def __init__(
        self, key: tuple[TokenBucket | None, Account | Lane[Tenant]], account: Account | None
    ) -> None:
        self.key = key
        self.account = account
        self.lanes: list[tuple[int, Lane[Tenant]]] = []

    def first(self) -> Lane[Tenant] | None:
        """Return the lane that stands first; those that have gone are tidied away."""
        while self.lanes:
            number, lane = self.lanes[0]
            if lane.number == number:
                return lane
            heappop(self.lanes)
        return None


class RateQueue(Generic[Tenant]):
    """Serve calls that wait for tokens, fairly, and say when to look again.

    In a lane only the head is served, however little the others want; a tenant whose own buckets are dry is passed
    over until they are not. Where lanes share a bucket, whose tenant was served least goes first, by cost over weight
    and over all lanes; in a lane what it was served there counts as well. A lane that is not first takes of such a
    bucket what does not delay one before it.

    A lane stands in line at a bucket that it shares, and sleeps while it waits for others and keeps nothing of it: a
    look costs O(log lanes) for each that is served and each bucket that is dry.

    `advance` must be called at `next_at`, and whenever something has been given back. At most `max_queued` wait in
    all; the rooms that `make_room` makes say how many of one tenant, over all lanes, and what the tenants weigh.

    Sources: EASY backfilling (Lifka, "The ANL/IBM SP scheduling system", JSSPP 1995) between lanes; start-time fair
    queueing (Goyal, Vin & Cheng, SIGCOMM 1996) among tenants.
    """

    def __init__(self, make_room: Callable[[], WaitingRoom[Tenant]], max_queued: int) -> None:
        self.next_at = inf
        """When to look next, if nothing is given back before."""
        self._make_room = make_room
        self._rules = make_room()
        self._max_queued = max_queued
        self._lanes: dict[Hashable, Lane[Tenant]] = {}
        self._entries: dict[Ticket[Tenant], tuple[Lane[Tenant], Line[Tenant], Reservation]] = {}
        self._accounts: dict[Tenant, Account] = {}
        self._drawing: dict[TokenBucket, dict[Lane[Tenant], None]] = {}
        self._standing: dict[TokenBucket | None, list[tuple[float, int, _File[Tenant]]]] = {}
        self._files: dict[tuple[TokenBucket | None, Account | Lane[Tenant]], _File[Tenant]] = {}
        self._asleep: Alarms[Lane[Tenant]] = Alarms()
        self._dry: dict[Tenant, dict[Lane[Tenant], None]] = {}  # where tenants may be passed over
        self._serial = count()
        self._round = 0.0
        self._step = 0.0  # what the round moves on by when the next call is served
        self._weight = 0.0  # of all tenants that wait

    def __len__(self) -> int:
        return len(self._entries)

    def delay(
        self, key: Hashable, tenant: Tenant, reservation: Reservation, now: float, priority: int
    ) -> Delay:
        """Say how long a call has to wait at least, given what its tenant waits for already.

        Exact when it is alone in its lane and nothing is given back meanwhile.
        """
        lane = self._lanes.get(key)
        line = None if lane is None else lane.lines.get(tenant)
        ahead = (
            line.amounts if line is not None and line.calls and priority <= line.lowest_priority else _NOTHING
        )
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
        account = self._accounts.get(tenant)
        depth = 0 if account is None else account.calls
        if len(self._entries) >= self._max_queued or depth >= self._rules._max_queued_per_tenant:
            return None
        if account is None:
            account = Account(self._round, self._rules._weight(tenant))
        elif not account.calls:
            account.turn = max(account.turn, self._round)
        lane = self._lanes.get(key)
        if lane is None:
            lane = Lane(
                key, list(dict.fromkeys(bucket for bucket, _ in reservation.charges[reservation.own :]))
            )
        line = lane.line(tenant, account, self._make_room)
        ticket = line.room.push(tenant, now, cost=cost, priority=priority, deadline=deadline)
        if ticket is None:
            return None
        self._entries[ticket] = lane, line, reservation
        self._count_in(lane, line, reservation, priority)
        if key not in self._lanes:
            self._open(lane)
        elif lane.head is None or lane.number is not None:
            self._stand(lane)
        return ticket

    def _count_in(
        self, lane: Lane[Tenant], line: Line[Tenant], reservation: Reservation, priority: int
    ) -> None:
        account = line.account
        if not account.calls:
            self._accounts[line.tenant] = account
            self._weight += account.weight
        account.calls += 1
        lane.calls += 1
        if not line.calls:
            line.amounts = [0.0] * len(reservation.charges)
            line.lowest_priority = priority
        elif priority > line.lowest_priority:
            # It may go first, and need less than the one its tenant is passed over for.
            lane.wake(line.tenant)
        line.calls += 1
        line.lowest_priority = min(line.lowest_priority, priority)
        for index, (_, amount) in enumerate(reservation.charges):
            line.amounts[index] += amount

    def cancel(self, ticket: Ticket[Tenant]) -> bool:
        """Take a call out that waits no longer; `False` when it does not wait. Follow it up with `advance`."""
        if ticket not in self._entries:
            return False
        lane, line, _ = self._entries[ticket]
        line.room.remove(ticket)
        self._forget(ticket)
        if lane.calls and lane.head is line:
            lane.release()
            self._stand(lane)
        return True

    def advance(self, now: float) -> list[Ticket[Tenant]]:
        """Serve whoever can be, and return the tickets whose wait is over.

        They are `GRANTED`, their reservations taken, or `EXPIRED`: their deadline has come or will have by the time
        it is their turn.
        """
        over: list[Ticket[Tenant]] = []
        kept: dict[TokenBucket, float] = {}  # of a bucket, for lanes before
        blocked: list[Lane[Tenant]] = []
        self.next_at = inf
        for lane in self._asleep.due(now):
            self._stand(lane)
        scan: list[tuple[float, int, TokenBucket | None]] = []
        for place in list(self._standing):
            self._scan(place, scan)
        while scan:
            turn, number, place = heappop(scan)
            if place is not None and _exhausted(place, now, kept):
                continue  # whoever stands behind there waits for whoever it is kept for
            first = self._first(place)
            if first is not None and first[:2] == (turn, number):
                lane = first[2]
                file = self._files[place, lane.group]
                if self._serve(lane, now, kept, over):
                    # Behind the other lanes of the tenant served, if there are any.
                    account = self._accounts.get(over[-1].tenant)
                    anew = account is not None and (place, account) in self._files
                    self._stand(lane, anew=anew)
                elif lane.number is not None:
                    heappop(file.lanes)
                    blocked.append(lane)
            self._scan(place, scan)
        for lane in blocked:
            if lane.number is not None:
                self._put(lane, lane.number)
        self.next_at = min(self.next_at, self._asleep.next_at())
        return over

    def give_back(
        self, tenant: Tenant, now: float, buckets: Sequence[TokenBucket] | None = None
    ) -> list[Ticket[Tenant]]:
        """Serve whoever can be now that a call of `tenant` has given something back; as `advance` otherwise.

        `buckets` are those that it was given to; all are looked at when that is not known.
        """
        for lane in self._dry.pop(tenant, ()):
            lane.wake(tenant)
            self._wake(lane)
        if buckets is None:
            buckets = list(self._drawing)
        for bucket in buckets:
            for lane in self._drawing.get(bucket, ()):
                self._wake(lane)
        return self.advance(now)

    def clear(self) -> None:
        """Forget everybody."""
        for each in (
            self._entries,
            self._lanes,
            self._accounts,
            self._drawing,
            self._standing,
            self._files,
            self._dry,
        ):
            each.clear()
        self._asleep.clear()
        self._round = self._step = self._weight = 0.0
        self.next_at = inf

    def _serve(
        self, lane: Lane[Tenant], now: float, kept: dict[TokenBucket, float], over: list[Ticket[Tenant]]
    ) -> bool:
        """Grant a lane's head what it waits for; `False` when nobody in the lane can be served now."""
        lane.wake_due(now)
        while (line := lane.choose()) is not None:
            ticket = line.room.head(now)
            for expired in line.room.take_expired():
                self._forget(expired)
                over.append(expired)
            if ticket is None:
                lane.release()
                continue
            reservation = self._entries[ticket][2]
            own = _wait(reservation.charges[: reservation.own], now)
            shared = reservation.charges[reservation.own :]
            wait = max(own, _wait(shared, now))
            if now + wait > ticket.deadline:
                line.room.remove(ticket)
                ticket.state = TicketState.EXPIRED
                self._forget(ticket)
                over.append(ticket)
                lane.release()
            elif own:
                lane.pass_over(line, now + own)
                self._dry.setdefault(line.tenant, {})[lane] = None
            elif wait or any(
                bucket in kept and bucket.wait(amount, now, kept[bucket]) for bucket, amount in shared
            ):
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
            self._sleep(lane, lane.asleep.next_at())
        return False

    def _keep(
        self,
        lane: Lane[Tenant],
        shared: Sequence[tuple[TokenBucket, float]],
        now: float,
        wait: float,
        kept: dict[TokenBucket, float],
    ) -> None:
        """Keep for a lane what will not be refilled until it is served, or let it sleep while that is nothing."""
        nap = wait
        for bucket, amount in shared:
            needed = min(amount, bucket.capacity)
            kept[bucket] = kept.get(bucket, 0.0) + max(0.0, needed - bucket.rate * wait)
            if len(self._drawing[bucket]) > 1:
                nap = min(nap, wait - needed / bucket.rate)
                if _exhausted(bucket, now, kept):
                    lane.place = bucket
        if wait:
            self.next_at = min(self.next_at, now + wait)
        if nap > _NAP or nap == wait > 0:
            self._sleep(lane, now + nap)

    def _charge(
        self,
        lane: Lane[Tenant],
        line: Line[Tenant],
        cost: float,
        shared: Sequence[tuple[TokenBucket, float]],
        now: float,
    ) -> None:
        """Charge a tenant for a call: over all lanes where they compete, else in its lane."""
        account = line.account
        lane.round = max(lane.round, line.key)
        if any(len(self._drawing[bucket]) > 1 and bucket.wait(amount, now) for bucket, amount in shared):
            start, account.turn = account.turn, account.turn + cost / account.weight
            self._round = min(max(self._round + self._step, start), account.turn)
            self._step = cost / self._weight
        else:
            line.turn += cost / account.weight

    def _first(self, place: TokenBucket | None) -> tuple[float, int, Lane[Tenant]] | None:
        """Return whose turn it is of those that stand at a bucket."""
        heap = self._standing.get(place, [])
        while heap:
            turn, number, file = heap[0]
            lane = file.first()
            if lane is None:
                heappop(heap)
                if self._files.get(file.key) is file:
                    del self._files[file.key]
                continue
            now_at = lane.turn if file.account is None else file.account.turn
            if turn < now_at < inf or number != lane.number:
                entry = (max(turn, now_at) if now_at < inf else turn, lane.number or 0, file)
                heapreplace(heap, entry)
            else:
                return turn, number, lane
        self._standing.pop(place, None)
        return None

    def _scan(self, place: TokenBucket | None, scan: list[tuple[float, int, TokenBucket | None]]) -> None:
        if (first := self._first(place)) is not None:
            heappush(scan, (first[0], first[1], place))

    def _stand(self, lane: Lane[Tenant], *, anew: bool = False) -> None:
        """Line a lane up for its turn."""
        if not lane.calls:
            return
        self._asleep.wake(lane)
        alone = lane.only_account()
        group: Account | Lane[Tenant] = lane if alone is None else alone
        if lane.number is None:
            lane.place = max(lane.buckets, key=lambda bucket: len(self._drawing[bucket]), default=None)
        elif not anew and lane.group is group and lane.turn >= lane.stood_at:
            return
        lane.group = group
        lane.number = next(self._serial)
        self._put(lane, lane.number)

    def _put(self, lane: Lane[Tenant], number: int) -> None:
        """Put a lane in line at its place."""
        key = lane.place, lane.group
        turn = lane.stood_at = lane.turn
        file = self._files.get(key)
        if file is not None and file.account is None:
            file.lanes.clear()  # it stands elsewhere in line from now on
            file = None
        if file is None:
            file = self._files[key] = _File(key, lane.group if isinstance(lane.group, Account) else None)
            heappush(self._standing.setdefault(lane.place, []), (turn, number, file))
        heappush(file.lanes, (number, lane))

    def _sleep(self, lane: Lane[Tenant], until: float) -> None:
        lane.number = None
        self._asleep.set(lane, until)

    def _wake(self, lane: Lane[Tenant]) -> None:
        if lane in self._asleep:
            self._stand(lane)

    def _open(self, lane: Lane[Tenant]) -> None:
        self._lanes[lane.key] = lane
        for bucket in lane.buckets:
            drawing = self._drawing.setdefault(bucket, {})
            if len(drawing) == 1:  # it may have to keep something of it from now on
                self._wake(next(iter(drawing)))
            drawing[lane] = None
        self._stand(lane)

    def _close(self, lane: Lane[Tenant]) -> None:
        lane.number = None
        self._asleep.wake(lane)
        del self._lanes[lane.key]
        for bucket in lane.buckets:
            del self._drawing[bucket][lane]
            if not self._drawing[bucket]:
                del self._drawing[bucket]

    def _forget(self, ticket: Ticket[Tenant]) -> None:
        lane, line, reservation = self._entries.pop(ticket)
        line.calls -= 1
        lane.calls -= 1
        line.account.calls -= 1
        for index, (_, amount) in enumerate(reservation.charges):
            line.amounts[index] -= amount
        if not line.calls:
            lane.asleep.wake(line.tenant)
            lane.forget()
        if not lane.calls:
            self._close(lane)
        if not line.account.calls:
            self._weight -= line.account.weight
            self._dry.pop(line.tenant, None)
            self._tidy()

    def _tidy(self) -> None:
        """Forget tenants without calls that owe nothing, or if they are too many, all but those that owe most."""
        if not self._entries:
            self.clear()
        elif len(self._accounts) > 2 * len(self._entries) + _MIN_REMEMBERED:
            idle = {tenant: each for tenant, each in self._accounts.items() if not each.calls}
            owing = sorted((each.turn for each in idle.values()), reverse=True)
            paid = max(self._round, owing[len(idle) // 2])
            for tenant, each in idle.items():
                if each.turn <= paid:
                    del self._accounts[tenant]


def _wait(charges: Sequence[tuple[TokenBucket, float]], now: float) -> float:
    return max((bucket.wait(amount, now) for bucket, amount in charges), default=0.0)


def _exhausted(bucket: TokenBucket, now: float, kept: dict[TokenBucket, float]) -> bool:
    """Tell whether all there is of a bucket is kept, but for what floats are no finer than."""
    return bucket in kept and bucket.level(now) - kept[bucket] <= bucket.rate * _INSTANT
