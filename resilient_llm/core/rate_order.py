"""Where the lanes of a rate queue stand in line, and whose turn it is at each bucket.

A lane stands at one bucket that it shares with others, or sleeps. What is served when its turn comes, and what is kept
for whom, must not enter here.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable
from heapq import heappop, heappush, heapreplace
from itertools import count
from math import inf
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from resilient_llm.core.alarms import Alarms
from resilient_llm.core.rate_accounts import Account
from resilient_llm.core.rate_lane import Lane
from resilient_llm.core.token_bucket import TokenBucket

__all__ = ["File", "LaneOrder", "Place", "Turn"]

Tenant = TypeVar("Tenant", bound=Hashable)

Place: TypeAlias = TokenBucket | None
"""A bucket at which lanes stand; `None` for those that share none."""


class Turn(NamedTuple):
    """Say whose turn it is at a place, in order among all places; `behind` another tenant, or not."""

    turn: float
    behind: bool
    number: int


class File(Generic[Tenant]):
    """Lanes that stand at one bucket and are one tenant's, by number; a lane of several tenants stands alone."""

    __slots__ = ("account", "key", "lanes")

    def __init__(self, key: tuple[Place, Account | Lane[Tenant]], account: Account | None) -> None:
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

    def step_out(self) -> None:
        """Take the lane that stands first out of line, until it is put back."""
        heappop(self.lanes)


class LaneOrder(Generic[Tenant]):
    """Line lanes up at the buckets they share, by what their tenants were served, or let them sleep."""

    __slots__ = ("_asleep", "_drawing", "_files", "_serial", "_short", "_standing")

    def __init__(self) -> None:
        self._drawing: dict[TokenBucket, dict[Lane[Tenant], None]] = {}
        self._short: dict[TokenBucket, float] = {}
        self._standing: dict[Place, list[tuple[Turn, File[Tenant]]]] = {}
        self._files: dict[tuple[Place, Account | Lane[Tenant]], File[Tenant]] = {}
        self._asleep: Alarms[Lane[Tenant]] = Alarms()
        self._serial = count()

    def add(self, lane: Lane[Tenant]) -> None:
        """Line up a new lane."""
        for bucket in lane.buckets:
            drawing = self._drawing.setdefault(bucket, {})
            if len(drawing) == 1:  # it may have to keep something of it from now on
                self.wake(next(iter(drawing)))
            drawing[lane] = None
        self.stand(lane)

    def remove(self, lane: Lane[Tenant]) -> None:
        """Take a lane out for good."""
        lane.number = None
        self._asleep.wake(lane)
        for bucket in lane.buckets:
            del self._drawing[bucket][lane]
            if not self._drawing[bucket]:
                del self._drawing[bucket]
                self._short.pop(bucket, None)

    @property
    def buckets(self) -> Collection[TokenBucket]:
        """Give all buckets that lanes draw on."""
        return self._drawing.keys()

    def is_contended(self, bucket: TokenBucket) -> bool:
        """Tell whether several lanes draw on a bucket."""
        return len(self._drawing[bucket]) > 1

    def run_short(self, bucket: TokenBucket, until: float) -> None:
        """Note that somebody has to wait for what there is of a bucket, and others may at least until then."""
        self._short[bucket] = max(until, self._short.get(bucket, until))

    def is_short(self, bucket: TokenBucket, now: float) -> bool:
        """Tell whether there is too little of a bucket for all that draw on it."""
        return now <= self._short.get(bucket, -inf)

    def stand(self, lane: Lane[Tenant], *, anew: bool = False) -> None:
        """Line a lane up for its turn; `anew` also where it stands already."""
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
        self.put_back(lane, lane.number)

    def put_back(self, lane: Lane[Tenant], number: int) -> None:
        """Put a lane in line at its place."""
        key = lane.place, lane.group
        turn = Turn(*lane.turn, number)
        lane.stood_at = turn[:2]
        file = self._files.get(key)
        if file is not None and file.account is None:
            file.lanes.clear()  # it stands elsewhere in line from now on
            file = None
        if file is None:
            file = self._files[key] = File(key, lane.group if isinstance(lane.group, Account) else None)
            heappush(self._standing.setdefault(lane.place, []), (turn, file))
        heappush(file.lanes, (number, lane))

    def sleep(self, lane: Lane[Tenant], until: float) -> None:
        """Take a lane out of line until then, or until it is woken."""
        lane.number = None
        self._asleep.set(lane, until)

    def wake(self, lane: Lane[Tenant]) -> None:
        """Line a lane up again that sleeps."""
        if lane in self._asleep:
            self.stand(lane)

    def wake_due(self, now: float) -> None:
        """Line up the lanes whose time has come."""
        for lane in self._asleep.due(now):
            self.stand(lane)

    def wake_at(self, buckets: Iterable[TokenBucket]) -> None:
        """Line up the lanes again that draw on these buckets."""
        for bucket in buckets:
            for lane in self._drawing.get(bucket, ()):
                self.wake(lane)

    def next_at(self) -> float:
        """Say when the next sleeping lane's time comes."""
        return self._asleep.next_at()

    def places(self) -> list[Place]:
        """List where lanes stand."""
        return list(self._standing)

    def file(self, place: Place, group: Account | Lane[Tenant] | None) -> File[Tenant] | None:
        """Give the lanes that stand together at a place."""
        return None if group is None else self._files.get((place, group))

    def first(self, place: Place) -> tuple[Turn, Lane[Tenant]] | None:
        """Return whose turn it is of those that stand at a place."""
        heap = self._standing.get(place, [])
        while heap:
            turn, file = heap[0]
            lane = file.first()
            if lane is None:
                heappop(heap)
                if self._files.get(file.key) is file:
                    del self._files[file.key]
                continue
            now_at = lane.turn if file.account is None else (file.account.turn, False)
            later = turn[:2] < now_at and now_at[0] < inf
            if later or turn.number != lane.number:
                at = now_at if later else turn[:2]
                lane.stood_at = at
                heapreplace(heap, (Turn(*at, lane.number or 0), file))
            else:
                return turn, lane
        self._standing.pop(place, None)
        return None

    def clear(self) -> None:
        """Forget every lane."""
        self._drawing.clear()
        self._short.clear()
        self._standing.clear()
        self._files.clear()
        self._asleep.clear()
