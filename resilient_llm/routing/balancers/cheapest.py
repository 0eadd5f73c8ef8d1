"""The target that costs least."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import ClassVar, cast

from resilient_llm.core.target_load import Pool, TargetLoad
from resilient_llm.routing.balancers._lowest import lowest_first
from resilient_llm.routing.balancers.balancer import Need

__all__ = ["Cheapest"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Cheapest:
    """Prefer the lowest price, and among targets of one price the one that has least to do for its weight.

    An unknown price comes after all that are known. A dearer target gets only what the cheaper ones cannot take,
    so that each wants a circuit and a limit of its own.
    """

    strategy: ClassVar[str] = "cheapest"
    reason: ClassVar[str] = "cost"
    spreads: ClassVar[bool] = False

    def order(self, pool: Pool, need: Need, now: float, random: Random) -> Iterator[TargetLoad]:  # noqa: ARG002
        """Give the cheapest first."""
        scores = partial(_scores, now)
        for equal in self._by_price(pool):
            if len(equal) == 1:
                yield equal.loads[0]
            else:
                yield from lowest_first(equal, scores, random)

    def score(self, load: TargetLoad, pool: Pool, need: Need, now: float) -> float:  # noqa: ARG002
        """Give its price in US dollars per million tokens; infinity where it is unknown."""
        return load.price or math.inf

    def _by_price(self, pool: Pool) -> Sequence[Pool]:
        known = cast("Sequence[Pool] | None", pool.cache.get(self))
        if known is None:
            prices = sorted({load.price or math.inf for load in pool})
            known = [Pool([load for load in pool if (load.price or math.inf) == price]) for price in prices]
            pool.cache[self] = known
        return known


def _scores(now: float, loads: Sequence[TargetLoad]) -> list[float]:
    return [load.relative_load(now) for load in loads]
