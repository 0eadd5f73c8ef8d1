"""OBS-04: a long stream is one span for the call and one for the attempt, however many chunks it has."""

from __future__ import annotations

import pytest

from resilient_llm.testing import FakeModel, FakeProvider
from tests.telemetry.service import Service

pytestmark = pytest.mark.anyio


async def test_a_thousand_chunks_are_three_spans() -> None:
    provider = FakeProvider(FakeModel(reply=" ".join(["word"] * 1000)))
    service = Service(provider, instrument="asgi")
    async with service.client() as client, client.stream("POST", "/v1/stream") as response:
        received = b"".join([chunk async for chunk in response.aiter_raw()])
    assert received.count(b"\n\n") >= 1000
    assert service.recording.spans.tree() == "POST /v1/stream\n  chat gpt-4o\n    attempt openai/gpt-4o"
    assert len(service.recording.spans.one("chat").events) == 1
