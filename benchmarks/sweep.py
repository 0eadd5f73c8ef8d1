"""Whether `ConcurrencyLimit` finds the knee of an upstream by itself, and follows when it moves.

In virtual time, against a model of an upstream that was measured in the field at 1, 10, 30, 60 and 100 calls in
flight. Prints that sweep as the model reproduces it, then fixed limits, then the adaptive limit from several starting
points, then with capacity halved and doubled, then what other ways to adapt would have done. The last line is a JSON
object: requests per minute are successful replies, `p95_s` is of these, from slot to end; `throttled_ratio` is 429s by
all attempts. Figures of the adaptive limit are medians over its runs, with the worst beside them.
"""

import argparse
import contextlib
import functools
import json
import math
import random
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import anyio

from resilient_llm import Bulkhead, ConcurrencyLimit, Pipeline
from resilient_llm.core.aimd import AIMDLimit, LimitAlgorithm, Sent
from resilient_llm.testing import run_virtual

FIELD = {  # in flight: requests per minute, p95 in seconds, success ratio where known
    1: (312, 1.3, None),
    10: (1840, 1.4, None),
    30: (3950, 1.6, 0.994),
    60: (4210, 2.8, None),
    100: (4080, 4.9, 0.912),
}
FIXED = (20, 24, 28, 33, 36, 40, 50, 80)
STARTS = (1, 20, 100, 200)
CALLERS = 250
SETTLE = 30.0
KNEE = 33.0


class Sample(NamedTuple):
    """One attempt that has ended: when, how long it took, and the status it ended with."""

    at: float
    seconds: float
    status: int


class UpstreamError(Exception):
    """An attempt failed."""

    def __init__(self, status_code: int) -> None:
        super().__init__(status_code)
        self.status_code = status_code


class Upstream:
    """An upstream with a knee, calibrated to the field's sweep.

    With n attempts in it and its knee at k:

    - The first token takes (0.0425 + 0.333 sqrt(min(1, n/k))) s, times a lognormal factor of sigma 0.3. For 93 of 100
      replies that is all; the rest take about 1.33 s more. That is the only mix that has both the field's 312 requests
      a minute at one in flight (0.19 s each, by Little's law) and its p95 of 1.3 s.
    - Beyond the knee n attempts share what serves k (processor sharing): everything takes n/k times as long.
    - 0.6 % fail with a 500 at any load. Of those sent beyond the knee a share of 0.0404 (n/k - 1) is answered 429
      within 50 ms (8.2 % at 100 in flight), unless it is `silent`: then it only gets slower.
    """

    def __init__(self, rng: random.Random, *, knee: float = KNEE, silent: bool = False) -> None:
        self.rng = rng
        self.knee = knee
        self.silent = silent
        self.in_flight = 0
        self.samples: list[Sample] = []

    async def answer(self) -> None:
        """Answer one attempt."""
        began = anyio.current_time()
        self.in_flight += 1
        status = 200
        try:
            load = self.in_flight / self.knee
            if not self.silent and self.rng.random() < 0.0404 * (load - 1):
                status = 429
                await anyio.sleep(0.05)
                raise UpstreamError(status)
            first = 0.0425 + 0.333 * math.sqrt(min(1.0, load))
            await anyio.sleep(first * self.rng.lognormvariate(-0.045, 0.3) * max(1.0, load))
            if self.rng.random() < 0.006:
                status = 500
                raise UpstreamError(status)
            if self.rng.random() < 0.07:
                slowdown = max(1.0, self.in_flight / self.knee)
                await anyio.sleep(self.rng.lognormvariate(math.log(1.33), 0.12) * slowdown)
        finally:
            self.in_flight -= 1
            now = anyio.current_time()
            self.samples.append(Sample(now, now - began, status))


class Figures(NamedTuple):
    """What a stretch of time was like."""

    rpm: float
    p95: float
    success: float
    throttled: float

    def __str__(self) -> str:
        return f"{self.rpm:8.0f} rpm {self.p95:7.2f} s {self.success:9.1%} {self.throttled:9.2%}"


HEADING = f"{'':12} {'':4} p95 {'':5}success {'':5} 429"


def figures(samples: Iterable[Sample], since: float, until: float) -> Figures:
    """Sum up what ended between two times."""
    within = [sample for sample in samples if since <= sample.at < until]
    good = sorted(sample.seconds for sample in within if sample.status == 200)
    return Figures(
        rpm=len(good) / (until - since) * 60,
        p95=good[int(0.95 * len(good))],
        success=len(good) / len(within),
        throttled=sum(sample.status == 429 for sample in within) / len(within),
    )


