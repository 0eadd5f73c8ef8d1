"""One look through the lanes of a rate queue: each in its turn, over all the buckets where lanes stand.

What is served, and what is kept for whom, must not enter here.
"""

from __future__ import annotations

from collections.abc import Hashable
from heapq import heappop, heappush
from typing import Generic, TypeVar

from resilient_llm.core.kept_levels import KeptLevels
from resilient_llm.core.rate_accounts import Account
from resilient_llm.core.rate_lane import Lane
from resilient_llm.core.rate_order import File, LaneOrder, Place, Turn

__all__ = ["Scan"]

Tenant = TypeVar("Tenant", bound=Hashable)


class Scan(Generic[Tenant]):
    """Give one lane after the other, until each has been looked at or waits for what is kept for those before.

    After each `next` say what came of it, with `served` or `blocked`; at the end, `finish`.
    """

    __slots__ = ("_blocked", "_file", "_kept", "_lane", "_order", "_place", "_turns")

    def __init__(self, order: LaneOrder[Tenant], kept: KeptLevels) -> None:
        self._order = order
        self._kept = kept
        self._turns: list[tuple[Turn, Place]] = []
        self._blocked: list[Lane[Tenant]] = []
        self._place: Place = None
        self._lane: Lane[Tenant] | None = None
        self._file: File[Tenant] | None = None
        for place in order.places():
            self._enter(place)

    def next(self, now: float) -> Lane[Tenant] | None:
        """Give the lane whose turn it is; `None` when there is none left."""
        while self._turns:
            turn, place = heappop(self._turns)
            if place is not None and self._kept.exhausts(place, now):
                continue  # whoever stands behind there waits for whoever it is kept for
            first = self._order.first(place)
            if first is not None and first[0] == turn:
                self._place, self._lane = place, first[1]
                self._file = self._order.file(place, first[1].group)
                return self._lane
            self._enter(place)
        return None

    def served(self, account: Account | None) -> None:
        """Line the lane up again, behind the other lanes of the tenant served if there are any."""
        if self._lane is not None:
            anew = self._order.file(self._place, account) is not None
            self._order.stand(self._lane, anew=anew)
            self._enter(self._place)

    def blocked(self) -> None:
        """Let the lane stand aside until the end, unless it sleeps."""
        lane = self._lane
        if lane is not None and lane.number is not None and self._file is not None:
            self._file.step_out()
            self._blocked.append(lane)
        self._enter(self._place)

    def finish(self) -> None:
        """Put those back in line who stood aside."""
        for lane in self._blocked:
            if lane.number is not None:
                self._order.put_back(lane, lane.number)

    def _enter(self, place: Place) -> None:
        if (first := self._order.first(place)) is not None:
            heappush(self._turns, (first[0], place))
