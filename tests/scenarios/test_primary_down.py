"""A primary is down for a minute: who answers, how often it is asked meanwhile, and when its traffic is back.

One call every four seconds; the primary answers 503 from 60 s on and before 120 s. A break lasts 15 s, then 22.5 s,
then 30 s at most, so traffic is to be back at 150 s at the latest.
"""

from __future__ import annotations

from typing import Literal

import pytest

from resilient_llm import CircuitBreaker, Policy, Retry, Router
from resilient_llm.lab import Chat, Outage, Paced, Report, Traffic, Upstream, simulate
from resilient_llm.routing.balancers import Priority, WeightedLeastConnections
from tests.scenarios.support import answered_by, network, target, times

BOTH = pytest.mark.parametrize("backend", ["asyncio", "trio"])
Backend = Literal["asyncio", "trio"]

DOWN, UP, LONGEST_BREAK = 60.0, 120.0, 30.0
SECONDS = 0.5  # of an answer; an error takes a tenth of that


def run(router: Router, *, every: float = 4.0, seed: int = 0, backend: Backend = "asyncio") -> Report:
    upstreams = network(
        primary=Upstream(first_token=SECONDS, outages=[Outage(DOWN, UP)]), other=Upstream(first_token=SECONDS)
    )
    traffic = Traffic(arrivals=Paced(every), request=Chat(model="chat"))
    policies: list[Policy] = [Retry(), router]
    return simulate(policies, upstreams, traffic, duration=240, seed=seed, backend=backend)


def breaker(failures: int = 5) -> CircuitBreaker:
    return CircuitBreaker(consecutive_failures=failures)


def failures(report: Report) -> list[float]:
    """Give when the primary was asked in vain."""
    return [at for at in times(report, "primary") if DOWN <= at < UP]


@BOTH
def test_with_priority_every_request_to_the_primary_is_known(backend: Backend) -> None:
    router = Router([target("primary", breaker()), target("other")], balancer=Priority())
    report = run(router, backend=backend)
    opens = [60, 64, 68, 72, 76]
    probes = [92, 116]  # breaks of 15 and 22.5 s, then a call
    assert failures(report) == opens + probes
    back = [at for at in times(report, "primary") if at >= UP]
    assert back == [148 + 4 * n for n in range(23)], "after the third break, of 30 s; then all of it at once"
    assert back[0] <= UP + LONGEST_BREAK
    assert report.success_ratio == 1
    assert answered_by(report) == {"primary": 15 + 23, "other": 22}
    assert report.latency.max == pytest.approx(SECONDS + 0.05), "an error, then at once the other's answer"


@BOTH
def test_a_call_that_finds_the_circuit_open_takes_no_longer_than_usual(backend: Backend) -> None:
    router = Router([target("primary", breaker()), target("other")], balancer=Priority())
    report = run(router, backend=backend)
    slow = [call.started for call in report.calls if call.seconds > SECONDS + 1e-6]
    assert slow == pytest.approx(failures(report)), "those that asked the primary in vain, and no other"


@BOTH
def test_without_a_circuit_every_call_asks_the_primary_first(backend: Backend) -> None:
    router = Router([target("primary"), target("other")], balancer=Priority())
    report = run(router, backend=backend)
    assert failures(report) == [60 + 4 * n for n in range(15)]
    assert report.success_ratio == 1


@pytest.mark.parametrize("balancer", [Priority(), WeightedLeastConnections()], ids=lambda one: one.strategy)
def test_a_fallback_model_answers_while_the_circuit_is_open(balancer: Priority) -> None:
    router = Router(
        {"chat": target("primary", breaker()), "small": target("other")},
        fallbacks={"chat": "small"},
        balancer=balancer,
    )
    report = run(router)
    asked = failures(report)
    first, second = report.where(since=DOWN, until=68).calls
    assert [len(call.exchanges) for call in (first, second)] == [4, 3], (
        "the model is asked again before another"
    )
    assert asked[5:] == [80, 104], "five failures in two calls; probes after 15 s and after 22.5 s"
    assert next(at for at in times(report, "primary") if at >= UP) == 136
    assert report.success_ratio == 1
    assert report.outcomes == {"success": 60 - 19, "fallback": 19}
    while_open = report.where(since=68, until=136)
    assert {call.outcome for call in while_open.calls} == {"fallback"}
    assert while_open.latency.max == pytest.approx(SECONDS + 0.05), "no backoff before the other model"


@pytest.mark.parametrize("seed", range(8))
def test_with_weights_a_heavy_primary_is_left_and_comes_back(seed: int) -> None:
    # By weight alone who is asked is left to chance, all the more so for one that has failed.
    router = Router([target("primary", breaker(2), weight=10), target("other")])
    report = run(router, seed=seed)
    asked = failures(report)
    probes = asked[2:]
    assert len(probes) <= 4
    assert next(at for at in times(report, "primary") if at >= UP) <= UP + LONGEST_BREAK
    assert report.success_ratio == 1
    assert report.latency.max == pytest.approx(SECONDS + 0.05)
    before = report.where(until=DOWN).answered_by["primary.test"]
    after = report.where(since=180).answered_by["primary.test"]
    assert before >= 11, "of 15"
    assert after >= 9, "of 15, its slow start being over"


@pytest.mark.parametrize("failures_to_open", [2, 5])
def test_with_weights_an_equal_is_asked_less_the_more_it_fails(failures_to_open: int) -> None:
    """Whether its circuit is open or not: with a call every four seconds it may not fail often enough for that."""
    asked, back = [], []
    for seed in range(12):
        report = run(Router([target("primary", breaker(failures_to_open)), target("other")]), seed=seed)
        assert report.success_ratio == 1
        asked.append(len(failures(report)))
        back.append(next(at for at in times(report, "primary") if at >= UP) - UP)
    assert max(asked) <= 6, "of 15 calls; its share is a half"
    if failures_to_open == 2:
        assert max(back) <= LONGEST_BREAK, "a probe is sent as soon as the break is over"
    assert sum(later <= LONGEST_BREAK for later in back) >= 9, "of 12"
