"""Places in a queue that are taken by calls which do not stand in it.

Why they wait elsewhere, or only would wait, must not enter here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

from resilient_llm.core.alarms import Alarms

__all__ = ["KeptPlace", "KeptPlaces"]


class KeptPlace:
    """The place of one call of a tenant."""

    __slots__ = ("tenant",)

    def __init__(self, tenant: Hashable) -> None:
        self.tenant = tenant


class KeptPlaces:
    """Keep a place for each of these calls, until its time is up or it is given up."""

    __slots__ = ("_tenants", "_until")

    def __init__(self) -> None:
        self._until: Alarms[KeptPlace] = Alarms()
        self._tenants: Counter[Hashable] = Counter()

    def __len__(self) -> int:
        return len(self._until)

    def of(self, tenant: Hashable) -> int:
        """Count the places of a tenant."""
        return self._tenants[tenant]

    def keep(self, tenant: Hashable, until: float) -> KeptPlace:
        """Keep a place for a call of a tenant until then."""
        place = KeptPlace(tenant)
        self._until.set(place, until)
        self._tenants[tenant] += 1
        return place

    def give_up(self, place: KeptPlace) -> None:
        """Keep a place no longer; nothing happens where its time was up already, or everybody was forgotten."""
        if self._until.wake(place):
            self._count_out(place)

    def catch_up(self, now: float) -> None:
        """Keep those no longer whose time is up."""
        for place in self._until.due(now):
            self._count_out(place)

    def clear(self) -> None:
        """Forget everybody."""
        self._until.clear()
        self._tenants.clear()

    def _count_out(self, place: KeptPlace) -> None:
        self._tenants[place.tenant] -= 1
        if not self._tenants[place.tenant]:
            del self._tenants[place.tenant]
