"""Counting windows: how many recent calls there were, how many failed and how many were slow.

They only count. What a count means (a trip, a score, a roll-back) is decided by whoever holds the window.
"""

from __future__ import annotations

import math
from array import array
from typing import Protocol

__all__ = ["CountWindow", "TimeWindow", "Window"]

_NEVER = -math.inf
_FIELDS = 4


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


class TimeWindow:
    """Total the calls of the last `duration` seconds.

    Time is cut into slices of `duration / buckets` seconds that are forgotten whole, so a call counts
    for at least `duration * (1 - 1 / buckets)` and less than `duration` seconds (the rolling window of
    Hystrix and Polly). A time earlier than the last one counts as that one. Amortised O(1) per call; memory
    is 32 bytes for each slice in which there were calls, besides about 200. Raises `ValueError` for a duration or
    number of buckets not above 0.
    """

    __slots__ = (
        "_bucket_duration",
        "_index",
        "_max_buckets",
        "_past",
        "_past_calls",
        "_past_failures",
        "_past_slow",
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
        # The slices before the current one, four numbers each: index, calls, failures, slow. An array, since there
        # is a window for every key. What the current one counts is the totals less those of all before.
        self._past: array[float] | None = None
        self._past_calls = 0
        self._past_failures = 0
        self._past_slow = 0
        self._index = _NEVER
        self._until = _NEVER

    @property
    def slices(self) -> int:
        """Say how many slices there are in which there were calls."""
        past = 0 if self._past is None else len(self._past) // _FIELDS
        return past + (self.calls > self._past_calls)

    def record(self, now: float, *, failed: bool, slow: bool) -> None:
        """Count one call that ended at `now` (s)."""
        if now >= self._until:
            self.expire(now)
        self.calls += 1
        if failed:
            self.failures += 1
        if slow:
            self.slow += 1

    def expire(self, now: float) -> None:
        """Forget the slices that have left the window by `now` (s)."""
        index = now // self._bucket_duration
        if index <= self._index:
            return
        if self.calls > self._past_calls:
            self._close()
        self._index = index
        self._until = (index + 1) * self._bucket_duration
        if self._past is not None:
            self._forget(self._past, index - self._max_buckets)
        self._past_calls, self._past_failures, self._past_slow = self.calls, self.failures, self.slow

    def _close(self) -> None:
        """Put the current slice to those before."""
        if self._past is None:
            self._past = array("d")
        self._past.extend(
            (
                self._index,
                self.calls - self._past_calls,
                self.failures - self._past_failures,
                self.slow - self._past_slow,
            )
        )

    def _forget(self, past: array[float], oldest: float) -> None:
        """Forget the slices up to `oldest`."""
        end = 0
        while end < len(past) and past[end] <= oldest:
            self.calls -= int(past[end + 1])
            self.failures -= int(past[end + 2])
            self.slow -= int(past[end + 3])
            end += _FIELDS
        if end == len(past):
            self._past = None
        elif end:
            del past[:end]


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
