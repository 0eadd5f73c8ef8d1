"""Leases in this process's memory: exact, and never lost, since whoever holds one is here.

None ends by itself, so that no time is needed for them. A function on a thread may outlive its event loop, and gives
its slot back from there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import inf
from threading import RLock
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from resilient_llm._loop import EventLoop
from resilient_llm.core.leases import LeaseAnswer, LeaseLimit, LeaseTable, Woken
from resilient_llm.stores.protocol_leases import Lease

if TYPE_CHECKING:
    from resilient_llm.telemetry import Telemetry

__all__ = ["MemoryLeasePool", "MemoryLeases"]

_VOTE_LASTS = 15.0
_NOW = 0.0


class MemoryLeases:
    """Keep leases in memory; see `stores.protocol_leases.Leases`."""

    lost = 0

    def __init__(self) -> None:
        self.lock = RLock()
        """Held while the table is read or changed; reentrant, since a finaliser may give a lease back at any time."""
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
        with self.lock:
            self._serial += 1
            return str(self._serial)

    def release(self, limits: Sequence[LeaseLimit], *, lease: str = "", place: str = "") -> None:
        """Take back a lease or a place, from any thread, and tell those who are first in line."""
        with self.lock:
            woken = self._table.release(limits, _NOW, lease=lease, place=place)
            if any(self._has_ended(first) for first, _ in woken):
                woken = [each for limit in limits for each in self._forget_ended(limit)]
        self._tell(woken)

    def make_way(self, limit: LeaseLimit) -> bool:
        """Give up the places in line for a key for which nobody will come back; `False` when there are none."""
        with self.lock:
            before = len(self._table.places(limit.key))
            woken = self._forget_ended(limit)
            gone = len(self._table.places(limit.key)) < before
        self._tell(woken)
        return gone

    def _forget_ended(self, limit: LeaseLimit) -> Sequence[Woken]:
        woken: Sequence[Woken] = ()
        for place in self._table.places(limit.key):
            if self._has_ended(place):
                woken = self._table.release([limit], _NOW, place=place)
        return woken

    def _has_ended(self, place: str) -> bool:
        pool = self._places.get(place)
        return pool is None or pool.has_ended()

    def _tell(self, woken: Iterable[Woken]) -> None:
        for first, key in woken:
            pool = self._places.get(first)
            if pool is not None:
                pool.hear_free(key.partition(":")[2])


class MemoryLeasePool:
    """One access to a pool in memory; see `stores.protocol_leases.LeasePool`."""

    __slots__ = ("__weakref__", "_leases", "_loop", "_name", "_on_free", "_place", "_table", "_waiting")

    def __init__(
        self, leases: MemoryLeases, table: LeaseTable, name: str, place: str, on_free: Callable[[str], None]
    ) -> None:
        self._on_free = on_free
        self._loop: EventLoop | None = None  # where it was last asked to wait
        self._leases = leases
        self._table = table
        self._name = name.replace(":", "/")
        self._place = place
        self._waiting: set[str] = set()

    async def acquire(self, limits: Sequence[LeaseLimit], *, wait: bool = False) -> Lease | LeaseAnswer:
        """Ask for a lease, without ever yielding to another task."""
        name = self._leases.name()
        if wait:
            self._loop = EventLoop.current()
        answer = self._acquire(name, limits, wait=wait)
        while any(
            limit.key == answer.refused and self._leases.make_way(limit) for limit in self._named(limits)
        ):
            answer = self._acquire(name, limits, wait=wait)
        if answer.refused is None:
            self._waiting.difference_update(key for key, _ in limits)
            return Lease(name, limits, answer.held, _NOW)
        key = answer.refused.partition(":")[2]
        if wait:
            self._waiting.add(key)
        return answer._replace(refused=key)

    def _acquire(self, name: str, limits: Sequence[LeaseLimit], *, wait: bool) -> LeaseAnswer:
        lasts = inf if wait else 0.0
        with self._leases.lock:
            return self._table.acquire(name, self._named(limits), _NOW, place=self._place, place_lasts=lasts)

    def has_ended(self) -> bool:
        """Tell whether whoever waits here does so in an event loop that has ended."""
        return self._loop is not None and not self._loop.is_here() and self._loop.has_ended()

    def adopt(self, limits: Sequence[LeaseLimit]) -> Lease:
        """Give out a lease whatever the limits."""
        name, named = self._leases.name(), self._named(limits)
        with self._leases.lock:
            self._table.renew([(key, name) for key, _ in named], _NOW)
            held = self._table.held(named[-1].key)
        return Lease(name, limits, held, _NOW)

    def release(self, lease: Lease) -> None:
        """Give a lease back: at once."""
        self._leases.release(self._named(lease.limits), lease=lease.id)

    def leave(self, limits: Iterable[LeaseLimit]) -> None:
        """Give up places: at once."""
        left = [limit for limit in limits if limit.key in self._waiting]
        if left:
            self._waiting.difference_update(key for key, _ in left)
            self._leases.release(self._named(left), place=self._place)

    def vote(self, number: float, heard: Callable[[float], None]) -> None:
        """Say what this access takes for the right number of slots, for as long as it is used at all."""
        try:
            now = EventLoop.current().time()
        except RuntimeError:
            return  # its event loop has ended, and what it finds right with it
        with self._leases.lock:
            mean = self._table.vote(self._name, self._place, number, now, lasts=_VOTE_LASTS)
        if mean is not None:
            heard(mean)

    def hear_free(self, key: str) -> None:
        """Tell whoever waits here that a lease may be free: in the event loop where it waits, while there is one."""
        loop = self._loop
        if loop is None or loop.is_here():
            self._on_free(key)
        elif not loop.has_ended():
            loop.post(lambda: self._on_free(key))

    def _named(self, limits: Sequence[LeaseLimit]) -> list[LeaseLimit]:
        return [LeaseLimit(f"{self._name}:{key}", most) for key, most in limits]
