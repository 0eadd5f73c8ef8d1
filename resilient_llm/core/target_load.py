"""What is known of targets that could take the next call: how busy, how reliable, how quick to begin.

A few numbers for each target, which fade with time and not with calls, so that one left alone recovers. What
follows from them a balancer decides; whether a target may be asked at all must not enter here.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import exp, inf
from random import Random

__all__ = ["MIN_SUCCESS", "Pool", "TargetLoad"]

MIN_SUCCESS = 0.05
"""What a target that only fails keeps of its weight, so that it is found out when it does not any more."""

_LATENCY_DECAY = 10.0  # seconds in which a sample's say falls to 1/e; Finagle's default for peak EWMA
_COLD_AFTER = 3 * _LATENCY_DECAY
_FAILURE_DECAY = 15.0  # the same for successes and failures
_MEMORY = 10.0  # calls that the success ratio is taken over, at most: as an EWMA of 0.9 and 0.1
_PRIOR = 1.0  # successes that a target is credited with
_FORGOTTEN = 1e-3  # calls
_MIN_RAMP = 0.1
_MIN_LATENCY = 1e-3  # what is quicker is as quick as can be
_BEST_LATENCY_AGE = 0.1


class TargetLoad:
    """Keep what a router has learnt of one target, in constant memory.

    `price` is in US dollars per million tokens, 0 where it is not known; `slow_start` the seconds in which one that
    came back is given its full weight again, 0 for at once. Times are seconds on any one clock. Raises `ValueError`
    for a number out of range.

    A failed call counts as if it were still in flight, fading over 15 s, and its time counts only if it is worse
    than what is known already: else the target that fails fastest would be the least busy and the quickest of all.

    Sources: success ratio and latency as moving averages weighted by time (exp(-age / decay)), the peak that
    rises at once and decays from Finagle's peak EWMA, the ramp from Envoy's slow start.
    """

    __slots__ = (
        "_back_at",
        "_bad",
        "_failed",
        "_failed_tokens",
        "_good",
        "_judged_at",
        "_latency",
        "_peak",
        "_sampled_at",
        "_samples",
        "in_flight",
        "name",
        "outstanding",
        "price",
        "slow_start",
        "weight",
    )

    def __init__(
        self, name: str, *, weight: float = 1.0, price: float = 0.0, slow_start: float = 30.0
    ) -> None:
        if not 0 < weight < inf:
            raise ValueError(f"weight={weight!r}: allowed are finite numbers above 0")
        if not 0 <= price < inf:
            raise ValueError(f"price={price!r}: allowed are finite numbers from 0")
        if not 0 <= slow_start < inf:
            raise ValueError(f"slow_start={slow_start!r}: allowed are seconds from 0, finite")
        self.name = name
        self.weight = weight
        """Its share of the calls as against other targets'; a `Pool` has to be made anew when it changes."""
        self.price = price
        self.in_flight = 0
        self.outstanding = 0.0
        """Estimated tokens of the calls in flight."""
        self.slow_start = slow_start
        self._back_at = -inf
        self._forget()

    def _forget(self) -> None:
        self._judged_at = self._sampled_at = -inf
        self._good = self._bad = self._failed = self._failed_tokens = 0.0
        self._latency = self._samples = self._peak = 0.0

    def sent(self, now: float, tokens: float) -> None:  # noqa: ARG002 - every event has its time
        """Note that a call of about so many tokens goes to it."""
        self.in_flight += 1
        self.outstanding += tokens

    def finished(self, now: float, tokens: float, *, ok: bool | None, first_token: float | None) -> None:
        """Note the end of a call that was `sent` with as many tokens.

        `ok` is `None` for one that says nothing about the target, such as a cancelled one; `first_token` the
        seconds that it took to begin its answer, if it did.
        """
        if self.in_flight > 1:
            self.in_flight -= 1
            self.outstanding = max(0.0, self.outstanding - tokens)
        else:  # sums of floats go wrong in their last digits; nothing in flight is nothing outstanding
            self.in_flight, self.outstanding = 0, 0.0
        if ok is not None:
            self._judge(now, tokens, ok)
        if first_token is not None and (ok is not False or first_token > (self.latency(now) or 0.0)):
            self._sample(now, max(_MIN_LATENCY, first_token))

    def came_back(self, now: float) -> None:
        """Begin again, slowly: it could not be asked for a while, and what was known of it is out of date."""
        self._forget()
        if self.slow_start:
            self._back_at = now

    def _judge(self, now: float, tokens: float, ok: bool) -> None:  # noqa: FBT001 - once for each attempt
        kept = 1.0
        if now > self._judged_at:
            kept = exp((self._judged_at - now) / _FAILURE_DECAY)
            self._judged_at = now
        self._good *= kept
        if self._failed:  # else nothing is known against it
            self._bad *= kept
            self._failed *= kept
            self._failed_tokens *= kept
        if ok:
            self._good += 1.0
            if self._failed < _FORGOTTEN:
                self._bad = self._failed = self._failed_tokens = 0.0
        else:
            self._bad += 1.0
            self._failed += 1.0
            self._failed_tokens += tokens
        excess = (self._good + self._bad) / _MEMORY
        if excess > 1:
            self._good /= excess
            self._bad /= excess

    def _kept(self, now: float) -> float:
        """Give what is left of the calls that have been judged."""
        return exp(min(0.0, (self._judged_at - now) / _FAILURE_DECAY))

    def _sample(self, now: float, latency: float) -> None:
        kept = 1.0
        if now > self._sampled_at:
            kept = exp((self._sampled_at - now) / _LATENCY_DECAY)
            self._sampled_at = now
        samples = self._samples = self._samples * kept + 1.0
        mean = self._latency = self._latency + (latency - self._latency) / samples
        self._peak = max(latency, mean, mean + (self._peak - mean) * kept)

    def success_ratio(self, now: float) -> float:
        """Give the share of its latest calls that did not fail, from 0 to 1; towards 1 when it is left alone."""
        return self._ratio(self._kept(now)) if self._failed else 1.0

    def _ratio(self, kept: float) -> float:
        return 1.0 - self._bad * kept / ((self._good + self._bad) * kept + _PRIOR)

    def latency(self, now: float) -> float | None:
        """Give the mean time to first token, in seconds; `None` when none came for 30 s: it is cold."""
        return self._latency if now - self._sampled_at < _COLD_AFTER else None

    def peak_latency(self, now: float) -> float | None:
        """Give the time to first token as the latest bad ones make one fear it; `None` when it is cold.

        It rises at once to every sample that is higher, and falls towards the mean.
        """
        age = now - self._sampled_at
        if age >= _COLD_AFTER:
            return None
        mean = self._latency
        above = self._peak - mean
        return mean + above * exp(min(0.0, -age / _LATENCY_DECAY)) if above else mean

    def ramp(self, now: float) -> float:
        """Give the share of its weight that it has while it starts slowly: from 0.1, or 1."""
        age = now - self._back_at
        return max(_MIN_RAMP, age / self.slow_start) if age < self.slow_start else 1.0

    def reliability(self, now: float) -> float:
        """Give the share of its weight that it deserves: its success ratio squared, at least 0.05, times its ramp."""
        return self._reliability(now, self._kept(now) if self._failed else 0.0)

    def _reliability(self, now: float, kept: float) -> float:
        ratio = self._ratio(kept)
        return max(MIN_SUCCESS, ratio * ratio) * self.ramp(now)

    def effective_weight(self, now: float) -> float:
        """Give its weight times its `reliability`."""
        return self.weight * self.reliability(now)

    def busy(self, now: float) -> float:
        """Give the calls in flight, and failed ones as far as they are not forgotten."""
        return self.in_flight + self._failed * self._kept(now) if self._failed else self.in_flight

    # The two that follow are worked out for every call: without a failure or a ramp at once, else with one `exp`.

    def relative_load(self, now: float) -> float:
        """Give how busy it would be with the next call, over its `effective_weight`."""
        if not self._failed and now - self._back_at >= self.slow_start:
            return (self.in_flight + 1.0) / self.weight
        kept = self._kept(now)
        busy = self.in_flight + self._failed * kept
        return (busy + 1.0) / (self.weight * self._reliability(now, kept))

    def relative_tokens(self, now: float, tokens: float) -> float:
        """Give the tokens of the calls that `busy` counts and of the next one, over its `effective_weight`.

        Each counts as one more than was estimated: a call that nobody knows the tokens of is a call all the same.
        """
        outstanding = self.outstanding + self.in_flight + tokens + 1.0
        if not self._failed and now - self._back_at >= self.slow_start:
            return outstanding / self.weight
        kept = self._kept(now)
        outstanding += (self._failed_tokens + self._failed) * kept
        return outstanding / (self.weight * self._reliability(now, kept))

    def __repr__(self) -> str:
        return f"<TargetLoad {self.name}: {self.in_flight} in flight>"


