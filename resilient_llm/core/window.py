"""Counting windows: how many recent calls there were, how many failed and how many were slow.

They only count. What a count means (a trip, a score, a roll-back) is decided by whoever holds the window.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Protocol

__all__ = ["CountWindow", "TimeWindow", "Window"]


class Window(Protocol):
    """Total the recent calls; the totals are as of the last `record` or `expire`."""

    calls: int
    failures: int
    slow: int

    def record(self, now: float, *, failed: bool, slow: bool) -> None:
        """Count one call that ended at `now` (s)."""

    def expire(self, now: float) -> None:
        """Forget what is too old at `now` (s)."""

    def clear(self) -> None:
        """Forget everything."""


class _Bucket:
    __slots__ = ("calls", "failures", "index", "slow")

    def __init__(self, index: float) -> None:
        self.index = index
        self.calls = 0
        self.failures = 0
        self.slow = 0


class TimeWindow:
    """Total the calls of the last `duration` seconds.

    Time is cut into slices of `duration / buckets` seconds that are forgotten whole, so a call counts
    for at least `duration * (1 - 1 / buckets)` and less than `duration` seconds (the rolling window of
    Hystrix and Polly). A time earlier than the last one counts as that one. Amortised O(1) per call; memory
    is at most `buckets` small counters. Raises `ValueError` for a duration or number of buckets not above 0.
    """

    __slots__ = (
        "_bucket_duration",
        "_buckets",
        "_current",
        "_index",
        "_max_buckets",
        "_until",
        "calls",
        "failures",
        "slow",
    )

    def __init__(self, duration: float, buckets: int = 10) -> None:
        if not 0 < duration < math.inf:
            raise ValueError(f"duration={duration!r}: must be a finite number of seconds above 0")
        if buckets < 1:
            raise ValueError(f"buckets={buckets!r}: must be at least 1")
        self._bucket_duration = duration / buckets
        self._max_buckets = buckets
        self.clear()

    def clear(self) -> None:
        """Forget everything, the last time seen included."""
        self.calls = 0
        self.failures = 0
        self.slow = 0
        self._buckets: deque[_Bucket] = deque()
        self._current: _Bucket | None = None
        self._index = -math.inf
        self._until = -math.inf

    def record(self, now: float, *, failed: bool, slow: bool) -> None:
        """Count one call that ended at `now` (s)."""
        if now >= self._until:
            self.expire(now)
        bucket = self._current
        if bucket is None:
            bucket = self._current = _Bucket(self._index)
            self._buckets.append(bucket)
        bucket.calls += 1
        self.calls += 1
        if failed:
            bucket.failures += 1
            self.failures += 1
        if slow:
            bucket.slow += 1
            self.slow += 1

    def expire(self, now: float) -> None:
        """Forget the slices that have left the window by `now` (s)."""
        index = now // self._bucket_duration
        if index <= self._index:
            return
        self._index = index
        self._until = (index + 1) * self._bucket_duration
        self._current = None  # its slice is over
        oldest = index - self._max_buckets
        while self._buckets and self._buckets[0].index <= oldest:
            bucket = self._buckets.popleft()
            self.calls -= bucket.calls
            self.failures -= bucket.failures
            self.slow -= bucket.slow


class CountWindow:
    """Total the last `size` calls, however long ago they were.

    A ring of one byte per call; O(1) per call. Raises `ValueError` for a size below one.
    """

    __slots__ = ("_next", "_ring", "_size", "calls", "failures", "slow")

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError(f"size={size!r}: must be at least 1")
        self._size = size
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self.calls = 0
        self.failures = 0
        self.slow = 0
        self._ring = bytearray()
        self._next = 0

    def record(self, now: float, *, failed: bool, slow: bool) -> None:  # noqa: ARG002 - calls do not age here
        """Count one call in place of the oldest."""
        call = failed | slow << 1
        if self.calls < self._size:
            self._ring.append(call)
            self.calls += 1
        else:
            oldest = self._ring[self._next]
            self.failures -= oldest & 1
            self.slow -= oldest >> 1
            self._ring[self._next] = call
            self._next = (self._next + 1) % self._size
        self.failures += failed
        self.slow += slow

    def expire(self, now: float) -> None:
        """Do nothing: only newer calls push a call out."""
