"""One lane of a rate queue: calls that draw on the same shared buckets, and in which order its tenants go.

What there is of a bucket, and which lane goes first, must not enter here.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from heapq import heappop, heappush, heapreplace
from itertools import count
from math import inf
from typing import Generic, TypeVar

from resilient_llm.core.alarms import Alarms
from resilient_llm.core.rate_accounts import Account
from resilient_llm.core.token_bucket import TokenBucket
from resilient_llm.core.waiting_room import WaitingRoom

__all__ = ["Lane", "Line"]

Tenant = TypeVar("Tenant", bound=Hashable)

_MIN_STALE = 16


class Line(Generic[Tenant]):
    """Keep one tenant's calls in one lane: their order, and what they wait for, added up.

    `turn` is what the tenant was served in this lane where no other lane competed, as cost over weight.
    """

    __slots__ = ("account", "amounts", "calls", "in_line", "lowest_priority", "room", "tenant", "turn")

    def __init__(self, tenant: Tenant, account: Account, room: WaitingRoom[Tenant], turn: float) -> None:
        self.tenant = tenant
        self.account = account
        self.room = room
        self.turn = turn
        self.calls = 0
        self.amounts: list[float] = []
        self.lowest_priority = 0
        self.in_line = False

    def count_in(self, amounts: Sequence[float], priority: int) -> None:
        """Count one call more that waits, for so much of each of its buckets."""
        if not self.calls:
            self.amounts = [0.0] * len(amounts)
            self.lowest_priority = priority
        self.calls += 1
        self.lowest_priority = min(self.lowest_priority, priority)
        for index, amount in enumerate(amounts):
            self.amounts[index] += amount

    def ahead_of(self, priority: int) -> Sequence[float]:
        """Give what is waited for, of each bucket, by those whom a call of that priority cannot overtake."""
        return self.amounts if self.calls and priority <= self.lowest_priority else ()

    def count_out(self, amounts: Sequence[float]) -> None:
        """Count one call less."""
        self.calls -= 1
        for index, amount in enumerate(amounts):
            self.amounts[index] -= amount

    @property
    def key(self) -> float:
        """Order the tenants of a lane; it only grows."""
        return self.account.turn + self.turn


class Lane(Generic[Tenant]):
    """Serve the tenants of one lane by what they were served, here and where lanes compete.

    Start-time fair queueing (Goyal, Vin & Cheng, SIGCOMM 1996). The round moves on with each call that is served (the
    virtual time of WF2Q+: Bennett & Zhang, IEEE/ACM ToN 1997), so that newcomers without end do not stay ahead of
    those who were served before. The head is committed to until a call of it is served or it has none left, so that
    of a tenant's calls those that leave take nothing away from those that stay.
    """

    __slots__ = (
        "_heap",
        "_serial",
        "_step",
        "asleep",
        "buckets",
        "calls",
        "group",
        "head",
        "key",
        "lines",
        "number",
        "place",
        "round",
        "stood_at",
        "weight",
    )

    def __init__(self, key: Hashable, buckets: Sequence[TokenBucket]) -> None:
        self.key = key
        self.buckets = buckets
        self.calls = 0
        self.weight = 0.0
        """The weights of the tenants that wait here, added up."""
        self.round = 0.0
        self.lines: dict[Tenant, Line[Tenant]] = {}
        self.asleep: Alarms[Tenant] = Alarms()
        """Tenants whose own buckets are dry."""
        self.head: Line[Tenant] | None = None
        """The tenant of which a call is to be served next, once that is decided."""
        self.place: TokenBucket | None = None
        """The bucket where it stands in line among lanes."""
        self.number: int | None = None
        """Its number in that line; `None` while it sleeps."""
        self.group: Account | Lane[Tenant] = self
        """With whom it stands there: the account of its only tenant, else itself."""
        self.stood_at = (0.0, False)
        """Its turn when it took its place."""
        self._heap: list[tuple[float, int, Line[Tenant]]] = []  # keys may be out of date
        self._serial = count()
        self._step = 0.0  # what the round moves on by when the next call is served

    def line(
        self, tenant: Tenant, account: Account, make_room: Callable[[], WaitingRoom[Tenant]]
    ) -> Line[Tenant]:
        """Give a tenant's line; one that comes, or comes back, starts in the current round."""
        line = self.lines.get(tenant)
        if line is None:
            line = self.lines[tenant] = Line(tenant, account, make_room(), 0.0)
        if not line.calls:
            line.account = account
            self._rejoin(line)
        return line

    def count_in(self, line: Line[Tenant], amounts: Sequence[float], priority: int) -> None:
        """Count one call more that waits."""
        if not line.calls:
            self.weight += line.account.weight
        self.calls += 1
        line.count_in(amounts, priority)

    def count_out(self, line: Line[Tenant], amounts: Sequence[float]) -> None:
        """Count one call less; a tenant that has none left is committed to no longer."""
        self.calls -= 1
        line.count_out(amounts)
        if line.calls:
            return
        self.weight -= line.account.weight
        if self.head is line:
            self.head = None
        self.asleep.wake(line.tenant)
        self._forget()

    def wake(self, tenant: Tenant) -> None:
        """Let a tenant that was passed over compete again."""
        if self.asleep.wake(tenant):
            self._rejoin(self.lines[tenant])

    def wake_due(self, now: float) -> None:
        """Let those compete again whose time has come."""
        for tenant in self.asleep.due(now):
            self._rejoin(self.lines[tenant])

    def pass_over(self, line: Line[Tenant], until: float) -> None:
        """Serve others until then: the own buckets of the head's tenant are dry."""
        # A higher priority may come meanwhile: commit to none of its calls.
        line.room.suspend(line.tenant)
        line.room.resume(line.tenant)
        self.head = None
        self.asleep.set(line.tenant, until)

    def choose(self) -> Line[Tenant] | None:
        """Commit to the tenant whose turn it is; `None` when nobody can be served."""
        if self.head is None and (front := self._front()) is not None:
            heappop(self._heap)
            front.in_line = False
            self.head = front
        return self.head

    def move_on(self, line: Line[Tenant], start: float, cost: float) -> None:
        """Move the round on for a call that is served, once it is charged; `start` was its tenant's key before."""
        self.round = min(max(self.round + self._step, start), line.key)
        self._step = cost / max(self.weight, line.account.weight)

    def release(self) -> None:
        """Choose anew, after a call of the head was served."""
        line, self.head = self.head, None
        if line is not None:
            self._enter(line)

    @property
    def turn(self) -> tuple[float, bool]:
        """Say when it is the lane's turn, and whether that is not its head's but an earlier one of who waits behind.

        Who waits behind has its turn, but what is served in it is of another tenant: where it waits in several lanes,
        those come first in which it is served itself.
        """
        front, head = self._front(), self.head
        turn = inf if front is None else front.account.turn
        if head is None:
            return turn, False
        return min((head.account.turn, False), (turn, True))

    def only_account(self) -> Account | None:
        """Give the account of its only tenant; `None` when there are several."""
        if len(self.lines) > 1:
            return None
        return next((line.account for line in self.lines.values()), None)

    def _forget(self) -> None:
        """Forget tenants without calls that owe nothing, or if they are too many, whoever has none."""
        if len(self.lines) <= 2 * self.calls + _MIN_STALE:
            return
        idle = [line for line in self.lines.values() if not line.calls]
        owing = sorted((line.key for line in idle), reverse=True)
        paid = max(self.round, owing[len(idle) // 2])
        for line in idle:
            if line.key <= paid:
                del self.lines[line.tenant]

    def _rejoin(self, line: Line[Tenant]) -> None:
        line.turn = max(line.turn, self.round - line.account.turn)
        self._enter(line)

    def _enter(self, line: Line[Tenant]) -> None:
        if not line.in_line:
            line.in_line = True
            heappush(self._heap, (line.key, next(self._serial), line))

    def _front(self) -> Line[Tenant] | None:
        while self._heap:
            key, number, line = self._heap[0]
            if not line.calls or line.tenant in self.asleep:
                heappop(self._heap)
                line.in_line = False
            elif key < line.key:
                heapreplace(self._heap, (line.key, number, line))
            else:
                return line
        return None
