"""Spans of time for which something counts, cut into slices that are forgotten whole.

What is counted in them must not enter here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol

__all__ = ["Period", "Position", "RollingPeriod"]


class Position(NamedTuple):
    """Say where in a period a moment lies.

    Periods are cut into slices of `width` seconds, numbered one after another; `slice` is the one it lies in and
    `ends_in` the seconds left of it. The last `kept` of them, with this one, count.
    """

    slice: int
    ends_in: float
    kept: int = 1
    width: float = math.inf


class Period(Protocol):
    """For how long what is spent counts."""

    @property
    def name(self) -> str:
        """Give the word for it: day, month."""
        ...

    def at(self, now: float) -> Position:
        """Say where `now` lies in it."""
        ...


@dataclass(frozen=True, slots=True)
class RollingPeriod:
    """Let what is spent count for `duration` seconds, and at most one of its `slices` longer.

    So in no `duration` seconds, whenever they begin, is more spent than may be.
    """

    name: str
    duration: float
    slices: int = 24

    def at(self, now: float) -> Position:
        """Say where `now` lies in it."""
        width = self.duration / self.slices
        number = math.floor(now / width)
        return Position(number, max(0.0, (number + 1) * width - now), self.slices + 1, width)
