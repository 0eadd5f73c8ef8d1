"""A candidate in place of a model, through the router: it steps up by itself, and back when it does worse."""

from __future__ import annotations

import pytest

from resilient_llm import Canary, CanaryChange, CircuitBreaker, Retry, Router
from resilient_llm.core.canary import RolloutState
from resilient_llm.core.slo import SLO
from resilient_llm.lab import Chat, LogNormal, Outage, Phase, Poisson, Report, Traffic, Upstream, simulate
from tests.scenarios.support import between, network, target

STEPS = (0.05, 0.25, 0.5, 1.0)
FIRST_TOKEN = LogNormal(0.4, 0.2)


def run(
    candidate: Upstream, *, slo: SLO | None = None, duration: float = 300
) -> tuple[Report, list[CanaryChange]]:
    """Call three times a second; a step lasts a minute at least, and ten calls of the candidate's."""
    changes: list[CanaryChange] = []
    canary = Canary(
        model="old",
        candidate="new",
        steps=STEPS,
        slo=slo or SLO(error_ratio=0.05, p99_first_token=2.0),
        min_calls=10,
        step_duration=60,
        cool_off=600,
        on_change=changes.append,
    )
    router = Router({"old": target("old"), "new": target("new", CircuitBreaker())}, fallbacks={"new": "old"})
    traffic = Traffic(arrivals=Poisson(3.0), request=Chat(model="old", stream_ratio=1.0))
    upstreams = network(old=Upstream(first_token=FIRST_TOKEN), new=candidate)
    report = simulate([canary, Retry(), router], upstreams, traffic, duration=duration)
    return report, changes


def share(report: Report, since: float, until: float) -> float:
    """Give the share of the calls that the candidate was asked for."""
    new, old = (between(report, name, since, until, every=until - since)[0] for name in ("new", "old"))
    return new / (new + old)


def test_it_steps_up_by_itself_while_the_slo_is_kept() -> None:
    report, changes = run(Upstream(first_token=FIRST_TOKEN), duration=400)
    assert [change.to_share for change in changes] == [0.25, 0.5, 1.0, 1.0]
    assert [change.to_state for change in changes[-2:]] == [RolloutState.RUNNING, RolloutState.PROMOTED]
    assert {change.reason for change in changes} == {"passed"}
    assert report.success_ratio == 1
    assert share(report, 0, 60) == pytest.approx(0.05, abs=0.04)
    assert share(report, 70, 120) == pytest.approx(0.25, abs=0.1)
    assert share(report, 330, 390) == 1


def test_it_rolls_back_when_the_candidate_fails_and_no_caller_notices() -> None:
    """From 160 s on, in the second step, the candidate answers 500: the old model answers in its place."""
    report, changes = run(Upstream(first_token=FIRST_TOKEN, outages=[Outage(160, 1e6, "500")]))
    assert [(change.to_share, change.reason) for change in changes] == [
        (0.25, "passed"),
        (0.0, "error_ratio"),
    ]
    assert changes[-1].to_state is RolloutState.ROLLED_BACK
    assert changes[-1].seen.errors >= 3
    assert report.success_ratio == 1
    assert sum(between(report, "new", 160, 180, every=20)) <= 25, (
        "of sixty calls a quarter, up to three attempts each"
    )
    assert share(report, 180, 300) == 0


def test_it_rolls_back_when_the_candidate_is_slow() -> None:
    report, changes = run(Upstream(first_token=FIRST_TOKEN, phases=[Phase(160, 1e6, latency_factor=10)]))
    assert [(change.to_share, change.reason) for change in changes] == [
        (0.25, "passed"),
        (0.0, "p99_first_token"),
    ]
    assert report.success_ratio == 1
    assert share(report, 200, 300) == 0


def test_a_candidate_that_is_worse_than_the_model_is_told_by_comparison() -> None:
    """Its first token takes twice as long as the old model's, which would be well within any absolute bound."""
    slo = SLO(error_ratio=None, p99_first_token_ratio=1.3)
    report, changes = run(Upstream(first_token=LogNormal(0.8, 0.2)), slo=slo, duration=200)
    assert [change.reason for change in changes] == ["p99_first_token_ratio"]
    assert changes[-1].to_state is RolloutState.ROLLED_BACK
    assert share(report, 150, 200) == 0
