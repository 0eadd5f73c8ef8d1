"""Who is served next when more calls wait than can run.

Bulkheads, concurrency limits and rate limits wait in the same room: fair across tenants by cost, first
come first served inside a tenant, bounded, aware of deadlines. What is waited for (slots, tokens), and
how a waiter sleeps and wakes, must not enter here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from heapq import heapify, heappop, heappush, heapreplace
from math import inf, isfinite
from typing import Any, Generic, TypeAlias, TypeVar

from resilient_llm.core.places import is_within_share, who_makes_way
from resilient_llm.core.ticket import Ticket, TicketState

__all__ = ["Ticket", "TicketState", "WaitingRoom"]

Tenant = TypeVar("Tenant", bound=Hashable)

_MIN_REMEMBERED = 64
_MIN_TOMBSTONES = 16


_WAITING = TicketState.WAITING

_Entry: TypeAlias = tuple[float, int, Ticket[Tenant]]


class _Queue(Generic[Tenant]):
    """One tenant's own queue and its place in the round.

    `entries` may hold tombstones (tickets that wait no longer); `size` counts the living, the room's head
    included. What is served before `turn` reaches `came_at`, the round in which the tenant came in, is served on
    credit.
    """

    __slots__ = ("came_at", "entries", "in_line", "size", "suspended", "tenant", "turn", "weight")

    def __init__(self, tenant: Tenant, weight: float, turn: float, came_at: float) -> None:
        self.tenant = tenant
        self.weight = weight
        self.turn = turn
        self.came_at = came_at
        self.entries: list[_Entry[Tenant]] = []
        self.size = 0
        self.in_line = False
        self.suspended = False


# Rooms in which nobody waits are kept for every key: they share these, which are never written to.
_NO_QUEUES: dict[Any, _Queue[Any]] = {}
_NOBODY_AWAY: OrderedDict[Any, float] = OrderedDict()
_NO_LINE: list[tuple[float, int, _Queue[Any]]] = []
_NO_DEADLINES: list[tuple[float, int, Ticket[Any]]] = []


class WaitingRoom(Generic[Tenant]):
    """Serve waiting tickets by start-time fair queueing across tenants, by cost and weight.

    A tenant's `turn` is the round in which what it was served is paid off at its weight (`turn += cost / weight`), and
    the earliest turn is next (Goyal, Vin & Cheng, SIGCOMM 1996). A push or a grant costs O(log tenants + log own
    backlog). It is what deficit round robin (Shreedhar & Varghese, SIGCOMM 1995) becomes when its quantum goes to zero
    and the visits that serve nobody are skipped by arithmetic: the same shares, and nothing to tune.

    A tenant that is new starts in the current round. The round moves on by cost / sum of weights with each grant
    (the virtual time of WF2Q+: Bennett & Zhang, IEEE/ACM ToN 1997), but never beyond the call being served. A
    tenant that comes back has the place it left, so that leaving pays no debt off, but at most `credit` calls like
    the one it comes back with before the current round. So a tenant whose calls come in bursts, but under its
    share, has them served one after the other; and what is served on credit leaves the round as it is.

    With c/w the largest cost over weight of any call:

    - Two tenants that wait throughout an interval are served alike, as cost over weight, to within 2 c/w, and
      what credit one of them had left when it began: at most `credit` times c/w.
    - Another tenant's backlog, however long, puts at most one call before a newcomer's first, and beyond that no
      more than its weight earns during one call of a third tenant, and what credit it had. Before the next call
      of a tenant that has credit it puts none, unless it has more.
    - Nobody starves, though newcomers come without end: with equal costs and weights the first of a tenant
      waits for at most twice as many calls as there are tenants waiting or remembered; in general for at most
      that times the largest cost over weight by the smallest. Those who come back with credit may have it served
      before, once: it grows again only as the round moves on.

    Inside a tenant a higher priority goes first, and `ageing` seconds of waiting count as much as one level:
    a call is never overtaken by one that came more than `ageing` seconds per level later. Equal priorities
    are FIFO.

    At most `max(max_queued, 64)` tenants with nothing waiting are remembered because they owe something, and as
    many for their credit, those who left last; none once nobody waits.

    `max_queued` bounds all tickets, `max_queued_per_tenant` those of one tenant. When the room is full everybody is
    turned away; with `displaces` a ticket that is within its tenant's share of the places (in proportion to `weights`,
    of those who wait) takes the place of the last one of the tenant that exceeds its own most, as `places` says:
    nobody within their share is displaced, nor who is first of a tenant. Who has run out of time takes nobody's place:
    where there is no other, its ticket is dropped and left for `take_expired`. `weights` (1 where it says nothing) is
    read when a tenant comes in. Times are monotonic seconds. Raises `ValueError` for an option out of range.
    """

    __slots__ = (
        "_advance",
        "_ageing",
        "_away",
        "_credit",
        "_deadlines",
        "_displaced",
        "_displaces",
        "_expired",
        "_head",
        "_idle",
        "_line",
        "_line_weight",
        "_max_idle",
        "_max_queued",
        "_queues",
        "_round",
        "_serial",
        "_waiting_weight",
        "_weights",
        "max_queued_per_tenant",
        "size",
    )

    def __init__(
        self,
        max_queued: int,
        *,
        max_queued_per_tenant: int | None = None,
        weights: Callable[[Tenant], float] | Mapping[Tenant, float] | None = None,
        ageing: float = 10.0,
        credit: int = 0,
        displaces: bool = False,
    ) -> None:
        if max_queued < 0:
            raise ValueError(f"max_queued={max_queued!r}: allowed are integers from 0")
        if max_queued_per_tenant is not None and max_queued_per_tenant < 1:
            raise ValueError(
                f"max_queued_per_tenant={max_queued_per_tenant!r}: allowed are integers from 1, and None"
            )
        if not 0 <= ageing < inf:
            raise ValueError(
                f"ageing={ageing!r}: allowed are finite seconds from 0 (then priorities count for nothing)"
            )
        if credit < 0:
            raise ValueError(f"credit={credit!r}: allowed are integers from 0")
        if isinstance(weights, Mapping):
            for tenant, weight in weights.items():
                _check_weight(tenant, weight)
        self._max_queued = max_queued
        self.max_queued_per_tenant = max_queued if max_queued_per_tenant is None else max_queued_per_tenant
        """How many tickets of one tenant wait at most."""
        self._max_idle = max(max_queued, _MIN_REMEMBERED)
        self._weights = weights
        self._ageing = ageing
        self._credit = credit
        self._displaces = displaces
        self.size = 0
        """How many tickets wait: what `len` gives, without a call."""
        self._idle = 0  # queues in line with nothing waiting: their debt is not paid yet
        self._queues: dict[Tenant, _Queue[Tenant]] = _NO_QUEUES
        self._away: OrderedDict[Tenant, float] = _NOBODY_AWAY  # turns of those who owe nothing, as they left
        # One entry per queue that competes or is in debt: (turn, serial, queue).
        self._line: list[tuple[float, int, _Queue[Tenant]]] = _NO_LINE
        self._line_weight = 0.0
        self._waiting_weight = 0.0  # of those who have tickets, suspended ones included
        self._serial = 0
        self._round = 0.0
        self._advance = 0.0  # what the round moves on by when the next ticket is chosen
        self._head: _Entry[Tenant] | None = None
        self._expired: list[Ticket[Tenant]] | None = None
        self._displaced: list[Ticket[Tenant]] | None = None
        # By deadline; of tickets that wait no longer, too.
        self._deadlines: list[tuple[float, int, Ticket[Tenant]]] = _NO_DEADLINES

    def push(
        self,
        tenant: Tenant,
        now: float,
        *,
        cost: float = 1.0,
        priority: int = 0,
        deadline: float = inf,
    ) -> Ticket[Tenant] | None:
        """Queue a call and return its ticket, or None when the room or the tenant's share of it is full.

        See to whoever made way for it: they are left for `take_displaced` and `take_expired`. `cost` is in the unit
        that shares are counted in (estimated tokens, or 1 per call); `deadline` is a time, not a duration. Raises
        `ValueError` for a cost or a weight that is not a finite number above 0.
        """
        if not 0 < cost < inf:
            raise ValueError(f"cost={cost!r}: allowed are finite numbers above 0")
        self._make_room(tenant, now)
        if self.depth(tenant) >= self.max_queued_per_tenant:
            return None
        if self.size >= self._max_queued:
            longest = self._makes_way(tenant)
            if longest is None:
                return None
            self._displace(longest)
        if not self.size:
            self._queues, self._away, self._line, self._deadlines = {}, OrderedDict(), [], []
        queue = self._queues.get(tenant)
        if queue is None:
            queue = self._queues[tenant] = self._come_in(tenant, cost)
        elif not queue.size:
            self._idle -= 1
        if not queue.size:
            self._waiting_weight += queue.weight
        ticket = Ticket(tenant, cost, priority, deadline, now)
        self._serial += 1
        heappush(queue.entries, (self.rank(ticket), self._serial, ticket))
        queue.size += 1
        self.size += 1
        if deadline < inf:
            self._note_deadline(ticket)
        return ticket

    def head(self, now: float) -> Ticket[Tenant] | None:
        """Return the ticket to serve next and commit to it, or None when nobody can be served.

        The same ticket is returned until it is popped, removed or expired or its tenant is suspended, whoever
        comes in meanwhile. Tickets met whose deadline has come are dropped and left for `take_expired`.
        """
        if self._head is not None:
            if self._head[2].deadline > now:
                return self._head[2]
            self._expire(self._head[2])
        while (queue := self._front()) is not None:
            entry = heappop(queue.entries)
            ticket = entry[2]
            if ticket.state is not _WAITING:
                continue
            if ticket.deadline <= now:
                self._expire(ticket)
                continue
            end = queue.turn + ticket.cost / queue.weight
            if end > queue.came_at:  # else it is served on credit
                self._round = min(max(self._round + self._advance, queue.turn), end)
                self._advance = 0.0
            self._head = entry
            return ticket
        return None

    def rank(self, ticket: Ticket[Tenant]) -> float:
        """Order the tickets of one tenant: lower goes first, of equals who came first."""
        # Ageing without re-sorting: p + (now - t) / ageing orders as t - p * ageing does, whatever `now` is.
        return ticket.enqueued_at - ticket.priority * self._ageing

    def pop(self) -> Ticket[Tenant]:
        """Grant the ticket `head` committed to, charge its tenant and return it.

        Raises `LookupError` when `head` has committed to none.
        """
        if self._head is None:
            raise LookupError("pop() grants what head(now) returned last, and that was nothing")
        ticket = self._head[2]
        self._head = None
        ticket.state = TicketState.GRANTED
        queue = self._queues[ticket.tenant]
        queue.turn += ticket.cost / queue.weight
        # The round moves on when the next ticket is chosen, not now: whoever comes in before that is ahead of
        # the tenant just served.
        self._advance = ticket.cost / max(self._line_weight, queue.weight)
        self._serial += 1
        entry = (queue.turn, self._serial, queue)
        if self._line[0][2] is queue:
            heapreplace(self._line, entry)
        else:  # somebody came back with credit since `head`
            self._line[next(i for i, (_, _, each) in enumerate(self._line) if each is queue)] = entry
            heapify(self._line)
        self._leave(queue)
        return ticket

    def remove(self, ticket: Ticket[Tenant]) -> bool:
        """Take a waiting ticket out, wherever it stands; False when it waits no more. Amortised O(1)."""
        if ticket.state is not _WAITING:
            return False
        self._drop(ticket, TicketState.CANCELLED)
        return True

    def take_expired(self) -> list[Ticket[Tenant]]:
        """Return the tickets dropped since the last time because their deadline had come."""
        expired, self._expired = self._expired, None
        return expired or []

    def take_displaced(self) -> list[Ticket[Tenant]]:
        """Return the tickets dropped since the last time to make way for others."""
        displaced, self._displaced = self._displaced, None
        return displaced or []

    def suspend(self, tenant: Tenant) -> None:
        """Pass a tenant's waiting tickets over until `resume`; nothing happens when it has none."""
        queue = self._queues.get(tenant)
        if queue is None or not queue.size:
            return
        queue.suspended = True
        if self._head is not None and self._head[2].tenant == tenant:
            heappush(queue.entries, self._head)
            self._head = None

    def resume(self, tenant: Tenant) -> None:
        """Let a suspended tenant compete again, in the current round: it has gained no credit meanwhile."""
        queue = self._queues.get(tenant)
        if queue is None or not queue.suspended:
            return
        queue.suspended = False
        if not queue.in_line:
            queue.turn = max(queue.turn, self._round)
            self._enter(queue)

    def is_full(self, tenant: Tenant, now: float) -> bool:
        """Tell whether a call of this tenant would be turned away now."""
        self._make_room(tenant, now)
        if self.depth(tenant) >= self.max_queued_per_tenant:
            return True
        return self.size >= self._max_queued and self._makes_way(tenant) is None

    def __len__(self) -> int:
        return self.size

    def depth(self, tenant: Tenant) -> int:
        """Return how many tickets of a tenant wait."""
        queue = self._queues.get(tenant)
        return 0 if queue is None else queue.size

    @property
    def tenants(self) -> int:
        """Tell how many tenants have a ticket that waits."""
        return len(self._queues) - self._idle

    def depths(self) -> dict[Tenant, int]:
        """Return how many tickets wait for each tenant that has any."""
        return {queue.tenant: queue.size for queue in list(self._queues.values()) if queue.size}

    def weight(self, tenant: Tenant) -> float:
        """Say what a tenant's share is in proportion to. Raises `ValueError` for what is no finite number above 0."""
        weights = self._weights
        if weights is None:
            return 1.0
        weight = weights.get(tenant, 1.0) if isinstance(weights, Mapping) else weights(tenant)
        return _check_weight(tenant, weight)

    def _make_room(self, tenant: Tenant, now: float) -> None:
        """Drop those whose deadline has come, where one more ticket of a tenant finds no place."""
        if self.size < self._max_queued and self.depth(tenant) < self.max_queued_per_tenant:
            return
        while self._deadlines and self._deadlines[0][0] <= now:
            ticket = heappop(self._deadlines)[2]
            if ticket.state is _WAITING:
                self._expire(ticket)

    def _note_deadline(self, ticket: Ticket[Tenant]) -> None:
        heappush(self._deadlines, (ticket.deadline, self._serial, ticket))
        if len(self._deadlines) > 2 * self.size + _MIN_TOMBSTONES:
            self._deadlines = [entry for entry in self._deadlines if entry[2].state is _WAITING]
            heapify(self._deadlines)

    def _makes_way(self, tenant: Tenant) -> _Queue[Tenant] | None:
        """Choose whose last ticket makes way for one of this tenant's in a full room; None when it is turned away."""
        if not self._displaces or not self.size:
            return None
        queue = self._queues.get(tenant)
        calls = 1 if queue is None else 1 + queue.size
        weight = self.weight(tenant) if queue is None else queue.weight
        weights = max(self._waiting_weight + (weight if calls == 1 else 0.0), weight)
        if not is_within_share(calls, weight, weights, self._max_queued):
            return None
        waiting = ((each, each.size, each.weight) for each in self._queues.values())
        return who_makes_way(waiting, weights, self._max_queued)

    def _displace(self, queue: _Queue[Tenant]) -> None:
        """Drop a tenant's last ticket; it has several, so one of them is not the head."""
        ticket = max(entry for entry in queue.entries if entry[2].state is _WAITING)[2]
        if self._displaced is None:
            self._displaced = []
        self._displaced.append(ticket)
        self._drop(ticket, TicketState.DISPLACED)

    def _front(self) -> _Queue[Tenant] | None:
        """Return the queue whose turn it is; tidy away what stands before it without being served."""
        line = self._line
        while line:
            queue = line[0][2]
            if not queue.size:
                # Its debt is paid, or will be by the round of whoever is served next.
                heappop(line)
                self._line_weight -= queue.weight
                self._idle -= 1
                del self._queues[queue.tenant]
                self._remember(queue)
            elif queue.suspended:
                heappop(line)
                self._line_weight -= queue.weight
                queue.in_line = False
            else:
                return queue
        self._line_weight = 0.0
        return None

    def _come_in(self, tenant: Tenant, cost: float) -> _Queue[Tenant]:
        """Line up a tenant that is new, or one that comes back to where it left off."""
        weight = self.weight(tenant)
        turn = self._round
        left_at = self._away.pop(tenant, None)
        if left_at is not None:
            turn = max(left_at, turn - self._credit * cost / weight)
        queue = _Queue(tenant, weight, turn, self._round)
        self._enter(queue)
        return queue

    def _enter(self, queue: _Queue[Tenant]) -> None:
        """Line a queue up for its turn."""
        self._serial += 1
        heappush(self._line, (queue.turn, self._serial, queue))
        queue.in_line = True
        self._line_weight += queue.weight

    def _remember(self, queue: _Queue[Tenant]) -> None:
        """Keep the turn of a tenant that has left, in place of whoever left longest ago."""
        if self._credit:
            self._away[queue.tenant] = queue.turn
            if len(self._away) > self._max_idle:
                self._away.popitem(last=False)

    def _expire(self, ticket: Ticket[Tenant]) -> None:
        if self._expired is None:
            self._expired = []
        self._expired.append(ticket)
        self._drop(ticket, TicketState.EXPIRED)

    def _drop(self, ticket: Ticket[Tenant], state: TicketState) -> None:
        ticket.state = state
        if self._head is not None and self._head[2] is ticket:
            self._head = None
        queue = self._queues[ticket.tenant]
        self._leave(queue)
        if len(queue.entries) > 2 * queue.size + _MIN_TOMBSTONES:
            queue.entries = [entry for entry in queue.entries if entry[2].state is _WAITING]
            heapify(queue.entries)

    def _leave(self, queue: _Queue[Tenant]) -> None:
        """Count one ticket less; a tenant left with none keeps its place in line, to be remembered by."""
        queue.size -= 1
        self.size -= 1
        if not self.size:
            self._reset()
        elif not queue.size:
            self._waiting_weight -= queue.weight
            queue.entries.clear()
            queue.suspended = False
            if not queue.in_line:
                queue.turn = max(queue.turn, self._round)
                self._enter(queue)
            self._idle += 1
            if self._idle > self._max_idle:
                self._forget()

    def _forget(self) -> None:
        """Take idle tenants that owe nothing out of the line, and if need be all but those that owe most."""
        owed = sorted((queue.turn for queue in self._queues.values() if not queue.size), reverse=True)
        paid = max(self._round, owed[self._max_idle // 2])
        for queue in [each for each in self._queues.values() if not each.size and each.turn <= paid]:
            del self._queues[queue.tenant]
            self._remember(queue)
        self._line = [entry for entry in self._line if entry[2].size or entry[2].turn > paid]
        heapify(self._line)
        self._line_weight = sum(queue.weight for _, _, queue in self._line)
        self._idle = sum(not queue.size for queue in self._queues.values())

    def _reset(self) -> None:
        """Start afresh once nobody waits: nothing to be fair about, and float rounds stay small."""
        self._queues, self._away, self._line = _NO_QUEUES, _NOBODY_AWAY, _NO_LINE
        self._deadlines = _NO_DEADLINES
        self._head = None
        self._line_weight = self._waiting_weight = self._round = self._advance = 0.0
        self.size = self._idle = 0


def _check_weight(tenant: object, weight: float) -> float:
    if not (isfinite(weight) and weight > 0):
        raise ValueError(f"weights: {weight!r} for tenant {tenant!r}: allowed are finite numbers above 0")
    return weight
