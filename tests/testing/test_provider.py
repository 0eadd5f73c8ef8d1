"""The fake provider's behaviour in time and on the wire, in virtual time, on both event loops."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpx
import pytest

from resilient_llm.testing import (
    OK,
    ASGIStreamTransport,
    FakeModel,
    FakeProvider,
    Fault,
    Latency,
    ProviderRequest,
    RateLimits,
    flapping,
)

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"
PATHS = [CHAT, MESSAGES, RESPONSES]


def request_body(path: str, *, model: str = "m", text: str = "hi", **extra: Any) -> dict[str, Any]:
    prompt = (
        {"input": text}
        if path in (RESPONSES, "/v1/embeddings")
        else {"messages": [{"role": "user", "content": text}]}
    )
    return {"model": model, **prompt, **extra}


async def post(http: httpx.AsyncClient, path: str = CHAT, **extra: Any) -> httpx.Response:
    return await http.post(path, json=request_body(path, **extra))


async def follow(http: httpx.AsyncClient, arrived: list[tuple[float, bytes]], *, stream: bool = True) -> None:
    """Read a response and write down what arrives when, however it ends."""
    async with http.stream("POST", CHAT, json=request_body(CHAT, stream=stream)) as response:
        async for chunk in response.aiter_raw():
            arrived.append((anyio.current_time(), chunk))  # noqa: PERF401 - what came before a failure counts


@asynccontextmanager
async def client_of(provider: FakeProvider, **headers: str) -> AsyncIterator[httpx.AsyncClient]:
    transport = ASGIStreamTransport(provider, app_errors="raise")
    async with httpx.AsyncClient(
        transport=transport, base_url="http://fake", headers=headers, timeout=None
    ) as http:
        yield http


def events_of(body: bytes) -> Iterator[Any]:
    """Parse an event stream: JSON where it is, text where not."""
    for block in body.decode().split("\n\n"):
        data = "\n".join(
            line.removeprefix("data: ") for line in block.split("\n") if line.startswith("data: ")
        )
        if data:
            try:
                yield json.loads(data)
            except ValueError:
                yield data


def text_of(event: Any) -> str:
    """Return the text that a token event of any dialect carries."""
    if not isinstance(event, dict):
        return ""
    if event.get("choices"):
        return str(event["choices"][0]["delta"].get("content") or "")
    delta = event.get("delta")
    return str(delta if isinstance(delta, str) else (delta or {}).get("text", ""))


def streamed_text(body: bytes) -> str:
    return "".join(map(text_of, events_of(body)))


TERMINAL = {CHAT: b"[DONE]", MESSAGES: b"message_stop", RESPONSES: b"response.completed"}
FINISH = {CHAT: b'"finish_reason":"stop"', MESSAGES: b"end_turn", RESPONSES: b"response.output_text.done"}


@pytest.mark.parametrize("path", PATHS)
async def test_a_reply_is_the_same_text_streamed_or_whole(path: str) -> None:
    provider = FakeProvider(FakeModel(reply="one  two\nthree "))
    async with client_of(provider) as http:
        whole = await post(http, path)
        streamed = await post(http, path, stream=True)
    assert "one  two\\nthree " in whole.text
    assert whole.headers["content-type"] == "application/json"
    assert streamed_text(streamed.content) == "one  two\nthree "
    assert streamed.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert TERMINAL[path] in streamed.content.split(b"\n\n")[-2]


async def test_tokens_arrive_one_by_one_at_their_times() -> None:
    provider = FakeProvider(
        FakeModel(reply="one two three", latency=Latency(headers=1, first_token=2, per_token=4))
    )
    provider.script("m", [Fault(delay_headers=0.125, delay_first_token=0.25, token_delay=0.5)])
    async with client_of(provider) as http:
        arrived: list[tuple[float, bytes]] = []
        await follow(http, arrived)
        await follow(http, arrived)
    assert [(time, text) for time, chunk in arrived if (text := streamed_text(chunk))] == [
        *[(3.375, "one"), (7.875, " two"), (12.375, " three")],
        *[(15.375, "one"), (19.375, " two"), (23.375, " three")],
    ]
    first, second = provider.requests
    assert (first.arrived, first.answered, first.ended) == (0, 1.125, 12.375)
    assert (second.arrived, second.answered, second.ended) == (12.375, 13.375, 23.375)


async def test_a_whole_reply_takes_as_long_as_a_stream() -> None:
    provider = FakeProvider(
        FakeModel(reply="one two three", latency=Latency(headers=1, first_token=2, per_token=4))
    )
    async with client_of(provider) as http:
        await post(http)
    assert anyio.current_time() == 11


@pytest.mark.parametrize(
    ("path", "limit", "reason"),
    [
        (CHAT, {"max_tokens": 2}, '"finish_reason":"length"'),
        (CHAT, {"max_completion_tokens": 2, "max_tokens": 5}, '"finish_reason":"length"'),
        (MESSAGES, {"max_tokens": 2}, '"stop_reason":"max_tokens"'),
        (RESPONSES, {"max_output_tokens": 2}, '"incomplete_details":{"reason":"max_output_tokens"}'),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_the_callers_maximum_cuts_the_reply_short(
    path: str, limit: dict[str, int], reason: str, stream: bool
) -> None:
    provider = FakeProvider(FakeModel(reply="one two three"))
    async with client_of(provider) as http:
        response = await post(http, path, stream=stream, **limit)
    assert reason in response.text
    assert "three" not in response.text
    assert provider.requests[0].tokens_sent == 2


async def test_usage_is_sent_when_asked_for() -> None:
    provider = FakeProvider(FakeModel(reply="one two three"))
    async with client_of(provider) as http:
        plain = list(events_of((await post(http, stream=True, text="x" * 41)).content))
        asked = list(
            events_of((await post(http, stream=True, stream_options={"include_usage": True})).content)
        )
        refused = list(
            events_of((await post(http, stream=True, stream_options={"include_usage": False})).content)
        )
    assert all("usage" not in event for event in (*plain, *refused))
    assert asked[-2]["choices"] == []
    assert asked[-2]["usage"]["total_tokens"] == 4
    assert all(event["usage"] is None for event in asked[:-2])
    assert provider.requests[0].prompt_tokens == 11


async def test_a_reply_may_be_a_function_of_the_request() -> None:
    def echo(request: ProviderRequest) -> str:
        messages: Any = request.body["messages"]
        return f"{request.tenant} said {messages[0]['content']}"

    provider = FakeProvider(FakeModel(reply=echo), tenant_header="X-Team")
    async with client_of(provider, **{"x-team": "red"}) as http:
        response = await post(http, text="hello")
    assert response.json()["choices"][0]["message"]["content"] == "red said hello"


# Faults


@pytest.mark.parametrize(
    ("path", "fault", "error"),
    [
        (CHAT, Fault(status=500), {"type": "server_error", "code": None}),
        (CHAT, Fault(status=429), {"type": "requests", "code": "rate_limit_exceeded"}),
        (
            CHAT,
            Fault(status=429, code="insufficient_quota"),
            {"type": "insufficient_quota", "code": "insufficient_quota"},
        ),
        (CHAT, Fault(status=400, code="context_length_exceeded"), {"type": "invalid_request_error"}),
        (CHAT, Fault(status=503, message="busy", type="x"), {"type": "x", "message": "busy"}),
        (MESSAGES, Fault(status=529), {"type": "overloaded_error", "message": "Overloaded"}),
        (MESSAGES, Fault(status=429), {"type": "rate_limit_error"}),
        (MESSAGES, Fault(status=500), {"type": "api_error"}),
        (MESSAGES, Fault(status=418), {"type": "invalid_request_error"}),
        (MESSAGES, Fault(status=502, type="odd_error"), {"type": "odd_error", "message": "odd error"}),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_an_error_has_the_dialects_own_body(
    path: str, fault: Fault, error: dict[str, str | None], stream: bool
) -> None:
    provider = FakeProvider()
    provider.script("m", [fault])
    async with client_of(provider) as http:
        response = await post(http, path, stream=stream)
    assert response.status_code == fault.status
    assert error.items() <= response.json()["error"].items()
    assert response.headers["content-type"] == "application/json"
    if path == MESSAGES:
        assert response.json()["type"] == "error"
        assert response.json()["request_id"] == response.headers["request-id"] == "req_fake000001"
    else:
        assert response.headers["x-request-id"] == "req_fake000001"


@pytest.mark.parametrize(
    ("body", "content", "content_type"),
    [
        ("<html>", b"<html>", "text/plain; charset=utf-8"),
        (b"\x00", b"\x00", "application/octet-stream"),
        ({"error": {"code": 429}}, b'{"error":{"code":429}}', "application/json"),
    ],
)
async def test_a_body_may_be_anything(body: Any, content: bytes, content_type: str) -> None:
    provider = FakeProvider()
    provider.script(
        "m", [Fault(body=body), Fault(status=502, body=body, headers={"Content-Type": "text/html"})]
    )
    async with client_of(provider) as http:
        plain, dressed = await post(http), await post(http)
    assert (plain.status_code, plain.content, plain.headers["content-type"]) == (200, content, content_type)
    assert (dressed.status_code, dressed.content, dressed.headers["content-type"]) == (
        502,
        content,
        "text/html",
    )


@pytest.mark.parametrize("path", PATHS)
async def test_an_error_event_in_a_stream(path: str) -> None:
    provider = FakeProvider()
    provider.script(
        "m", [Fault(error_event_at=2, status=529), Fault(error_event_at=0, body={"error": "boom"})]
    )
    async with client_of(provider) as http:
        response = await post(http, path, stream=True)
        assert response.status_code == 200
        *_, last = events_of(response.content)
        assert streamed_text(response.content) == "The quick"
        assert TERMINAL[path] not in response.content
        if path == CHAT:
            assert last["error"]["type"] == "server_error"
        elif path == MESSAGES:
            assert (last["type"], last["error"]["type"]) == ("error", "overloaded_error")
            assert b"event: error\n" in response.content
        else:
            assert (last["type"], last["code"], last["sequence_number"]) == ("error", "server_error", 6)
        if path != RESPONSES:
            assert list(events_of((await post(http, path, stream=True)).content))[-1] == {"error": "boom"}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("fault", "text", "finish", "terminal"),
    [
        (Fault(omit_done=True), "The quick brown fox jumps over the lazy dog.", True, False),
        (Fault(end_after_tokens=2), "The quick", False, False),
        (Fault(end_after_tokens=99), "The quick brown fox jumps over the lazy dog.", False, False),
        (Fault(empty_stream=True), "", False, False),
        (OK, "The quick brown fox jumps over the lazy dog.", True, True),
    ],
)
async def test_streams_that_end_wrongly(
    path: str, fault: Fault, text: str, finish: bool, terminal: bool
) -> None:
    provider = FakeProvider()
    provider.script("m", [fault])
    async with client_of(provider) as http:
        response = await post(http, path, stream=True)
    assert streamed_text(response.content) == text
    assert (FINISH[path] in response.content) is finish
    assert (TERMINAL[path] in response.content) is terminal
    assert (response.content == b"") is fault.empty_stream
    assert provider.requests[0].complete


@pytest.mark.parametrize("path", PATHS)
async def test_a_malformed_event(path: str) -> None:
    provider = FakeProvider()
    provider.script("m", [Fault(malformed_event_at=1)])
    async with client_of(provider) as http:
        response = await post(http, path, stream=True)
    broken = [event for event in events_of(response.content) if isinstance(event, str) and event != "[DONE]"]
    assert len(broken) == 1
    assert broken[0].startswith("{")
    assert streamed_text(response.content) == "The brown fox jumps over the lazy dog."


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize(
    ("fault", "error", "tokens"),
    [
        (Fault(reset=True), httpx.ReadError, 0),
        (Fault(reset_after_tokens=2), httpx.ReadError, 2),
        (Fault(cut_after_tokens=2), httpx.RemoteProtocolError, 2),
        (Fault(cut_after_tokens=0), httpx.RemoteProtocolError, 0),
        (Fault(cut_after_tokens=99), httpx.RemoteProtocolError, 9),
    ],
)
async def test_broken_connections(fault: Fault, error: type[Exception], tokens: int, stream: bool) -> None:
    provider = FakeProvider()
    provider.script("m", [fault])
    arrived: list[tuple[float, bytes]] = []
    async with client_of(provider) as http:
        with pytest.raises(error):
            await follow(http, arrived, stream=stream)
        assert provider.active == 0
    record = provider.requests[0]
    assert (record.complete, record.disconnected) == (False, False)
    if stream:
        assert record.tokens_sent == tokens
        assert len(list(filter(text_of, events_of(b"".join(chunk for _, chunk in arrived))))) == tokens
    assert record.status == (None if fault.reset else 200)


async def test_a_stall_lasts_until_the_client_leaves() -> None:
    provider = FakeProvider()
    provider.script(
        "m",
        [
            Fault(stall_after_tokens=2, ping_every=10),
            Fault(stall_after_tokens=0),
            Fault(delay_headers=math.inf),
        ],
    )
    async with client_of(provider) as http:
        arrived: list[tuple[float, bytes]] = []
        with anyio.move_on_after(35):
            await follow(http, arrived)
        await provider.wait_until_idle()
        assert arrived[3:] == [(10, b": ping\n\n"), (20, b": ping\n\n"), (30, b": ping\n\n")]
        for _ in range(2):
            with anyio.move_on_after(5):
                await post(http)
            await provider.wait_until_idle()
    assert [request.disconnected_at for request in provider.requests] == [35, 40, 45]
    assert [request.tokens_sent for request in provider.requests] == [2, 0, 0]


async def test_keep_alives_fill_silence_and_take_no_time() -> None:
    provider = FakeProvider(FakeModel(reply="one two"))
    provider.script("m", [Fault(delay_first_token=25, token_delay=5, ping_every=10)])
    async with client_of(provider) as http:
        response = await post(http, MESSAGES, stream=True)
    assert anyio.current_time() == 30
    kinds = [event["type"] for event in events_of(response.content)]
    assert kinds == [
        *("message_start", "content_block_start", "ping", "ping", "ping"),
        *(
            "content_block_delta",
            "content_block_delta",
            "content_block_stop",
            "message_delta",
            "message_stop",
        ),
    ]


async def test_the_body_may_be_cut_into_small_pieces() -> None:
    provider = FakeProvider(FakeModel(reply="naïve ☕"))
    provider.script("m", [Fault(chunk_size=3), Fault(chunk_size=1)])
    async with client_of(provider) as http:
        async with http.stream("POST", CHAT, json=request_body(CHAT, stream=True)) as response:
            parts = [chunk async for chunk in response.aiter_raw()]
        assert {len(part) for part in parts} <= {1, 2, 3}
        assert streamed_text(b"".join(parts)) == "naïve ☕"
        assert (await post(http)).json()["choices"][0]["message"]["content"] == "naïve ☕"


@pytest.mark.parametrize(
    ("fault", "check"),
    [
        (
            Fault(error_event_at=1, status=429),
            lambda response: response.json()["error"]["code"] == "rate_limit_exceeded",
        ),
        (Fault(empty_stream=True), lambda response: response.content == b""),
        (
            Fault(malformed_event_at=0),
            lambda response: response.text.startswith('{"id"') and response.text[-1] != "}",
        ),
        (Fault(finish_reason="content_filter"), lambda response: "content_filter" in response.text),
    ],
)
async def test_what_faults_of_the_reply_do_without_a_stream(fault: Fault, check: Any) -> None:
    provider = FakeProvider()
    provider.script("m", [fault])
    async with client_of(provider) as http:
        response = await post(http)
    assert response.status_code == 200
    assert check(response)


# Scripts


async def test_a_script_plays_one_fault_a_request_then_serves() -> None:
    provider = FakeProvider()
    provider.script("m", [Fault(status=500), OK, Fault(status=503)])
    provider.script(None, itertools.cycle([OK, Fault(status=418)]))
    async with client_of(provider) as http:
        assert [(await post(http)).status_code for _ in range(5)] == [500, 200, 503, 200, 200]
        assert [(await post(http, model="x")).status_code for _ in range(4)] == [200, 418, 200, 418]
        provider.script("m", lambda request: Fault(status=400 + request.number))
        assert (await post(http)).status_code == 410
        provider.script("m", [])
        assert (await post(http)).status_code == 200
    assert provider.requests[0].fault == Fault(status=500)


async def test_a_script_that_yields_no_fault_is_an_error_when_its_turn_comes() -> None:
    provider = FakeProvider()
    bad: Any = iter([500])
    provider.script("m", bad)
    async with client_of(provider) as http:
        with pytest.raises(TypeError, match="a script is made of Fault values, got 500"):
            await post(http)
    worse: Any = lambda request: None  # noqa: E731
    provider.script("m", worse)
    async with client_of(provider) as http:
        with pytest.raises(TypeError, match="got None"):
            await post(http)
    assert provider.active == 0


async def test_flapping_in_time() -> None:
    provider = FakeProvider()
    provider.script("m", flapping(up=10, down=5))
    statuses = []
    async with client_of(provider) as http:
        for _ in range(8):
            statuses.append((await post(http)).status_code)
            await anyio.sleep(4)
    assert statuses == [200, 200, 200, 503, 200, 200, 200, 503]


# Limits


async def test_rate_limits_are_enforced_and_reported_as_openai_does() -> None:
    limits = RateLimits(requests_per_minute=60, tokens_per_minute=100, window=10)
    provider = FakeProvider(FakeModel(reply="one two three four", rate_limits=limits))
    async with client_of(provider) as http:
        first = await post(http, text="x" * 24)
        second = await post(http, text="x" * 24)
    assert first.headers["x-ratelimit-limit-requests"] == "60"
    assert first.headers["x-ratelimit-remaining-requests"] == "9"
    assert first.headers["x-ratelimit-reset-requests"] == "1s"
    assert first.headers["x-ratelimit-limit-tokens"] == "100"
    assert first.headers["x-ratelimit-remaining-tokens"] == "6"
    assert first.headers["x-ratelimit-reset-tokens"] == "6s"
    assert second.status_code == 429
    assert second.headers["retry-after"] == "2"
    assert second.headers["retry-after-ms"] == "2000"
    assert second.json()["error"]["type"] == "tokens"
    assert "Please try again in 2s" in second.json()["error"]["message"]
    assert provider.requests[1].refused == "tokens"
    assert provider.requests[1].tokens_sent == 0


async def test_rate_limits_are_reported_as_anthropic_does() -> None:
    limits = RateLimits(requests_per_minute=1)
    provider = FakeProvider(
        FakeModel(rate_limits=limits), wall_clock=lambda: 2_000_000_000 + anyio.current_time()
    )
    async with client_of(provider) as http:
        first = await post(http, MESSAGES, max_tokens=5)
        await anyio.sleep(0.5)
        second = await post(http, MESSAGES, max_tokens=5)
    assert first.headers["anthropic-ratelimit-requests-limit"] == "1"
    assert first.headers["anthropic-ratelimit-requests-remaining"] == "0"
    assert first.headers["anthropic-ratelimit-requests-reset"] == "2033-05-18T03:34:20Z"
    assert second.status_code == 429
    assert second.headers["retry-after"] == "60"
    assert second.json()["error"]["type"] == "rate_limit_error"


async def test_a_request_larger_than_the_limit_is_refused_for_good() -> None:
    provider = FakeProvider(FakeModel(rate_limits=RateLimits(tokens_per_minute=10)))
    async with client_of(provider) as http:
        openai = await post(http, text="x" * 100)
        anthropic = await post(http, MESSAGES, text="x" * 100)
    assert openai.status_code == anthropic.status_code == 429
    assert "Request too large" in openai.json()["error"]["message"]
    assert "retry-after" not in openai.headers
    assert "retry-after" not in anthropic.headers


async def test_saturation_is_served_at_exactly_the_limit() -> None:
    """Hammer 120 requests a minute with ten callers that come back when told."""
    provider = FakeProvider(FakeModel(reply="one", rate_limits=RateLimits(requests_per_minute=120, window=1)))

    async def caller(http: httpx.AsyncClient) -> None:
        while anyio.current_time() < 60:
            response = await post(http)
            if response.status_code == 429:
                await anyio.sleep(int(response.headers["retry-after-ms"]) / 1000)

    async with client_of(provider) as http, anyio.create_task_group() as group:
        for _ in range(10):
            group.start_soon(caller, http)
    served = [request for request in provider.requests if request.status == 200 and request.arrived < 60]
    assert 115 <= len(served) <= 122


async def test_keys_models_and_the_account_have_their_own_limits() -> None:
    provider = FakeProvider(
        models={
            "shared": FakeModel(rate_limits=RateLimits(requests_per_minute=1)),
            "by key": FakeModel(rate_limits=RateLimits(requests_per_minute=1, per_key=True)),
            "free": FakeModel(),
        },
        account_limits=RateLimits(requests_per_minute=6),
    )

    async def status(model: str, key: str) -> int:
        response = await http.post(
            CHAT, json=request_body(CHAT, model=model), headers={"authorization": f"Bearer {key}"}
        )
        return response.status_code

    async with client_of(provider) as http:
        assert [await status("shared", "a"), await status("shared", "b")] == [200, 429]
        assert [await status("by key", "a"), await status("by key", "b"), await status("by key", "a")] == [
            200,
            200,
            429,
        ]
        assert [await status("free", "a") for _ in range(4)] == [200, 200, 200, 429]
    assert provider.requests[-1].refused == "requests"


async def test_more_than_it_can_serve_at_once_is_refused() -> None:
    overload = Fault(status=429, headers={"retry-after": "1"})
    provider = FakeProvider(FakeModel(max_concurrent=2, overload=overload, latency=Latency(headers=1)))
    statuses: list[int] = []

    async def call(http: httpx.AsyncClient) -> None:
        statuses.append((await post(http)).status_code)

    async with client_of(provider) as http:
        async with anyio.create_task_group() as group:
            for _ in range(5):
                group.start_soon(call, http)
            await provider.wait_for_requests(5)
            await anyio.sleep(0.5)
            assert (provider.active, statuses) == (2, [429, 429, 429])
        # One after the other, each finds the place free that the last has left.
        assert [(await post(http)).status_code for _ in range(3)] == [200, 200, 200]
    assert sorted(statuses) == [200, 200, 429, 429, 429]
    assert [request.refused for request in provider.requests].count("concurrency") == 3


async def test_beyond_the_knee_more_concurrency_brings_no_more_throughput() -> None:
    provider = FakeProvider(FakeModel(knee=10, latency=Latency(headers=1)))

    async def throughput(concurrency: int) -> float:
        start, count = anyio.current_time(), 0

        async def worker(http: httpx.AsyncClient) -> None:
            nonlocal count
            while anyio.current_time() < start + 50:
                await post(http)
                count += 1

        async with client_of(provider) as http, anyio.create_task_group() as group:
            for _ in range(concurrency):
                group.start_soon(worker, http)
        return count / (anyio.current_time() - start)

    assert [round(await throughput(n)) for n in (1, 5, 10, 20, 40)] == [1, 5, 10, 10, 10]


# Everything else


async def test_a_client_that_leaves_is_logged_and_stops_the_work() -> None:
    provider = FakeProvider(
        FakeModel(reply="one two three four", latency=Latency(first_token=1, per_token=1))
    )
    async with client_of(provider, **{"x-tenant": "acme"}) as http:
        with anyio.move_on_after(2.5):
            await follow(http, [])
        await provider.wait_until_idle()
    request = provider.requests[0]
    assert (request.number, request.tenant, request.model, request.stream) == (1, "acme", "m", True)
    assert request.disconnected
    assert request.disconnected_at == request.ended == 2.5
    assert (request.tokens_sent, request.complete, request.status) == (2, False, 200)
    assert request.body["messages"] == [{"role": "user", "content": "hi"}]
    assert json.loads(request.raw_body) == request.body


async def test_a_client_may_leave_before_its_request_is_complete() -> None:
    async def slow_body() -> AsyncIterator[bytes]:
        yield b"{"
        await anyio.sleep(10)
        yield b"}"

    provider = FakeProvider()
    async with client_of(provider) as http:
        with anyio.move_on_after(3):
            await http.post(CHAT, content=slow_body())
        await provider.wait_until_idle()
    assert provider.requests[0].disconnected_at == 3


async def test_a_request_has_ended_when_its_client_sees_the_end() -> None:
    provider = FakeProvider()
    provider.script("m", [OK, Fault(end_after_tokens=1), Fault(empty_stream=True), OK])
    async with client_of(provider) as http:
        for stream in (True, True, True, False):
            await follow(http, [], stream=stream)
            assert provider.active == 0
            assert provider.requests[-1].ended is not None


async def test_counting_and_waiting() -> None:
    provider = FakeProvider(FakeModel(latency=Latency(headers=5)), max_requests_kept=2)
    async with client_of(provider) as http, anyio.create_task_group() as group:

        async def later(delay: float) -> None:
            await anyio.sleep(delay)
            await post(http)

        for delay in range(4):
            group.start_soon(later, delay)
        await provider.wait_for_requests(2)
        assert anyio.current_time() == 1
        await provider.wait_until_active(4)
        assert anyio.current_time() == 3
        assert (provider.total_requests, [request.number for request in provider.requests]) == (4, [3, 4])
        await provider.wait_until_idle()
        assert anyio.current_time() == 8
    assert (provider.active, provider.peak_active) == (0, 4)


async def test_models_keys_and_addresses_it_does_not_know() -> None:
    provider = FakeProvider(None, models={"known": FakeModel()}, api_keys={"secret"})
    async with client_of(provider, authorization="Bearer secret") as http:
        assert (await post(http, model="known")).status_code == 200
        unknown = await post(http, model="unknown")
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
        assert (await http.post(CHAT, content=b"{")).status_code == 400
        assert (await http.post(CHAT, json=[])).status_code == 400
        assert (await http.post(CHAT, json={"messages": []})).status_code == 400
        assert (await http.get("/v2/nothing")).status_code == 404
        assert (await http.get(CHAT)).status_code == 405
        assert (await http.post("/v1/models")).status_code == 405
    async with client_of(provider, **{"x-api-key": "wrong"}) as http:
        assert (await post(http, MESSAGES, model="known")).json()["error"]["type"] == "authentication_error"
    assert provider.requests[-1].api_key == "wrong"


async def test_the_list_of_models() -> None:
    provider = FakeProvider(models={"a": FakeModel(), "b": FakeModel()})
    async with client_of(provider) as http:
        openai = (await http.get("/v1/models")).json()
        anthropic = (await http.get("/v1/models", headers={"anthropic-version": "2023-06-01"})).json()
    assert [model["id"] for model in openai["data"]] == ["a", "b"]
    assert (anthropic["first_id"], anthropic["last_id"], anthropic["has_more"]) == ("a", "b", False)


async def test_embeddings() -> None:
    provider = FakeProvider()
    async with client_of(provider) as http:
        body = (await post(http, "/v1/embeddings", text="same")).json()
        both = (
            await http.post(
                "/v1/embeddings", json={"model": "e", "input": ["same", "other"], "dimensions": 3}
            )
        ).json()
    assert math.isclose(math.hypot(*body["data"][0]["embedding"]), 1)
    assert [len(item["embedding"]) for item in both["data"]] == [3, 3]
    assert both["data"][0]["embedding"] != both["data"][1]["embedding"]
    assert body["usage"] == {"prompt_tokens": 1, "total_tokens": 1}
    assert provider.requests[0].dialect == "openai.embeddings"


async def test_the_same_seed_makes_the_same_run() -> None:
    async def run() -> list[float | None]:
        provider = FakeProvider(FakeModel(latency=Latency(headers=1, spread=0.5)), rng=random.Random(3))
        start = anyio.current_time()
        async with client_of(provider) as http:
            for _ in range(5):
                await post(http)
        return [round((request.ended or 0) - start, 9) for request in provider.requests]

    first = await run()
    assert await run() == first
    assert len({round(b - a, 6) for a, b in itertools.pairwise([0.0, *filter(None, first)])}) == 5


async def test_a_broken_connection_behind_another_server_is_an_exception() -> None:
    provider = FakeProvider()
    provider.script("m", [Fault(reset=True)])

    async def without_extension(scope: Any, receive: Any, send: Any) -> None:
        await provider({**scope, "extensions": None}, receive, send)

    transport = ASGIStreamTransport(without_extension, app_errors="raise")
    async with httpx.AsyncClient(transport=transport, base_url="http://fake") as http:
        with pytest.raises(ConnectionResetError, match="the fake provider breaks this connection"):
            await post(http)


async def test_a_server_that_raises_when_the_client_has_gone_is_understood() -> None:
    provider = FakeProvider()

    async def strict(scope: Any, receive: Any, send: Any) -> None:
        async def raising(message: Any) -> None:
            raise BrokenPipeError

        await provider(scope, receive, raising)
        assert provider.requests[0].disconnected
        await send({"type": "http.response.start", "status": 204})
        await send({"type": "http.response.body"})

    async with httpx.AsyncClient(transport=ASGIStreamTransport(strict), base_url="http://fake") as http:
        assert (await post(http)).status_code == 204


async def test_other_kinds_of_connection() -> None:
    provider = FakeProvider()
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message["type"])

    messages = iter(["lifespan.startup", "lifespan.shutdown"])

    async def receive() -> Any:
        return {"type": next(messages)}

    await provider({"type": "lifespan"}, receive, send)
    await provider({"type": "websocket"}, receive, send)
    assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete", "websocket.close"]
    assert provider.total_requests == 0
