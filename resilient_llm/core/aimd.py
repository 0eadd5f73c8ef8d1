"""How many calls may be in flight, found out from how attempts end.

A limit grows while attempts succeed and shrinks when the target says, or shows, that it has enough. Counting
permits is the pool's job and reading replies the providers'; waiting and clocks must not enter here.
"""

from __future__ import annotations

from math import log, sqrt
from typing import NamedTuple, Protocol

__all__ = ["AIMDLimit", "LimitAlgorithm", "Sent"]

_PROBE_FROM = 0.9  # of the last limit at which something was dropped; from there up to it ...
_PROBE_STEP = 0.1  # ... growth per round trip is no more than this
_PROBE_SUCCESSES = 250  # which a probe is made to take about, when probes find the same again and again
_KNEE_DECREASE = 0.8
_WINDOW_ROUNDS = 5
_MIN_WINDOW = 50
_MIN_STEP = 0.1  # of ln(in flight): below, two windows say nothing about each other
_CONFIDENCE = 1.5  # standard errors
_SHORTEST = 1e-6


class Sent:
    """What to remember of an attempt until it ends.

    `in_flight` counts the attempts out when it was sent, itself included; `generation` is the limit's then.
    """

    __slots__ = ("at", "generation", "in_flight")

    def __init__(self, at: float, in_flight: int, generation: int) -> None:
        self.at = at
        self.in_flight = in_flight
        self.generation = generation


class LimitAlgorithm(Protocol):
    """Decide how many attempts may be in flight at once, sample by sample."""

    @property
    def limit(self) -> int:
        """Give the limit as it is now, at least 1."""

    @property
    def generation(self) -> int:
        """Tell the limit as it is now from what it was: samples sent in an older generation are out of date."""

    def on_sample(self, now: float, sent: Sent, *, dropped: bool) -> int:
        """Take in an attempt that ended at `now` and return the limit.

        `dropped` says that the target had too much to do for it; everything else that is no success is no
        sample.
        """


class AIMDLimit:
    """Grow by one per round trip, shrink by a factor when attempts are dropped or the knee is passed.

    - A drop multiplies the limit by `decrease_ratio`, once per round trip: each decrease begins a generation,
      and attempts sent in an earlier one count for nothing, neither as drops nor as successes.
    - A success adds 1 / limit, so a round trip's worth of them adds one; only a tenth of that in the last tenth
      below the limit at which something was last dropped, so that most of the time is spent close to it. Small
      limits are soon through with that, so when the next drop comes at the same number in flight, the last tenth
      takes twice as many successes the next time, until it takes about 250.
    - An attempt sent with less than half the limit in flight does not make it grow: the limit was not in use.
    - With `min_gain_ratio` the limit also shrinks, by a fifth, when of a rise in concurrency less than that
      share came out as throughput. `None` turns this off; 0.25 finds the knee in `benchmarks/sweep.py`.

    Bounds are `minimum` and `maximum`. Raises `ValueError` for an option out of range.

    Sources: additive increase, multiplicative decrease as in Chiu & Jain (1989) and TCP (RFC 5681); slow
    probing near the last loss as in CUBIC (RFC 9438), with binary exponential back-off as in Ethernet (Metcalfe &
    Boggs, CACM 19(7), 1976); the guard by use and the 0.5 in it from Netflix
    concurrency-limits; the knee from Jain's delay-based congestion avoidance (CCR 19(5), 1989).
    """

    __slots__ = (
        "_ceiling",
        "_decrease_ratio",
        "_holding",
        "_knee",
        "_limit",
        "_max",
        "_min",
        "_patience",
        "generation",
    )

    def __init__(
        self,
        *,
        initial: int = 20,
        minimum: int = 1,
        maximum: int = 200,
        decrease_ratio: float = 0.7,
        min_gain_ratio: float | None = 0.25,
    ) -> None:
        if minimum < 1:
            raise ValueError(f"min={minimum!r}: allowed are counts from 1")
        if maximum < minimum:
            raise ValueError(f"max={maximum!r}: allowed are counts from min={minimum!r}")
        if not minimum <= initial <= maximum:
            raise ValueError(
                f"initial={initial!r}: allowed are counts from min={minimum!r} to max={maximum!r}"
            )
        if not 0 < decrease_ratio < 1:
            raise ValueError(f"decrease_ratio={decrease_ratio!r}: allowed are ratios between 0 and 1")
        if min_gain_ratio is not None and not 0 <= min_gain_ratio < 1:
            raise ValueError(
                f"min_gain_ratio={min_gain_ratio!r}: allowed are ratios from 0 to below 1, and None"
            )
        self._min = minimum
        self._max = maximum
        self._decrease_ratio = decrease_ratio
        self._knee = None if min_gain_ratio is None else _Knee(min_gain_ratio)
        self._limit = float(initial)
        self._ceiling = 0.0
        self._patience = 1  # how many times as long as usual a probe takes
        self.generation = 0
        """How many decreases there were."""
        self._holding = False  # after the knee was passed, until it is known what the decrease has brought

    @property
    def limit(self) -> int:
        """Give the limit as it is now."""
        return int(self._limit)

    def on_sample(self, now: float, sent: Sent, *, dropped: bool) -> int:
        """Take in an attempt that ended at `now` and return the limit; see `LimitAlgorithm`."""
        limit = self._limit
        if sent.generation != self.generation:
            return int(limit)
        if dropped:
            if int(limit) != int(self._ceiling):
                self._patience = 1
            elif limit * limit * self._patience < _PROBE_SUCCESSES:
                self._patience *= 2
            self._ceiling = limit
            self._decrease(self._decrease_ratio)
        elif 2 * sent.in_flight >= int(limit):
            if not self._holding:
                self._grow()
            if self._knee is not None:
                self._look_for_the_knee(self._knee, sent.in_flight, now - sent.at)
        return int(self._limit)

    def _grow(self) -> None:
        limit, probe_from = self._limit, _PROBE_FROM * self._ceiling
        if limit < probe_from:
            limit = min(limit + 1 / limit, probe_from)
        elif limit <= self._ceiling:
            limit += _PROBE_STEP / (limit * self._patience)
        else:
            limit += 1 / limit
        self._limit = min(float(self._max), limit)

    def _look_for_the_knee(self, knee: _Knee, in_flight: int, duration: float) -> None:
        passed = knee.on_success(in_flight, duration, self._limit)
        if passed:
            self._decrease(_KNEE_DECREASE)
            self._holding = True
        elif passed is not None:
            self._holding = False

    def _decrease(self, ratio: float) -> None:
        self._limit = max(float(self._min), self._limit * ratio)
        self.generation += 1
        if self._knee is not None:
            self._knee.restart()


