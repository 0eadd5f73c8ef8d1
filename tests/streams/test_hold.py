"""What is held back until a stream has content, and what passes as it comes."""

from __future__ import annotations

import gzip
import json
import math
from functools import partial
from typing import Any

import anyio
import httpx2
import pytest

from resilient_llm import AttemptTimeout, Backoff, Deadline, Retry, Stream
from resilient_llm.outcome import Verdict
from tests.streams.scripted import (
    ASK,
    DONE,
    EVENTS,
    OVERLOADED,
    PING,
    ROLE,
    WHOLE,
    Body,
    Spy,
    Upstream,
    chunks,
    data,
    read,
    resilient,
    says,
    send,
    streamed,
)

pytestmark = pytest.mark.anyio

AT_ONCE = Backoff(initial=0.001, maximum=0.001, jitter="none")
TWICE = Retry(max_attempts=2, backoff=AT_ONCE)
ALL = b"".join(WHOLE)
JSON = {"content-type": "application/json"}


def json_reply(body: object, status: int = 200, headers: dict[str, str] = JSON) -> httpx2.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx2.Response(
        status, headers={**headers, "content-length": str(len(content))}, stream=Body(content)
    )


async def test_events_are_passed_on_one_by_one_and_byte_for_byte() -> None:
    crlf = [part.replace(b"\n", b"\r\n") for part in WHOLE]
    for parts in (WHOLE, crlf, [PING, *WHOLE], [b"\xef\xbb\xbf", *WHOLE]):
        upstream = Upstream(partial(streamed, *[step for part in parts for step in (0.1, part)]))
        came = await chunks(await send(resilient(upstream, TWICE)))
        assert b"".join(chunk for _, chunk in came) == b"".join(parts)
        assert len(came) == 3  # all up to the first content; the rest as it comes
        assert [at for at, _ in came] == [0, 0.1, 0.2]


@pytest.mark.parametrize("size", [1, 2, 7, 64])
async def test_however_they_are_cut(size: int) -> None:
    parts = [ALL[at : at + size] for at in range(0, len(ALL), size)]
    spy = Spy()
    came = await chunks(await send(resilient(Upstream(lambda: streamed(*parts)), TWICE, spy)))
    assert b"".join(chunk for _, chunk in came) == ALL
    assert all(chunk.endswith(b"\n\n") for _, chunk in came)  # where an error could be told
    assert spy.ended[0].verdict is Verdict.SUCCESS


async def test_what_is_held_is_bounded_and_beyond_that_committed() -> None:
    pings = [b": " + b"x" * 1000 + b"\n\n"] * 20
    upstream = Upstream(lambda: streamed(*pings, ROLE, httpx2.ReadError("reset")))
    response = await send(resilient(upstream, Stream(hold_max=10_000), TWICE))
    body = await read(response)
    assert len(upstream.sent) == 1  # it could not be told that it began anew
    assert body.startswith(b"".join(pings) + ROLE)
    assert b'"read_error"' in body[len(b"".join(pings) + ROLE) :]
    upstream = Upstream(lambda: streamed(*pings, ROLE, httpx2.ReadError("reset")), lambda: streamed(*WHOLE))
    assert await read(await send(resilient(upstream, TWICE))) == ALL  # the default is a MiB