class Run(NamedTuple):
    """What one run left behind: its attempts, and the limit every half second."""

    samples: list[Sample]
    limits: list[tuple[float, int]]

    def figures(self, since: float, until: float) -> Figures:
        """Sum up what ended between two times."""
        return figures(self.samples, since, until)

    def limit(self, since: float, until: float) -> str:
        """Give the limit's mean and range between two times."""
        limits = [limit for at, limit in self.limits if since <= at < until]
        return f"{statistics.mean(limits):4.0f} ({min(limits)}-{max(limits)})"

    def rpm_of_each(self, seconds: float, since: float, until: float) -> Iterator[tuple[float, float]]:
        """Give when each stretch of so many seconds began, and what it brought; they overlap by half."""
        for index in range(int((until - since) / seconds * 2) - 1):
            at = since + index * seconds / 2
            yield at, self.figures(at, at + seconds).rpm

    def reached(self, rpm: float, until: float) -> float:
        """Give the beginning of the first ten seconds that brought 80 % of `rpm`."""
        return next((at for at, got in self.rpm_of_each(10, 0, until) if got >= 0.8 * rpm), math.inf)

    def lowest(self, since: float, until: float) -> float:
        """Give what the poorest ten seconds brought."""
        return min(got for _, got in self.rpm_of_each(10, since, until))


async def load(
    policy: Bulkhead | ConcurrencyLimit,
    upstream: Upstream,
    until: float,
    knees: Sequence[tuple[float, float]],
) -> Run:
    """Keep `CALLERS` callers calling; at each of `knees`' times the capacity changes."""
    pipeline = Pipeline([policy])
    run = Run(upstream.samples, [])

    async def caller() -> None:
        while True:
            with contextlib.suppress(UpstreamError):
                await pipeline.run(upstream.answer)

    with anyio.move_on_at(until):
        async with anyio.create_task_group() as group:
            for _ in range(CALLERS):
                group.start_soon(caller)
            changes = list(knees)
            while True:
                now = anyio.current_time()
                while changes and changes[0][0] <= now:
                    upstream.knee = changes.pop(0)[1]
                if isinstance(policy, ConcurrencyLimit):
                    run.limits.append((now, policy.limit(None)))
                await anyio.sleep(0.5)
    return run


def fixed(limit: int, seed: int, seconds: float, *, knee: float = KNEE, silent: bool = False) -> Figures:
    """Run with a limit that stays."""
    policy = Bulkhead(max_concurrent=limit, max_queued=CALLERS, max_wait=math.inf, key=lambda _call: None)
    upstream = Upstream(random.Random(seed), knee=knee, silent=silent)
    return run_virtual(load, policy, upstream, seconds, ()).figures(5.0, seconds)


def adaptive(
    seed: int,
    seconds: float,
    *,
    initial: int = 20,
    knees: Sequence[tuple[float, float]] = (),
    silent: bool = False,
    algorithm: Callable[[], LimitAlgorithm] | None = None,
) -> Run:
    """Run with a limit that adapts."""
    policy = ConcurrencyLimit(
        initial=initial,
        max_queued=CALLERS,
        max_wait=math.inf,
        key=lambda _call: None,
        algorithm=algorithm,
    )
    upstream = Upstream(random.Random(seed), silent=silent)
    return run_virtual(load, policy, upstream, seconds, knees)


class PerSuccess:
    """Grow by one on every success, as batch tools often do, instead of once per round trip."""

    def __init__(self) -> None:
        self._limit = 20.0
        self.generation = 0

    @property
    def limit(self) -> int:
        """Give the limit as it is now."""
        return int(self._limit)

    def on_sample(self, now: float, sent: Sent, *, dropped: bool) -> int:  # noqa: ARG002
        """Take in an attempt that ended."""
        if sent.generation == self.generation:
            if dropped:
                self._limit = max(1.0, self._limit * 0.7)
                self.generation += 1
            elif 2 * sent.in_flight >= self.limit:
                self._limit = min(200.0, self._limit + 1)
        return self.limit


ALGORITHMS: dict[str, Callable[[], LimitAlgorithm] | None] = {
    "+1 per success, 429s only": PerSuccess,
    "+1 per round trip, 429s only": functools.partial(AIMDLimit, min_gain_ratio=None),
    "and the knee (the default)": None,
}


class Plan(NamedTuple):
    """How much to measure: which seeds, and the seconds of each run once it has settled."""

    seeds: Sequence[int]
    steady: float


def show_field(plan: Plan) -> None:
    """Print the field's sweep beside the model's."""
    print(f"The field's sweep, and the model's{HEADING[8:]}")
    for limit, (rpm, p95, success) in FIELD.items():
        got = fixed(limit, 1, plan.steady if limit > 1 else 10 * plan.steady)
        known = "" if success is None else f"{success:.1%}"
        print(f"  {limit:4} in flight  {rpm:5} rpm {p95:.1f} s {known:>6}  {got}")


