"""What the spans of a call say that did not go well."""

from __future__ import annotations

import errno

import anyio
import httpx2
import pytest

from resilient_llm import Bulkhead, CircuitBreaker, Deadline, Retry
from resilient_llm.testing import FakeModel, FakeProvider, Fault, Latency
from tests.signals import Recording
from tests.telemetry.observed import (
    FIXED,
    ask,
    client_of,
    the_call,
)

pytestmark = pytest.mark.anyio

SLOW = FakeModel(latency=Latency(headers=1.0))


@pytest.mark.parametrize(
    ("fault", "status", "outcome", "attempt_outcome", "error_type"),
    [
        (Fault(status=400), 400, "failed", "fatal", "invalid_request_error"),
        (Fault(status=401), 401, "failed", "fatal", "invalid_api_key"),
        (Fault(status=500), 500, "exhausted", "retryable", "server_error"),
        (
            Fault(status=429, headers={"retry-after": "9999"}),
            429,
            "exhausted",
            "retryable",
            "rate_limit_exceeded",
        ),
        (Fault(reset=True), 502, "exhausted", "retryable", "read_error"),
        (Fault(delay_headers=100.0), 504, "exhausted", "timeout", "read_timeout"),
    ],
    ids=["bad request", "bad key", "server error", "hint over the cap", "reset", "no answer"],
)
async def test_a_call_that_fails_says_why(
    fault: Fault, status: int, outcome: str, attempt_outcome: str, error_type: str
) -> None:
    recording = Recording()
    provider = FakeProvider()
    provider.script(None, lambda _request: fault)
    async with client_of(recording, provider, Retry(max_attempts=2, backoff=FIXED)) as client:
        response = await ask(client)
    assert response.status_code == status

    spans, call = the_call(recording)
    assert (call.status, call.attributes["resilient_llm.outcome"]) == ("ERROR", outcome)
    last = spans.named("attempt")[-1]
    assert (last.status, last.attributes["resilient_llm.attempt.outcome"]) == ("ERROR", attempt_outcome)
    assert call.attributes["error.type"] == last.attributes["error.type"] == error_type
    assert "resilient_llm.attempt.retry_after" not in last.attributes or last.attributes[
        "resilient_llm.attempt.retry_after"
    ] == pytest.approx(9999)
    if outcome == "exhausted":
        why = next(event for event in call.events if event.name == "resilient_llm.retry_suppressed")
        assert why.attributes["resilient_llm.reason"] in ("max_attempts", "retry_after_over_cap")


async def test_the_total_deadline_is_a_timeout() -> None:
    recording = Recording()
    async with client_of(recording, FakeProvider(SLOW), Deadline(0.5), Retry()) as client:
        response = await ask(client)
    assert response.status_code == 504

    spans, call = the_call(recording)
    assert (call.status, call.attributes["resilient_llm.outcome"]) == ("ERROR", "timeout")
    assert call.attributes["error.type"] == "deadline_exceeded"
    attempt = spans.one("attempt")
    assert (attempt.status, attempt.attributes["resilient_llm.attempt.outcome"]) == ("ERROR", "timeout")
    assert attempt.seconds == call.seconds == pytest.approx(0.5)


async def test_a_caller_that_leaves_is_no_error() -> None:
    recording = Recording()
    async with client_of(recording, FakeProvider(SLOW), Retry()) as client:
        with anyio.move_on_after(0.5):
            await ask(client)

    spans, call = the_call(recording)
    assert (call.status, call.attributes["resilient_llm.outcome"]) == ("UNSET", "cancelled")
    attempt = spans.one("attempt")
    assert (attempt.status, attempt.attributes["resilient_llm.attempt.outcome"]) == ("UNSET", "cancelled")
    assert not {"error.type", "http.response.status_code"} & (
        call.attributes.keys() | attempt.attributes.keys()
    )


