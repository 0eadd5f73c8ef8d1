"""One of three targets becomes slow by ten for a minute: what it keeps of the traffic, and what callers notice.

Four calls a second; `a` is slow from 60 s on and before 120 s. It answers as well as ever, so no circuit opens.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import pytest

from resilient_llm import Retry, Router
from resilient_llm.lab import Chat, LogNormal, Phase, Poisson, Report, Traffic, Uniform, Upstream, simulate
from resilient_llm.routing.balancers import (
    Balancer,
    Cheapest,
    LeastOutstandingTokens,
    PeakEWMA,
    PrefixAffinity,
    Priority,
    WeightedLeastConnections,
    WeightedRandom,
)
from tests.scenarios.support import BALANCERS, network, target


def upstream(*phases: Phase) -> Upstream:
    return Upstream(
        first_token=LogNormal(0.4, 0.3), per_token=0.002, output_tokens=Uniform(50, 150), phases=phases
    )


@cache
def run(balancer: type[Balancer], *, healthy_only: bool = False) -> Report:
    upstreams = {"b": upstream(), "c": upstream()}
    if not healthy_only:
        upstreams = {"a": upstream(Phase(60, 120, latency_factor=10)), **upstreams}
    router = Router([target(name) for name in upstreams], balancer=balancer())
    traffic = Traffic(arrivals=Poisson(4.0), request=Chat(system_tokens=20))
    return simulate([Retry(), router], network(**upstreams), traffic, duration=180)


def kept(report: Report, since: float, until: float) -> float:
    """Give the share of the requests that came to the slow one."""
    counts = {name: upstream.between(since, until) for name, upstream in report.upstreams.items()}
    return counts["a.test"] / sum(counts.values())


class Expected(NamedTuple):
    """The share that the slow one keeps, at most and at least, after ten seconds."""

    most: float
    least: float = 0.0


EXPECTED = {
    Cheapest: Expected(0.12),  # by calls in flight alone: what takes ten times as long gets a tenth
    LeastOutstandingTokens: Expected(0.12),
    PeakEWMA: Expected(0.02),
    PrefixAffinity: Expected(0.15),
    Priority: Expected(1.0, 1.0),  # goes by order and nothing else
    WeightedLeastConnections: Expected(0.04, 0.001),
    WeightedRandom: Expected(0.4, 0.26),  # does not look at latency
}


@pytest.mark.parametrize("balancer", BALANCERS)
def test_what_the_slow_one_keeps(balancer: type[Balancer]) -> None:
    report = run(balancer)
    assert report.success_ratio == 1
    expected = EXPECTED[balancer]
    assert expected.least <= kept(report, 70, 120) <= expected.most


@pytest.mark.parametrize("balancer", [one for one in BALANCERS if one is not Priority])
def test_it_has_its_share_before_and_soon_after(balancer: type[Balancer]) -> None:
    report = run(balancer)
    assert kept(report, 0, 60) == pytest.approx(1 / 3, abs=0.08)
    assert kept(report, 150, 180) == pytest.approx(1 / 3, abs=0.08)


@pytest.mark.parametrize("balancer", [PeakEWMA, WeightedLeastConnections])
def test_callers_of_balancers_that_go_by_latency_hardly_notice(balancer: type[Balancer]) -> None:
    with_it = run(balancer).where(since=70, until=120).latency
    without = run(PeakEWMA, healthy_only=True).where(since=70, until=120).latency
    assert with_it.p50 == pytest.approx(without.p50, rel=0.05)
    assert with_it.p95 == pytest.approx(without.p95, rel=0.05)


def test_with_peak_ewma_the_p99_is_that_of_a_router_without_the_slow_one() -> None:
    with_it = run(PeakEWMA).where(since=70, until=120).latency
    without = run(PeakEWMA, healthy_only=True).where(since=70, until=120).latency
    assert with_it.p99 == pytest.approx(without.p99, rel=0.05)


@pytest.mark.parametrize("balancer", [Cheapest, LeastOutstandingTokens, PrefixAffinity, WeightedRandom])
def test_callers_of_the_others_notice_it_in_the_p95(balancer: type[Balancer]) -> None:
    with_it = run(balancer).where(since=70, until=120).latency
    without = run(PeakEWMA, healthy_only=True).where(since=70, until=120).latency
    assert with_it.p50 <= 1.2 * without.p50
    assert with_it.p95 >= 4 * without.p95