class Pool:
    """Hold the targets that can take each other's place, in the order of preference.

    It does not change, so that what a balancer works out from it may be kept, in `cache` under the balancer. Raises
    `ValueError` when there are none.
    """

    __slots__ = ("_best", "_best_at", "_bounds", "cache", "loads", "total_weight")

    def __init__(self, loads: Sequence[TargetLoad]) -> None:
        if not loads:
            raise ValueError("a pool needs at least one target")
        self.loads = tuple(loads)
        self.cache: dict[object, object] = {}
        self._bounds = list(accumulate(load.weight for load in self.loads))
        self.total_weight = self._bounds[-1]
        self._best: float | None = None
        self._best_at = -inf

    def draw(self, random: Random) -> TargetLoad:
        """Give a target at random, each as often as its weight says. The pool must not be empty."""
        # A product that is rounded up to the total would be past the last bound.
        at = bisect_right(self._bounds, random.random() * self.total_weight, 0, len(self._bounds) - 1)
        return self.loads[at]

    def best_latency(self, now: float) -> float | None:
        """Give the lowest mean latency of all, in seconds, as of at most 0.1 s ago; `None` when all are cold.

        Those that start slowly do not count: what is in first is the quickest they have.
        """
        if not 0 <= now - self._best_at < _BEST_LATENCY_AGE:
            latencies = [load.latency(now) for load in self.loads if load.ramp(now) >= 1.0]
            self._best = min((latency for latency in latencies if latency is not None), default=None)
            self._best_at = now
        return self._best

    def __len__(self) -> int:
        return len(self.loads)

    def __iter__(self) -> Iterator[TargetLoad]:
        return iter(self.loads)
