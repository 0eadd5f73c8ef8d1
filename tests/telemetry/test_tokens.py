"""The tokens of a call, and the names of the GenAI conventions that are still moving."""

from __future__ import annotations

from typing import Any

import pytest

from resilient_llm import Reply, Retry, Usage
from resilient_llm.outcome import Outcome, Verdict
from resilient_llm.testing import FakeProvider
from tests.signals import Recording
from tests.support import Door, Nothing
from tests.telemetry.observed import URL, client_of, read_stream, telemetry_of

pytestmark = pytest.mark.anyio


class Counting:
    """A provider whose replies say what they used."""

    def __init__(self, usage: Usage) -> None:
        self.usage = usage

    async def __call__(self, attempt: Any) -> Any:
        attempt.finish(Outcome(verdict=Verdict.SUCCESS, usage=self.usage))
        return Reply(200, [], Nothing(), complete=True)


USED = Usage(input_tokens=700, output_tokens=20, cached_tokens=500)


async def test_tokens_are_on_the_span_and_in_one_histogram_by_type() -> None:
    recording = Recording()
    door = Door(Retry(), provider=Counting(USED), telemetry=telemetry_of(recording))
    await door()
    call = recording.spans.one("chat")
    assert {name: value for name, value in call.attributes.items() if "usage" in name} == {
        "gen_ai.usage.input_tokens": 700,
        "gen_ai.usage.output_tokens": 20,
        "gen_ai.usage.cache_read.input_tokens": 500,
    }
    sent = recording.points.one("gen_ai.client.token.usage", type="input")
    assert (sent.unit, sent.count, sent.value) == ("{token}", 1, 700)
    assert sent.bounds == tuple(4**n for n in range(14))
    assert recording.points.one("gen_ai.client.token.usage", type="output").value == 20
    assert len(recording.points.of("gen_ai.client.token.usage")) == 2


@pytest.mark.parametrize("cut", [False, True])
async def test_what_a_reply_says_of_itself_is_on_the_span(cut: bool) -> None:
    recording = Recording()
    ended = (
        Outcome(verdict=Verdict.FAILURE, error_type="truncated") if cut else Outcome(verdict=Verdict.SUCCESS)
    )

    async def answer(attempt: Any) -> Reply:
        attempt.telemetry.answered(id="chatcmpl-1", model="gpt-4o-2024-08-06", finish_reasons=("stop",))
        attempt.finish(ended)
        return Reply(200, [], Nothing(), complete=True)

    await Door(provider=answer, telemetry=telemetry_of(recording))()
    call = recording.spans.one("chat")
    assert call.attributes["gen_ai.response.id"] == "chatcmpl-1"
    assert call.attributes["gen_ai.response.model"] == "gpt-4o-2024-08-06"
    assert call.attributes["gen_ai.response.finish_reasons"] == ("stop",)
    assert call.attributes["resilient_llm.outcome"] == ("truncated" if cut else "success")


async def test_tokens_that_are_not_known_are_not_zero() -> None:
    recording = Recording()
    await Door(provider=Counting(Usage(output_tokens=0)), telemetry=telemetry_of(recording))()
    assert "gen_ai.usage.input_tokens" not in recording.spans.one("chat").attributes
    (only,) = recording.points.of("gen_ai.client.token.usage")
    assert (only.attributes["gen_ai.token.type"], only.count, only.value) == ("output", 1, 0)


async def test_the_newer_set_of_names() -> None:
    recording = Recording()
    telemetry = telemetry_of(recording, semconv="inference")
    await Door(provider=Counting(USED), telemetry=telemetry)()
    async with client_of(telemetry, FakeProvider()) as client:
        await read_stream(client)
        await client.post(
            URL.replace("chat/completions", "embeddings"), json={"model": "small", "input": "x"}
        )

    points = recording.points
    assert {point.name for point in points if point.name.startswith("gen_ai.")} == {
        "gen_ai.client.inference.duration",
        "gen_ai.client.inference.time_to_first_chunk",
        "gen_ai.client.inference.usage.input_tokens",
        "gen_ai.client.inference.usage.output_tokens",
        "gen_ai.client.inference.usage.cache_read.input_tokens",
        "gen_ai.client.operation.duration",  # of the embeddings, which are no inference
    }
    assert points.one("gen_ai.client.inference.duration").count == 2
    assert points.one("gen_ai.client.inference.usage.input_tokens").value == 700
    assert points.one("gen_ai.client.operation.duration").attributes["gen_ai.operation.name"] == "embeddings"