async def test_a_refusal_is_a_span_without_attempts() -> None:
    recording = Recording()
    bulkhead = Bulkhead(max_concurrent=1, max_queued=0)
    async with (
        client_of(recording, FakeProvider(SLOW), bulkhead) as client,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(ask, client)
        await anyio.sleep(0.1)
        response = await ask(client, "gpt-5")
    assert response.status_code == 429

    spans, call = the_call(recording, "chat gpt-5")
    assert spans.children(call) == []
    assert (call.status, call.attributes["resilient_llm.outcome"]) == ("ERROR", "rejected")
    assert call.attributes["error.type"] == "bulkhead_full"
    assert call.attributes["resilient_llm.attempts"] == 0
    (event,) = call.events
    assert (event.name, event.attributes) == (
        "resilient_llm.rejected",
        {"resilient_llm.limiter.name": "bulkhead", "resilient_llm.reason": "bulkhead_full"},
    )


async def test_a_wait_that_ends_badly_says_how() -> None:
    recording = Recording()
    bulkhead = Bulkhead(max_concurrent=1, max_wait=0.2)
    async with (
        client_of(recording, FakeProvider(SLOW), bulkhead) as client,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(ask, client)
        await anyio.sleep(0.1)
        await ask(client, "gpt-5")
        with anyio.move_on_after(0.1):
            await ask(client, "gpt-6")

    waits = recording.spans.named("wait")
    assert [wait.attributes["resilient_llm.wait.outcome"] for wait in waits] == ["timeout", "cancelled"]
    assert [round(wait.seconds, 6) for wait in waits] == [0.2, 0.1]
    assert {wait.status for wait in waits} == {"UNSET"}


async def test_what_a_circuit_does_is_on_the_call_that_made_it_so() -> None:
    recording = Recording()
    provider = FakeProvider()
    provider.script(None, lambda _request: Fault(status=500))
    breaker = CircuitBreaker(consecutive_failures=1, break_duration=10)
    async with client_of(recording, provider, Retry(backoff=FIXED), breaker) as client:
        await ask(client)
        provider.script(None, [])
        await anyio.sleep(10)
        await ask(client, "gpt-5")

    spans = recording.spans
    opened, closed = spans.one("chat gpt-4o"), spans.one("chat gpt-5")
    assert opened.event_names() == ["resilient_llm.breaker.state_change", "resilient_llm.retry_suppressed"]
    assert opened.events[0].attributes == {
        "resilient_llm.breaker.name": "circuit:provider.example:8080",
        "resilient_llm.breaker.from": "closed",
        "resilient_llm.breaker.to": "open",
        "resilient_llm.breaker.reason": "consecutive_failures",
    }
    assert [event.attributes["resilient_llm.breaker.to"] for event in closed.events] == [
        "half_open",
        "closed",
    ]
    assert opened.events[1].attributes == {"resilient_llm.reason": "circuit_open"}
    # One attempt was made; the next would be refused, so nobody waits for it, and the provider's word is told.
    assert [child.name.split()[0] for child in spans.children(opened)] == ["attempt"]
    assert (opened.attributes["resilient_llm.attempts"], opened.attributes["resilient_llm.retries"]) == (1, 0)
    assert opened.attributes["resilient_llm.outcome"] == "exhausted"


async def test_a_retry_that_was_not_waited_for_is_none() -> None:
    recording = Recording()
    provider = FakeProvider()
    provider.script(None, lambda _request: Fault(status=500))
    async with client_of(recording, provider, Retry(backoff=FIXED)) as client:
        with anyio.move_on_after(0.5):
            await ask(client)
    spans, call = the_call(recording)
    assert [child.name for child in spans.children(call)] == ["attempt openai/gpt-4o", "backoff"]
    assert call.attributes["resilient_llm.retries"] == 0
    assert call.attributes["resilient_llm.retry_delay"] == pytest.approx(0.5)


async def test_a_process_without_descriptors_says_so() -> None:
    recording = Recording()

    async def none_left(_request: httpx2.Request) -> httpx2.Response:
        raise httpx2.ConnectError("no connection") from OSError(errno.EMFILE, "Too many open files")

    async with client_of(recording, none_left, Retry(max_attempts=2, backoff=FIXED)) as client:
        response = await ask(client)
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "too_many_open_files"
    spans, call = the_call(recording)
    last = spans.named("attempt")[-1]
    assert (last.status, last.attributes["resilient_llm.attempt.outcome"]) == ("ERROR", "retryable")
    assert call.attributes["error.type"] == last.attributes["error.type"] == "too_many_open_files"
