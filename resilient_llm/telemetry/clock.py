"""When things happened, on one call's line of time."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from resilient_llm._loop import EventLoop

__all__ = ["Clock"]


class Clock:
    """Tie anyio's clock to the world's once, so that the spans of a call add up, in virtual time too."""

    __slots__ = ("_anchor", "_anchor_ns", "_loop")

    def __init__(self, loop: EventLoop) -> None:
        self._loop = loop
        self._anchor = loop.time()
        self._anchor_ns = time.time_ns()

    def now(self) -> float:
        """Give the time in seconds on anyio's clock; it goes on when the event loop has ended."""
        now = self._loop.time()
        if now < self._anchor:  # the clock of a loop that is no more
            return self._anchor + (time.time_ns() - self._anchor_ns) / 1e9
        return now

    def ns(self, at: float) -> int:
        """Give a time on anyio's clock in nanoseconds since the epoch, as spans want it."""
        return self._anchor_ns + round((at - self._anchor) * 1e9)
