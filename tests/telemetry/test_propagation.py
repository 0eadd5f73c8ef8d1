"""What the provider learns of the trace: which attempt this is, and nothing else."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest
from opentelemetry import baggage, context

from resilient_llm import Retry, Telemetry
from tests.signals import Recording
from tests.telemetry.observed import BODY, FIXED, URL, ask, client_of, telemetry_of

pytestmark = pytest.mark.anyio


class Unavailable:
    """A provider that fails a number of times and keeps what it was asked."""

    def __init__(self, times: int = 0) -> None:
        self.times = times
        self.requests: list[httpx2.Request] = []

    async def __call__(self, request: httpx2.Request) -> httpx2.Response:
        await request.aread()
        self.requests.append(request)
        return httpx2.Response(503 if len(self.requests) <= self.times else 200, json={})


async def test_each_attempt_is_sent_as_the_parent_of_what_the_provider_does() -> None:
    recording, provider = Recording(), Unavailable(times=1)
    async with client_of(recording, provider, Retry(backoff=FIXED)) as client:
        await ask(client)
    spans = recording.spans
    expected = [f"00-{span.trace_id}-{span.span_id}-" for span in spans.named("attempt")]
    sent = [request.headers["traceparent"] for request in provider.requests]
    assert [header[:-2] for header in sent] == expected
    assert len({span.trace_id for span in spans}) == 1


async def test_the_caller_s_own_request_is_left_as_it_is() -> None:
    provider = Unavailable()
    async with client_of(Recording(), provider) as client:
        request = client.build_request(
            "POST", URL, json=BODY, headers={"traceparent": "the caller's", "X-A": "1"}
        )
        before = list(request.headers.raw)
        await client.send(request)
    assert request.headers.raw == before
    (seen,) = provider.requests
    assert seen.headers.get_list("traceparent") != ["the caller's"]
    assert len(seen.headers.get_list("traceparent")) == 1
    others = [header for header in seen.headers.raw if header[0] != b"traceparent"]
    assert others == [header for header in before if header[0] != b"traceparent"]
    assert seen.content == request.content


async def test_an_upload_is_still_sent_as_it_comes() -> None:
    async def body() -> AsyncIterator[bytes]:
        yield b'{"model": '
        yield b'"gpt-4o"}'

    provider = Unavailable()
    async with client_of(Recording(), provider) as client:
        await client.post(URL, content=body())
    assert provider.requests[0].content == b'{"model": "gpt-4o"}'
    assert "traceparent" in provider.requests[0].headers
    assert provider.requests[0].headers["transfer-encoding"] == "chunked"


@pytest.mark.parametrize(
    "options", [{"propagate": False}, None], ids=["when it is told not to", "when nothing is traced"]
)
async def test_nothing_is_added(options: dict[str, Any] | None) -> None:
    provider = Unavailable()
    telemetry = Telemetry() if options is None else telemetry_of(Recording(), **options)
    async with client_of(telemetry, provider) as client:
        await ask(client)
    assert "traceparent" not in provider.requests[0].headers


async def test_baggage_is_not_for_providers() -> None:
    provider = Unavailable()
    token = context.attach(baggage.set_baggage("user.email", "CANARY-123"))
    try:
        async with client_of(Recording(), provider) as client:
            await ask(client)
    finally:
        context.detach(token)
    assert "traceparent" in provider.requests[0].headers
    assert "CANARY-123" not in str(provider.requests[0].headers)
