"""Who sleeps until when: alarms that can be put off, called off and asked for the next one.

What a sleeper is, and what is done when it wakes, must not enter here.
"""

from __future__ import annotations

from collections.abc import Hashable
from heapq import heapify, heappop, heappush
from itertools import count
from math import inf
from typing import Generic, TypeVar

__all__ = ["Alarms"]

Sleeper = TypeVar("Sleeper", bound=Hashable)

_MIN_STALE = 16


class Alarms(Generic[Sleeper]):
    """Keep who sleeps until when."""

    __slots__ = ("_heap", "_serial", "_until")

    def __init__(self) -> None:
        self._until: dict[Sleeper, float] = {}
        # Entries may be out of date; those that count are what `_until` says.
        self._heap: list[tuple[float, int, Sleeper]] = []
        self._serial = count()

    def set(self, sleeper: Sleeper, until: float) -> None:
        """Let it sleep until then."""
        self._until[sleeper] = until
        heappush(self._heap, (until, next(self._serial), sleeper))
        if len(self._heap) > 2 * len(self._until) + _MIN_STALE:
            self._heap = [(at, next(self._serial), each) for each, at in self._until.items()]
            heapify(self._heap)

    def wake(self, sleeper: Sleeper) -> bool:
        """Wake it; `False` when it does not sleep."""
        return self._until.pop(sleeper, None) is not None

    def due(self, now: float) -> list[Sleeper]:
        """Wake those whose time has come, and return them."""
        woken: list[Sleeper] = []
        while self.next_at() <= now:
            sleeper = heappop(self._heap)[2]
            del self._until[sleeper]
            woken.append(sleeper)
        return woken

    def next_at(self) -> float:
        """Say when the next one's time comes."""
        while self._heap:
            at, _, sleeper = self._heap[0]
            if self._until.get(sleeper) == at:
                return at
            heappop(self._heap)
        return inf

    def clear(self) -> None:
        """Forget everybody."""
        self._until.clear()
        self._heap.clear()

    def __contains__(self, sleeper: Sleeper) -> bool:
        return sleeper in self._until

    def __len__(self) -> int:
        return len(self._until)
