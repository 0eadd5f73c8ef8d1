"""A batch over several models and targets, each with requests and tokens per minute and a knee of its own (mission B).

Targets keep to the limits that are declared with them, and find their concurrency by themselves; a callers' pool of
fixed size is the backpressure. The provider's buckets hold ten seconds' worth, so that it is rates that are tested.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import pytest

from resilient_llm import CircuitBreaker, ConcurrencyLimit, Policy, RateLimit, Retry, Router, Target
from resilient_llm.lab import (
    Chat,
    ClosedLoop,
    LogNormal,
    Network,
    Outage,
    Report,
    Sharing,
    Traffic,
    Uniform,
    Upstream,
    simulate,
)
from resilient_llm.testing import RateLimits
from tests.scenarios.support import network, target

WINDOW = 10.0
SECONDS = 40.0


class Limits(NamedTuple):
    """What a provider grants: requests and tokens per minute, and so many at once at full speed."""

    rpm: float
    tpm: float
    knee: float


LIMITS = {
    "eu": Limits(500, 300_000, 40),
    "us": Limits(300, 200_000, 25),
    "strong": Limits(300, 200_000, 25),
}


def provider(limits: Limits, *outages: Outage) -> Upstream:
    return Upstream(
        first_token=LogNormal(1.0, 0.3),
        per_token=0.01,
        output_tokens=Uniform(50, 150),
        capacity=Sharing(limits.knee, refusal_ratio=lambda load: min(0.5, max(0.0, 0.1 * (load - 1)))),
        rate_limits=RateLimits(requests_per_minute=limits.rpm, tokens_per_minute=limits.tpm, window=WINDOW),
        outages=outages,
    )


def limited(name: str) -> Target:
    limits = LIMITS[name]
    policies: list[Policy] = [
        RateLimit(
            requests_per_minute=limits.rpm,
            tokens_per_minute=limits.tpm,
            window=WINDOW,
            key="target",
            max_wait=60,
        ),
        ConcurrencyLimit(),
        CircuitBreaker(),
    ]
    return target(name, *policies, weight=limits.rpm)


def run(*, prompt_tokens: float, outage: Outage | None = None, seconds: float = SECONDS) -> Report:
    upstreams: Network = network(
        eu=provider(LIMITS["eu"]),
        us=provider(LIMITS["us"]),
        strong=provider(LIMITS["strong"], *[outage] if outage else []),
    )
    router = Router(
        {"cheap": [limited("eu"), limited("us")], "strong": limited("strong")}, fallbacks={"strong": "cheap"}
    )
    traffic = [
        Traffic(
            arrivals=ClosedLoop(workers),
            request=Chat(model=model, prompt_tokens=LogNormal(prompt_tokens, 0.5), max_tokens=200),
        )
        for model, workers in (("cheap", 60), ("strong", 30))
    ]
    return simulate([Retry(), router], upstreams, traffic, duration=seconds)


@cache
def batch(prompt_tokens: float) -> Report:
    return run(prompt_tokens=prompt_tokens)


def throttled_ratio(report: Report) -> float:
    return sum(one.statuses[429] for one in report.upstreams.values()) / report.requests


SHORT, LONG = 300, 1000  # tokens of prompts: requests per minute are what binds, or tokens


@pytest.mark.parametrize("prompt_tokens", [SHORT, LONG])
def test_every_item_is_answered_and_hardly_a_request_is_throttled(prompt_tokens: float) -> None:
    report = batch(prompt_tokens)
    assert len(report.calls) > 500
    assert report.success_ratio == 1
    assert throttled_ratio(report) < 0.003


def test_the_sum_of_the_requests_per_minute_is_used() -> None:
    report = batch(SHORT)
    granted = sum(limits.rpm for limits in LIMITS.values()) * (SECONDS + WINDOW) / 60
    sent = sum(upstream.between(0, SECONDS) for upstream in report.upstreams.values())
    assert 0.95 * granted <= sent <= granted
    for name, limits in LIMITS.items():
        most = limits.rpm * (SECONDS + WINDOW) / 60
        assert 0.9 * most <= report.upstreams[f"{name}.test"].between(0, SECONDS) <= most + 1


def test_the_sum_of_the_tokens_per_minute_is_used() -> None:
    report = batch(LONG)
    granted = sum(limits.tpm for limits in LIMITS.values()) * (SECONDS + WINDOW) / 60
    used = sum(
        sent.input_tokens + sent.output_tokens
        for upstream in report.upstreams.values()
        for sent in upstream.exchanges
        if sent.arrived < SECONDS
    )
    assert 0.9 * granted <= used <= 1.01 * granted


@pytest.mark.parametrize("prompt_tokens", [SHORT, LONG])
def test_none_is_driven_past_its_knee_though_nobody_told_where_that_is(prompt_tokens: float) -> None:
    report = batch(prompt_tokens)
    for name, limits in LIMITS.items():
        assert report.upstreams[f"{name}.test"].in_flight_max <= limits.knee


def test_without_the_limits_a_fifth_and_more_is_throttled() -> None:
    upstreams = network(eu=provider(LIMITS["eu"]), us=provider(LIMITS["us"]))
    traffic = Traffic(arrivals=ClosedLoop(60), request=Chat(prompt_tokens=SHORT, max_tokens=200))
    report = simulate([Retry(), Router([target("eu"), target("us")])], upstreams, traffic, duration=8)
    assert throttled_ratio(report) > 0.2


def test_while_the_strong_model_is_down_the_cheap_one_answers_for_it() -> None:
    report = run(prompt_tokens=SHORT, outage=Outage(10, 30), seconds=60)
    assert report.success_ratio == 1
    strong = report.where(model="strong")
    assert {call.answered_by for call in strong.where(since=12, until=28).calls} <= {"eu.test", "us.test"}
    assert report.upstreams["strong.test"].between(15, 30) <= 2, "probes"
    assert throttled_ratio(report) < 0.003, "the others' limits hold all the same"
    assert set(strong.where(since=52).answered_by) == {"strong.test"}, "and then it answers itself again"