async def test_an_event_that_is_too_large_ends_the_stream_and_not_before() -> None:
    """SSE-13: 130 KB, 600 KB, 2 MB and a picture of 20 MB pass; what is over the limit does not fill the memory."""
    for size in (130_000, 600_000, 2_000_000, 20_000_000):
        large = says("x" * size)
        parts = [large[at : at + 65_536] for at in range(0, len(large), 65_536)]
        body = await read(await send(resilient(Upstream(partial(streamed, ROLE, *parts, *WHOLE[1:])), TWICE)))
        assert body == ROLE + large + b"".join(WHOLE[1:])
    spy = Spy()
    endless = [ROLE, says("one"), b"data: ", *[b"x" * 65_536] * 1000]
    upstream = Upstream(lambda: streamed(*endless))
    bounded = Stream(max_event_size=8 * 1024 * 1024)
    body = await read(await send(resilient(upstream, bounded, TWICE, spy)))
    assert body.startswith(ROLE + says("one") + b'data: {"error"')
    assert b'"event_too_large"' in body
    assert len(body) < 1000
    assert [outcome.error_type for outcome in spy.ended] == ["event_too_large"]
    assert upstream.bodies[0].reads < 8 * 1024 * 1024 / 65_536 + 5
    assert upstream.all_closed


async def test_an_error_can_be_added_so_the_length_is_left_out() -> None:
    for answered in (WHOLE, [ROLE, says("Hello "), httpx2.ReadError("reset")]):
        headers = {**EVENTS, "content-length": str(len(ALL)), "x-request-id": "7"}
        upstream = Upstream(partial(streamed, *answered, headers=headers))
        response = await send(resilient(upstream, TWICE))
        assert response.headers["x-request-id"] == "7"
        assert "content-length" not in response.headers
        await read(response)


@pytest.mark.parametrize(
    "policies",
    [[TWICE], [Stream(resume="continue", prefill=lambda _call: True), TWICE], []],
    ids=["held", "held, and could be gone on with", "not held"],
)
async def test_what_the_provider_says_is_wrong_is_the_last_it_says(policies: list[Any]) -> None:
    spy = Spy()
    upstream = Upstream(lambda: streamed(ROLE + OVERLOADED + DONE, math.inf))
    with anyio.fail_after(1):
        response = await send(resilient(upstream, *policies, Deadline(100), spy))
        body = await read(response)
    assert response.status_code == 200
    assert body == ROLE + OVERLOADED
    assert len(upstream.sent) == (2 if policies else 1)
    assert upstream.all_closed
    assert {outcome.error_type for outcome in spy.ended} == {"overloaded"}
    assert ("x-should-retry" in response.headers) is bool(policies)


# Content encodings: bytes pass as they came, and nothing can be put between them


def zipped(*parts: bytes) -> list[bytes]:
    whole = gzip.compress(b"".join(parts))
    return [whole[at : at + 50] for at in range(0, len(whole), 50)]


ZIPPED = {**EVENTS, "content-encoding": "gzip"}


async def test_an_encoded_stream_passes_as_it_is() -> None:
    """HTTP-01."""
    parts = zipped(*WHOLE)
    spy = Spy()
    headers = {**ZIPPED, "content-length": str(len(b"".join(parts)))}
    response = await send(resilient(Upstream(lambda: streamed(*parts, headers=headers)), TWICE, spy))
    assert response.headers["content-encoding"] == "gzip"
    assert response.headers["content-length"] == headers["content-length"]  # and that it is
    assert await read(response) == b"".join(parts)
    assert spy.ended[0].verdict is Verdict.SUCCESS
    assert spy.calls[0].first_content is not None


async def test_an_encoded_stream_that_fails_unseen_is_tried_again() -> None:
    upstream = Upstream(
        lambda: streamed(*zipped(ROLE, OVERLOADED), headers=ZIPPED),
        lambda: streamed(*zipped(*WHOLE), headers=ZIPPED),
    )
    response = await send(resilient(upstream, TWICE))
    assert gzip.decompress(await read(response)) == ALL


async def test_what_is_left_of_an_encoded_stream_is_decoded_with_the_headers_to_match() -> None:
    upstream = Upstream(
        lambda: streamed(*zipped(ROLE, OVERLOADED, DONE), headers={**ZIPPED, "content-length": "9"})
    )
    response = await send(resilient(upstream, TWICE))
    assert "content-encoding" not in response.headers
    assert "content-length" not in response.headers
    assert (await read(response)).startswith(ROLE + OVERLOADED)


