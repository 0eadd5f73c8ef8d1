"""What goes wrong at an upstream, and when: kinds of failure, outages and phases, on the simulation's clock.

Values only. How a failure is played out is `serving`'s business.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Final, Literal, TypeAlias, get_args

from resilient_llm._options import is_number, label, number, one_of, seconds
from resilient_llm.errors import ConfigurationError
from resilient_llm.lab.distributions import Amount, Distribution, amount, distribution

__all__ = ["ANSWERED", "BEGINS_WELL", "KINDS", "FailureKind", "Outage", "Phase", "check_seed", "episodes"]

FailureKind: TypeAlias = Literal[
    "400",
    "401",
    "403",
    "429",
    "500",
    "502",
    "503",
    "504",
    "529",
    "insufficient_quota",
    "connect",
    "reset",
    "silence",
    "cut",
    "stall",
    "error_event",
    "late_error_event",
]
"""How a request fails.

A status is answered with the error body of the API; `insufficient_quota` is the 429 that waiting does not cure. No
connection is made (`connect`), or it is lost before anything comes (`reset`). `silence` is no answer at all, until the
client's read timeout. The rest begins well, with status 200: the body breaks off half-way (`cut`), nothing more comes
half-way (`stall`), there is an error in the body before any content (`error_event`) or half-way (`late_error_event`).
"""

ANSWERED: Final[dict[FailureKind, int]] = {
    kind: int(kind) for kind in get_args(FailureKind) if kind.isdigit()
} | {"insufficient_quota": 429}
"""The kinds that are an error response, and its status."""

BEGINS_WELL: Final[frozenset[FailureKind]] = frozenset({"cut", "stall", "error_event", "late_error_event"})
"""The kinds that begin with status 200."""


KINDS: Final[tuple[FailureKind, ...]] = get_args(FailureKind)


@dataclass(frozen=True, slots=True)
class Outage:
    """Make requests fail that come from `start` on and before `end`, in seconds since the simulation began.

    A `share` of them does, those with the API key `key` only where it is given. `retry_after` is what an error
    response tells the client, in seconds.
    """

    start: float
    end: float
    kind: FailureKind = "503"
    share: float = 1.0
    key: str | None = None
    retry_after: float | None = None

    def __post_init__(self) -> None:
        _check_window(self.start, self.end)
        one_of(KINDS, kind=self.kind)
        number(0, 1, share=self.share)
        if not self.share:
            raise ConfigurationError("share=0: allowed are shares above 0")
        if self.key is not None:
            label(key=self.key)
        if self.retry_after is not None:
            seconds(zero=True, retry_after=self.retry_after)


@dataclass(frozen=True, slots=True)
class Phase:
    """Change an upstream from `start` on and before `end`: all its times by a factor, or its capacity."""

    start: float
    end: float
    latency_factor: float = 1.0
    capacity_factor: float = 1.0

    def __post_init__(self) -> None:
        _check_window(self.start, self.end)
        number(
            0,
            math.inf,
            inside=True,
            latency_factor=self.latency_factor,
            capacity_factor=self.capacity_factor,
        )


def episodes(
    *, good: Amount, bad: Amount, until: float, seed: int | str = 0
) -> Iterator[tuple[float, float]]:
    """Give the bad times of what is good for a while, then bad for a while, and so on: (start, end) of each.

    Make outages or phases of them: `[Outage(*when) for when in episodes(...)]`. On average a share of
    `bad / (good + bad)` of the time is bad (an alternating renewal process; failures of real upstreams come in bursts,
    and a retry within the burst fails as well).
    """
    amount(good=good, bad=bad)
    seconds(zero=True, until=until)
    check_seed(seed)
    return _episodes(distribution(good), distribution(bad), until, Random(f"episodes {seed}"))


def _episodes(
    good: Distribution, bad: Distribution, until: float, rng: Random
) -> Iterator[tuple[float, float]]:
    at = good.draw(rng)
    while at < until:
        lasts = bad.draw(rng)
        if lasts > 0:
            yield at, at + lasts
        at += lasts + good.draw(rng)


def check_seed(seed: int | str) -> None:
    """Raise `ConfigurationError` for a seed that would not be the same the next time."""
    if not isinstance(seed, str) and not (isinstance(seed, int) and is_number(seed)):
        raise ConfigurationError(f"seed={seed!r}: allowed are whole numbers, and strings")


def _check_window(start: float, end: float) -> None:
    seconds(zero=True, start=start)
    seconds(infinite=True, end=end)
    if not start < end:
        raise ConfigurationError(f"end={end!r}: allowed are times after start={start!r}")
