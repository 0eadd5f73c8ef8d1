"""When calls come: at random, at a beat, all at once, or whenever the last one is done.

An open process gives the times of its calls, whatever becomes of them; a closed loop makes the next call when one has
ended. What a call asks for is `traffic`'s.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, repeat
from random import Random
from typing import Protocol, TypeAlias

from resilient_llm._options import at_least, is_number, number, seconds
from resilient_llm.errors import ConfigurationError
from resilient_llm.lab.distributions import Amount, amount

__all__ = ["Arrivals", "Burst", "ClosedLoop", "OpenArrivals", "Paced", "Poisson", "Steps"]


class OpenArrivals(Protocol):
    """Give times that do not depend on what becomes of the calls."""

    def times(self, rng: Random) -> Iterator[float]:
        """Give the time of each call, in seconds since the simulation began; they never go back."""
        ...


@dataclass(frozen=True, slots=True)
class Poisson:
    """Calls of many callers who know nothing of each other: `rate` a second on average, from `start` on."""

    rate: float
    start: float = 0.0

    def __post_init__(self) -> None:
        number(0, math.inf, inside=True, rate=self.rate)
        seconds(zero=True, start=self.start)

    def times(self, rng: Random) -> Iterator[float]:
        """Give the times."""
        at = self.start
        while True:
            at += rng.expovariate(self.rate)
            yield at


@dataclass(frozen=True, slots=True)
class Paced:
    """A call each `every` seconds, the first at `start`."""

    every: float
    start: float = 0.0

    def __post_init__(self) -> None:
        seconds(every=self.every)
        seconds(zero=True, start=self.start)

    def times(self, rng: Random) -> Iterator[float]:  # noqa: ARG002 - nothing is left to chance
        """Give the times."""
        number = 0
        while True:
            yield self.start + number * self.every
            number += 1


@dataclass(frozen=True, slots=True)
class Burst:
    """So many calls at one instant, `start`; with `every` again and again after so many seconds."""

    calls: int
    start: float = 0.0
    every: float = math.inf

    def __post_init__(self) -> None:
        at_least(1, calls=self.calls)
        seconds(infinite=True, every=self.every)
        seconds(zero=True, start=self.start)

    def times(self, rng: Random) -> Iterator[float]:  # noqa: ARG002 - nothing is left to chance
        """Give the times."""
        number = 0
        while True:
            yield from repeat(self.start + number * self.every if number else self.start, self.calls)
            if self.every == math.inf:
                return
            number += 1


@dataclass(frozen=True, slots=True)
class Steps:
    """Poisson arrivals whose rate changes: `rates` has (from when on, calls a second), earliest first."""

    rates: Sequence[tuple[float, float]]

    def __post_init__(self) -> None:
        growing = _are_steps(self.rates) and all(
            earlier < later for (earlier, _), (later, _) in pairwise(self.rates)
        )
        if not growing:
            raise ConfigurationError(
                f"rates={self.rates!r}: allowed are pairs (start, rate), starts growing from 0, rates from 0"
            )

    def times(self, rng: Random) -> Iterator[float]:
        """Give the times. The process has no memory, so each step begins anew."""
        ends = [start for start, _ in self.rates[1:]] + [math.inf]
        for (start, rate), end in zip(self.rates, ends, strict=True):
            at = start
            while rate and (at := at + rng.expovariate(rate)) < end:
                yield at


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """`workers` callers, from `start` on, of whom each calls again when its call has ended and `think` has passed.

    After a call without an answer, or one that took no time at all, a worker waits `after_failure` seconds first: else
    time would stand still where calls are refused on the spot.
    """

    workers: int
    think: Amount = 0.0
    start: float = 0.0
    after_failure: float = 0.1

    def __post_init__(self) -> None:
        at_least(1, workers=self.workers)
        amount(think=self.think)
        seconds(after_failure=self.after_failure)
        seconds(zero=True, start=self.start)


Arrivals: TypeAlias = OpenArrivals | ClosedLoop


def _are_steps(rates: object) -> bool:
    if not isinstance(rates, Sequence) or isinstance(rates, str | bytes) or not rates:
        return False
    return all(
        isinstance(step, tuple | list)
        and len(step) == 2
        and all(is_number(value) and 0 <= value < math.inf for value in step)
        for step in rates
    )
