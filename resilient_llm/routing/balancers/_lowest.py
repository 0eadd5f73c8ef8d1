"""Targets in the order of a score, without looking at more of them than it takes.

Shared by balancers that give each target a number. What the number is made of must not enter here.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, islice
from random import Random
from typing import TypeAlias

from resilient_llm.core.target_load import Pool, TargetLoad

__all__ = ["LOOK_AT", "Scores", "lowest_first", "others"]

LOOK_AT = 8
"""Targets that are looked at for a call. Of more, as many are drawn: choosing among a few is nearly as good as among
all, and does not make all processes rush to the same one (Mitzenmacher, "The power of two choices", 2001)."""

Scores: TypeAlias = Callable[[Sequence[TargetLoad]], list[float]]
"""Give each target's score: the lower, the better, and above 0."""


def lowest_first(pool: Pool, scores: Scores, random: Random) -> Iterator[TargetLoad]:
    """Give the target with the lowest score, then the others.

    When that one is idle, it is drawn from those that are, each as often as the inverse of its score says: among
    targets that have nothing to do, who has least to do says nothing, and their weights are all there is to go by.

    In a large pool targets are drawn by weight, looked at and given in turns of `LOOK_AT`.
    """
    loads: Sequence[TargetLoad] = pool.loads
    if len(loads) > LOOK_AT:
        loads = list(dict.fromkeys([pool.draw(random) for _ in range(LOOK_AT)]))
    given = scores(loads)
    best = _choose(loads, given, random)
    yield loads[best]
    if len(loads) > 1:
        yield from _ranked(loads, given, but=best)
    if len(loads) < len(pool.loads):
        rest = others(pool, loads, random)
        while turn := list(islice(rest, LOOK_AT)):
            yield from _ranked(turn, scores(turn))


def others(pool: Pool, seen: Sequence[TargetLoad], random: Random) -> Iterator[TargetLoad]:
    """Give the targets that have not been seen, in random order."""
    known = set(seen)
    rest = [load for load in pool.loads if load not in known]
    for left in range(len(rest), 0, -1):
        at = int(random.random() * left)
        rest[at], rest[left - 1] = rest[left - 1], rest[at]
        yield rest[left - 1]


def _choose(loads: Sequence[TargetLoad], scores: list[float], random: Random) -> int:
    lowest = min(scores)
    best = scores.index(lowest)
    if loads[best].in_flight:
        if scores.count(lowest) == 1:
            return best
        equal = [at for at, score in enumerate(scores) if score == lowest]
        return equal[int(random.random() * len(equal))]
    idle = [at for at, load in enumerate(loads) if not load.in_flight]
    if len(idle) == 1:
        return best
    bounds = list(accumulate([1 / scores[at] for at in idle]))
    return idle[bisect_right(bounds, random.random() * bounds[-1], 0, len(idle) - 1)]


def _ranked(loads: Sequence[TargetLoad], scores: list[float], *, but: int = -1) -> Iterator[TargetLoad]:
    for at in sorted(range(len(scores)), key=scores.__getitem__):
        if at != but:
            yield loads[at]
