"""What a real Jaeger makes of our spans. Skipped where there is none; `scripts/jaeger` builds one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import anyio
import pytest
from opentelemetry.sdk.trace import TracerProvider

from integrations.jaeger.call import SERVICE, ask, client_of, tracing_to, troubled_call
from integrations.jaeger.server import ROOT, Jaeger, find_jaeger, running
from resilient_llm import Backoff, Bulkhead, CircuitBreaker, Retry, ambient
from resilient_llm.testing import FakeModel, FakeProvider, Fault, Latency
from tests.signals import Span, Spans

pytestmark = pytest.mark.realtime

SHORT = Backoff(initial=0.02, jitter="none")
TAIL_SAMPLING = Path(__file__).with_name("tail_sampling.yaml")


@pytest.fixture(scope="module")
def program() -> Path:
    found = find_jaeger()
    if found is None:
        pytest.skip("there is no Jaeger: neither on PATH nor built by scripts/jaeger")
    return found


@pytest.fixture(scope="module")
def jaeger(program: Path) -> Iterator[Jaeger]:
    with running(program) as started:
        yield started


def test_the_tree_of_a_call_that_waited_and_was_retried(jaeger: Jaeger) -> None:
    with tracing_to(jaeger.otlp) as tracer_provider:
        trace_id = anyio.run(troubled_call, tracer_provider)
    spans = jaeger.wait_for(lambda: jaeger.trace(trace_id), lambda spans: len(spans) == 8)

    assert spans.tree().splitlines() == [
        "answer",
        "  chat gpt-4o",
        "    wait bulkhead",
        "    attempt openai/gpt-4o",
        "    backoff",
        "    attempt openai/gpt-4o",
        "    backoff",
        "    attempt openai/gpt-4o",
    ]
    call = spans.one("chat")
    assert (call.kind, call.status, call.scope) == ("CLIENT", "UNSET", "resilient_llm")
    assert values(call, "outcome", "attempts", "retries") == ("success", 3, 2)
    assert call.attributes["gen_ai.operation.name"] == "chat"
    assert call.attributes["gen_ai.provider.name"] == "openai"
    assert call.attributes["gen_ai.request.model"] == "gpt-4o"
    assert (call.attributes["server.address"], call.attributes["server.port"]) == ("provider.example", 80)
    assert "error.type" not in call.attributes

    wait, throttled, hinted, failed, own, answered = spans.children(call)
    assert (wait.kind, *values(wait, "limiter.name", "wait.outcome")) == ("INTERNAL", "bulkhead", "acquired")
    attempts = (throttled, failed, answered)
    assert [(attempt.kind, attempt.status) for attempt in attempts] == [
        ("CLIENT", "ERROR"),
        ("CLIENT", "ERROR"),
        ("CLIENT", "UNSET"),
    ]
    assert [attempt.attributes["http.response.status_code"] for attempt in attempts] == [429, 503, 200]
    assert [values(attempt, "attempt.number", "attempt.reason") for attempt in attempts] == [
        (1, "initial"),
        (2, "retry"),
        (3, "retry"),
    ]
    assert values(throttled, "attempt.retry_after") == (1.0,)
    assert [values(backoff, "backoff.source")[0] for backoff in (hinted, own)] == [
        "retry_after",
        "exponential",
    ]
    assert (hinted.kind, hinted.seconds >= 1.0) == ("INTERNAL", True)
    spans.assert_accounted(call)


def test_calls_that_fail_are_found_by_what_went_wrong(jaeger: Jaeger) -> None:
    provider = FakeProvider(FakeModel(latency=Latency(headers=0.3)))
    provider.script("down", lambda _request: Fault(status=503))
    with tracing_to(jaeger.otlp) as tracer_provider:
        anyio.run(two_calls_of_what_is_down, provider, tracer_provider)

    exhausted, refused = jaeger.wait_for(
        lambda: (found(jaeger, "outcome", "exhausted"), found(jaeger, "outcome", "rejected")), all
    )
    assert exhausted.tree().splitlines() == [
        "chat down",
        "  attempt openai/down",
        "  backoff",
        "  attempt openai/down",
    ]
    assert [span.status for span in exhausted] == ["ERROR", "ERROR", "UNSET", "ERROR"]
    call = exhausted.one("chat")
    assert call.attributes["error.type"] == exhausted.named("attempt")[-1].attributes["error.type"]
    assert values(call, "tenant", "attempts") == ("acme", 2)
    (opened,) = (event for event in call.events if event.name == "resilient_llm.breaker.state_change")
    assert opened.attributes["resilient_llm.breaker.to"] == "open"
    exhausted.assert_accounted(call)

    assert refused.tree() == "chat down"
    (call,) = refused
    assert (call.status, call.attributes["error.type"], *values(call, "attempts")) == (
        "ERROR",
        "circuit_open",
        0,
    )
    assert call.event_names() == ["resilient_llm.rejected"]


async def two_calls_of_what_is_down(provider: FakeProvider, tracer_provider: TracerProvider) -> None:
    policies = (Retry(max_attempts=2, backoff=SHORT), CircuitBreaker(consecutive_failures=2))
    async with client_of(provider, tracer_provider, *policies) as client:
        with ambient(tenant="acme"):
            assert (await ask(client, "down")).status_code == 503
            assert (await ask(client, "down")).status_code == 503
    assert provider.total_requests == 2


def test_an_attempt_lasts_until_its_stream_has_been_read(jaeger: Jaeger) -> None:
    provider = FakeProvider(FakeModel(latency=Latency(headers=0.3, per_token=0.02)))
    with tracing_to(jaeger.otlp) as tracer_provider:
        anyio.run(read_stream, provider, tracer_provider)

    spans = jaeger.wait_for(lambda: found(jaeger, "attempt.model", "streamed"), lambda spans: len(spans) == 2)
    assert spans.tree() == "chat streamed\n  attempt openai/streamed"
    call, attempt = spans
    assert call.attributes["gen_ai.request.stream"] is True
    (first_chunk,) = values(attempt, "attempt.time_to_first_chunk")
    assert 0.3 <= first_chunk < attempt.seconds
    assert call.event_names() == ["resilient_llm.commit"]
    spans.assert_accounted(call)


async def read_stream(provider: FakeProvider, tracer_provider: TracerProvider) -> None:
    async with client_of(provider, tracer_provider, Retry()) as client:
        question = {"model": "streamed", "messages": [{"role": "user", "content": "?"}], "stream": True}
        async with client.stream("POST", "/chat/completions", json=question) as response:
            assert (await response.aread()).endswith(b"data: [DONE]\n\n")


def test_what_the_demo_sends_is_what_it_says_it_measured(program: Path) -> None:
    with running(program) as jaeger:
        figures = run_demo(jaeger.otlp)
        tenants: dict[str, dict[str, Any]] = figures["tenants"]
        calls = sum(tenant["calls"] for tenant in tenants.values())
        (service,) = jaeger.wait_for(jaeger.services, lambda services: len(services) == 1)
        spans = jaeger.wait_for(lambda: jaeger.traces(service), lambda spans: len(spans.roots()) >= calls)

    requests = spans.roots()
    assert Counter(root.kind for root in requests) == {"SERVER": calls}
    assert Counter(request.trace_id for request in requests).most_common(1)[0][1] == 1
    for name, tenant in tenants.items():
        own = [request for request in requests if values(request, "tenant") == (name,)]
        assert len(own) == tenant["calls"]
        assert Counter(request.status for request in own)["ERROR"] <= tenant["failed"] + tenant["rejected"]
        assert [request.attributes["http.response.status_code"] for request in own].count(200) == tenant["ok"]
        retries = [values(call, "tenant", "retries") for call in spans.named("chat")]
        assert sum(count for whose, count in retries if whose == name) == tenant["retries"]
    assert len(spans.named("attempt")) == figures["provider_requests"]
    check_the_parts(spans, {request.span_id for request in requests})
    check_the_circuit(spans, figures["circuit"])
    check_the_time(spans)


def run_demo(otlp: str) -> dict[str, Any]:
    """Run the demo as users do, and give the figures that it prints last."""
    command = [sys.executable, "-m", "resilient_llm.cli", "demo", "--duration", "3", "--plain", "--json"]
    ran = subprocess.run(
        [*command, "--otlp", otlp], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    lines = ran.stdout.splitlines()
    # Its exit code says whether three seconds were enough to show everything, which is not the question here.
    assert lines, ran.stderr
    assert lines[-1].startswith("{"), ran.stdout + ran.stderr
    figures: dict[str, Any] = json.loads(lines[-1])
    return figures


def check_the_parts(spans: Spans, requests: set[str]) -> None:
    """Each part of a request is of the kind and under the span where it belongs, in an order that can be."""
    calls = {call.span_id for call in spans.named("chat")}
    for wait in spans.named("wait"):
        assert (wait.kind, wait.parent_id in requests | calls) == ("INTERNAL", True)
    for call in spans.named("chat"):
        assert (call.kind, call.parent_id in requests) == ("CLIENT", True)
        assert (call.status == "ERROR") == (values(call, "outcome") != ("success",))
        children = spans.children(call)
        assert {child.name.split()[0] for child in children} <= {"wait", "attempt", "backoff"}
        for before, after in pairwise(children):
            assert before.end <= after.start
            assert before.name != after.name
        attempts = [child for child in children if child.kind == "CLIENT"]
        assert values(call, "attempts") == (len(attempts),)
        for number, attempt in enumerate(attempts, 1):
            assert values(attempt, "attempt.number") == (number,)
            went_well = values(attempt, "attempt.outcome") == ("success",)
            assert (attempt.status == "UNSET", "error.type" not in attempt.attributes) == (went_well,) * 2


def check_the_circuit(spans: Spans, states: list[str]) -> None:
    """The failing model's circuit went through the states that the demo saw."""
    changes = [
        (event.at, event.attributes["resilient_llm.breaker.to"])
        for span in spans
        for event in span.events
        if event.name == "resilient_llm.breaker.state_change"
        and str(event.attributes["resilient_llm.breaker.name"]).endswith("demo-large")
    ]
    assert [to for _, to in sorted(changes)] == states


