"""A client whose calls are recorded, over the fake provider or a function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import httpx2

from resilient_llm import Backoff, Policy, Telemetry
from resilient_llm.httpx2 import ResilientTransport
from resilient_llm.testing import FakeProvider
from tests.signals import Recording, Span, Spans

__all__ = [
    "BODY",
    "FIXED",
    "STREAM",
    "URL",
    "CallSpan",
    "ask",
    "client_of",
    "outcomes",
    "read_stream",
    "telemetry_of",
    "the_call",
]

FIXED = Backoff(initial=1.0, maximum=1.0, jitter="none")
URL = "http://provider.example:8080/v1/chat/completions"
BODY = {"model": "gpt-4o", "messages": [{"role": "user", "content": "hi"}]}
STREAM = {**BODY, "stream": True}

CallSpan = tuple[Spans, Span]


def telemetry_of(recording: Recording, **options: Any) -> Telemetry:
    """Send what is observed to a recording."""
    return Telemetry(
        tracer_provider=recording.tracer_provider, meter_provider=recording.meter_provider, **options
    )


def client_of(
    observed: Recording | Telemetry,
    provider: FakeProvider | Callable[[httpx2.Request], Any],
    *policies: Policy,
    **options: Any,
) -> httpx2.AsyncClient:
    """Make a client whose calls go through policies to a provider, and are recorded."""
    telemetry = telemetry_of(observed) if isinstance(observed, Recording) else observed
    inner: httpx2.AsyncBaseTransport = (
        provider.httpx2_transport() if isinstance(provider, FakeProvider) else httpx2.MockTransport(provider)
    )
    transport = ResilientTransport(inner, policies=policies, telemetry=telemetry, **options)
    return httpx2.AsyncClient(transport=transport, timeout=60)


async def ask(client: httpx2.AsyncClient, model: str = "gpt-4o") -> httpx2.Response:
    """Make a call that is not streamed."""
    return await client.post(URL, json={**BODY, "model": model})


async def read_stream(client: httpx2.AsyncClient, model: str = "gpt-4o") -> list[bytes]:
    """Make a streamed call and read it to its end."""
    async with client.stream("POST", URL, json={**STREAM, "model": model}) as response:
        return [chunk async for chunk in response.aiter_raw()]


def the_call(recording: Recording, name: str = "chat") -> CallSpan:
    """Give everything that was recorded, and the span of the one call among it."""
    spans = recording.spans
    return spans, spans.one(name)


def outcomes(spans: Sequence[Span]) -> list[Any]:
    """Give how attempts ended."""
    return [span.attributes["resilient_llm.attempt.outcome"] for span in spans]