@pytest.mark.parametrize(
    ("last", "error"),
    [
        (None, httpx2.RemoteProtocolError),
        (httpx2.ReadError("reset"), httpx2.ReadError),
        (math.inf, httpx2.ReadTimeout),
    ],
    ids=["truncated", "reset", "stall"],
)
async def test_an_encoded_stream_that_breaks_is_an_exception(last: Any, error: type[Exception]) -> None:
    parts: list[Any] = [*zipped(ROLE, says("Hello "), says("world"))]
    if last is not None:
        parts.append(last)
    spy = Spy()
    upstream = Upstream(lambda: streamed(*parts, headers=ZIPPED))
    response = await send(resilient(upstream, TWICE, AttemptTimeout(content_gap=5), spy))
    with pytest.raises(error):
        await read(response)
    assert spy.ended[0].verdict is Verdict.FAILURE
    assert upstream.all_closed


async def test_an_encoding_nobody_can_read_passes_at_once() -> None:
    headers = {**EVENTS, "content-encoding": "rot13"}
    spy = Spy()
    upstream = Upstream(lambda: streamed(b"qngn", 1.0, b"!", 1.0, b"!", headers=headers))
    response = await send(resilient(upstream, TWICE, AttemptTimeout(first_content=1.5, content_gap=1.5), spy))
    assert await chunks(response) == [(0, b"qngn"), (1, b"!"), (2, b"!")]  # every byte may be content
    assert spy.ended[0].verdict is Verdict.SUCCESS


# What says it is a stream and is not, and the other way round


@pytest.mark.parametrize("chunked", [1000, 5])
async def test_json_under_the_name_of_a_stream(chunked: int) -> None:
    """STR-17, the other way round."""
    refused = json.dumps({"error": {"message": "no", "code": "invalid_api_key"}}).encode()
    answer = json.dumps({"choices": [{"message": {"content": "Hello"}, "finish_reason": "stop"}]}).encode()
    for body, then in ((refused, refused), (answer, ALL)):  # an SDK would see nothing in an answer
        parts = [body[at : at + chunked] for at in range(0, len(body), chunked)]
        spy = Spy()
        headers = {**EVENTS, "content-length": str(len(body))}
        upstream = Upstream(partial(streamed, *parts, headers=headers), lambda: streamed(ALL))
        assert await read(await send(resilient(upstream, TWICE, spy))) == then
        assert spy.ended[0].error_type == ("invalid_api_key" if body is refused else "unexpected_body")


async def test_str_17_a_json_error_in_place_of_a_stream_is_there_at_once() -> None:
    upstream = Upstream(lambda: json_reply({"error": {"message": "no", "code": "invalid_api_key"}}, 401))
    began = anyio.current_time()
    response = await send(resilient(upstream, TWICE, AttemptTimeout(headers=5, first_content=10)))
    assert (response.status_code, anyio.current_time() - began) == (401, 0)
    assert json.loads(await read(response))["error"]["code"] == "invalid_api_key"
    assert int(response.headers["content-length"]) == len(await read(response))
    assert len(upstream.sent) == 1


@pytest.mark.parametrize(
    "kind", ["application/json", "text/plain; charset=utf-8", "application/octet-stream", None]
)
async def test_a_stream_under_another_name_is_one_all_the_same(kind: str | None) -> None:
    headers = {} if kind is None else {"content-type": kind}
    spy = Spy()
    upstream = Upstream(
        lambda: streamed(ROLE, OVERLOADED, headers=headers),
        lambda: streamed(*WHOLE[:2], 1.0, *WHOLE[2:], headers=headers),
    )
    came = await chunks(await send(resilient(upstream, TWICE, spy)))
    assert b"".join(chunk for _, chunk in came) == ALL
    assert [at for at, _ in came] == [0, 1, 1]  # as it comes, and not at the end
    assert [outcome.verdict for outcome in spy.ended] == [Verdict.FAILURE, Verdict.SUCCESS]


