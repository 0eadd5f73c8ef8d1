"""Replies in one piece: read inside the attempt, so that a cut or false one is tried again like any failure."""

from __future__ import annotations

import gzip
import json
import math
from typing import Any

import anthropic
import anyio
import httpx2
import openai
import pytest

from resilient_llm import AttemptTimeout, Backoff, Bulkhead, Deadline, Retry
from resilient_llm.outcome import Verdict
from tests.streams.scripted import ASK, Body, Spy, Upstream, read, resilient, send, streamed
from tests.streams.scripted import WHOLE as EVENTS

pytestmark = pytest.mark.anyio

TWICE = Retry(max_attempts=2, backoff=Backoff(initial=0.001, maximum=0.001, jitter="none"))
WHOLE = {**ASK, "stream": False}
ANSWER = json.dumps(
    {
        "id": "c1",
        "object": "chat.completion",
        "model": "m-1",
        "choices": [
            {"index": 0, "message": {"role": "assistant", "content": "Hello"}, "finish_reason": "stop"}
        ],
        "usage": {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4},
    }
).encode()
JSON = {"content-type": "application/json"}
HTML = b"<html><body>Please log in</body></html>"


def reply(*steps: Any, status: int = 200, headers: dict[str, str] = JSON) -> httpx2.Response:
    return httpx2.Response(status, headers=headers, stream=Body(*steps))


FALSE: dict[str, tuple[list[Any], dict[str, str], str, str]] = {
    "cut": ([ANSWER[:50]], JSON, "truncated", "truncated"),
    "broken off": ([ANSWER[:50], httpx2.ReadError("reset")], JSON, "read_error", "read_error"),
    "empty": ([], JSON, "empty_body", "empty_body"),
    "a page": ([HTML], {"content-type": "text/html"}, "unexpected_body", "unexpected_body"),
    "a page that says it is JSON": ([HTML], JSON, "truncated", "truncated"),
    "nothing at all": ([], {}, "empty_body", "empty_body"),
    "null": ([b"null"], JSON, "unexpected_body", "unexpected_body"),
    "an empty object": ([b"{}"], JSON, "unexpected_body", "unexpected_body"),
    "an empty list": ([b"[]"], JSON, "unexpected_body", "unexpected_body"),
    "another thing": ([b'{"status": "ok"}'], JSON, "unexpected_body", "unexpected_body"),
    "a stream": (EVENTS, {"content-type": "text/event-stream"}, "unexpected_body", "unexpected_body"),
    "a stream called JSON": (EVENTS, JSON, "unexpected_body", "unexpected_body"),
    "not gzip": ([ANSWER], {**JSON, "content-encoding": "gzip"}, "unexpected_body", "unexpected_body"),
}


@pytest.mark.parametrize("status", [204, 205])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_model_that_has_no_content_to_give_is_asked_again(status: int, stream: bool) -> None:
    upstream = Upstream(
        lambda: reply(status=status, headers={}), lambda: streamed(*EVENTS) if stream else reply(ANSWER)
    )
    whole = b"".join(EVENTS) if stream else ANSWER
    assert await read(await send(resilient(upstream, TWICE), {**ASK, "stream": stream})) == whole
    assert len(upstream.sent) == 2
    response = await send(resilient(Upstream(lambda: reply(status=status, headers={})), TWICE))
    assert (response.status_code, json.loads(await read(response))["error"]["code"]) == (502, "empty_body")


@pytest.mark.parametrize("body", [b"{}", b"[]", b"", ANSWER])
@pytest.mark.parametrize("url", ["http://h.example/v1/files", "https://api.openai.com/v1/moderations"])
async def test_on_other_routes_anything_may_be_an_answer(body: bytes, url: str) -> None:
    status = 200 if body else 204
    upstream = Upstream(lambda: reply(body, status=status))
    response = await send(resilient(upstream, TWICE), WHOLE, url=url)
    assert (response.status_code, await read(response), len(upstream.sent)) == (status, body, 1)


