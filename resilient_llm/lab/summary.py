"""The usual figures of many durations."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["Summary", "finite", "mean"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Sum up durations, in seconds; percentiles are of the nearest rank. All nan where there are none."""

    count: int
    mean: float
    p50: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(cls, durations: Iterable[float]) -> Summary:
        """Sum these up."""
        values = sorted(durations)
        if not values:
            return cls(count=0, mean=math.nan, p50=math.nan, p95=math.nan, p99=math.nan, max=math.nan)

        def percentile(ratio: float) -> float:
            return values[max(0, math.ceil(ratio * len(values)) - 1)]

        return cls(
            count=len(values),
            mean=math.fsum(values) / len(values),
            p50=percentile(0.5),
            p95=percentile(0.95),
            p99=percentile(0.99),
            max=values[-1],
        )

    def as_dict(self) -> dict[str, float | None]:
        """Give the figures as JSON has them: None where there are none."""
        names = ("mean", "p50", "p95", "p99", "max")
        return {"count": self.count} | {name: finite(getattr(self, name)) for name in names}


def mean(values: Iterable[float]) -> float:
    """Give the mean; nan where there are none."""
    listed = list(values)
    return math.fsum(listed) / len(listed) if listed else math.nan


def finite(value: float) -> float | None:
    """Give a number as JSON has it: None for nan and infinity."""
    return value if math.isfinite(value) else None