async def test_a_whole_reply_to_who_asked_for_a_stream() -> None:
    """An SDK looks for events in it, finds none, and takes that for an answer without a word."""
    answer = {"choices": [{"message": {"content": "Hello"}, "finish_reason": "stop"}]}
    upstream = Upstream(lambda: json_reply(answer), lambda: streamed(ALL))
    spy = Spy()
    assert await read(await send(resilient(upstream, TWICE, spy))) == ALL
    assert [outcome.error_type for outcome in spy.ended] == ["unexpected_body", None]
    assert spy.ended[0].ambiguous
    alone = await send(resilient(Upstream(lambda: json_reply(answer)), TWICE))
    assert alone.status_code == 502
    elsewhere = Upstream(lambda: json_reply(answer))
    other = await send(resilient(elsewhere, TWICE), url="http://h.example/v1/else")
    assert json.loads(await read(other)) == answer


@pytest.mark.parametrize("more", [[], WHOLE, [5.0]], ids=["alone", "then an answer", "then silence"])
async def test_a_terminal_marker_before_there_is_an_answer(more: list[Any]) -> None:
    """An SDK reads no further than that."""
    spy = Spy()
    upstream = Upstream(lambda: streamed(DONE, *more), lambda: streamed(*WHOLE))
    assert await read(await send(resilient(upstream, TWICE, spy))) == ALL
    assert [outcome.error_type for outcome in spy.ended] == ["empty_stream", None]
    body = await read(await send(resilient(Upstream(lambda: streamed(ROLE, DONE, *more)), Deadline(60))))
    assert DONE not in body  # nobody is to take it for one
    assert b'"code": "truncated"' in body


async def test_what_is_not_in_its_encoding_is_no_stream() -> None:
    headers = {**EVENTS, "content-encoding": "gzip"}
    upstream = Upstream(lambda: streamed(*WHOLE, headers=headers), lambda: streamed(*WHOLE))
    assert await read(await send(resilient(upstream, TWICE))) == ALL
    response = await send(resilient(Upstream(lambda: streamed(*WHOLE, headers=headers)), TWICE))
    assert response.status_code == 502


async def test_without_a_retry_a_late_first_content_is_the_librarys_timeout_for_an_sdk_to_try_again() -> None:
    upstream = Upstream(lambda: streamed(1.0, PING, math.inf))
    began = anyio.current_time()
    with pytest.raises(httpx2.ReadTimeout, match="first_content_timeout"):
        await send(resilient(upstream, Deadline(60), AttemptTimeout(first_content=3)))
    assert anyio.current_time() - began == 3
    assert upstream.all_closed
    upstream = Upstream(lambda: streamed(PING, 1.0, *WHOLE))
    response = await send(resilient(upstream, AttemptTimeout(first_content=3)))
    assert await read(response) == PING + ALL


@pytest.mark.parametrize(("method", "status"), [("HEAD", 200), ("POST", 304)])
async def test_a_reply_without_a_body_is_not_an_empty_stream(method: str, status: int) -> None:
    spy = Spy()
    upstream = Upstream(lambda: httpx2.Response(status, headers=EVENTS, stream=Body()))
    response = await send(resilient(upstream, TWICE, spy), method=method)
    assert (response.status_code, await read(response), len(upstream.sent)) == (status, b"", 1)
    assert spy.ended[0].verdict is Verdict.SUCCESS


async def test_a_stream_in_memory_is_looked_at_too() -> None:
    upstream = Upstream(
        lambda: httpx2.Response(200, headers=EVENTS, content=ROLE + OVERLOADED),
        lambda: httpx2.Response(200, headers=EVENTS, content=ALL),
    )
    assert await read(await send(resilient(upstream, TWICE))) == ALL
    assert len(upstream.sent) == 2


# What nobody knows, or must not be done twice


