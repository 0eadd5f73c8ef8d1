"""Any target, as often as its weight says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import ClassVar

from resilient_llm.core.target_load import Pool, TargetLoad
from resilient_llm.routing.balancers.balancer import Need

__all__ = ["WeightedRandom"]

_DRAWS = 8  # until the shares of all are worked out


@dataclass(frozen=True, kw_only=True, eq=False)
class WeightedRandom:
    """Draw targets, each as often as its weight x success ratio squared says, however busy they are.

    Its order is the one of drawing again and again without putting back: if the first cannot take the call, the
    others get it in proportion to their weights.
    """

    strategy: ClassVar[str] = "weighted_random"
    reason: ClassVar[str] = "weight"
    spreads: ClassVar[bool] = True

    def order(self, pool: Pool, need: Need, now: float, random: Random) -> Iterator[TargetLoad]:  # noqa: ARG002
        """Give a target drawn by weight, then the others in the same way."""
        # Drawing by the fixed weights and keeping what is drawn only as often as its reliability says comes to
        # drawing by both, with no need to add up the weights of all; likewise for those that have been given.
        given: set[TargetLoad] = set()
        while len(given) < len(pool.loads):
            for _ in range(_DRAWS):
                load = pool.draw(random)
                if load not in given and random.random() < load.reliability(now):
                    break
            else:
                break
            given.add(load)
            yield load
        rest = [load for load in pool.loads if load not in given]
        if rest:
            # Sorting by an exponential wait for each is drawing all of them in turn (Efraimidis and Spirakis, 2006).
            waits = [random.expovariate(load.effective_weight(now)) for load in rest]
            for at in sorted(range(len(rest)), key=waits.__getitem__):
                yield rest[at]

    def score(self, load: TargetLoad, pool: Pool, need: Need, now: float) -> float:  # noqa: ARG002
        """Give the number of draws in which it comes once, on average, were all targets well."""
        return pool.total_weight / load.effective_weight(now)