def check_the_time(spans: Spans) -> None:
    """The calls' children account for their time.

    Of all calls together: in a busy process one of them loses some milliseconds to the others now and then.
    """
    calls = spans.named("chat")
    gaps = [spans.uncovered(call) for call in calls]
    assert sum(gaps) <= 0.05 * sum(call.seconds for call in calls)


def test_tail_sampling_keeps_what_is_worth_a_look(program: Path) -> None:
    with running(
        program, f"--config={TAIL_SAMPLING}", "--set=processors.tail_sampling.decision_wait=1s"
    ) as jaeger:
        with tracing_to(jaeger.otlp) as tracer_provider:
            anyio.run(some_dull_and_some_remarkable_calls, tracer_provider)
        spans = jaeger.wait_for(
            lambda: jaeger.traces(SERVICE),
            lambda spans: {"chat waits", "chat fails", "chat last"} <= names(spans),
        )
    assert spans.one("chat fails").attributes["resilient_llm.outcome"] == "success"
    assert spans.one("chat last").event_names() == ["resilient_llm.rejected"]
    assert len(spans.named("chat dull")) < 50  # of 100, and 10 is what to expect


async def some_dull_and_some_remarkable_calls(tracer_provider: TracerProvider) -> None:
    slow = FakeModel(latency=Latency(headers=0.9))
    provider = FakeProvider(FakeModel(), models={"slow": slow})
    provider.script("fails", [Fault(status=503)])
    policies = (Bulkhead(max_concurrent=1, max_queued=1), Retry(backoff=SHORT))
    async with client_of(provider, tracer_provider, *policies) as client:
        for _ in range(100):
            await ask(client, "dull")
        await ask(client, "fails")
        async with anyio.create_task_group() as tasks:
            for model in ("slow", "waits", "last"):
                tasks.start_soon(ask, client, model)
                await anyio.sleep(0.01)


def names(spans: Spans) -> set[str]:
    return {span.name for span in spans}


def values(span: Span, *keys: str) -> tuple[Any, ...]:
    """The values of attributes of ours, `None` where there is none."""
    return tuple(span.attributes.get(f"resilient_llm.{key}") for key in keys)


def found(jaeger: Jaeger, key: str, value: str) -> Spans:
    """The spans of the trace that the UI finds by an attribute of ours."""
    ids = jaeger.search(SERVICE, **{f"resilient_llm.{key}": value})
    assert len(ids) <= 1
    return jaeger.trace(ids.pop()) if ids else Spans([])
