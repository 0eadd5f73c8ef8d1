"""What a balancer is, and what it is told.

Protocols only. A balancer puts targets in order; whether one may be asked at all is the router's to find out.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Protocol

from resilient_llm.core.target_load import Pool, TargetLoad

__all__ = ["Balancer", "Need"]


class Need(Protocol):
    """Say what a balancer may want to know of a call; worked out only when it asks."""

    @property
    def tokens(self) -> float:
        """Give the tokens that it is estimated to use."""
        ...

    def prefix(self) -> int:
        """Give the hash of the part of its prompt that stays the same through a conversation."""
        ...


class Balancer(Protocol):
    """Say which of the targets that can take each other's place is the best one for a call.

    Pure: it keeps no state but in the pool's cache, and takes time and randomness as parameters.
    """

    @property
    def strategy(self) -> str:
        """Give its name, for spans: `resilient_llm.route.strategy`."""
        ...

    @property
    def reason(self) -> str:
        """Say what it goes by, for spans: priority, weight, latency, cost or affinity."""
        ...

    @property
    def spreads(self) -> bool:
        """Tell whether every target is to get some of the calls, so that one that may be back is tried at once."""
        ...

    def order(self, pool: Pool, need: Need, now: float, random: Random) -> Iterator[TargetLoad]:
        """Give every target of the pool once, the best first, and no sooner than asked for."""
        ...

    def score(self, load: TargetLoad, pool: Pool, need: Need, now: float) -> float:
        """Give the number by which it judges one target of the pool: the lower, the better."""
        ...
