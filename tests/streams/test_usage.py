"""What each attempt used: said once, settled into limits, and counted where nobody got anything for it."""

from __future__ import annotations

import json
import math
from functools import partial
from typing import Any

import anyio
import httpx2
import pytest

from resilient_llm import AttemptTimeout, Backoff, Deadline, RateLimit, Retry, Stream
from resilient_llm.outcome import Usage
from tests.signals import Recording
from tests.streams.scripted import (
    ASK,
    DONE,
    ROLE,
    Spy,
    Upstream,
    data,
    read,
    resilient,
    says,
    send,
    streamed,
    usage,
)
from tests.telemetry.observed import telemetry_of

pytestmark = pytest.mark.anyio

TWICE = Retry(max_attempts=2, backoff=Backoff(initial=1, maximum=1, jitter="none"))
RESET = httpx2.ReadError("reset")
CHAT = "http://h.example/v1/chat/completions"
MESSAGES = "http://h.example/v1/messages"
RESPONSES = "http://h.example/v1/responses"
GEMINI = "http://h.example/v1beta/models/m:streamGenerateContent"
START = data(
    {
        "type": "message_start",
        "message": {"id": "m", "usage": {"input_tokens": 9, "cache_read_input_tokens": 4}},
    },
    "message_start",
)
DELTA = data(
    {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Hello world"}},
    "content_block_delta",
)
TOLD: dict[str, tuple[str, list[bytes], Usage]] = {
    "chat": (
        CHAT,
        [ROLE, says("Hello", "stop"), usage(15, 5), DONE],
        Usage(input_tokens=15, output_tokens=5),
    ),
    "responses": (
        RESPONSES,
        [
            data({"type": "response.output_text.delta", "delta": "Hello"}),
            data(
                {
                    "type": "response.completed",
                    "response": {
                        "status": "completed",
                        "usage": {
                            "input_tokens": 15,
                            "output_tokens": 50,
                            "input_tokens_details": {"cached_tokens": 8},
                            "output_tokens_details": {"reasoning_tokens": 40},
                        },
                    },
                }
            ),
        ],
        Usage(input_tokens=15, output_tokens=50, cached_tokens=8, reasoning_tokens=40),
    ),
    "messages": (
        MESSAGES,
        [
            START,
            DELTA,
            data(
                {
                    "type": "message_delta",
                    "delta": {"stop_reason": "end_turn"},
                    "usage": {"output_tokens": 5},
                },
                "message_delta",
            ),
            data({"type": "message_stop"}, "message_stop"),
        ],
        Usage(input_tokens=13, output_tokens=5, cached_tokens=4),
    ),
    "gemini": (
        GEMINI,
        [
            data(
                {
                    "candidates": [{"content": {"parts": [{"text": "Hello"}]}, "finishReason": "STOP"}],
                    "usageMetadata": {
                        "promptTokenCount": 15,
                        "candidatesTokenCount": 5,
                        "thoughtsTokenCount": 2,
                    },
                }
            )
        ],
        Usage(input_tokens=15, output_tokens=7, reasoning_tokens=2),
    ),
}


@pytest.mark.parametrize(("url", "events", "told"), TOLD.values(), ids=TOLD)
async def test_what_a_stream_says_it_used_is_settled_once(url: str, events: list[bytes], told: Usage) -> None:
    spy = Spy()
    limit = RateLimit(requests_per_minute=1000, tokens_per_minute=1000, estimate=lambda _: 400)
    response = await send(resilient(Upstream(lambda: streamed(*events)), limit, TWICE, spy), url=url)
    assert remaining(limit, spy) == pytest.approx(600)  # reserved
    await read(response)
    await response.stream.aclose()  # type: ignore[union-attr]
    assert [outcome.usage for outcome in spy.ended] == [told]
    assert remaining(limit, spy) == pytest.approx(1000 - (told.total_tokens or 0))


def remaining(limit: RateLimit, spy: Spy) -> float:
    (tokens,) = [level for level in limit.levels(spy.calls[-1]) if level.dimension == "tokens"]
    return tokens.remaining


async def test_of_a_stream_that_is_left_it_is_estimated() -> None:
    """By the length of what came: what the provider bills for such a stream it says nowhere."""
    for leave in ("close", "cancel", "break", "time out"):
        spy = Spy()
        last = RESET if leave == "break" else math.inf
        upstream = Upstream(partial(streamed, START, DELTA, last))
        clocks = AttemptTimeout(content_gap=50 if leave != "time out" else 2)
        response = await send(resilient(upstream, TWICE, clocks, spy), url=MESSAGES)
        with anyio.move_on_after(10 if leave == "cancel" else math.inf):
            if leave == "close":
                await anext(aiter(response.stream))  # type: ignore[arg-type]
                await response.stream.aclose()  # type: ignore[union-attr]
            else:
                await read(response)
        assert [outcome.usage for outcome in spy.ended] == [
            Usage(input_tokens=13, output_tokens=3, cached_tokens=4, estimated=True)
        ], leave


async def test_unknown_is_not_zero() -> None:
    spy = Spy()
    limit = RateLimit(requests_per_minute=1000, tokens_per_minute=1000, estimate=lambda _: 400)
    await read(await send(resilient(Upstream(lambda: streamed(RESET)), limit, Retry(max_attempts=1), spy)))
    assert spy.ended[0].usage is None
    assert remaining(limit, spy) == pytest.approx(600)  # it may have been billed, so the estimate stands


@pytest.mark.parametrize(
    ("first", "first_content", "discarded"),
    [
        ([START, RESET], None, (13, 0)),
        ([START, math.inf], 5.0, (13, 0)),
        ([START], None, (13, 0)),
        ([START + DELTA + data({"type": "error", "error": {"type": "api_error"}}, "error")], None, (13, 3)),
    ],
    ids=["reset", "late", "truncated", "an error"],
)
async def test_what_nobody_got_anything_for_is_counted(
    first: list[Any], first_content: float | None, discarded: tuple[int, int]
) -> None:
    """The provider has read the prompt, and may bill it, before it failed."""
    recording = Recording()
    url, events, told = TOLD["messages"]
    spy = Spy()
    upstream = Upstream(lambda: streamed(*first), lambda: streamed(*events))
    transport = resilient(
        upstream,
        TWICE,
        AttemptTimeout(content_gap=50, first_content=first_content),
        spy,
        telemetry=telemetry_of(recording),
    )
    await read(await send(transport, url=url))
    assert spy.ended[-1].usage == told
    points = recording.points.of("resilient_llm.attempt.discarded_tokens")
    counts = {point.attributes["gen_ai.token.type"]: point.value for point in points}
    assert (counts.get("input", 0), counts.get("output", 0)) == discarded
    assert {point.attributes["resilient_llm.attempt.target"] for point in points} == {"h.example"}
    assert recording.points.one("gen_ai.client.token.usage", gen_ai_token_type="input").value == 13


async def test_what_the_caller_saw_is_not_discarded() -> None:
    recording = Recording()
    stream = Stream(resume="continue", prefill=["m"])
    upstream = Upstream(
        lambda: streamed(ROLE, says("Hello "), RESET), lambda: streamed(ROLE, says("world", "stop"), DONE)
    )
    transport = resilient(upstream, stream, TWICE, telemetry=telemetry_of(recording))
    await read(await send(transport))
    alone = resilient(
        Upstream(lambda: streamed(ROLE, says("Hi"), RESET)), Deadline(60), telemetry=telemetry_of(recording)
    )
    await read(await send(alone))
    assert recording.points.of("resilient_llm.attempt.discarded_tokens") == []


async def test_a_buffered_attempt_that_failed_is_discarded() -> None:
    recording = Recording()
    upstream = Upstream(
        lambda: streamed(ROLE, says("x" * 40), RESET), lambda: streamed(ROLE, says("Hi", "stop"), DONE)
    )
    await read(
        await send(resilient(upstream, Stream(resume="buffer"), TWICE, telemetry=telemetry_of(recording)))
    )
    assert recording.points.one("resilient_llm.attempt.discarded_tokens").value == 10


async def test_what_a_discarded_attempt_has_reported_is_counted_and_not_an_estimate() -> None:
    recording, spy = Recording(), Spy()
    told = [ROLE, says("x" * 400, "stop"), usage(15, 5)]
    upstream = Upstream(lambda: streamed(*told, RESET), lambda: streamed(ROLE, says("Hi", "stop"), DONE))
    telemetry = telemetry_of(recording)
    await read(await send(resilient(upstream, Stream(resume="buffer"), TWICE, spy, telemetry=telemetry)))
    assert spy.ended[0].usage == Usage(input_tokens=15, output_tokens=5)
    points = recording.points.of("resilient_llm.attempt.discarded_tokens")
    counts = {point.attributes["gen_ai.token.type"]: point.value for point in points}
    assert counts == {"input": 15, "output": 5}


async def test_a_span_says_that_its_usage_is_estimated() -> None:
    estimated = "resilient_llm.usage.estimated"
    for events, guessed in (
        ([ROLE, says("Hello", "stop"), usage(3, 2), DONE], False),
        ([ROLE, says("Hello"), RESET], True),
    ):
        recording = Recording()
        upstream = Upstream(partial(streamed, *events))
        await read(await send(resilient(upstream, TWICE, telemetry=telemetry_of(recording))))
        (attempt,) = [span for span in recording.spans if span.name.startswith("attempt")]
        assert (estimated in attempt.attributes) is guessed
        assert (estimated in recording.spans.one("chat").attributes) is guessed


async def test_the_span_has_the_time_to_the_first_content_and_the_model_that_answered() -> None:
    recording = Recording()
    named = data({"id": "c7", "model": "m-2026", "choices": [{"index": 0, "delta": {"content": "Hi"}}]})
    upstream = Upstream(
        lambda: streamed(1.0, RESET),
        lambda: streamed(ROLE, 2.0, named, 3.0, says("!", "stop"), usage(3, 2), DONE),
    )
    await read(await send(resilient(upstream, TWICE, telemetry=telemetry_of(recording))))
    call = recording.spans.one("chat")
    assert call.attributes["gen_ai.response.model"] == "m-2026"
    assert call.attributes["gen_ai.response.time_to_first_chunk"] == pytest.approx(4)  # 1 s, the backoff, 2 s
    assert call.attributes["gen_ai.usage.output_tokens"] == 2
    first, second = [span for span in recording.spans if span.name.startswith("attempt")]
    assert "resilient_llm.attempt.time_to_first_chunk" not in first.attributes
    assert second.attributes["resilient_llm.attempt.time_to_first_chunk"] == pytest.approx(2)
    assert second.seconds == pytest.approx(5)


# STR-16


@pytest.mark.parametrize("asks", [None, False, True])
async def test_str_16_usage_that_was_asked_for_in_a_callers_name_is_not_shown_to_him(
    asks: bool | None,
) -> None:
    events = [ROLE, says("Hello", "stop"), usage(15, 5), DONE]
    upstream, spy = Upstream(lambda: streamed(*events)), Spy()
    asked = ASK if asks is None else {**ASK, "stream_options": {"include_usage": asks, "other": 1}}
    body = await read(await send(resilient(upstream, Stream(include_usage=True), TWICE, spy), asked))
    assert spy.ended[0].usage == Usage(input_tokens=15, output_tokens=5)
    assert body == b"".join(events if asks else [ROLE, says("Hello", "stop"), DONE])
    sent = json.loads(upstream.requests[0].stream._stream)  # type: ignore[union-attr]
    assert sent["stream_options"]["include_usage"] is True
    assert asks is None or sent["stream_options"]["other"] == 1
    assert int(upstream.requests[0].headers["content-length"]) == len(upstream.requests[0].stream._stream)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("asked", "url"), [({**ASK, "stream": False}, CHAT), (ASK, MESSAGES), (ASK, RESPONSES), (ASK, GEMINI)]
)
async def test_str_16_nothing_is_asked_where_nothing_can_be(asked: dict[str, Any], url: str) -> None:
    upstream = Upstream(lambda: httpx2.Response(400, json={}))
    await send(resilient(upstream, Stream(include_usage=True), TWICE), asked, url=url)
    assert json.loads(upstream.requests[0].stream._stream) == asked  # type: ignore[union-attr]
