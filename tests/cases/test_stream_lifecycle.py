"""Field cases of streams, at the client's door: what a caller gets and what a provider sees.

What single events and ends mean is in `test_streams_meaning`. In `tests/streams` there are callers who leave a service
(STR-13, STR-14: `test_asgi_relay`), usage asked for in a caller's name (STR-16: `test_usage`), and tasks that share a
stream (CAN-06 to CAN-08: `test_ends`).
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import anyio
import httpx2
import pytest

from resilient_llm import Backoff, CircuitBreaker, CircuitState, Deadline, Retry, Stream
from resilient_llm.outcome import Verdict
from tests.streams.scripted import (
    ASK,
    DONE,
    OVERLOADED,
    PING,
    ROLE,
    WHOLE,
    Spy,
    Upstream,
    data,
    read,
    resilient,
    says,
    send,
    streamed,
)

pytestmark = pytest.mark.anyio

MESSAGES = "http://h.example/v1/messages"
TWICE = Retry(max_attempts=2, backoff=Backoff(initial=0.01, maximum=0.01, jitter="none"))
START = data({"type": "message_start", "message": {"id": "m", "role": "assistant"}}, "message_start")
HELLO = data(
    {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Hello"}},
    "content_block_delta",
)
STOP = data({"type": "message_delta", "delta": {"stop_reason": "end_turn"}}, "message_delta") + data(
    {"type": "message_stop"}, "message_stop"
)
REFUSED = data({"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}, "error")
CUT = httpx2.RemoteProtocolError("peer closed connection")


async def test_str_01_an_error_event_is_retried_before_content_and_told_after_it() -> None:
    breaker = CircuitBreaker(consecutive_failures=2)
    upstream = Upstream(lambda: streamed(START, REFUSED), lambda: streamed(START, HELLO, STOP))
    assert await read(await send(resilient(upstream, TWICE, breaker), url=MESSAGES)) == START + HELLO + STOP
    upstream = Upstream(lambda: streamed(START, HELLO, REFUSED))
    for _ in range(2):
        body = await read(await send(resilient(upstream, TWICE, breaker), url=MESSAGES))
        assert body == START + HELLO + REFUSED  # the provider's own, and nothing after it
    assert len(upstream.sent) == 2
    assert breaker.state("h.example") is CircuitState.OPEN


@pytest.mark.parametrize(
    ("url", "parts", "marker"),
    [(None, [ROLE, says("Hel"), says("lo")], b"[DONE]"), (MESSAGES, [START, HELLO, HELLO], b"message_stop")],
    ids=["chat", "messages"],
)
async def test_str_03_a_proper_end_without_its_marker_is_truncation(
    url: str | None, parts: list[bytes], marker: bytes
) -> None:
    spy = Spy()
    where = {} if url is None else {"url": url}
    body = await read(await send(resilient(Upstream(lambda: streamed(*parts)), TWICE, spy), **where))
    assert body.startswith(b"".join(parts))
    assert b"truncated" in body
    assert marker not in body
    assert [(outcome.verdict, outcome.error_type) for outcome in spy.ended] == [
        (Verdict.FAILURE, "truncated")
    ]


@pytest.mark.parametrize("before", [[], [PING], [ROLE]], ids=["at once", "after a ping", "after the role"])
async def test_str_06_a_cut_before_content_is_tried_again(before: list[bytes]) -> None:
    upstream = Upstream(lambda: streamed(*before, CUT), lambda: streamed(*WHOLE))
    assert await read(await send(resilient(upstream, TWICE))) == b"".join(WHOLE)
    assert len(upstream.sent) == 2
    assert upstream.bodies[0].closed is not None


async def test_str_06_a_cut_after_content_is_one_error_and_no_replay() -> None:
    spy = Spy()
    upstream = Upstream(lambda: streamed(ROLE, says("one"), says("two"), says("thr")[:-20], CUT))
    body = await read(await send(resilient(upstream, TWICE, spy)))
    whole = ROLE + says("one") + says("two")
    assert body.startswith(whole)
    assert body.removeprefix(whole).count(b"data: ") == 1  # what was cut off is not passed on
    assert b'"remote_protocol_error"' in body
    assert b"[DONE]" not in body
    assert len(upstream.sent) == 1
    assert spy.ended[0].verdict is Verdict.FAILURE


@pytest.mark.parametrize("empty", [[], [PING, PING]], ids=["no bytes", "comments"])
async def test_str_07_an_empty_stream_is_tried_again_and_a_502_in_the_end(empty: list[bytes]) -> None:
    upstream = Upstream(lambda: streamed(*empty), lambda: streamed(*WHOLE))
    assert await read(await send(resilient(upstream, TWICE))) == b"".join(WHOLE)
    response = await send(resilient(Upstream(lambda: streamed(*empty)), TWICE))
    assert (response.status_code, response.headers["content-type"]) == (502, "application/json")
    assert b"empty_stream" in await read(response)


@pytest.mark.parametrize("stream", [[], [Stream()], [Stream(resume="continue", prefill=["another"])]])
async def test_str_08_nothing_is_said_twice(stream: list[Any]) -> None:
    upstream = Upstream(
        lambda: streamed(ROLE, says("Hel"), CUT), lambda: streamed(ROLE, says("Hello", "stop"), DONE)
    )
    body = await read(await send(resilient(upstream, *stream, Retry(max_attempts=5))))
    assert body.count(b"Hel") == 1
    assert len(upstream.sent) == 1


async def test_str_08_a_refused_prefill_does_not_replace_the_failure() -> None:
    refusal = {"error": {"message": "assistant prefill is not supported", "code": "invalid_prefill"}}
    upstream = Upstream(lambda: streamed(ROLE, says("Hel"), CUT), lambda: httpx2.Response(400, json=refusal))
    stream = Stream(resume="continue", prefill=["m"])
    body = await read(await send(resilient(upstream, stream, TWICE)))
    assert b'"remote_protocol_error"' in body
    assert b"prefill" not in body


async def test_str_10_an_error_that_comes_with_the_first_event_is_within_reach_of_the_retry() -> None:
    throttled = httpx2.Response(429, json={"error": {"message": "slow down"}}, headers={"retry-after": "2"})
    upstream = Upstream(lambda: throttled, lambda: streamed(ROLE, OVERLOADED), lambda: streamed(*WHOLE))
    began = anyio.current_time()
    retry = Retry(max_attempts=3, backoff=Backoff(initial=1, maximum=1, jitter="none"))
    assert await read(await send(resilient(upstream, retry))) == b"".join(WHOLE)
    waits = [at - began for at in upstream.sent]
    assert 2 <= waits[1] <= 2.3
    assert waits[2] - waits[1] == pytest.approx(1)


async def test_can_11_one_deadline_for_attempts_that_never_answer() -> None:
    """Three attempts of 30 s are not a minute and a half."""
    upstream = Upstream(lambda: streamed(math.inf))
    began = anyio.current_time()
    response = await send(resilient(upstream, Deadline(30), Retry()))
    assert (response.status_code, anyio.current_time() - began) == (504, 30)
    assert len(upstream.sent) == 1


async def test_what_is_forwarded_is_what_came() -> None:
    """SSE-04, SSE-06, SSE-07, SSE-16, SSE-17: odd, and none of our business."""
    odd = [
        b"id: 1\n" + ROLE,
        PING,
        b"data:\n\n",
        b"data: : keepalive\n\n",
        b": OPENROUTER PROCESSING\n\n",
        data({"choices": [], "prompt_filter_results": []}),
        'data: {"choices":[{"delta":{"content":"\u2705 \u2028 \u4f60"}}]}\n\n'.encode(),
        says("Hello", "stop"),
        DONE,
    ]
    for size in (1, 3, 1000):
        whole = b"".join(odd)
        parts = [whole[at : at + size] for at in range(0, len(whole), size)]
        spy = Spy()
        assert (
            await read(await send(resilient(Upstream(partial(streamed, *parts)), TWICE, spy), ASK)) == whole
        )
        assert spy.ended[0].ok
