"""How many retries a stream of calls may afford, so that retries cannot multiply an outage.

Counts calls and retries in a sliding window of fixed size. It knows nothing of what is retried, why, or when.
"""

from __future__ import annotations

import math

__all__ = ["RetryBudget"]

_SLICES = 10


class RetryBudget:
    """Allow retries and hedges as a share of recent calls, plus a reserve for quiet times.

    Within any `ttl` seconds that end in a granted retry, retries are at most `ratio` times the calls plus
    `min_per_second * ttl`. A new budget has its whole reserve. Nothing ever waits: the answer is yes or no.

    `ratio` is retries per call, 0 to 1; `min_per_second` is the rate of the reserve; `ttl` is in seconds.
    All methods take `now` in seconds of one monotonic clock; a `now` before the last one counts as the last.
    Time is kept in tenths of `ttl`: a call expires up to a tenth early and a retry up to a tenth late, so the
    bound above is exact at the cost of that much of the budget. Memory is constant.

    Raises `ValueError` for an option outside its range.

    Source: Finagle's `RetryBudget` (a leaky token bucket: a call deposits 1, a retry withdraws 1 / `ratio`,
    the reserve is always there), counted here in retries.
    """

    __slots__ = ("_calls", "_ratio", "_reserve", "_retries", "_slice", "_until", "_width")

    def __init__(self, *, ratio: float = 0.2, min_per_second: float = 1.0, ttl: float = 10.0) -> None:
        if not 0 <= ratio <= 1:
            raise ValueError(f"ratio={ratio!r}: allowed are ratios from 0 to 1")
        if not 0 <= min_per_second < math.inf:
            raise ValueError(f"min_per_second={min_per_second!r}: allowed are finite rates from 0")
        if not 0 < ttl < math.inf:
            raise ValueError(f"ttl={ttl!r}: allowed are finite seconds above 0")
        self._ratio = ratio
        self._reserve = min_per_second * ttl
        self._width = ttl / _SLICES
        self._slice = self._until = -math.inf
        self._calls = _SlidingCount(_SLICES)
        self._retries = _SlidingCount(_SLICES + 1)

    def deposit(self, now: float) -> None:
        """Count one call; not its attempts."""
        if now >= self._until:
            self._advance(now)
        self._calls.add()

    def withdraw(self, now: float) -> bool:
        """Take one retry or hedge out of the budget, or answer `False` and take nothing."""
        self._advance(now)
        if self._balance() < 1:
            return False
        self._retries.add()
        return True

    def remaining(self, now: float) -> float:
        """Give the number of retries that could be had now; a fraction below 1 is none yet."""
        self._advance(now)
        return max(0.0, self._balance())

    def idle(self, now: float) -> bool:
        """Tell whether nothing is counted, so that a new budget would answer the same."""
        self._advance(now)
        return not self._calls.total and not self._retries.total

    def _balance(self) -> float:
        # From counts each time, so that no rounding adds up. Negative once calls have expired before the
        # retries they paid for.
        return self._reserve + self._ratio * self._calls.total - self._retries.total

    def _advance(self, now: float) -> None:
        current = now // self._width
        if current > self._slice:
            steps = int(min(current - self._slice, _SLICES + 1))
            self._slice = current
            self._until = (current + 1) * self._width
            self._calls.advance(steps)
            self._retries.advance(steps)


class _SlidingCount:
    """Count events in the current slice of time and the ones before it."""

    __slots__ = ("_counts", "_current", "total")

    def __init__(self, slices: int) -> None:
        self._counts = [0] * slices
        self._current = 0
        self.total = 0

    def add(self) -> None:
        self._counts[self._current] += 1
        self.total += 1

    def advance(self, steps: int) -> None:
        """Begin the slice `steps` later, forgetting the oldest ones."""
        for _ in range(min(steps, len(self._counts))):
            self._current = (self._current + 1) % len(self._counts)
            self.total -= self._counts[self._current]
            self._counts[self._current] = 0
