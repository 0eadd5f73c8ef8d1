"""The comparison of the balancers runs, and they differ in what they are meant to differ in."""

from __future__ import annotations

from benchmarks.balancers import BALANCERS, measure
from resilient_llm.routing.balancers import (
    Cheapest,
    LeastOutstandingTokens,
    PeakEWMA,
    PrefixAffinity,
    Priority,
    WeightedLeastConnections,
    WeightedRandom,
)


def test_each_is_best_at_what_it_is_for() -> None:
    figures = {balancer: measure(balancer(), seconds=150) for balancer in BALANCERS}
    assert all(one.success_ratio >= 0.99 for one in figures.values())
    assert min(figures, key=lambda one: figures[one].usd_per_1000) is Cheapest
    assert max(figures, key=lambda one: figures[one].shares["quick"]) is Priority
    assert max(figures, key=lambda one: figures[one].stay_ratio) is PrefixAffinity
    by_latency = max(figures[one].p99 for one in (PeakEWMA, WeightedLeastConnections))
    assert by_latency < 0.6 * min(figures[one].p99 for one in (LeastOutstandingTokens, WeightedRandom))
