"""Gemini's streams that are no events but a JSON array, which passes as it comes and is judged like any stream."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Sequence
from typing import Any

import anyio
import httpx2
import pytest

from resilient_llm import AttemptTimeout, Backoff, Deadline, Retry
from resilient_llm.outcome import Usage, Verdict
from tests.streams.scripted import Body, Spy, Step, Upstream, chunks, read, resilient, send

pytestmark = pytest.mark.anyio

URL = "http://h.example/v1beta/models/m:streamGenerateContent"
ASK = {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]}
JSON = {"content-type": "application/json; charset=UTF-8"}
TWICE = Retry(max_attempts=2, backoff=Backoff(initial=1, maximum=1, jitter="none"))


def part(text: str, finish: str | None = None, **more: Any) -> bytes:
    candidate: dict[str, Any] = {"content": {"role": "model", "parts": [{"text": text}]}, "index": 0}
    if finish is not None:
        candidate["finishReason"] = finish
    return json.dumps({"candidates": [candidate], **more}, indent=1).encode()


USED = {"usageMetadata": {"promptTokenCount": 3, "candidatesTokenCount": 2}}
WHOLE: list[bytes] = [b"[" + part("The "), b"\r\n,\r\n" + part("fox", "STOP", **USED), b"\r\n]\r\n"]
BUSY = json.dumps({"error": {"code": 503, "message": "busy", "status": "UNAVAILABLE"}}).encode()
RESET = httpx2.ReadError("reset")


def array(*steps: Step, headers: dict[str, str] = JSON) -> httpx2.Response:
    return httpx2.Response(200, headers=headers, stream=Body(*steps))


async def test_it_passes_as_it_comes_and_its_usage_is_read() -> None:
    spy = Spy()
    steps: list[Step] = [1.0, WHOLE[0], 2.0, WHOLE[1], 3.0, WHOLE[2]]
    response = await send(resilient(Upstream(lambda: array(*steps)), TWICE, spy), ASK, url=URL)
    came = await chunks(response)
    assert [at for at, _ in came] == [0, 2, 5]
    assert b"".join(chunk for _, chunk in came) == b"".join(WHOLE)
    assert spy.ended[0].ok
    assert spy.ended[0].usage == Usage(input_tokens=3, output_tokens=2)
    assert spy.calls[0].first_content == 1


@pytest.mark.parametrize("size", [1, 7])
async def test_its_bytes_are_the_same_however_they_come(size: int) -> None:
    stream = b"".join(WHOLE)
    cut = [stream[at : at + size] for at in range(0, len(stream), size)]
    assert await read(await send(resilient(Upstream(lambda: array(*cut)), TWICE), ASK, url=URL)) == stream
    packed = gzip.compress(stream)
    headers = {**JSON, "content-encoding": "gzip"}
    upstream = Upstream(lambda: array(packed[:30], packed[30:], headers=headers))
    assert gzip.decompress(await read(await send(resilient(upstream, TWICE), ASK, url=URL))) == stream


UNSEEN: dict[str, tuple[list[Step], str]] = {
    "empty": ([b"[]"], "empty_stream"),
    "nothing but spaces": ([b" [ ", b" ] "], "empty_stream"),
    "usage only": ([b"[" + json.dumps(USED).encode() + b"]"], "truncated"),
    "cut": ([b"[", RESET], "read_error"),
    "a proper end in the middle": ([WHOLE[0][:20]], "truncated"),
    "an error": ([b"[" + BUSY + b"]"], "UNAVAILABLE"),
    "an error alone": ([BUSY], "UNAVAILABLE"),
    "silence": ([b"[", math.inf], "first_content_timeout"),
}


@pytest.mark.parametrize(("steps", "error_type"), UNSEEN.values(), ids=UNSEEN)
async def test_what_fails_before_there_is_content_is_tried_again(steps: list[Step], error_type: str) -> None:
    spy, clocks = Spy(), AttemptTimeout(first_content=5)
    upstream = Upstream(lambda: array(*steps), lambda: array(*WHOLE))
    response = await send(resilient(upstream, TWICE, clocks, spy), ASK, url=URL)
    assert await read(response) == b"".join(WHOLE)
    assert [outcome.error_type for outcome in spy.ended] == [error_type, None]
    alone = await send(resilient(Upstream(lambda: array(*steps)), TWICE, clocks), ASK, url=URL)
    assert alone.status_code == {"UNAVAILABLE": 503, "first_content_timeout": 504}.get(error_type, 502)


SEEN: dict[str, tuple[Sequence[Step], str, type[Exception]]] = {
    "no reason to finish": ([WHOLE[0], b"]"], "truncated", httpx2.RemoteProtocolError),
    "never closed": (WHOLE[:2], "truncated", httpx2.RemoteProtocolError),
    "cut": ([WHOLE[0], RESET], "read_error", httpx2.ReadError),
    "stall": ([WHOLE[0], 1.0, b" ", math.inf], "content_gap_timeout", httpx2.ReadTimeout),
}


@pytest.mark.parametrize(("steps", "error_type", "raised"), SEEN.values(), ids=SEEN)
async def test_a_failure_that_is_seen_is_an_exception_since_nothing_can_be_told_in_an_array(
    steps: Sequence[Step], error_type: str, raised: type[Exception]
) -> None:
    spy, upstream = Spy(), Upstream(lambda: array(*steps))
    began = anyio.current_time()
    response = await send(resilient(upstream, TWICE, AttemptTimeout(content_gap=4), spy), ASK, url=URL)
    with pytest.raises(raised):
        await read(response)
    assert anyio.current_time() - began == (4 if error_type == "content_gap_timeout" else 0)
    assert (spy.ended[0].verdict, spy.ended[0].error_type) == (Verdict.FAILURE, error_type)
    assert len(upstream.sent) == 1
    assert upstream.all_closed


async def test_an_error_in_the_middle_is_the_last_that_passes() -> None:
    spy = Spy()
    steps = [WHOLE[0], b"," + BUSY, b"]"]
    response = await send(resilient(Upstream(lambda: array(*steps)), TWICE, spy), ASK, url=URL)
    assert json.loads(await read(response))[-1]["error"]["status"] == "UNAVAILABLE"
    assert spy.ended[0].error_type == "UNAVAILABLE"


async def test_where_events_were_asked_for_an_array_is_no_answer() -> None:
    events = b"data: " + json.dumps(json.loads(part("fox", "STOP"))).encode() + b"\r\n\r\n"
    upstream = Upstream(
        lambda: array(*WHOLE), lambda: array(events, headers={"content-type": "text/event-stream"})
    )
    spy = Spy()
    response = await send(resilient(upstream, Deadline(60), TWICE, spy), ASK, url=f"{URL}?alt=sse")
    assert await read(response) == events
    assert spy.ended[0].error_type == "unexpected_body"
