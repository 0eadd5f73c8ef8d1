"""The demo's figures: computed from spans and clocks, and honest about what a run did not show."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from opentelemetry.trace import SpanKind
from rich.console import Console

from resilient_llm.demo.figures import Figures, SpanFigures, TenantFigures, percentile
from resilient_llm.demo.layout import duration, story
from tests.demo.spans import Trace

QUIET = TenantFigures(
    calls=90, ok=90, rejected=0, failed=0, retries=8, wait_p50=0, wait_p99=0, total_p50=0.2, total_p99=1.3
)
NOISY = replace(QUIET, calls=1500, ok=300, rejected=1200, wait_p50=0.5, wait_p99=0.9)
FIGURES = Figures(
    tenants={"amber": QUIET, "noisy": NOISY},
    quiet=QUIET,
    refused_p50=0.0021,
    provider_requests=500,
    faults={"503": 40, "slow": 10},
    failures=40,
    outage=4.0,
    hinted_retries=7,
    early_retries=0,
    circuit=("open", "half_open", "closed"),
    circuit_refusals=22,
)


def told(figures: Figures) -> str:
    console = Console(width=200, color_system=None)
    with console.capture() as capture:
        console.print(story(figures))
    return capture.get()


def test_percentiles_are_values_that_occurred() -> None:
    values = [float(n) for n in range(1, 101)]
    assert [percentile(values, p) for p in (0, 1, 50, 99, 100)] == [1, 1, 50, 99, 100]
    assert percentile([7.0], 99) == 7.0
    assert percentile([], 50) is None


def test_durations_for_people() -> None:
    seconds = [None, 0, 0.0004, 0.0021, 0.9994, 0.9996, 12.345]
    assert [duration(value) for value in seconds] == [
        "-",
        "0 ms",
        "0 ms",
        "2 ms",
        "999 ms",
        "1.00 s",
        "12.35 s",
    ]


def test_waits_are_those_of_the_calls_that_were_served() -> None:
    trace = Trace()
    for tenant, status, wait in (
        ("amber", 200, 0.0),
        ("amber", 200, 0.25),
        ("amber", 429, 2.0),
        ("noisy", 200, 1.0),
    ):
        with trace.span("POST /chat", {"resilient_llm.tenant": tenant}, kind=SpanKind.SERVER) as server:
            if wait:
                with trace.span("wait bulkhead", {"resilient_llm.wait.outcome": "acquired"}):
                    trace.now += wait
            server.set_attribute("http.response.status_code", status)
    figures = SpanFigures()
    figures.add(trace.spans[:4])
    figures.add(trace.spans[4:])
    assert figures.requests == 4
    assert figures.waits == {"amber": [0.0, 0.25], "noisy": [1.0]}


def call(
    trace: Trace, model: str, hint: float, waited: float, events: Mapping[str, float] | None = None
) -> None:
    attributes = {"resilient_llm.tenant": "amber", "gen_ai.request.model": model}
    with trace.span("chat", attributes) as span:
        with trace.span("attempt", {"resilient_llm.attempt.number": 1}) as attempt:
            attempt.set_attribute("resilient_llm.attempt.retry_after", hint)
        with trace.span("backoff", {"resilient_llm.backoff.source": "retry_after"}):
            trace.now += waited
        with trace.span("attempt", {"resilient_llm.attempt.number": 2}):
            for to, at in (events or {}).items():
                trace.add_event(span, to, at)
        span.set_attribute("resilient_llm.retries", 1)


def test_retries_and_those_that_came_too_early() -> None:
    trace = Trace()
    call(trace, "demo-mini", hint=1.0, waited=1.05)
    call(trace, "demo-mini", hint=1.0, waited=0.95)
    call(trace, "demo-mini", hint=0.0, waited=0.1)
    figures = SpanFigures()
    figures.add(trace.spans)
    assert (figures.retries, figures.hinted_retries, figures.early_retries) == ({"amber": 3}, 2, 1)


def test_the_circuits_changes_in_the_order_in_which_they_came() -> None:
    trace = Trace()
    call(trace, "demo-large", 0.0, 0.1, {"half_open": 2.0, "closed": 3.0})
    call(trace, "demo-large", 0.0, 0.1, {"open": 1.0})
    call(trace, "demo-mini", 0.0, 0.1, {"open": 4.0})
    figures = SpanFigures()
    figures.add(trace.spans)
    assert figures.circuit == ("open", "half_open", "closed")


def test_the_story_of_a_run_that_showed_everything() -> None:
    assert FIGURES.shortfalls() == []
    text = told(FIGURES)
    for part in (
        "noisy made 50 times the calls of a quiet tenant. 300 of them were served; 1200 met its own full bulkhead",
        "half of these within 2 ms",
        "90 of 90 calls served, and a p99 wait for a slot of 0 ms where noisy waited 900 ms",
        "The provider failed 40 of 500 requests. 16 retries later none of the calls of demo-mini had failed",
        "its circuit opened, answered 22 calls in the provider's stead",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("figures", "claim"),
    [
        (
            replace(FIGURES, quiet=replace(QUIET, ok=89)),
            "all calls of quiet tenants are served, but 89 of 90 were",
        ),
        (
            replace(FIGURES, tenants={"noisy": replace(NOISY, ok=1500, rejected=0)}, failures=40),
            "the noisy tenant is served in part, but 1500 of 1500 calls were",
        ),
        (
            replace(FIGURES, quiet=replace(QUIET, wait_p99=0.95)),
            "the noisy tenant's queue is its own, but quiet tenants waited as long as it did",
        ),
        (replace(FIGURES, failures=0), "failures of the provider are retried, but none was"),
        (replace(FIGURES, early_retries=2), "no retry comes sooner than told, but 2 did"),
        (replace(FIGURES, circuit_refusals=0), "circuit opens and spares the provider calls, but it did not"),
        (
            replace(FIGURES, circuit=("open", "half_open")),
            "the circuit closes again by itself, but it did not",
        ),
    ],
)
def test_what_a_run_did_not_show_is_said_instead(figures: Figures, claim: str) -> None:
    (shortfall,) = figures.shortfalls()
    assert claim in shortfall
    assert told(figures).strip() == f"✗ Not shown: {shortfall}."
