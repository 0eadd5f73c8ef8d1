"""Days and months as a calendar has them, read off a clock that the application gives.

No clock is read in here but that one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

from resilient_llm.core.period import Position

__all__ = ["CalendarPeriod", "WorldClock"]

WorldClock = Callable[[], datetime]
"""Tell the world's time, in the time zone whose midnight begins a day."""


@dataclass(frozen=True, slots=True)
class CalendarPeriod:
    """Let what is spent count until the calendar's next day or month begins."""

    name: Literal["day", "month"]
    clock: WorldClock

    def at(self, now: float) -> Position:  # noqa: ARG002 - it is the world's time that counts
        """Say where the clock's time lies in it."""
        time = self.clock()
        midnight = time.replace(hour=0, minute=0, second=0, microsecond=0, fold=0)
        if self.name == "day":
            number, end = time.toordinal(), midnight + timedelta(days=1)
        else:
            number = time.year * 12 + time.month
            end = (midnight.replace(day=1) + timedelta(days=32)).replace(day=1)
        # By timestamps: a day on which clocks are changed has 23 or 25 hours.
        return Position(number, max(0.0, end.timestamp() - time.timestamp()))
