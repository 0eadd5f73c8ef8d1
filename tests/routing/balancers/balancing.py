"""Targets, calls and traffic for tests of balancers: no clock, no event loop, only numbers."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from random import Random
from typing import NamedTuple

from resilient_llm.core.target_load import Pool, TargetLoad
from resilient_llm.routing.balancers import (
    Balancer,
    Cheapest,
    LeastOutstandingTokens,
    PeakEWMA,
    PrefixAffinity,
    Priority,
    WeightedLeastConnections,
    WeightedRandom,
)

BALANCERS: tuple[Balancer, ...] = (
    WeightedLeastConnections(),
    LeastOutstandingTokens(),
    PeakEWMA(),
    WeightedRandom(),
    Priority(),
    Cheapest(),
    PrefixAffinity(),
)
BY_LOAD = tuple(balancer for balancer in BALANCERS if balancer.strategy not in ("priority", "cheapest"))


@dataclass(frozen=True)
class Call:
    """What a balancer may ask of a call."""

    tokens: float = 100.0
    hashed: int = 0

    def prefix(self) -> int:
        return self.hashed


def pool_of(*weights: float) -> Pool:
    return Pool([TargetLoad(chr(ord("a") + at), weight=weight) for at, weight in enumerate(weights)])


def busy(load: TargetLoad, calls: int, now: float = 0.0, tokens: float = 100.0) -> None:
    for _ in range(calls):
        load.sent(now, tokens)


def answered(load: TargetLoad, first_token: float, now: float = 0.0, times: int = 1) -> None:
    for _ in range(times):
        load.sent(now, 100.0)
        load.finished(now, 100.0, ok=True, first_token=first_token)


def failed(load: TargetLoad, now: float = 0.0, times: int = 1) -> None:
    for _ in range(times):
        load.sent(now, 100.0)
        load.finished(now, 100.0, ok=False, first_token=None)


def first(
    balancer: Balancer, pool: Pool, random: Random, *, now: float = 0.0, call: Call | None = None
) -> TargetLoad:
    return next(balancer.order(pool, call or Call(), now, random))


def four_sigma(draws: int, share: float) -> float:
    """How far a count may be from its mean; further it is once in 16,000 times."""
    return 4 * math.sqrt(draws * share * (1 - share))


class Answer(NamedTuple):
    """How a target answers one call: seconds it takes in all and to the first token, and whether it does."""

    duration: float
    first_token: float | None = None
    ok: bool = True


@dataclass
class Traffic:
    """Send calls to a pool as they arrive, and let them end when they do."""

    balancer: Balancer
    pool: Pool
    answers: Callable[[TargetLoad, float], Answer]
    random: Random
    make_call: Callable[[Random], Call] = lambda random: Call(hashed=random.getrandbits(64))

    def arrivals(self, rate: float, *, start: float = 0.0, stop: float) -> Iterator[float]:
        at = start
        while (at := at + self.random.expovariate(rate)) < stop:
            yield at

    def run(self, arrivals: Iterator[float]) -> Counter[str]:
        """Give the numbers of calls by target."""
        sent = Counter[str]()
        ends: list[tuple[float, int, TargetLoad, float, Answer]] = []
        numbers = count()
        for now in arrivals:
            self._end(ends, now)
            call = self.make_call(self.random)
            load = next(self.balancer.order(self.pool, call, now, self.random))
            answer = self.answers(load, now)
            load.sent(now, call.tokens)
            sent[load.name] += 1
            heapq.heappush(ends, (now + answer.duration, next(numbers), load, call.tokens, answer))
        self._end(ends, math.inf)
        return sent

    @staticmethod
    def _end(ends: list[tuple[float, int, TargetLoad, float, Answer]], until: float) -> None:
        while ends and ends[0][0] <= until:
            at, _, load, tokens, answer = heapq.heappop(ends)
            load.finished(at, tokens, ok=answer.ok, first_token=answer.first_token)