async def test_a_protocol_nobody_knows_passes_as_it_comes() -> None:
    """An error of one JSON-RPC call, say, is not the end of the stream it comes in."""
    url = "http://h.example/mcp"
    events = [
        PING,
        data({"jsonrpc": "2.0", "error": {"code": -32000}}),
        data({"jsonrpc": "2.0", "result": 1}),
        b"data: x",
    ]
    upstream = Upstream(lambda: streamed(*[step for event in events for step in (event, 1.0)]))
    spy = Spy()
    came = await chunks(await send(resilient(upstream, TWICE, spy), {"jsonrpc": "2.0"}, url=url))
    assert spy.ended[0].ok
    assert b"".join(chunk for _, chunk in came) == b"".join(events)
    assert [at for at, _ in came][:3] == [0, 1, 2]
    upstream = Upstream(lambda: streamed(events[2], httpx2.ReadError("reset")))
    response = await send(resilient(upstream, TWICE), {"jsonrpc": "2.0"}, url=url)
    stream = aiter(response.stream)  # type: ignore[arg-type]
    assert await anext(stream) == events[2]
    with pytest.raises(httpx2.ReadError, match="reset"):  # and no event of somebody else's protocol
        await anext(stream)


async def test_a_protocol_nobody_knows_has_events_of_any_size() -> None:
    url = "http://h.example/events"
    upstream = Upstream(lambda: streamed(b"data: ", b"x" * 200_000, b"y" * 10, b"\n\n"))
    body = await read(await send(resilient(upstream, Stream(max_event_size=1000), TWICE), {}, url=url))
    assert body == b"data: " + b"x" * 200_000 + b"y" * 10 + b"\n\n"


async def test_what_must_not_be_done_twice_is_not_held_back() -> None:
    url = "http://h.example/v1/responses"
    start = data({"type": "response.created", "sequence_number": 0, "response": {"id": "r"}})
    upstream = Upstream(lambda: streamed(start, 5.0, httpx2.ReadError("reset")))
    asked = {"model": "m", "input": "hi", "stream": True, "store": True}
    response = await send(resilient(upstream, TWICE), asked, url=url)
    came = await chunks(response)
    assert came[0] == (0, start)
    assert came[1][0] == 5
    assert len(upstream.sent) == 1


async def test_a_stream_is_read_no_faster_than_its_caller_reads() -> None:
    upstream = Upstream(lambda: streamed(*WHOLE[:2], *[says("x")] * 100, *WHOLE[2:]))
    response = await send(resilient(upstream, TWICE))
    body = upstream.bodies[0]
    stream = aiter(response.stream)  # type: ignore[arg-type]
    assert body.reads == 2
    for ahead in range(2, 20):
        await anext(stream)
        assert body.reads == ahead
        await anyio.sleep(10)
        assert body.reads == ahead
    await response.stream.aclose()  # type: ignore[union-attr]


async def test_no_attempt_is_given_up_as_empty_before_its_end() -> None:
    """STR-07: only the end decides, however slow the model is."""
    upstream = Upstream(lambda: streamed(*(20.0, PING) * 3, *WHOLE))
    response = await send(resilient(upstream, TWICE), ASK)
    assert (await read(response)).endswith(ALL)
    assert len(upstream.sent) == 1


async def test_a_stream_of_another_kind_from_a_provider_that_is_known() -> None:
    """The events of a job have no last word that a completion has."""
    events = [data({"error": "of the job"}), data({"object": "fine_tuning.job.event", "message": "step 1"})]
    url = "https://api.openai.com/v1/fine_tuning/jobs/1/events?stream=true"
    spy = Spy()
    response = await send(
        resilient(Upstream(lambda: streamed(*events)), TWICE, spy), {}, url=url, method="GET"
    )
    assert await read(response) == b"".join(events)
    assert [outcome.verdict for outcome in spy.ended] == [Verdict.SUCCESS]
