"""The target that has least to do for what it can do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import ClassVar

from resilient_llm._options import number
from resilient_llm.core.target_load import Pool, TargetLoad
from resilient_llm.routing.balancers._lowest import lowest_first
from resilient_llm.routing.balancers.balancer import Need

__all__ = ["WeightedLeastConnections"]


@dataclass(frozen=True, kw_only=True, eq=False)
class WeightedLeastConnections:
    """Prefer the lowest (in flight + 1) / (weight x success ratio squared x speed).

    Speed is 1 for targets whose time to first token is at most `(1 + slack_ratio)` times the pool's lowest, and
    falls in inverse proportion beyond, down to `min_speed_ratio`; a target that nothing is known of counts as quick.
    Among idle targets one is drawn, each as often as that weight says.

    Source: the shortest expected delay of Linux IPVS, with a weight that adapts.
    """

    slack_ratio: float = 0.25
    min_speed_ratio: float = 0.1
    strategy: ClassVar[str] = "weighted_least_connections"
    reason: ClassVar[str] = "weight"
    spreads: ClassVar[bool] = True

    def __post_init__(self) -> None:
        number(0, 10, slack_ratio=self.slack_ratio)
        number(0.001, 1, min_speed_ratio=self.min_speed_ratio)

    def order(self, pool: Pool, need: Need, now: float, random: Random) -> Iterator[TargetLoad]:  # noqa: ARG002
        """Give the one with least to do first."""
        return lowest_first(pool, partial(self._scores, pool, now), random)

    def score(self, load: TargetLoad, pool: Pool, need: Need, now: float) -> float:  # noqa: ARG002
        """Give the calls in flight with the next one, over the weight that counts."""
        return self._scores(pool, now, [load])[0]

    def _scores(self, pool: Pool, now: float, loads: Sequence[TargetLoad]) -> list[float]:
        best = pool.best_latency(now)
        if best is None:
            return [load.relative_load(now) for load in loads]
        slow = best * (1.0 + self.slack_ratio)
        scores = []
        for load in loads:
            score = load.relative_load(now)
            latency = load.latency(now)
            if latency is not None and latency > slow:
                score /= max(self.min_speed_ratio, slow / latency)
            scores.append(score)
        return scores
