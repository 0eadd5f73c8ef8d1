"""Distributions that latencies, sizes and pauses are drawn from.

Each is a frozen value that draws from a `random.Random` it is given, and knows its mean, so that a simulation can be
checked against arithmetic. What is drawn from them is not known here.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from random import Random
from typing import Protocol, TypeAlias

from resilient_llm._options import is_number, number
from resilient_llm.errors import ConfigurationError

__all__ = [
    "Amount",
    "Bimodal",
    "Constant",
    "Distribution",
    "Empirical",
    "Exponential",
    "LogNormal",
    "Uniform",
    "amount",
    "distribution",
]

_WIDEST = 30.0
"""A standard deviation of logarithms beyond which means are no numbers any more."""


class Distribution(Protocol):
    """Draw numbers that are not negative."""

    @property
    def mean(self) -> float:
        """Give the expected value."""
        ...

    def draw(self, rng: Random) -> float:
        """Draw one."""
        ...


Amount: TypeAlias = "Distribution | float"
"""A distribution, or a number that stands for `Constant`."""


@dataclass(frozen=True, slots=True)
class Constant:
    """The same value every time."""

    value: float

    def __post_init__(self) -> None:
        number(0, math.inf, value=self.value)

    @property
    def mean(self) -> float:
        """Give the value."""
        return self.value

    def draw(self, rng: Random) -> float:  # noqa: ARG002 - nothing is left to chance
        """Give the value."""
        return self.value


@dataclass(frozen=True, slots=True)
class Uniform:
    """Anything from `low` to `high`, all equally likely."""

    low: float
    high: float

    def __post_init__(self) -> None:
        number(0, math.inf, low=self.low, high=self.high)
        _check(self.low <= self.high, "low and high", "with low at most high", (self.low, self.high))

    @property
    def mean(self) -> float:
        """Give the middle."""
        return (self.low + self.high) / 2

    def draw(self, rng: Random) -> float:
        """Draw one."""
        return rng.uniform(self.low, self.high)


@dataclass(frozen=True, slots=True)
class Exponential:
    """The time until something that happens at a constant rate: mostly short, now and then long."""

    mean: float

    def __post_init__(self) -> None:
        number(0, math.inf, inside=True, mean=self.mean)

    def draw(self, rng: Random) -> float:
        """Draw one."""
        return rng.expovariate(1 / self.mean)


@dataclass(frozen=True, slots=True)
class LogNormal:
    """What latencies usually look like: half of them under the `median`, and a tail that grows with `sigma`.

    `sigma` is the standard deviation of the logarithm; 0.3 has its 99th percentile at twice the median, 0.7 at five
    times the median.
    """

    median: float
    sigma: float

    def __post_init__(self) -> None:
        number(0, math.inf, inside=True, median=self.median)
        number(0, _WIDEST, sigma=self.sigma)

    @classmethod
    def of_mean(cls, mean: float, sigma: float) -> LogNormal:
        """Make the one with this mean."""
        number(0, math.inf, inside=True, mean=mean)
        number(0, _WIDEST, sigma=sigma)
        return cls(mean / math.exp(sigma**2 / 2), sigma)

    @property
    def mean(self) -> float:
        """Give the expected value, which is above the median."""
        return self.median * math.exp(self.sigma**2 / 2)

    def draw(self, rng: Random) -> float:
        """Draw one."""
        return rng.lognormvariate(math.log(self.median), self.sigma)


@dataclass(frozen=True, slots=True)
class Bimodal:
    """What `base` gives, but `factor` times that for a `share` of the draws: 1 in 20 slow by ten, say."""

    base: Amount
    share: float
    factor: float

    def __post_init__(self) -> None:
        amount(base=self.base)
        number(0, 1, share=self.share)
        number(0, math.inf, factor=self.factor)

    @property
    def mean(self) -> float:
        """Give the expected value."""
        return distribution(self.base).mean * (1 + self.share * (self.factor - 1))

    def draw(self, rng: Random) -> float:
        """Draw one."""
        factor = self.factor if rng.random() < self.share else 1.0
        return factor * distribution(self.base).draw(rng)


@dataclass(frozen=True, slots=True)
class Empirical:
    """One of `values` that were measured, each as likely as its `weights` say; all equally without any."""

    values: Sequence[float]
    weights: Sequence[float] | None = None
    _totals: tuple[float, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check(_are_numbers(self.values), "values", "numbers from 0, at least one", self.values)
        weights = [1.0] * len(self.values) if self.weights is None else self.weights
        _check(
            _are_numbers(weights) and len(weights) == len(self.values) and 0 < sum(weights) < math.inf,
            "weights",
            "as many numbers from 0 as values, not all 0",
            self.weights,
        )
        object.__setattr__(self, "_totals", tuple(accumulate(weights)))

    @property
    def mean(self) -> float:
        """Give the weighted mean of the values."""
        weights = [1.0] * len(self.values) if self.weights is None else self.weights
        return sum(map(float.__mul__, map(float, self.values), map(float, weights))) / self._totals[-1]

    def draw(self, rng: Random) -> float:
        """Draw one."""
        place = bisect_right(self._totals, rng.random() * self._totals[-1])
        return self.values[min(place, len(self.values) - 1)]


def distribution(amount: Amount) -> Distribution:
    """Give what an option means that may be a plain number."""
    return Constant(amount) if isinstance(amount, int | float) else amount


def amount(*, none: bool = False, **options: Amount | None) -> None:
    """Raise `ConfigurationError` unless every option is a number from 0, or a distribution."""
    for name, value in options.items():
        if value is None and none:
            continue
        if is_number(value) and value >= 0:
            continue
        drawn = callable(getattr(value, "draw", None)) and hasattr(value, "mean")
        if isinstance(value, type) or not drawn:
            allowed = f"numbers from 0, and distributions{', and None' if none else ''}"
            raise ConfigurationError(f"{name}={value!r}: allowed are {allowed}")


def _are_numbers(values: object) -> bool:
    if isinstance(values, str | bytes) or not isinstance(values, Sequence) or not values:
        return False
    return all(is_number(value) and value >= 0 for value in values)


def _check(fits: bool, option: str, allowed: str, value: object) -> None:  # noqa: FBT001 - reads as a sentence
    if not fits:
        raise ConfigurationError(f"{option}={value!r}: allowed are {allowed}")
