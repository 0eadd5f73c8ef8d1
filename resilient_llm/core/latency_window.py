"""How long recent replies took, as a histogram that forgets: any quantile of it at any time.

It only counts. What a quantile means (when to hedge, what is slow) is decided by whoever holds the window.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from itertools import accumulate

__all__ = ["LatencyWindow"]

_SHORTEST = 0.001
_LONGEST = 3600.0
_GROWTH = 1.05
_LOG_GROWTH = math.log(_GROWTH)
_EDGES = tuple(
    min(_LONGEST, _SHORTEST * _GROWTH**n)
    for n in range(math.ceil(math.log(_LONGEST / _SHORTEST, _GROWTH)) + 1)
)
"""Upper edges of the bins, in seconds."""

_SLICES = 6


class LatencyWindow:
    """Estimate quantiles of the latencies of the last `duration` seconds, once there are `min_samples` of them.

    Latencies fall into bins, each a twentieth wider than the one before, from 1 ms to an hour; shorter and longer
    ones count as these. An estimate is the upper edge of the bin that holds the sample of that rank: never below
    the exact quantile, and at most 5 % above it. Time is cut into six slices that are forgotten whole, so a sample
    counts for at least five sixths of `duration` and less than all of it. A time earlier than the last one counts
    as that one. Memory is constant, whatever the number of samples; a sample costs O(1), an estimate one pass over
    the bins if samples have come or gone since the last.

    Raises `ValueError` for a duration that is not finite and above 0, or `min_samples` below 1.

    Source: a histogram of bounded relative error as in HdrHistogram and DDSketch (Masson et al., VLDB 2019); the
    rolling window of Hystrix.
    """

    __slots__ = ("_counts", "_current", "_index", "_min_samples", "_slices", "_sums", "_total", "_width")

    def __init__(self, duration: float, *, min_samples: int = 1) -> None:
        if not 0 < duration < math.inf:
            raise ValueError(f"duration={duration!r}: must be a finite number of seconds above 0")
        if min_samples < 1:
            raise ValueError(f"min_samples={min_samples!r}: must be at least 1")
        self._width = duration / _SLICES
        self._min_samples = min_samples
        self._index = -math.inf
        self._counts = [0] * len(_EDGES)
        self._total = 0
        self._sums: list[int] | None = None  # samples up to each bin, until the next change
        self._slices: deque[tuple[float, dict[int, int]]] = deque()
        self._current: dict[int, int] | None = None

    def record(self, now: float, latency: float) -> None:
        """Count a reply that took `latency` seconds and came at `now` (s)."""
        self._expire(now)
        current = self._current
        if current is None:
            current = self._current = {}
            self._slices.append((self._index, current))
        bin_ = _bin(latency)
        current[bin_] = current.get(bin_, 0) + 1
        self._counts[bin_] += 1
        self._total += 1
        self._sums = None

    def samples(self, now: float) -> int:
        """Count the samples in the window at `now` (s)."""
        self._expire(now)
        return self._total

    def quantile(self, now: float, q: float) -> float | None:
        """Give the seconds within which a share `q` (0 to 1) of the replies came; `None` with too few samples."""
        self._expire(now)
        if self._total < self._min_samples:
            return None
        if self._sums is None:
            self._sums = list(accumulate(self._counts))
        rank = max(1, math.ceil(q * self._total - 1e-9))  # 0.07 * 100 is a little more than 7
        return _EDGES[bisect_left(self._sums, rank)]

    def _expire(self, now: float) -> None:
        index = now // self._width
        if index <= self._index:
            return
        self._index = index
        self._current = None  # its slice is over
        while self._slices and self._slices[0][0] <= index - _SLICES:
            _, counts = self._slices.popleft()
            for bin_, count in counts.items():
                self._counts[bin_] -= count
                self._total -= count
            self._sums = None


def _bin(latency: float) -> int:
    if latency <= _SHORTEST:
        return 0
    if latency >= _LONGEST:
        return len(_EDGES) - 1
    return math.ceil(math.log(latency / _SHORTEST) / _LOG_GROWTH - 1e-9)
