"""Leases in this process's memory: exact, and never lost, since whoever holds one is here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from resilient_llm._loop import EventLoop
from resilient_llm.core.leases import LeaseAnswer, LeaseLimit, LeaseTable, Woken
from resilient_llm.stores.protocol_leases import Lease

if TYPE_CHECKING:
    from resilient_llm.telemetry import Telemetry

__all__ = ["MemoryLeasePool", "MemoryLeases"]

_VOTE_LASTS = 15.0


class MemoryLeases:
    """Keep leases in memory; see `stores.protocol_leases.Leases`."""

    lost = 0

    def __init__(self) -> None:
        self._table = LeaseTable()
        self._places: WeakValueDictionary[str, MemoryLeasePool] = WeakValueDictionary()
        self._serial = 0

    def pool(self, name: str, on_free: Callable[[str], None]) -> MemoryLeasePool:
        """Make an access to a pool."""
        place = self.name()
        made = self._places[place] = MemoryLeasePool(self, self._table, name, place, on_free)
        return made

    def observe(self, telemetry: Telemetry) -> None:
        """Report nothing: no lease is ever lost."""

    def name(self) -> str:
        """Make a name that nothing else has."""
        self._serial += 1
        return str(self._serial)

    def wake(self, woken: Sequence[Woken]) -> None:
        """Tell those who are first in line."""
        for place, key in woken:
            pool = self._places.get(place)
            if pool is not None:
                pool.on_free(key.partition(":")[2])


class MemoryLeasePool:
    """One access to a pool in memory; see `stores.protocol_leases.LeasePool`."""

    __slots__ = ("__weakref__", "_leases", "_name", "_place", "_table", "_waiting", "on_free")

    def __init__(
        self, leases: MemoryLeases, table: LeaseTable, name: str, place: str, on_free: Callable[[str], None]
    ) -> None:
        self.on_free = on_free
        self._leases = leases
        self._table = table
        self._name = name.replace(":", "/")
        self._place = place
        self._waiting: set[str] = set()

    async def acquire(self, limits: Sequence[LeaseLimit], *, wait: bool = False) -> Lease | LeaseAnswer:
        """Ask for a lease, without ever yielding to another task."""
        name, now = self._leases.name(), _now()
        answer = self._table.acquire(
            name,
            self._named(limits),
            now,
            place=self._place,
            place_lasts=float("inf") if wait else 0.0,
        )
        if answer.refused is None:
            self._waiting.difference_update(key for key, _ in limits)
            return Lease(name, limits, answer.held, now)
        key = answer.refused.partition(":")[2]
        if wait:
            self._waiting.add(key)
        return answer._replace(refused=key)

    def adopt(self, limits: Sequence[LeaseLimit]) -> Lease:
        """Give out a lease whatever the limits."""
        name, now = self._leases.name(), _now()
        self._table.renew([(key, name) for key, _ in self._named(limits)], now)
        return Lease(name, limits, self._table.held(self._named(limits)[-1].key), now)

    def release(self, lease: Lease) -> None:
        """Give a lease back: at once."""
        self._leases.wake(self._table.release(self._named(lease.limits), _now(), lease=lease.id))

    def leave(self, limits: Iterable[LeaseLimit]) -> None:
        """Give up places: at once."""
        left = [limit for limit in limits if limit.key in self._waiting]
        if left:
            self._waiting.difference_update(key for key, _ in left)
            self._leases.wake(self._table.release(self._named(left), _now(), place=self._place))

    def vote(self, number: float, heard: Callable[[float], None]) -> None:
        """Say what this access takes for the right number of slots, for as long as it is used at all."""
        mean = self._table.vote(self._name, self._place, number, _now(), lasts=_VOTE_LASTS)
        if mean is not None:
            heard(mean)

    def _named(self, limits: Sequence[LeaseLimit]) -> list[LeaseLimit]:
        return [LeaseLimit(f"{self._name}:{key}", most) for key, most in limits]


def _now() -> float:
    return EventLoop.current().time()
