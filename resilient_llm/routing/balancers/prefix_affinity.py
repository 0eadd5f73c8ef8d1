"""The target that has read the beginning of the prompt before."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from random import Random
from typing import ClassVar, cast

from resilient_llm._options import number
from resilient_llm.core.target_load import Pool, TargetLoad
from resilient_llm.routing.balancers.balancer import Need

__all__ = ["PrefixAffinity"]

_SLOTS = 4096
_KEPT = 8  # targets of a slot's ranking that are remembered
_WORD = (1 << 64) - 1
_FORGIVEN = 0.25  # of a failed call; until so little is left of it, it takes up room as one in flight does


@dataclass(frozen=True, kw_only=True, eq=False)
class PrefixAffinity:
    """Send prompts that begin alike to the same target, whose provider may have cached that beginning.

    Every process prefers the same target for a prefix, as often as weights say, and one that is taken away leaves
    the others' prefixes where they are. A target takes at most `max_load_ratio` times its share by weight of the
    calls in flight, rounded up; what is beyond goes to the next in the prefix's order. One that came back or that
    fails has a smaller share, and failed calls count as in flight until they are forgotten.

    Sources: consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam, 2016), on rendezvous hashing
    with weights (Thaler and Ravishankar, 1998; Schindelhauer and Schomaker, 2005) of 4,096 slots that prefixes
    fall into, whose rankings are remembered.
    """

    max_load_ratio: float = 1.25
    strategy: ClassVar[str] = "prefix_affinity"
    reason: ClassVar[str] = "affinity"
    spreads: ClassVar[bool] = False

    def __post_init__(self) -> None:
        number(1, 1000, max_load_ratio=self.max_load_ratio)

    def order(self, pool: Pool, need: Need, now: float, random: Random) -> Iterator[TargetLoad]:  # noqa: ARG002
        """Give the targets that have room in the order of the prefix, then the others, the least busy first."""
        table = self._table(pool)
        slot = need.prefix() % _SLOTS
        full: list[TargetLoad] = []
        share = self._share(pool)
        first = table.first(slot)
        for load in first:
            if self._has_room(load, share, now):
                yield load
            else:
                full.append(load)
        if len(first) < len(pool):
            for load in table.all(slot)[len(first) :]:
                if self._has_room(load, share, now):
                    yield load
                else:
                    full.append(load)
        if full:
            yield from sorted(full, key=lambda load: load.relative_load(now))

    def score(self, load: TargetLoad, pool: Pool, need: Need, now: float) -> float:
        """Give its place in the order of the prefix, 0 to 8; if it is full, as many more as there are targets."""
        first = self._table(pool).first(need.prefix() % _SLOTS)
        place = first.index(load) if load in first else _KEPT
        return float(place if self._has_room(load, self._share(pool), now) else place + len(pool))

    def _share(self, pool: Pool) -> float:
        """Give the calls, of those in flight and the next one, that a target may have for each unit of weight."""
        in_flight = sum([load.in_flight for load in pool.loads])
        return self.max_load_ratio * (in_flight + 1) / pool.total_weight

    def _has_room(self, load: TargetLoad, share: float, now: float) -> bool:
        most = math.ceil(share * load.effective_weight(now) - 1e-9)
        return math.ceil(load.busy(now) - _FORGIVEN) < most

    def _table(self, pool: Pool) -> _Rankings:
        table = cast("_Rankings | None", pool.cache.get(self))
        if table is None:
            table = pool.cache[self] = _Rankings(pool.loads)
        return table


class _Rankings:
    """Rank targets for each slot, in an order that has nothing to do with the other targets."""

    __slots__ = ("_first", "_loads", "_seeded")

    def __init__(self, loads: Sequence[TargetLoad]) -> None:
        self._loads = loads
        self._seeded = [(_seed(load.name), -1.0 / load.weight) for load in loads]
        self._first: dict[int, tuple[TargetLoad, ...]] = {}

    def first(self, slot: int) -> tuple[TargetLoad, ...]:
        """Give the first few of a slot's ranking."""
        first = self._first.get(slot)
        if first is None:
            first = self._first[slot] = tuple(self.all(slot)[:_KEPT])
        return first

    def all(self, slot: int) -> list[TargetLoad]:
        """Give a slot's whole ranking."""
        waits = self._waits(slot)
        return [self._loads[at] for at in sorted(range(len(waits)), key=waits.__getitem__)]

    def _waits(self, slot: int) -> list[float]:
        """Draw an exponential wait for each target: which is the shortest is as likely as its weight says."""
        start = (slot + 1) * 0x9E3779B97F4A7C15 & _WORD
        waits = []
        for seed, scale in self._seeded:
            word = (start ^ seed) * 0xBF58476D1CE4E5B9 & _WORD  # mixed with the factors of splitmix64
            word = (word ^ (word >> 32)) * 0x94D049BB133111EB & _WORD
            waits.append(math.log(((word >> 11) + 0.5) / (1 << 53)) * scale)
        return waits


def _seed(name: str) -> int:
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big")
