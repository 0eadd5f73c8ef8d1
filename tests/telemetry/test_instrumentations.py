"""Our spans among those of other people's instrumentations."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import anyio
import httpx
import httpx2
import pytest
from opentelemetry.instrumentation.httpx import HTTPX2ClientInstrumentor, HTTPXClientInstrumentor

import resilient_llm.httpx
import resilient_llm.httpx2
from resilient_llm import Backoff, Bulkhead, Retry
from resilient_llm.asgi import ResilienceMiddleware
from resilient_llm.testing import ASGIStreamTransport, FakeModel, FakeProvider, Fault, Latency, serve
from tests.signals import Recording
from tests.telemetry.observed import BODY, STREAM, telemetry_of
from tests.telemetry.service import Instrument, Service

pytestmark = pytest.mark.anyio


TREE = """
chat gpt-4o
  attempt openai/gpt-4o
    POST
  backoff
  attempt openai/gpt-4o
    POST
chat gpt-4o
  attempt openai/gpt-4o
    POST
"""


@pytest.fixture(params=["httpx", "httpx2"])
def instrumented(request: pytest.FixtureRequest) -> Iterator[tuple[ModuleType, Recording]]:
    """One of the libraries, instrumented for the whole process, as an application does it."""
    recording = Recording()
    library, instrumentor = {
        "httpx": (httpx, HTTPXClientInstrumentor()),
        "httpx2": (httpx2, HTTPX2ClientInstrumentor()),
    }[request.param]
    instrumentor.instrument(tracer_provider=recording.tracer_provider)
    yield library, recording
    instrumentor.uninstrument()


def transport_of(library: ModuleType, recording: Recording, *policies: Any) -> Any:
    ours = resilient_llm.httpx if library is httpx else resilient_llm.httpx2
    return ours.ResilientTransport(policies=policies, telemetry=telemetry_of(recording))


@pytest.mark.realtime
async def test_an_instrumentation_of_the_library_is_below_each_attempt(
    instrumented: tuple[ModuleType, Recording],
) -> None:
    library, recording = instrumented
    provider = FakeProvider()
    provider.script(None, [Fault(status=503)])
    quick = Retry(backoff=Backoff(initial=0.01, maximum=0.01, jitter="none"))
    async with (
        serve(provider) as url,
        library.AsyncClient(transport=transport_of(library, recording, quick)) as client,
    ):
        await client.post(f"{url}/v1/chat/completions", json=BODY)
        async with client.stream("POST", f"{url}/v1/chat/completions", json=STREAM) as response:
            assert len([chunk async for chunk in response.aiter_raw()]) > 0

    spans = recording.spans
    assert spans.tree() == TREE.strip()
    for post in spans.named("POST"):
        attempt = next(span for span in spans if span.span_id == post.parent_id)
        assert attempt.start <= post.start <= post.end <= attempt.end
    # What the provider was told is the innermost of them.
    told = [request.headers["traceparent"].split("-")[2] for request in provider.requests]
    assert told == [post.span_id for post in spans.named("POST")]


@pytest.mark.realtime
async def test_an_instrumentation_of_one_client_is_above_the_call() -> None:
    """It wraps our transport, so it sees calls and not attempts; docs/telemetry.md says so."""
    recording = Recording()
    async with (
        serve(FakeProvider()) as url,
        httpx.AsyncClient(transport=transport_of(httpx, recording, Retry())) as client,
    ):
        HTTPXClientInstrumentor.instrument_client(client, tracer_provider=recording.tracer_provider)
        await client.post(f"{url}/v1/chat/completions", json=BODY)
    assert recording.spans.tree() == "POST\n  chat gpt-4o\n    attempt openai/gpt-4o"


@pytest.mark.parametrize("instrument", ["fastapi", "asgi"])
async def test_at_the_asgi_door_the_call_and_the_wait_are_below_the_server_s_span(
    instrument: Instrument,
) -> None:
    provider = FakeProvider(FakeModel(latency=Latency(headers=1.0)))
    provider.script(None, [Fault(status=503)])
    service = Service(provider, instrument=instrument)
    async with service.client() as client, anyio.create_task_group() as tasks:
        tasks.start_soon(client.post, "/v1/chat")
        await anyio.sleep(0.5)
        await client.post("/v1/chat")

    spans = service.recording.spans
    first, second = spans.named("POST")
    assert {first.kind, second.kind} == {"SERVER"}
    assert [child.name for child in spans.children(first)] == ["chat gpt-4o"]
    assert [child.name for child in spans.children(second)] == ["wait bulkhead", "chat gpt-4o"]
    assert [child.name for child in spans.children(spans.named("chat")[0])] == [
        "attempt openai/gpt-4o",
        "backoff",
        "attempt openai/gpt-4o",
    ]
    assert spans.one("wait").attributes["resilient_llm.wait.outcome"] == "acquired"
    assert spans.one("wait").seconds == pytest.approx(2.5)
    for server in (first, second):
        assert server.attributes["resilient_llm.tenant"] == "acme"
    assert {call.attributes["resilient_llm.tenant"] for call in spans.named("chat")} == {"acme"}


async def test_a_refusal_at_the_asgi_door_is_an_event_of_the_server_s_span() -> None:
    service = Service(FakeProvider(FakeModel(latency=Latency(headers=1.0))), instrument="asgi")
    async with service.client() as client, anyio.create_task_group() as tasks:
        tasks.start_soon(client.post, "/v1/chat")
        tasks.start_soon(client.post, "/v1/chat")
        await anyio.sleep(0.5)
        assert (await client.post("/v1/chat")).status_code == 429
    refused = next(span for span in service.recording.spans.named("POST") if span.events)
    assert refused.event_names() == ["resilient_llm.rejected"]
    assert refused.events[0].attributes["resilient_llm.reason"] == "bulkhead_full"
    assert service.recording.points.one("resilient_llm.rejections").value == 1


async def test_without_a_server_s_span_a_wait_at_the_asgi_door_is_measured_and_begins_no_trace() -> None:
    recording = Recording()

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        await anyio.sleep(1)
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    guarded = ResilienceMiddleware(
        app, tenant=None, policies=[Bulkhead(max_concurrent=1)], telemetry=telemetry_of(recording)
    )
    client = httpx.AsyncClient(transport=ASGIStreamTransport(guarded), base_url="http://service.example")
    async with client, anyio.create_task_group() as tasks:
        tasks.start_soon(client.get, "/")
        tasks.start_soon(client.get, "/")
    assert len(recording.spans) == 0
    assert recording.points.one("resilient_llm.wait.duration").value == pytest.approx(1)