@pytest.mark.parametrize(("steps", "headers", "error_type", "code"), FALSE.values(), ids=FALSE)
async def test_a_reply_that_is_none_is_tried_again(
    steps: list[Any], headers: dict[str, str], error_type: str, code: str
) -> None:
    spy = Spy()
    upstream = Upstream(lambda: reply(*steps, headers=headers), lambda: reply(ANSWER))
    assert await read(await send(resilient(upstream, TWICE, spy), WHOLE)) == ANSWER
    assert [outcome.error_type for outcome in spy.ended] == [error_type, None]
    assert spy.ended[0].ambiguous  # it may be billed
    assert upstream.bodies[0].closed is not None

    upstream = Upstream(lambda: reply(*steps, headers=headers))
    response = await send(resilient(upstream, TWICE), WHOLE)
    body = json.loads(await read(response))
    assert (response.status_code, body["error"]["code"]) == (502, code)
    assert response.headers["x-should-retry"] == "false"
    assert len(upstream.sent) == 2


@pytest.mark.parametrize("key", [key for key in FALSE if key != "broken off"])
async def test_without_a_retry_it_passes_as_it_is(key: str) -> None:
    steps, headers, *_ = FALSE[key]
    spy = Spy()
    response = await send(
        resilient(Upstream(lambda: reply(*steps, headers=headers)), Deadline(10), spy), WHOLE
    )
    assert response.status_code == 200
    assert await read(response) == b"".join(steps)
    assert spy.ended[0].verdict is Verdict.FAILURE  # but circuits and spans know


async def test_an_error_in_a_200_gets_its_status_in_the_end_and_an_sdk_raises_it() -> None:
    """SDKs go by the status: of the body as it came they would make an answer with nothing in it."""
    refused = json.dumps(
        {"error": {"message": "slow down", "type": "rate_limit", "code": "rate_limit_exceeded"}}
    )
    upstream = Upstream(lambda: reply(refused.encode()), lambda: reply(ANSWER))
    assert await read(await send(resilient(upstream, TWICE), WHOLE)) == ANSWER
    upstream = Upstream(lambda: reply(refused.encode()))
    async with httpx2.AsyncClient(transport=resilient(upstream, TWICE)) as http:
        client = openai.AsyncOpenAI(base_url="http://h.example/v1", api_key="none", http_client=http)
        with pytest.raises(openai.RateLimitError, match="slow down") as raised:
            await client.chat.completions.create(model="m", messages=[])
    assert raised.value.code == "rate_limit_exceeded"
    assert len(upstream.sent) == 2
    overloaded = json.dumps({"type": "error", "error": {"type": "overloaded_error", "message": "no"}})
    upstream = Upstream(lambda: reply(overloaded.encode()))
    async with httpx2.AsyncClient(transport=resilient(upstream, TWICE)) as http:
        claude = anthropic.AsyncAnthropic(base_url="http://h.example", api_key="none", http_client=http)
        with pytest.raises(anthropic.InternalServerError, match="no") as error:
            await claude.messages.create(
                model="m", max_tokens=5, messages=[{"role": "user", "content": "hi"}]
            )
    assert error.value.status_code == 529
    assert len(upstream.sent) == 2


async def test_an_encoded_reply_is_read_and_passes_as_it_is() -> None:
    headers = {**JSON, "content-encoding": "gzip"}
    upstream = Upstream(
        lambda: reply(gzip.compress(ANSWER[:50]), headers=headers),
        lambda: reply(gzip.compress(ANSWER), headers=headers),
    )
    response = await send(resilient(upstream, TWICE), WHOLE)
    assert gzip.decompress(await read(response)) == ANSWER
    assert response.headers["content-encoding"] == "gzip"
    assert len(upstream.sent) == 2


async def test_a_reply_too_large_to_look_at_passes_and_holds_its_permits_until_it_has() -> None:
    bulkhead = Bulkhead(max_concurrent=1)
    parts = [b'"' + b"x" * 1_048_575] * 20
    upstream = Upstream(lambda: reply(*parts))
    response = await send(resilient(upstream, bulkhead, TWICE), WHOLE)
    assert upstream.bodies[0].reads == 17
    assert bulkhead.in_use() == 1
    stream = aiter(response.stream)  # type: ignore[arg-type]
    got = [await anext(stream) for _ in range(20)]
    assert got == parts
    assert upstream.bodies[0].reads == 20
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    assert bulkhead.in_use() == 0


