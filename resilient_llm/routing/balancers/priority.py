"""The first target that can be asked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import ClassVar

from resilient_llm.core.target_load import Pool, TargetLoad
from resilient_llm.routing.balancers.balancer import Need

__all__ = ["Priority"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Priority:
    """Prefer targets strictly in the order in which they are listed.

    The others get what the first cannot take, and it gets everything again as soon as it can be asked: what
    keeps it from being asked, a circuit or a limit of its own, is also what says when it can again.
    """

    strategy: ClassVar[str] = "priority"
    reason: ClassVar[str] = "priority"
    spreads: ClassVar[bool] = False

    def order(self, pool: Pool, need: Need, now: float, random: Random) -> Iterator[TargetLoad]:  # noqa: ARG002
        """Give the targets as they are listed."""
        return iter(pool.loads)

    def score(self, load: TargetLoad, pool: Pool, need: Need, now: float) -> float:  # noqa: ARG002
        """Give its place, from 0."""
        return float(pool.loads.index(load))
