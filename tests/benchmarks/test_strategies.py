"""Failover routing beats what was published for it, at the base failure ratio it was published for."""

import pytest

from benchmarks.strategies import PUBLISHED, measure


def test_failover_routing_beats_the_best_row() -> None:
    nothing, failover = measure("none"), measure("failover routing")
    published = PUBLISHED["failover routing"]
    assert nothing.success_ratio == pytest.approx(PUBLISHED["none"].success, abs=0.005)
    assert nothing.latency.mean * 1000 == pytest.approx(PUBLISHED["none"].mean_ms, rel=0.02)
    assert failover.success_ratio >= 0.999
    assert failover.latency.mean * 1000 < published.mean_ms
    assert failover.extra_cost_ratio(nothing) < published.extra_cost
