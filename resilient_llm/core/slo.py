"""Whether a candidate does as well as it must, judged from what its calls and the baseline's came to.

Counts and the statistics of small samples. Which calls go to a candidate, and what follows from a judgement, must
not enter here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from statistics import NormalDist
from typing import NamedTuple

from resilient_llm._options import is_number, number
from resilient_llm.core.sample import SLOW_SHARE, Sample
from resilient_llm.errors import ConfigurationError

__all__ = ["SLO", "Finding", "Judgement", "judge"]

_FEWEST = 3
"""How many calls must have gone wrong for anything to be clear: one or two of few prove nothing."""

_SHARES = ("error_ratio", "error_increase", "client_error_ratio", "client_error_increase")
_AMOUNTS = ("p99_first_token", "p99_first_token_ratio", "cost", "cost_ratio")


@dataclass(frozen=True, slots=True, kw_only=True)
class SLO:
    """Say how well a candidate must do; `None` leaves a bound out.

    Absolute: `error_ratio` and `client_error_ratio` are shares of calls, `p99_first_token` is in seconds (known to
    within 5 %), `cost` the mean of a call in US dollars. Relative to the baseline in the same time: `error_increase`
    and `client_error_increase` are what may be added to its share, `p99_first_token_ratio` and `cost_ratio` how many
    times as much the candidate may take.

    A bound is *clearly* violated when chance would make a candidate that just keeps it look so bad less often than
    1 - `confidence`, and three calls or more have gone wrong: by the lower Wilson bound of a share (of calls slower
    than the bound, for a p99), by Newcombe's for a difference of shares, and by a z-test of mean costs.

    Raises `ConfigurationError` for a bound out of range, and when there is none. Sources: Wilson 1927; Newcombe 1998,
    "Interval estimation for the difference between independent proportions", method 10.
    """

    error_ratio: float | None = 0.05
    error_increase: float | None = None
    client_error_ratio: float | None = None
    client_error_increase: float | None = None
    p99_first_token: float | None = None
    p99_first_token_ratio: float | None = None
    cost: float | None = None
    cost_ratio: float | None = None
    confidence: float = 0.99

    def __post_init__(self) -> None:
        number(0, 1, none=True, **{name: getattr(self, name) for name in _SHARES})
        for name in _AMOUNTS:
            value = getattr(self, name)
            if value is not None and not (is_number(value) and 0 < value < math.inf):
                raise ConfigurationError(f"{name}={value!r}: allowed are finite numbers above 0, and None")
        if all(getattr(self, name) is None for name in (*_SHARES, *_AMOUNTS)):
            raise ConfigurationError(
                f"SLO: allowed is one that bounds something: {', '.join((*_SHARES, *_AMOUNTS))}"
            )
        number(0.5, 1, inside=True, confidence=self.confidence)

    @property
    def is_relative(self) -> bool:
        """Tell whether any bound is relative to the baseline."""
        bounds = (
            self.error_increase,
            self.client_error_increase,
            self.p99_first_token_ratio,
            self.cost_ratio,
        )
        return any(bound is not None for bound in bounds)


class Judgement(Enum):
    """Say whether an SLO is kept."""

    KEPT = "kept"
    UNCLEAR = "unclear"
    """Too little is known, or it is violated by no more than may be chance."""
    VIOLATED = "violated"


class Finding(NamedTuple):
    """Say of a whole SLO, or of one bound, whether it is kept; `bound` is the name of the one it hangs on."""

    judgement: Judgement
    bound: str | None = None


_KEPT = Finding(Judgement.KEPT)


def judge(slo: SLO, candidate: Sample, baseline: Sample | None, *, min_calls: int) -> Finding:
    """Judge a candidate by its sample and, where there is one, the baseline's.

    Kept is what was seen in `min_calls` calls or more of either to lie within all bounds; bounds relative to a
    baseline that is `None` count for nothing. What is clearly violated is so with any number of calls, but for
    costs, whose means say little of few.
    """
    unclear: Finding | None = None
    for finding in _findings(slo, candidate, baseline, min_calls):
        if finding.judgement is Judgement.VIOLATED:
            return finding
        if finding.judgement is Judgement.UNCLEAR:
            unclear = unclear or finding
    return unclear or _KEPT


def _findings(slo: SLO, candidate: Sample, baseline: Sample | None, min_calls: int) -> Iterator[Finding]:
    if candidate.calls < min_calls:
        yield Finding(Judgement.UNCLEAR, "min_calls")
    z = NormalDist().inv_cdf(slo.confidence)
    yield from _absolute(slo, candidate, z, min_calls)
    if baseline is not None:
        yield from _relative(slo, candidate, baseline, z, min_calls)


def _absolute(slo: SLO, candidate: Sample, z: float, min_calls: int) -> Iterator[Finding]:
    if slo.error_ratio is not None:
        yield _errors(candidate).within(slo.error_ratio, "error_ratio", z)
    if slo.client_error_ratio is not None:
        yield _client_errors(candidate).within(slo.client_error_ratio, "client_error_ratio", z)
    if slo.p99_first_token is not None:
        yield _slow(candidate, slo.p99_first_token).within(SLOW_SHARE, "p99_first_token", z)
    if slo.cost is not None:
        if candidate.priced < min_calls:
            yield Finding(Judgement.UNCLEAR, "cost")
        else:
            yield _compare(candidate.mean_cost, slo.cost, candidate.cost_variance, "cost", z)


def _relative(slo: SLO, candidate: Sample, baseline: Sample, z: float, min_calls: int) -> Iterator[Finding]:
    if slo.is_relative and baseline.calls < min_calls:
        yield Finding(Judgement.UNCLEAR, "baseline")
    if slo.error_increase is not None:
        yield _errors(candidate).above(_errors(baseline), slo.error_increase, "error_increase", z)
    if slo.client_error_increase is not None:
        bound = "client_error_increase"
        yield _client_errors(candidate).above(_client_errors(baseline), slo.client_error_increase, bound, z)
    if slo.p99_first_token_ratio is not None:
        bound = "p99_first_token_ratio"
        usual = baseline.p99_first_token
        if usual is None or baseline.timed < min_calls:
            yield Finding(Judgement.UNCLEAR, bound)
        else:
            yield _slow(candidate, usual * slo.p99_first_token_ratio).within(SLOW_SHARE, bound, z)
    if slo.cost_ratio is not None:
        bound = "cost_ratio"
        if min(candidate.priced, baseline.priced) < min_calls:
            yield Finding(Judgement.UNCLEAR, bound)
        else:
            limit, variance = slo.cost_ratio * baseline.mean_cost, slo.cost_ratio**2 * baseline.cost_variance
            yield _compare(candidate.mean_cost, limit, candidate.cost_variance + variance, bound, z)


def _errors(sample: Sample) -> _Share:
    return _Share(sample.errors, sample.calls)


def _client_errors(sample: Sample) -> _Share:
    return _Share(sample.client_errors, sample.calls + sample.client_errors)


def _slow(sample: Sample, limit: float) -> _Share:
    """Give the share of calls with a first token later than `limit`: a p99 within it leaves one of 100 at most."""
    return _Share(sample.slower(limit), sample.timed)


def _compare(mean: float, limit: float, variance: float, bound: str, z: float) -> Finding:
    """Judge a mean with this variance."""
    more = mean - limit
    rounding = 1e-9 * mean
    if more <= rounding:
        return _KEPT
    return Finding(Judgement.VIOLATED if more > z * math.sqrt(variance) else Judgement.UNCLEAR, bound)


class _Share(NamedTuple):
    """So many of so many calls."""

    some: int
    all: int

    def within(self, limit: float, bound: str, z: float) -> Finding:
        """Judge whether it is at most `limit`; nothing is known of a share of no calls."""
        if not self.all:
            return Finding(Judgement.UNCLEAR, bound)
        if self.some <= limit * self.all:
            return _KEPT
        clear = self.some >= _FEWEST and self._wilson(-z) > limit
        return Finding(Judgement.VIOLATED if clear else Judgement.UNCLEAR, bound)

    def above(self, other: _Share, limit: float, bound: str, z: float) -> Finding:
        """Judge whether it is at most `limit` more than another."""
        if not self.all or not other.all:
            return Finding(Judgement.UNCLEAR, bound)
        own, usual = self.some / self.all, other.some / other.all
        if own - usual <= limit:
            return _KEPT
        uncertain = math.hypot(own - self._wilson(-z), other._wilson(z) - usual)
        clear = self.some >= _FEWEST and own - usual - uncertain > limit
        return Finding(Judgement.VIOLATED if clear else Judgement.UNCLEAR, bound)

    def _wilson(self, z: float) -> float:
        """Give the upper Wilson bound of the share, or the lower one for a negative `z`."""
        n, p = self.all, self.some / self.all
        centre = p + z * z / (2 * n)
        return (centre + z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))) / (1 + z * z / n)