async def test_sound_is_not_read_ahead_whoever_makes_it() -> None:
    upstream = Upstream(lambda: reply(b"a", b"b", headers={"content-type": "audio/mpeg"}))
    response = await send(
        resilient(upstream, TWICE), {"model": "tts"}, url="http://h.example/v1/audio/speech"
    )
    assert upstream.bodies[0].reads == 0
    assert await read(response) == b"ab"


# Error replies


@pytest.mark.parametrize("steps", [[b'{"er', math.inf], [math.inf], [b'{"er', httpx2.ReadError("reset")]])
async def test_an_error_whose_body_does_not_come_is_still_that_error(steps: list[Any]) -> None:
    spy = Spy()
    headers = {**JSON, "content-length": "100", "retry-after": "3"}
    upstream = Upstream(lambda: reply(*steps, status=429, headers=headers))
    began = anyio.current_time()
    response = await send(resilient(upstream, Retry(max_attempts=1), spy), WHOLE)
    assert anyio.current_time() - began <= 5
    assert (response.status_code, await read(response)) == (429, b"")
    assert "content-length" not in response.headers
    assert (spy.ended[0].verdict, spy.ended[0].retry_after) == (Verdict.THROTTLED, 3)
    assert upstream.all_closed


async def test_an_error_in_place_of_a_stream_is_read_within_its_attempt() -> None:
    """STR-10."""
    upstream = Upstream(lambda: reply(b"{}", status=503), lambda: streamed(*EVENTS))
    assert await read(await send(resilient(upstream, TWICE))) == b"".join(EVENTS)


async def test_one_clock_for_all_of_a_reply() -> None:
    upstream = Upstream(lambda: reply(1.0, ANSWER[:50], 1.5, ANSWER[50:]))
    clocks = AttemptTimeout(headers=0.5, first_content=0.7, content_gap=0.5, whole_reply=3)
    assert await read(await send(resilient(upstream, clocks), WHOLE)) == ANSWER
    spy = Spy()
    response = await send(resilient(upstream, AttemptTimeout(whole_reply=2), TWICE, spy), WHOLE)
    assert response.status_code == 504
    assert [outcome.error_type for outcome in spy.ended] == ["timeout", "timeout"]
    assert upstream.all_closed
    with pytest.raises(httpx2.ReadTimeout):  # where nobody retries, an SDK does so by itself
        await send(resilient(upstream, AttemptTimeout(whole_reply=2)), WHOLE)


async def test_an_error_that_is_what_was_asked_for_is_an_answer() -> None:
    """The state of a job that has failed, from a provider whose errors look alike."""
    failed = json.dumps(
        {"object": "response", "status": "failed", "error": {"code": "server_error"}}
    ).encode()
    for url in ("https://api.openai.com/v1/responses/resp_1", "https://api.openai.com/v1/fine_tuning/jobs/1"):
        spy, upstream = Spy(), Upstream(lambda: reply(failed))
        response = await send(resilient(upstream, TWICE, spy), {}, url=url, method="GET")
        assert (response.status_code, await read(response)) == (200, failed)
        assert (len(upstream.sent), spy.ended[0].verdict) == (1, Verdict.SUCCESS)


async def test_a_limit_for_the_whole_reply_holds_for_one_that_is_not_read_here() -> None:
    spy = Spy()
    upstream = Upstream(lambda: reply(b"a", 1.0, b"b", math.inf, headers={"content-type": "audio/mpeg"}))
    transport = resilient(upstream, Deadline(60), AttemptTimeout(whole_reply=5, first_content=2), spy)
    response = await send(transport, {"model": "tts"}, url="http://h.example/v1/audio/speech")
    began = anyio.current_time()
    with pytest.raises(httpx2.ReadTimeout, match="the attempt took too long"):
        await read(response)
    assert anyio.current_time() - began == pytest.approx(5)
    assert (spy.ended[0].verdict, spy.ended[0].error_type) == (Verdict.FAILURE, "timeout")
    assert upstream.all_closed
