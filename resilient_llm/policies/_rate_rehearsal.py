"""Those who would wait for a rate limit, in a dry run that lets nobody wait.

How long each would wait, and what becomes of one for whom there is no place, must not enter here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from heapq import heappop, heappush
from itertools import count

__all__ = ["RateRehearsal"]


class RateRehearsal:
    """Keep a place for each call that would wait, until it would have been served.

    There are `max_queued_total` of them, and `max_queued` for one tenant. Nobody is displaced: who comes last into a
    full queue finds no place.
    """

    __slots__ = ("_max_queued", "_max_queued_total", "_serial", "_tenants", "_until")

    def __init__(self, max_queued: int, max_queued_total: int) -> None:
        self._max_queued = max_queued
        self._max_queued_total = max_queued_total
        self._tenants: Counter[Hashable] = Counter()
        self._until: list[tuple[float, int, Hashable]] = []
        self._serial = count()

    def __len__(self) -> int:
        return len(self._until)

    def has_room(self, tenant: Hashable, now: float) -> bool:
        """Tell whether one more call of a tenant could wait."""
        while self._until and self._until[0][0] <= now:
            served = heappop(self._until)[2]
            self._tenants[served] -= 1
            if not self._tenants[served]:
                del self._tenants[served]
        return self.waiting(tenant) < self._max_queued and len(self._until) < self._max_queued_total

    def waiting(self, tenant: Hashable) -> int:
        """Count a tenant's calls that would wait."""
        return self._tenants[tenant]

    def wait(self, tenant: Hashable, until: float) -> None:
        """Keep a place for a call of a tenant."""
        heappush(self._until, (until, next(self._serial), tenant))
        self._tenants[tenant] += 1

    def clear(self) -> None:
        """Forget everybody."""
        self._tenants.clear()
        self._until.clear()