class _Load(NamedTuple):
    """What a window of successes was like: means of logarithms, and the squared error of the second."""

    in_flight: float
    duration: float
    error: float


class _Knee:
    """Tell when more attempts in flight bring hardly more throughput.

    Throughput is the number in flight over the time each takes (Little's law). If one grows by a share g and
    the other by e * g, throughput grows by (1 - e) * g: before the knee e is near 0, past it 1. Two windows of
    successes at different loads measure e; what they have in common, such as how long replies are, cancels
    out, and a difference counts only when it is larger than its own scatter: the noisier the times, the larger
    the steps in load that are compared.
    """

    __slots__ = ("_count", "_durations", "_in_flight", "_reference", "_squares", "_threshold")

    def __init__(self, min_gain_ratio: float) -> None:
        self._threshold = 1 - min_gain_ratio
        self._reference: _Load | None = None
        self.restart()

    def restart(self) -> None:
        """Begin a new window; the one to compare it with stays."""
        self._count = 0
        self._in_flight = self._durations = self._squares = 0.0

    def on_success(self, in_flight: int, duration: float, limit: float) -> bool | None:
        """Take in a success; say at the end of each window whether the knee has been passed, else None."""
        y = log(max(duration, _SHORTEST))
        self._count += 1
        self._in_flight += in_flight
        self._durations += y
        self._squares += y * y
        count = self._count
        if count < max(_MIN_WINDOW, _WINDOW_ROUNDS * limit):
            return None
        mean = self._durations / count
        variance = max(0.0, self._squares / count - mean * mean)
        load = _Load(log(self._in_flight / count), mean, variance / (count - 1))
        self.restart()
        return self._compare(load)

    def _compare(self, load: _Load) -> bool:
        before = self._reference
        if before is None:
            self._reference = load
            return False
        step = load.in_flight - before.in_flight
        if abs(step) < _MIN_STEP:
            return False
        # How much longer the higher load took than it may have: positive past the knee.
        excess = load.duration - before.duration - self._threshold * step
        if step < 0:
            excess = -excess
        passed = excess > _CONFIDENCE * sqrt(load.error + before.error)
        conclusive = passed or -excess > _CONFIDENCE * sqrt(load.error + before.error)
        if conclusive or step < 0:
            self._reference = load
        return passed
