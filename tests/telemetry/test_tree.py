"""The spans of a call: which there are, what they are called, what they say."""

from __future__ import annotations

from typing import Any

import anyio
import httpx2
import pytest
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

from resilient_llm import Bulkhead, Retry, ambient
from resilient_llm.testing import FakeModel, FakeProvider, Fault, Latency
from tests.signals import Recording
from tests.telemetry.observed import (
    FIXED,
    ask,
    client_of,
    outcomes,
    telemetry_of,
    the_call,
)

pytestmark = pytest.mark.anyio

SLOW = FakeModel(latency=Latency(headers=1.0))


async def test_a_call_that_goes_well_is_two_spans() -> None:
    recording = Recording()
    provider = FakeProvider()
    async with client_of(recording, provider, Bulkhead(max_concurrent=1), Retry()) as client:
        await ask(client)

    spans, call = the_call(recording)
    assert spans.tree() == "chat gpt-4o\n  attempt openai/gpt-4o"
    attempt = spans.one("attempt")
    assert (call.kind, call.status, call.parent_id) == ("CLIENT", "UNSET", None)
    assert (attempt.kind, attempt.status, attempt.scope) == ("CLIENT", "UNSET", "resilient_llm")
    assert call.attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "openai",
        "gen_ai.request.model": "gpt-4o",
        "server.address": "provider.example",
        "server.port": 8080,
        "gen_ai.response.id": "chatcmpl-fake000001",
        "gen_ai.response.model": "gpt-4o",
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.input_tokens": provider.requests[0].prompt_tokens,
        "gen_ai.usage.output_tokens": 9,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "resilient_llm.outcome": "success",
        "resilient_llm.attempts": 1,
        "resilient_llm.retries": 0,
        "resilient_llm.hedges": 0,
        "resilient_llm.fallbacks": 0,
        "resilient_llm.retry_delay": 0.0,
        "resilient_llm.wait_time": 0.0,
    }
    assert attempt.attributes == {
        "resilient_llm.attempt.number": 1,
        "resilient_llm.attempt.target": "provider.example:8080",
        "resilient_llm.attempt.provider": "openai",
        "resilient_llm.attempt.model": "gpt-4o",
        "resilient_llm.attempt.reason": "initial",
        "resilient_llm.attempt.outcome": "success",
        "http.response.status_code": 200,
        "server.address": "provider.example",
        "server.port": 8080,
    }
    assert call.events == attempt.events == ()


