"""The target that has fewest tokens to get through."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import ClassVar

from resilient_llm.core.target_load import Pool, TargetLoad
from resilient_llm.routing.balancers._lowest import lowest_first
from resilient_llm.routing.balancers.balancer import Need

__all__ = ["LeastOutstandingTokens"]


@dataclass(frozen=True, kw_only=True, eq=False)
class LeastOutstandingTokens:
    """Prefer the fewest estimated tokens in flight, with those of the call, over weight x success ratio squared.

    For calls of very different lengths: ten short questions are less to do than one long document. Among idle
    targets one is drawn, each as often as that weight says.
    """

    strategy: ClassVar[str] = "least_outstanding_tokens"
    reason: ClassVar[str] = "weight"
    spreads: ClassVar[bool] = True

    def order(self, pool: Pool, need: Need, now: float, random: Random) -> Iterator[TargetLoad]:
        """Give the one with the fewest tokens first."""
        return lowest_first(pool, partial(self._scores, need, now), random)

    def score(self, load: TargetLoad, pool: Pool, need: Need, now: float) -> float:  # noqa: ARG002
        """Give the tokens in flight with those of the call, over the weight that counts."""
        return self._scores(need, now, [load])[0]

    def _scores(self, need: Need, now: float, loads: Sequence[TargetLoad]) -> list[float]:
        tokens = need.tokens
        return [load.relative_tokens(now, tokens) for load in loads]
