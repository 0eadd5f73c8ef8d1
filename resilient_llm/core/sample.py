"""What calls to one model came to: counts, times to the first token, costs; small however many calls there were.

Only counts. What of it is good or bad must not enter here.
"""

from __future__ import annotations

import math
from enum import Enum

__all__ = ["SLOW_SHARE", "Result", "Sample"]

SLOW_SHARE = 0.01
"""The share of calls that a p99 leaves out."""

_GROWTH = math.log(1.05)
_FASTEST = 1e-4  # seconds; what is quicker counts as this
_NEVER = 1_000  # the bucket of first tokens that never came


class Result(Enum):
    """Say what a finished call tells of the model that it went to."""

    SUCCESS = "success"
    ERROR = "error"
    CLIENT_ERROR = "client_error"
    """The request was refused as wrong: the caller's fault, unless the baseline would have taken it."""


class Sample:
    """Count what calls came to: how many, their errors, the times to their first tokens, their costs."""

    __slots__ = (
        "_cost_squares",
        "_first_tokens",
        "calls",
        "client_errors",
        "cost",
        "errors",
        "priced",
        "timed",
    )

    def __init__(self) -> None:
        self.calls = 0
        """Those that succeeded or failed; refused as wrong are not among them."""
        self.errors = 0
        self.client_errors = 0
        self.timed = 0
        self.priced = 0
        self.cost = 0.0
        self._cost_squares = 0.0
        self._first_tokens: dict[int, int] = {}

    def record(self, result: Result, *, first_token: float | None = None, cost: float | None = None) -> None:
        """Count one call; `first_token` in seconds (infinite: it never came), `cost` in US dollars."""
        if result is Result.CLIENT_ERROR:
            self.client_errors += 1
        else:
            self.calls += 1
            self.errors += result is Result.ERROR
        if first_token is not None:
            bucket = _bucket(first_token)
            self._first_tokens[bucket] = self._first_tokens.get(bucket, 0) + 1
            self.timed += 1
        if cost is not None:
            self.priced += 1
            self.cost += cost
            self._cost_squares += cost * cost

    def add(self, other: Sample) -> None:
        """Count all that another has counted."""
        self.calls += other.calls
        self.errors += other.errors
        self.client_errors += other.client_errors
        self.timed += other.timed
        self.priced += other.priced
        self.cost += other.cost
        self._cost_squares += other._cost_squares
        for bucket, count in other._first_tokens.items():
            self._first_tokens[bucket] = self._first_tokens.get(bucket, 0) + count

    @property
    def error_ratio(self) -> float:
        """Give the share of calls that failed; 0 of none."""
        return self.errors / self.calls if self.calls else 0.0

    @property
    def client_error_ratio(self) -> float:
        """Give the share of all calls that were refused as wrong; 0 of none."""
        answered = self.calls + self.client_errors
        return self.client_errors / answered if answered else 0.0

    @property
    def mean_cost(self) -> float:
        """Give the mean cost in US dollars of the calls whose cost is known; 0 of none."""
        return self.cost / self.priced if self.priced else 0.0

    @property
    def cost_variance(self) -> float:
        """Give the variance of the mean cost; infinite where there are too few to tell."""
        if self.priced <= 1:
            return math.inf
        mean = self.cost / self.priced
        return max(0.0, self._cost_squares / self.priced - mean * mean) / (self.priced - 1)

    @property
    def p99_first_token(self) -> float | None:
        """Give the time in seconds within which 99 of 100 calls had their first token, by nearest rank.

        To within 5 %; `None` while no time is known.
        """
        rank = math.ceil(self.timed * (1 - SLOW_SHARE))
        for bucket in sorted(self._first_tokens):
            rank -= self._first_tokens[bucket]
            if rank <= 0:
                return math.inf if bucket == _NEVER else math.exp((bucket + 0.5) * _GROWTH)
        return None

    def slower(self, than: float) -> int:
        """Count the calls whose first token took longer than so many seconds, to within 5 %."""
        limit = _bucket(than)
        return sum(count for bucket, count in self._first_tokens.items() if bucket > limit)


def _bucket(seconds: float) -> int:
    """Give the number of the bucket that a time falls in, each 5 % wide."""
    return (
        _NEVER
        if seconds == math.inf
        else min(_NEVER - 1, math.floor(math.log(max(seconds, _FASTEST)) / _GROWTH))
    )
