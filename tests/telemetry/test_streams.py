"""The spans of a call whose reply is streamed."""

from __future__ import annotations

import httpx2
import pytest

from resilient_llm import Retry
from resilient_llm.testing import FakeModel, FakeProvider, Fault, Latency
from tests.signals import Recording
from tests.telemetry.observed import (
    FIXED,
    STREAM,
    URL,
    client_of,
    read_stream,
    the_call,
)

pytestmark = pytest.mark.anyio


async def test_a_stream_is_timed_to_its_first_chunk_and_ends_with_its_last() -> None:
    recording = Recording()
    provider = FakeProvider(
        FakeModel(latency=Latency(headers=0.1, first_token=0.4, per_token=0.25), reply="one two three")
    )
    provider.script(None, [Fault(status=500)])
    client = client_of(recording, provider, Retry(backoff=FIXED))
    async with client, client.stream("POST", URL, json=STREAM) as response:
        assert len(recording.spans) == 2  # the failed attempt and the backoff; the rest is open
        chunks = [chunk async for chunk in response.aiter_raw()]
    assert len(chunks) > 1

    spans, call = the_call(recording)
    attempt = spans.named("attempt")[-1]
    assert call.end == attempt.end
    assert call.attributes["gen_ai.request.stream"] is True
    assert call.attributes["gen_ai.response.finish_reasons"] == ("stop",)
    first = attempt.attributes["resilient_llm.attempt.time_to_first_chunk"]
    assert isinstance(first, float)
    assert 0.1 <= first <= 0.5
    assert attempt.seconds >= first + 2 * 0.25 - 1e-6
    began = (attempt.start - call.start) / 1e9
    assert call.attributes["gen_ai.response.time_to_first_chunk"] == pytest.approx(began + first, abs=1e-6)
    (commit,) = call.events
    assert commit.name == "resilient_llm.commit"
    assert (commit.at - attempt.start) / 1e9 == pytest.approx(first, abs=1e-6)
    assert recording.points.one("gen_ai.client.operation.time_to_first_chunk").value == pytest.approx(
        began + first, abs=1e-6
    )


async def test_a_stream_that_is_cut_ends_with_error() -> None:
    recording = Recording()
    provider = FakeProvider(FakeModel(latency=Latency(per_token=0.1)))
    provider.script(None, [Fault(cut_after_tokens=2)])
    async with client_of(recording, provider) as client:
        with pytest.raises(httpx2.RemoteProtocolError):
            await read_stream(client)
    spans, call = the_call(recording)
    assert (call.status, call.attributes["resilient_llm.outcome"]) == ("ERROR", "failed")
    assert call.attributes["gen_ai.response.finish_reasons"] == ("error",)
    attempt = spans.one("attempt")
    assert (attempt.status, attempt.attributes["http.response.status_code"]) == ("ERROR", 200)
    assert attempt.attributes["resilient_llm.attempt.possibly_billed"] is True


async def test_the_body_of_an_error_is_no_first_chunk() -> None:
    recording = Recording()
    provider = FakeProvider()
    provider.script(None, [Fault(status=400)])
    async with client_of(recording, provider) as client:
        assert await read_stream(client)
    _, call = the_call(recording)
    assert "gen_ai.response.time_to_first_chunk" not in call.attributes
    assert call.events == ()
