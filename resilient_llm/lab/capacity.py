"""How much an upstream can serve at a time, and what becomes of the rest.

Values that decide from counts they are given; what is in service is counted in `serving`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Literal, Protocol, TypeAlias

from resilient_llm._options import function, number, one_of
from resilient_llm.lab.conditions import ANSWERED, FailureKind

__all__ = ["Admission", "Capacity", "Sharing", "Slots"]

Admission: TypeAlias = Literal["serve", "wait", "refuse"]


class Capacity(Protocol):
    """Decide what becomes of a request, by what is in service and waiting when it comes."""

    @property
    def limit(self) -> float:
        """Give the requests that are served at full speed."""
        ...

    @property
    def refuse_with(self) -> FailureKind:
        """Give the error that refused requests get."""
        ...

    def admit(self, serving: int, waiting: int, limit: float, rng: Random) -> Admission:
        """Decide about one more; `limit` is what holds now."""
        ...

    def latency_factor(self, load: float) -> float:
        """Give how much longer everything takes, with so many in service for each of `limit`."""
        ...


def _share_evenly(load: float) -> float:
    return max(1.0, load)


def _refuse_nothing(_load: float) -> float:
    return 0.0


@dataclass(frozen=True, slots=True)
class Sharing:
    """Serve everything at once: up to `limit` at full speed, beyond it the more slowly the more there is.

    This is the knee of most model servers: more in flight than `limit` brings no more throughput. `slowdown` gives the
    factor for a load (in service / limit), by default processor sharing; `refusal_ratio` the share of requests
    refused at a load, by default none. Both are looked at when a request comes and when its first token has.
    """

    limit: float
    slowdown: Callable[[float], float] = _share_evenly
    refusal_ratio: Callable[[float], float] = _refuse_nothing
    refuse_with: FailureKind = "429"

    def __post_init__(self) -> None:
        _check(self)
        function(slowdown=self.slowdown, refusal_ratio=self.refusal_ratio)

    def admit(self, serving: int, waiting: int, limit: float, rng: Random) -> Admission:  # noqa: ARG002
        """Refuse by chance, as `refusal_ratio` says for the load with it."""
        ratio = self.refusal_ratio((serving + 1) / limit)
        return "refuse" if ratio > 0 and rng.random() < ratio else "serve"

    def latency_factor(self, load: float) -> float:
        """Give what `slowdown` says."""
        return self.slowdown(load)


@dataclass(frozen=True, slots=True)
class Slots:
    """Serve at most `limit` at a time; so many more wait, first come first served; the rest is refused."""

    limit: float
    max_queued: float = math.inf
    refuse_with: FailureKind = "503"

    def __post_init__(self) -> None:
        _check(self)
        number(0, math.inf, max_queued=self.max_queued)

    def admit(self, serving: int, waiting: int, limit: float, rng: Random) -> Admission:  # noqa: ARG002
        """Serve while there is a slot and nobody waits for it."""
        if not waiting and serving + 1 <= max(1.0, limit):
            return "serve"
        return "wait" if waiting < self.max_queued else "refuse"

    def latency_factor(self, load: float) -> float:  # noqa: ARG002 - whoever has a slot has it alone
        """Give 1."""
        return 1.0


def _check(capacity: Capacity) -> None:
    number(1, math.inf, limit=capacity.limit)
    one_of(ANSWERED, refuse_with=capacity.refuse_with)
