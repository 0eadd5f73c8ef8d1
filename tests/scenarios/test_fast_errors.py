"""A target that answers every request with a 500 in ten milliseconds attracts no traffic by being quick."""

from __future__ import annotations

import pytest

from resilient_llm import CircuitBreaker, Policy, Retry, Router
from resilient_llm.lab import Outage, Poisson, Report, Upstream, simulate
from resilient_llm.routing.balancers import (
    Balancer,
    LeastOutstandingTokens,
    PeakEWMA,
    PrefixAffinity,
    Priority,
    WeightedLeastConnections,
    WeightedRandom,
)
from tests.scenarios.support import BALANCERS, between, network, requests, target

ADAPTIVE = [one for one in BALANCERS if one is not Priority]


def run(
    balancer: type[Balancer], *policies: Policy, rate: float, calls: int = 200, until: float = 1e9
) -> Report:
    upstreams = network(
        bad=Upstream(first_token=0.5, outages=[Outage(0, until, "500")], failure_latency=0.01),
        b=Upstream(first_token=0.5),
        c=Upstream(first_token=0.5),
    )
    targets = [target("bad", *policies), target("b"), target("c")]
    return simulate([Retry(), Router(targets, balancer=balancer())], upstreams, Poisson(rate), calls=calls)


def attracted(report: Report) -> float:
    """Give the share of the calls for which it was asked."""
    return requests(report)["bad"] / len(report.calls)


@pytest.mark.parametrize(("rate", "most"), [(0.25, 0.25), (4.0, 0.06)])
@pytest.mark.parametrize("balancer", ADAPTIVE)
def test_without_a_circuit_it_gets_less_the_more_is_known(
    balancer: type[Balancer], rate: float, most: float
) -> None:
    report = run(balancer, rate=rate)
    assert 0 < attracted(report) <= most
    assert report.success_ratio == 1
    assert report.latency.max == pytest.approx(0.51), "never twice for one call"


@pytest.mark.parametrize("balancer", BALANCERS)
def test_with_a_circuit_it_gets_probes(balancer: type[Balancer]) -> None:
    report = run(balancer, CircuitBreaker(), rate=2.0)
    breaks = report.ended / 22.5
    assert requests(report)["bad"] <= 5 + breaks + 3, "five that open it, and a probe after each break"
    assert report.success_ratio == 1


def test_priority_needs_the_circuit() -> None:
    assert attracted(run(Priority, rate=2.0)) == 1
    assert attracted(run(Priority, CircuitBreaker(), rate=2.0)) <= 0.06


@pytest.mark.parametrize(
    "balancer", [LeastOutstandingTokens, PeakEWMA, PrefixAffinity, WeightedLeastConnections, WeightedRandom]
)
def test_it_is_found_out_when_it_is_well_again(balancer: type[Balancer]) -> None:
    report = run(balancer, rate=2.0, calls=300, until=30)
    minute_later = between(report, "bad", 90, 145, every=55)[0]
    assert minute_later / 110 == pytest.approx(1 / 3, abs=0.12), "of the 110 calls of 55 s"
