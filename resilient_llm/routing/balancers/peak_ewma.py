"""The better one of two, by how long the next call would wait for its first token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import ClassVar

from resilient_llm.core.target_load import Pool, TargetLoad
from resilient_llm.routing.balancers._lowest import others
from resilient_llm.routing.balancers.balancer import Need

__all__ = ["PeakEWMA"]

_DRAWS = 4  # to come by a second target, until it is taken from those that are left


@dataclass(frozen=True, kw_only=True, eq=False)
class PeakEWMA:
    """Draw two targets by weight and take the one with the lower (in flight + 1) x time to first token / weight.

    The time is a moving average that rises at once to each sample above it and falls slowly; the weight is
    multiplied by the success ratio squared. A target that nothing is known of counts as the quickest of the pool.

    Sources: peak EWMA and the choice of two as in Finagle and linkerd; Mitzenmacher, "The power of two choices in
    randomized load balancing", 2001.
    """

    strategy: ClassVar[str] = "peak_ewma"
    reason: ClassVar[str] = "latency"
    spreads: ClassVar[bool] = True

    def order(self, pool: Pool, need: Need, now: float, random: Random) -> Iterator[TargetLoad]:
        """Give the better one of two, then the other, then the better one of another two, and so on."""
        loads = pool.loads
        if len(loads) == 1:
            yield loads[0]
            return
        one = pool.draw(random)
        for _ in range(_DRAWS):
            two = pool.draw(random)
            if two is not one:
                break
        else:
            two = next(others(pool, (one,), random))
        if self.score(two, pool, need, now) < self.score(one, pool, need, now):
            one, two = two, one
        yield one
        yield two
        if len(loads) > 2:
            yield from self._rest(pool, (one, two), need, now, random)

    def _rest(
        self, pool: Pool, seen: tuple[TargetLoad, ...], need: Need, now: float, random: Random
    ) -> Iterator[TargetLoad]:
        rest = others(pool, seen, random)
        for one in rest:
            two = next(rest, None)
            if two is None:
                yield one
            elif self.score(two, pool, need, now) < self.score(one, pool, need, now):
                yield two
                yield one
            else:
                yield one
                yield two

    def score(self, load: TargetLoad, pool: Pool, need: Need, now: float) -> float:  # noqa: ARG002
        """Give the seconds that the next call is likely to wait, over the weight that counts."""
        latency = load.peak_latency(now)
        if latency is None:
            latency = pool.best_latency(now) or 1.0
        return latency * load.relative_load(now)