async def test_a_call_that_waits_and_is_retried_shows_each_of_it() -> None:
    recording = Recording()
    provider = FakeProvider(FakeModel(latency=Latency(headers=0.5)))
    provider.script(None, [Fault(), Fault(status=429, headers={"retry-after": "2"}), Fault(status=503)])
    bulkhead = Bulkhead(max_concurrent=1)
    async with (
        client_of(recording, provider, bulkhead, Retry(backoff=FIXED)) as client,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(ask, client)
        await anyio.sleep(0.1)
        await ask(client, "gpt-5")

    spans, call = the_call(recording, "chat gpt-5")
    assert [child.name for child in spans.children(call)] == [
        "wait bulkhead",
        "attempt openai/gpt-5",
        "backoff",
        "attempt openai/gpt-5",
        "backoff",
        "attempt openai/gpt-5",
    ]
    wait, throttled, hinted, failed, own, last = spans.children(call)

    assert (wait.kind, round(wait.seconds, 6)) == ("INTERNAL", 0.4)
    assert wait.attributes == {
        "resilient_llm.limiter.name": "bulkhead",
        "resilient_llm.limit.unit": "concurrency",
        "resilient_llm.wait.outcome": "acquired",
        "resilient_llm.wait.queue_depth": 1,
    }

    assert throttled.status == "ERROR"
    assert throttled.attributes["resilient_llm.attempt.outcome"] == "retryable"
    assert throttled.attributes["resilient_llm.attempt.retry_after"] == 2.0
    assert throttled.attributes["http.response.status_code"] == 429
    assert throttled.attributes["error.type"] == "rate_limit_exceeded"
    assert "http.request.resend_count" not in throttled.attributes

    assert hinted.kind == "INTERNAL"
    assert hinted.attributes["resilient_llm.backoff.source"] == "retry_after"
    assert hinted.attributes["resilient_llm.backoff.next_attempt"] == 2
    assert hinted.attributes["resilient_llm.backoff.planned"] == pytest.approx(hinted.seconds)
    assert hinted.seconds >= 2
    assert isinstance(hinted.attributes["resilient_llm.retry_budget.remaining"], float)

    assert failed.attributes["resilient_llm.attempt.number"] == 2
    assert failed.attributes["resilient_llm.attempt.reason"] == "retry"
    assert failed.attributes["http.request.resend_count"] == 1
    assert (own.attributes["resilient_llm.backoff.source"], round(own.seconds, 6)) == ("exponential", 1.0)
    assert outcomes([throttled, failed, last]) == ["retryable", "retryable", "success"]

    assert call.status == "UNSET"
    assert "error.type" not in call.attributes
    assert call.attributes["resilient_llm.outcome"] == "success"
    assert (call.attributes["resilient_llm.attempts"], call.attributes["resilient_llm.retries"]) == (3, 2)
    assert call.attributes["resilient_llm.wait_time"] == pytest.approx(wait.seconds)
    assert call.attributes["resilient_llm.retry_delay"] == pytest.approx(hinted.seconds + own.seconds)


async def test_a_wait_that_took_no_time_has_no_span() -> None:
    recording = Recording()
    provider = FakeProvider(FakeModel(latency=Latency(headers=0.0005)))
    async with (
        client_of(recording, provider, Bulkhead(max_concurrent=1)) as client,
        anyio.create_task_group() as tasks,
    ):
        for _ in range(2):
            tasks.start_soon(ask, client)
    assert recording.spans.named("wait") == []
    assert recording.points.one("resilient_llm.wait.duration").value == pytest.approx(0.0005)


async def test_below_an_instrumentation_that_says_it_already_the_call_does_not_say_it_again() -> None:
    recording = Recording()
    tracer = recording.tracer_provider.get_tracer("the SDK's own")
    async with client_of(recording, FakeProvider(), Retry()) as client:
        with tracer.start_as_current_span("chat gpt-4o", attributes={"gen_ai.operation.name": "chat"}):
            await ask(client)

    spans = recording.spans
    assert spans.tree() == "chat gpt-4o\n  resilient_llm.call\n    attempt openai/gpt-4o"
    call = spans.one("resilient_llm.call")
    assert (call.kind, call.status) == ("INTERNAL", "UNSET")
    assert not [name for name in call.attributes if name.startswith(("gen_ai.", "server."))]
    assert call.attributes["resilient_llm.outcome"] == "success"
    assert not [name for name in recording.points.names() if name.startswith("gen_ai.")]
    assert recording.points.one("resilient_llm.attempt.duration").count == 1


async def test_below_any_other_span_the_call_says_all() -> None:
    recording = Recording()
    tracer = recording.tracer_provider.get_tracer("the application's")
    async with client_of(recording, FakeProvider()) as client:
        with tracer.start_as_current_span("answer"):
            await ask(client)
    assert recording.spans.tree() == "answer\n  chat gpt-4o\n    attempt openai/gpt-4o"
    assert "gen_ai.client.operation.duration" in recording.points.names()


async def test_a_call_that_a_policy_makes_is_a_call_of_its_own() -> None:
    recording = Recording()
    moderator = client_of(recording, FakeProvider(FakeModel(latency=Latency(headers=0.1))))

    async def moderate(call: Any, call_next: Any) -> Any:
        await ask(moderator, "moderation")
        return await call_next(call)

    async with moderator, client_of(recording, FakeProvider(), moderate, Retry()) as client:
        await ask(client)
    assert recording.spans.tree() == (
        "chat gpt-4o\n  chat moderation\n    attempt openai/moderation\n  attempt openai/gpt-4o"
    )
    assert len(recording.points.of("gen_ai.client.operation.duration")) == 2


@pytest.mark.parametrize(("record", "expected"), [(True, "acme"), (False, None)])
async def test_the_tenant_is_on_the_span_unless_it_must_not_be(record: bool, expected: str | None) -> None:
    recording = Recording()
    async with client_of(telemetry_of(recording, record_tenant=record), FakeProvider()) as client:
        with ambient(tenant="acme"):
            await ask(client)
    _, call = the_call(recording)
    assert call.attributes.get("resilient_llm.tenant") == expected


async def test_spans_that_policies_and_transports_make_belong_to_the_call_and_the_attempt() -> None:
    recording = Recording()
    tracer = recording.tracer_provider.get_tracer("the application's")

    async def guard(call: Any, call_next: Any) -> Any:
        with tracer.start_as_current_span("moderate"):
            await anyio.sleep(0.1)
        return await call_next(call)

    async def answer(_request: httpx2.Request) -> httpx2.Response:
        with tracer.start_as_current_span("POST"):
            return httpx2.Response(200, json={"choices": []})

    async with client_of(recording, answer, guard, Retry()) as client:
        await ask(client)
    assert recording.spans.tree() == "chat gpt-4o\n  moderate\n  attempt openai/gpt-4o\n    POST"


async def test_a_span_that_is_not_sampled_costs_no_attributes_and_is_still_propagated() -> None:
    recording = Recording(sampler=ALWAYS_OFF)
    seen: list[str | None] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        seen.append(request.headers.get("traceparent"))
        return httpx2.Response(200, json={})

    async with client_of(recording, answer, Retry()) as client:
        await ask(client)
    assert len(recording.spans) == 0
    assert seen[0] is not None
    assert seen[0].endswith(("-00", "-02"))
    assert recording.points.one("gen_ai.client.operation.duration").count == 1
