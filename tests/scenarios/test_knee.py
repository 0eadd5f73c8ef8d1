"""The concurrency sweep of mission D behind a router: two targets with knees of their own, found by nobody telling.

An upstream like the one that was measured in the field: full speed up to its knee, beyond it processor sharing and ever
more 429s. `large` can take 33 at a time and `small` 11; a reply takes 1.5 s.
"""

from __future__ import annotations

from functools import cache

from resilient_llm import Bulkhead, ConcurrencyLimit, Policy, Retry, Router
from resilient_llm.lab import ClosedLoop, LogNormal, Report, Sharing, Upstream, simulate
from tests.scenarios.support import network, target

KNEES = {"large": 33, "small": 11}
MOST = sum(KNEES.values()) / 1.5  # replies a second
SETTLE, END = 30.0, 60.0


def upstream(knee: int) -> Upstream:
    return Upstream(
        total=LogNormal.of_mean(1.5, 0.3),
        first_token=0.2,
        capacity=Sharing(knee, refusal_ratio=lambda load: min(1.0, max(0.0, 0.0404 * (load - 1)))),
    )


@cache
def run(fixed: int | None, workers: int = 120) -> Report:
    """Let many callers call through a limit for each target: a fixed one, or one that adapts."""

    def limits() -> list[Policy]:
        if fixed is None:
            return [ConcurrencyLimit(max_queued=500, max_wait=120)]
        return [Bulkhead(max_concurrent=fixed, max_queued=500, max_wait=120, key="target")]

    upstreams = network(**{name: upstream(knee) for name, knee in KNEES.items()})
    targets = [target(name, *limits(), weight=knee) for name, knee in KNEES.items()]
    return simulate([Retry(), Router(targets)], upstreams, ClosedLoop(workers), duration=END)


def answers(report: Report) -> float:
    """Give the answers a second, once everything has settled."""
    return sum(SETTLE <= call.ended < END for call in report.calls if call.ok) / (END - SETTLE)


def in_flight(report: Report, name: str) -> float:
    """Give how many requests were at an upstream on average, by Little's law."""
    sent = [one for one in report.upstreams[f"{name}.test"].exchanges if one.ended is not None]
    spent = sum(
        min(one.ended or 0.0, END) - max(one.arrived, SETTLE)
        for one in sent
        if one.arrived < END and (one.ended or 0.0) > SETTLE
    )
    return spent / (END - SETTLE)


def throttled_ratio(report: Report) -> float:
    sent = [
        one for upstream in report.upstreams.values() for one in upstream.exchanges if one.arrived >= SETTLE
    ]
    return sum(one.status == 429 for one in sent) / len(sent)


def slowest(report: Report) -> float:
    """Give the p95 of what requests took at the upstreams."""
    times = sorted(
        (one.ended or 0.0) - one.arrived
        for upstream in report.upstreams.values()
        for one in upstream.exchanges
        if one.answered and one.arrived >= SETTLE
    )
    return times[int(0.95 * len(times))]


def test_a_fixed_limit_is_wrong_for_one_of_the_targets() -> None:
    few, many = run(11), run(33)
    assert answers(few) < 0.6 * MOST, "right for the small one; the large one idles"
    assert in_flight(many, "small") > 1.7 * KNEES["small"], (
        "right for the large one; the small one is swamped"
    )
    assert slowest(many) > 1.4 * slowest(few)


def test_each_limit_finds_the_knee_of_its_target() -> None:
    report = run(None)
    assert report.success_ratio == 1
    assert answers(report) > 0.85 * MOST
    for name, knee in KNEES.items():
        assert 0.7 * knee <= in_flight(report, name) <= 1.35 * knee
    assert throttled_ratio(report) < 0.02
    assert slowest(report) < 1.6 * slowest(run(11))
