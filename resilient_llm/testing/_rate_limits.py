"""The provider's own rate limits, really enforced. Pure: time is a parameter."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

from ._checks import is_number

Dimension: TypeAlias = Literal["requests", "tokens"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RateLimits:
    """Limit requests and tokens per minute, each by a token bucket that refills evenly.

    A bucket holds `window` seconds' worth: 60 lets a whole minute's allowance go at once, 1
    enforces it by the second. A request is charged one request, and its prompt's and reply's
    tokens, on admission. `per_key` keeps buckets for each API key instead of one for all. Raises
    ValueError for limits that are not positive.
    """

    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    window: float = 60.0
    per_key: bool = False

    def __post_init__(self) -> None:
        for name in ("requests_per_minute", "tokens_per_minute"):
            value = getattr(self, name)
            if value is not None and not (is_number(value) and 0 < value < math.inf):
                raise ValueError(f"{name} must be > 0, or None for no limit, got {value!r}")
        if not (is_number(self.window) and 0 < self.window < math.inf):
            raise ValueError(f"window must be > 0 seconds, got {self.window!r}")


@dataclass(frozen=True, slots=True)
class Level:
    """Where one bucket stands: the limit per minute, what is left, and the seconds until it is full again."""

    dimension: Dimension
    limit: float
    remaining: float
    reset: float


@dataclass(frozen=True, slots=True)
class Refusal:
    """Which bucket refused how much, and after how many seconds it would not; inf is never."""

    level: Level
    requested: float
    wait: float


class TokenBucket:
    """A bucket that holds `capacity` and refills by `rate` a second."""

    def __init__(self, capacity: float, rate: float) -> None:
        self.capacity = capacity
        self.rate = rate
        self._level = capacity
        self._updated = -math.inf

    def level(self, now: float) -> float:
        """Refill up to `now` and return what is in the bucket."""
        if self._level < self.capacity:
            self._level = min(self.capacity, self._level + (now - self._updated) * self.rate)
        self._updated = now
        return self._level

    def take(self, amount: float) -> None:
        """Take `amount` out, at the time of the last `level`."""
        self._level -= amount

    def wait(self, amount: float, now: float) -> float:
        """Return the seconds until `amount` is there; inf when it never will be."""
        if amount > self.capacity:
            return math.inf
        # A request that comes exactly when it was told to must not fail by a rounding error.
        missing = amount - self.level(now)
        return missing / self.rate if missing > 1e-9 * self.capacity else 0.0


class Quota:
    """The buckets of one `RateLimits`."""

    def __init__(self, limits: RateLimits) -> None:
        self._buckets: dict[Dimension, TokenBucket] = {}
        self._limits: dict[Dimension, float] = {}
        per_minute: dict[Dimension, float | None] = {
            "requests": limits.requests_per_minute,
            "tokens": limits.tokens_per_minute,
        }
        for dimension, limit in per_minute.items():
            if limit is not None:
                self._limits[dimension] = limit
                self._buckets[dimension] = TokenBucket(max(1.0, limit * limits.window / 60), limit / 60)

    def refusal(self, tokens: int, now: float) -> Refusal | None:
        """Say which bucket makes a request of so many tokens wait longest; None if none does."""
        amounts: dict[Dimension, float] = {"requests": 1, "tokens": tokens}
        waits = {
            dimension: bucket.wait(amounts[dimension], now) for dimension, bucket in self._buckets.items()
        }
        if not any(waits.values()):
            return None
        dimension = max(waits, key=waits.__getitem__)
        return Refusal(self._level(dimension, now), amounts[dimension], waits[dimension])

    def charge(self, tokens: int) -> None:
        """Take an admitted request out of every bucket, after `refusal` at the same time."""
        amounts: dict[Dimension, float] = {"requests": 1, "tokens": tokens}
        for dimension, bucket in self._buckets.items():
            bucket.take(amounts[dimension])

    def levels(self, now: float) -> list[Level]:
        """Return where every bucket stands."""
        return [self._level(dimension, now) for dimension in self._buckets]

    def _level(self, dimension: Dimension, now: float) -> Level:
        bucket = self._buckets[dimension]
        remaining = max(0.0, bucket.level(now))
        return Level(
            dimension, self._limits[dimension], remaining, (bucket.capacity - remaining) / bucket.rate
        )


def tightest(levels: list[Level]) -> list[Level]:
    """Keep of each dimension the level with the least left."""
    chosen: dict[Dimension, Level] = {}
    for level in levels:
        if level.dimension not in chosen or level.remaining < chosen[level.dimension].remaining:
            chosen[level.dimension] = level
    return list(chosen.values())