def sweep_fixed(plan: Plan) -> tuple[int, Figures]:
    """Find the fixed limit with the best throughput."""
    print(f"\nFixed limits          {HEADING}")
    found: dict[int, Figures] = {}
    for limit in FIXED:
        runs = [fixed(limit, seed, plan.steady) for seed in plan.seeds]
        found[limit] = Figures(*(statistics.median(values) for values in zip(*runs, strict=True)))
        print(f"  {limit:4}                {found[limit]}")
    best = max(found, key=lambda limit: found[limit].rpm)
    return best, found[best]


def sweep_adaptive(plan: Plan, best: Figures) -> dict[str, float]:
    """Let the limit settle from several starting points."""
    print(f"\nAdaptive, after {SETTLE:.0f} s  {HEADING}       limit  80 % after  lowest 10 s")
    until = SETTLE + plan.steady
    settled, reached, lowest = [], [], []
    for initial in STARTS:
        for seed in plan.seeds:
            run = adaptive(seed * 100 + initial, until, initial=initial)
            settled.append(run.figures(SETTLE, until))
            reached.append(run.reached(best.rpm, until))
            lowest.append(run.lowest(SETTLE, until) / best.rpm)
            limits = run.limit(SETTLE, until)
            print(
                f"  from {initial:4}           {settled[-1]}  {limits:>12} {reached[-1]:8.0f} s {lowest[-1]:10.0%}"
            )
    return {
        "adaptive_rpm": statistics.median(got.rpm for got in settled),
        "adaptive_p95_s": statistics.median(got.p95 for got in settled),
        "throttled_ratio": statistics.median(got.throttled for got in settled),
        "adaptive_rpm_worst": min(got.rpm for got in settled),
        "adaptive_p95_s_worst": max(got.p95 for got in settled),
        "throttled_ratio_worst": max(got.throttled for got in settled),
        "reached_s_worst": max(reached),
        "lowest_10_s_ratio_worst": min(lowest),
    }


def move_capacity(plan: Plan, best_limit: int) -> dict[str, float]:
    """Halve the capacity, restore and double it; compare with the best limit for each."""
    print(f"\nCapacity moves        {HEADING}       limit  of best fixed")
    phases = {"whole": 1.0, "halved": 0.5, "restored": 1.0, "doubled": 2.0}
    length = SETTLE + 30.0
    best = {
        factor: max(
            fixed(round(best_limit * factor * part), 1, plan.steady, knee=KNEE * factor).rpm
            for part in (0.8, 1.0, 1.2)
        )
        for factor in set(phases.values())
    }
    ratios: dict[str, list[float]] = {name: [] for name in phases}
    throttled: list[float] = []
    for seed in plan.seeds:
        knees = [(index * length, factor * KNEE) for index, factor in enumerate(phases.values())]
        run = adaptive(seed, len(phases) * length, knees=knees)
        for index, (name, factor) in enumerate(phases.items()):
            moved, until = index * length, (index + 1) * length
            got = run.figures(moved + SETTLE, until)
            ratios[name].append(got.rpm / best[factor])
            throttled.append(run.figures(moved, until).throttled)
            print(
                f"  {name:8}            {got}  {run.limit(moved + SETTLE, until):>12} {ratios[name][-1]:14.0%}"
            )
    worst = {f"{name}_rpm_ratio_worst": min(values) for name, values in ratios.items()}
    return {**worst, "moving_throttled_ratio_worst": max(throttled)}


def compare_algorithms(plan: Plan) -> dict[str, float]:
    """Set the default beside simpler ways to adapt."""
    print(f"\nOther ways to adapt             {HEADING}       limit")
    until = SETTLE + plan.steady
    result: dict[str, float] = {}
    for silent in (False, True):
        print("  an upstream that only gets slower" if silent else "  this upstream")
        for name, algorithm in ALGORITHMS.items():
            run = adaptive(1, until, silent=silent, algorithm=algorithm)
            got = run.figures(SETTLE, until)
            print(f"    {name:28}{got}  {run.limit(SETTLE, until):>14}")
            if silent and algorithm is None:
                result = {"silent_rpm": got.rpm, "silent_p95_s": got.p95}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true", help="8 seeds and longer runs")
    plan = Plan(range(1, 9), 150.0) if parser.parse_args().full else Plan((1,), 90.0)
    show_field(plan)
    best_limit, best = sweep_fixed(plan)
    result = {
        "best_fixed_rpm": best.rpm,
        "best_fixed_limit": best_limit,
        "best_fixed_p95_s": best.p95,
        **sweep_adaptive(plan, best),
        **move_capacity(plan, best_limit),
        **compare_algorithms(plan),
    }
    print(json.dumps({name: round(value, 4) for name, value in result.items()}))


if __name__ == "__main__":
    main()
