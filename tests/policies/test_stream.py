"""What becomes of a stream that breaks, as the `Stream` policy says."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from functools import partial
from typing import Any

import anyio
import httpx2
import pytest

from resilient_llm import (
    AttemptTimeout,
    Backoff,
    Bulkhead,
    Call,
    CircuitBreaker,
    ConfigurationError,
    Deadline,
    Pipeline,
    RateLimit,
    Retry,
    Router,
    Stream,
    Target,
)
from resilient_llm.httpx2 import ResilientTransport
from resilient_llm.outcome import Usage, Verdict
from tests.streams.scripted import (
    ASK,
    DONE,
    EVENTS,
    OVERLOADED,
    ROLE,
    WHOLE,
    Body,
    Spy,
    Step,
    Upstream,
    chunks,
    data,
    read,
    resilient,
    says,
    send,
    streamed,
    usage,
)

pytestmark = pytest.mark.anyio

TWICE = Retry(max_attempts=2, backoff=Backoff(initial=1, maximum=1, jitter="none"))
BUFFER = Stream(resume="buffer")
GO_ON = Stream(resume="continue", prefill=["m"])
RESET = httpx2.ReadError("reset")
HALF: list[Step] = [ROLE, says("Hello "), 1.0, says("wor")]
HALF_USED = Usage(output_tokens=3, estimated=True)
REST = [ROLE, says("ld"), says("!", "stop"), DONE]


def text(body: bytes) -> str:
    """Give what was said in a stream."""
    events = [line[6:] for line in body.splitlines() if line.startswith(b"data: {")]
    choices = [choice for event in events for choice in json.loads(event).get("choices", [])]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def asked(request: httpx2.Request) -> dict[str, Any]:
    """Give the body of a request."""
    sent: dict[str, Any] = json.loads(request.stream._stream)  # type: ignore[union-attr]
    return sent


# Buffered


async def test_a_buffered_stream_is_whole_or_none() -> None:
    upstream = Upstream(lambda: streamed(*HALF, RESET), lambda: streamed(*WHOLE[:2], 2.0, *WHOLE[2:]))
    began = anyio.current_time()
    came = await chunks(await send(resilient(upstream, BUFFER, TWICE)))
    assert came == [(0, b"".join(WHOLE))]
    assert anyio.current_time() - began == 1 + 1 + 2
    upstream = Upstream(lambda: streamed(*HALF))  # a proper end of half an answer
    response = await send(resilient(upstream, BUFFER, TWICE))
    assert (response.status_code, len(upstream.sent)) == (502, 2)


async def test_buffering_does_not_need_a_retry() -> None:
    upstream = Upstream(lambda: streamed(*HALF))
    response = await send(resilient(upstream, BUFFER))
    assert response.status_code == 502
    assert "x-should-retry" not in response.headers  # an SDK may
    with pytest.raises(httpx2.ReadError):
        await send(resilient(Upstream(lambda: streamed(*HALF, RESET)), BUFFER))


async def test_what_is_too_long_to_buffer_passes_and_breaks_in_sight() -> None:
    long = [says("x" * 1000)] * 20
    upstream = Upstream(lambda: streamed(ROLE, *long, RESET))
    body = await read(await send(resilient(upstream, Stream(resume="buffer", hold_max=10_000), TWICE)))
    assert body.startswith(b"".join([ROLE, *long]))
    assert b"read_error" in body
    assert len(upstream.sent) == 1


async def test_clocks_run_while_it_is_buffered() -> None:
    spy = Spy()
    upstream = Upstream(lambda: streamed(*HALF, 3.0, *REST))
    clocks = AttemptTimeout(first_content=2, content_gap=2.5)
    began = anyio.current_time()
    response = await send(resilient(upstream, BUFFER, Retry(max_attempts=1), clocks, spy))
    assert (response.status_code, anyio.current_time() - began) == (504, 3.5)
    assert spy.ended[0].error_type == "content_gap_timeout"
    assert spy.ended[0].usage == Usage(output_tokens=3, estimated=True)


async def test_a_model_that_has_said_all_need_not_hang_up() -> None:
    upstream = Upstream(lambda: streamed(*WHOLE, 5.0))
    began = anyio.current_time()
    response = await send(resilient(upstream, BUFFER, TWICE))
    assert anyio.current_time() == began
    assert await read(response) == b"".join(WHOLE)


# Gone on with


async def test_the_rest_of_an_answer_joins_on() -> None:
    spy = Spy()
    upstream = Upstream(lambda: streamed(*HALF, RESET), lambda: streamed(*REST))
    body = await read(await send(resilient(upstream, GO_ON, TWICE, spy), {**ASK, "max_tokens": 100}))
    assert text(body) == "Hello world!"
    assert body.count(b'"role"') == 1
    assert body.count(b"[DONE]") == 1
    assert body.endswith(DONE)
    assert b"error" not in body
    request = asked(upstream.requests[1])
    assert request["messages"][1:] == [{"role": "assistant", "content": "Hello wor"}]
    assert request["max_tokens"] == 98
    assert int(upstream.requests[1].headers["content-length"]) == len(upstream.requests[1].stream._stream)  # type: ignore[union-attr]
    assert [outcome.verdict for outcome in spy.ended] == [Verdict.FAILURE, Verdict.SUCCESS]
    assert [call.number for call in spy.calls] == [1, 2]


async def test_an_error_that_the_provider_tells_is_gone_on_from_too() -> None:
    upstream = Upstream(lambda: streamed(*HALF, OVERLOADED + DONE, math.inf), lambda: streamed(*REST))
    body = await read(await send(resilient(upstream, GO_ON, TWICE)))
    assert text(body) == "Hello world!"
    assert b"overloaded" not in body
    assert upstream.bodies[0].closed is not None


@pytest.mark.parametrize(
    "second",
    [
        lambda: httpx2.Response(400, json={"error": {"message": "no prefill", "code": "unsupported"}}),
        lambda: httpx2.Response(
            200, json={"choices": [{"message": {"content": "Hi"}, "finish_reason": "stop"}]}
        ),
        lambda: httpx2.Response(200, headers={"content-type": "audio/mpeg"}, stream=Body(b"x")),
        lambda: streamed(ROLE, RESET),
        httpx2.ConnectError("refused"),
        ValueError("a bug"),
    ],
    ids=["refused", "JSON", "sound", "broken unseen", "no connection", "a bug"],
)
async def test_one_that_cannot_be_gone_on_with_ends_with_the_first_failure(second: Any) -> None:
    bulkhead, spy = Bulkhead(max_concurrent=1), Spy()
    upstream = Upstream(lambda: streamed(*HALF, RESET), second)
    body = await read(await send(resilient(upstream, bulkhead, GO_ON, Retry(max_attempts=2), spy)))
    assert text(body) == "Hello wor"
    assert b'"read_error"' in body.splitlines()[-2]
    assert b"no prefill" not in body
    assert b"[DONE]" not in body
    assert bulkhead.in_use() == 0
    assert len(upstream.sent) == 2
    assert all(call.finished for call in spy.calls)


async def test_it_is_gone_on_with_once() -> None:
    upstream = Upstream(
        lambda: streamed(*HALF, RESET), lambda: streamed(ROLE, says("ld"), httpx2.WriteError("x"))
    )
    body = await read(await send(resilient(upstream, GO_ON, Retry(max_attempts=5))))
    assert text(body) == "Hello world"
    assert b'"read_error"' in body  # the first one
    assert len(upstream.sent) == 2


async def test_retries_of_the_rest_are_the_calls() -> None:
    """`max_attempts` is for the call; what fails unseen is tried again also when it is the rest."""
    upstream = Upstream(
        lambda: streamed(*HALF, RESET), lambda: streamed(ROLE, RESET), lambda: streamed(*REST)
    )
    retry = Retry(max_attempts=3, backoff=Backoff(initial=1, maximum=1, jitter="none"))
    began = anyio.current_time()
    assert text(await read(await send(resilient(upstream, GO_ON, retry)))) == "Hello world!"
    assert [at - began for at in upstream.sent] == [0, 2, 3]  # it broke at 1; then the backoffs


async def test_the_deadline_holds_for_all_of_it() -> None:
    upstream = Upstream(lambda: streamed(*HALF, RESET), lambda: streamed(50.0, *REST))
    began = anyio.current_time()
    body = await read(await send(resilient(upstream, Deadline(5), GO_ON, TWICE)))
    assert anyio.current_time() - began == 5
    assert b'"read_error"' in body
    assert upstream.all_closed


async def test_who_leaves_meanwhile_leaves_nothing_behind() -> None:
    bulkhead, spy = Bulkhead(max_concurrent=1), Spy()
    calls = Spy()
    for leave in ("cancelled", "closed"):
        upstream = Upstream(lambda: streamed(*HALF, RESET), lambda: streamed(50.0, *REST))
        policies: list[Any] = [calls, bulkhead, GO_ON, TWICE, spy]
        response = await send(ResilientTransport(upstream, policies=policies))

        async def reader(response: httpx2.Response = response) -> None:
            with suppress(anyio.ClosedResourceError):
                await read(response)

        async with anyio.create_task_group() as group:
            group.start_soon(reader)
            await anyio.sleep(10)
            if leave == "closed":
                await response.stream.aclose()  # type: ignore[union-attr]
            else:
                group.cancel_scope.cancel()
        assert bulkhead.in_use() == 0
        assert upstream.all_closed
        assert [outcome.error_type for outcome in spy.ended[-2:]] == ["read_error", "cancelled"]
        assert (calls.ended[-1].error_type, calls.ended[-1].usage) == ("cancelled", HALF_USED)
    assert len(calls.ended) == 2


async def test_both_attempts_are_paid_for() -> None:
    calls, attempts = Spy(), Spy()
    limit = RateLimit(requests_per_minute=1000, tokens_per_minute=1000, estimate=lambda _: 10)
    upstream = Upstream(
        lambda: streamed(ROLE, says("x" * 40), RESET),
        lambda: streamed(ROLE, says("rest", "stop"), usage(15, 5), DONE),
    )
    at_once = Retry(max_attempts=2, backoff=Backoff(initial=0.001, maximum=0.001, jitter="none"))
    transport = ResilientTransport(upstream, policies=[limit, calls, GO_ON, at_once, attempts])
    await read(await send(transport))
    first = Usage(output_tokens=10, estimated=True)
    second = Usage(input_tokens=15, output_tokens=5)
    assert [outcome.usage for outcome in attempts.ended] == [first, second]
    both = Usage(input_tokens=15, output_tokens=15, estimated=True)
    assert [outcome.usage for outcome in calls.ended] == [both]
    (tokens,) = [level for level in limit.levels(calls.calls[0]) if level.dimension == "tokens"]
    assert tokens.remaining == pytest.approx(1000 - 30, abs=0.1)


@pytest.mark.parametrize(
    "half",
    [
        [
            ROLE,
            data(
                {
                    "choices": [
                        {"index": 0, "delta": {"tool_calls": [{"index": 0, "function": {"name": "f"}}]}}
                    ]
                }
            ),
        ],
        [ROLE, says("a"), data({"choices": [{"index": 1, "delta": {"content": "b"}}]})],
        [ROLE, data({"choices": [{"index": 0, "delta": {"reasoning_content": "hm"}}]})],
    ],
    ids=["a tool's arguments", "two alternatives", "only thoughts"],
)
async def test_only_text_can_be_gone_on_with(half: list[bytes]) -> None:
    upstream = Upstream(lambda: streamed(*half, RESET))
    body = await read(await send(resilient(upstream, GO_ON, TWICE)))
    assert b'"read_error"' in body
    assert len(upstream.sent) == 1


async def test_a_model_that_is_not_declared_is_never_asked() -> None:
    upstream = Upstream(lambda: streamed(*HALF, RESET), lambda: streamed(*REST))
    body = await read(await send(resilient(upstream, GO_ON, TWICE), {**ASK, "model": "other"}))
    assert b'"read_error"' in body
    assert len(upstream.sent) == 1


@pytest.mark.parametrize(
    "asked",
    [{**ASK, "n": 2}, {**ASK, "store": True}, {**ASK, "messages": None}],
    ids=["several answers", "not to be repeated", "no conversation"],
)
async def test_a_request_whose_answer_cannot_be_gone_on_with(asked: dict[str, Any]) -> None:
    """Also if by chance only the first of several answers had begun."""
    upstream = Upstream(lambda: streamed(*HALF, RESET), lambda: streamed(*REST))
    assert b'"read_error"' in await read(await send(resilient(upstream, GO_ON, TWICE), asked))
    assert len(upstream.sent) == 1


async def test_what_cannot_be_gone_on_with_is_buffered_if_that_comes_next() -> None:
    either = Stream(resume=["continue", "buffer"], prefill=["m"])
    upstream = Upstream(lambda: streamed(*HALF, RESET), lambda: streamed(*WHOLE))
    response = await send(resilient(upstream, either, TWICE), {**ASK, "n": 2})
    assert await chunks(response) == [(0, b"".join(WHOLE))]


@pytest.mark.parametrize("reason", ["stop", "length", "content_filter"])
@pytest.mark.parametrize("end", [RESET, math.inf], ids=["cut", "stall"])
async def test_an_answer_that_has_finished_is_never_gone_on_with(reason: str, end: Step) -> None:
    spy = Spy()
    upstream = Upstream(lambda: streamed(ROLE, says("The fox."), says("", reason), end))
    clocks = AttemptTimeout(content_gap=5)
    body = await read(await send(resilient(upstream, GO_ON, TWICE, clocks, spy)))
    assert text(body) == "The fox."
    assert b'"code": "%b"' % (spy.ended[0].error_type or "").encode() in body.splitlines()[-2]
    assert len(upstream.sent) == 1
    upstream = Upstream(lambda: streamed(ROLE, says("The fox."), says("", reason)))
    body = await read(await send(resilient(upstream, GO_ON, TWICE)))  # the marker alone is missing
    assert b"error" not in body
    assert len(upstream.sent) == 1


@pytest.mark.parametrize(
    "code", ["content_filter", "context_length_exceeded", "insufficient_quota", "invalid_request_error"]
)
@pytest.mark.parametrize("policies", [[], [TWICE]], ids=["alone", "with a Retry"])
async def test_a_refusal_is_not_sent_again(code: str, policies: list[Any]) -> None:
    refused = data({"error": {"message": "no", "type": code, "code": code}})
    upstream = Upstream(lambda: streamed(*HALF, refused), lambda: streamed(*REST))
    body = await read(await send(resilient(upstream, GO_ON, *policies)))
    assert text(body) == "Hello wor"
    assert code.encode() in body.splitlines()[-2]
    assert len(upstream.sent) == 1


@pytest.mark.parametrize(
    ("retry", "steps"),
    [
        (Retry(max_attempts=1), [*HALF, RESET]),
        (Retry(budget_ratio=0, budget_min_per_second=0), [*HALF, RESET]),
        (Retry(retry_ambiguous=False), [*HALF, RESET]),
        (Retry(max_retry_after=5), [*HALF, OVERLOADED]),
    ],
    ids=["no attempt left", "no budget", "may have been billed", "sooner than the provider wants"],
)
async def test_what_a_retry_would_not_do_is_not_done(retry: Retry, steps: list[Step]) -> None:
    upstream = Upstream(
        lambda: streamed(*steps, headers={**EVENTS, "retry-after": "60"}), lambda: streamed(*REST)
    )
    body = await read(await send(resilient(upstream, GO_ON, retry)))
    assert text(body) == "Hello wor"
    assert (b"overloaded" if OVERLOADED in steps else b"read_error") in body.splitlines()[-2]
    assert len(upstream.sent) == 1


async def test_going_on_is_a_retry_which_waits_as_long_as_the_provider_asks_and_is_paid_for() -> None:
    throttled = data({"error": {"message": "slow down", "code": "rate_limit_exceeded"}})
    retry = Retry(budget_ratio=1, budget_min_per_second=0)
    half: list[Step] = [ROLE, says("Hello wor"), throttled]
    upstream = Upstream(
        lambda: streamed(*half, headers={**EVENTS, "retry-after": "7"}), lambda: streamed(*REST)
    )
    spy = Spy()
    transport = ResilientTransport(upstream, policies=[spy, GO_ON, retry])
    began = anyio.current_time()
    assert text(await read(await send(transport))) == "Hello world!"
    assert 7 <= upstream.sent[1] - began < 9
    (call,) = spy.calls
    assert (call.attempts, call.retries) == (2, 1)
    assert call.budget is not None
    assert call.budget.remaining(anyio.current_time()) == 0  # one deposit for the call, and one retry


async def test_an_event_of_the_rest_may_be_as_large_as_the_policy_says() -> None:
    large = "x" * 9_000_000
    upstream = Upstream(lambda: streamed(*HALF, RESET), lambda: streamed(ROLE, says(large, "stop"), DONE))
    wide = Stream(resume="continue", prefill=["m"], max_event_size=1 << 25)
    narrow = Stream(resume="continue", prefill=["m"], max_event_size=1 << 23)
    assert len(text(await read(await send(resilient(upstream, wide, TWICE))))) == len("Hello wor") + len(
        large
    )
    upstream = Upstream(lambda: streamed(*HALF, RESET), lambda: streamed(ROLE, says(large, "stop"), DONE))
    body = await read(await send(resilient(upstream, narrow, TWICE)))
    assert b'"read_error"' in body
    assert text(body) == "Hello wor"


async def test_a_last_event_that_makes_the_answer_whole_reaches_the_caller() -> None:
    """Without the blank line that it lacks SDKs would leave it out."""
    tail = says("world", "stop").rstrip()
    for end in (tail, tail + b"\n"):
        for policies in ([TWICE], [GO_ON, TWICE], [Deadline(5)], [Stream(resume="buffer")]):
            upstream = Upstream(partial(streamed, ROLE, says("Hello "), end))
            body = await read(await send(resilient(upstream, *policies)))
            assert body == ROLE + says("Hello ") + tail + b"\n\n"
    upstream = Upstream(lambda: streamed(*HALF, RESET), lambda: streamed(ROLE, says("ld!", "stop").rstrip()))
    body = await read(await send(resilient(upstream, GO_ON, TWICE)))
    assert text(body) == "Hello world!"
    assert body.endswith(b"\n\n")


async def test_a_function_may_declare_it_with_fields_for_the_server() -> None:
    def declared(call: Call) -> dict[str, Any]:
        return {"continue_final_message": True, "add_generation_prompt": False}

    upstream = Upstream(lambda: streamed(*HALF, RESET), lambda: streamed(*REST))
    transport = resilient(upstream, Stream(resume="continue", prefill=declared), TWICE)
    assert text(await read(await send(transport))) == "Hello world!"
    request = asked(upstream.requests[1])
    assert (request["continue_final_message"], request["add_generation_prompt"]) == (True, False)


async def test_a_function_that_is_broken_breaks_no_call(caplog: pytest.LogCaptureFixture) -> None:
    def declared(call: Call) -> bool:
        raise KeyError(call.model)

    upstream = Upstream(lambda: streamed(*HALF, RESET), lambda: streamed(*REST))
    body = await read(await send(resilient(upstream, Stream(resume="continue", prefill=declared), TWICE)))
    assert text(body) == "Hello wor"
    assert b'"read_error"' in body
    assert "; the call's stream is not gone on with" in caplog.text


async def test_an_encoded_stream_is_not_gone_on_with() -> None:
    import gzip  # noqa: PLC0415

    upstream = Upstream(
        lambda: streamed(
            gzip.compress(ROLE + says("Hello")), RESET, headers={**EVENTS, "content-encoding": "gzip"}
        )
    )
    with pytest.raises(httpx2.ReadError):
        await read(await send(resilient(upstream, GO_ON, TWICE)))
    assert len(upstream.sent) == 1


async def test_a_circuit_that_opened_meanwhile_is_no_failure_of_its_own() -> None:
    upstream = Upstream(lambda: streamed(*HALF, RESET), lambda: streamed(*REST))
    body = await read(await send(resilient(upstream, GO_ON, TWICE, CircuitBreaker(consecutive_failures=1))))
    assert b'"read_error"' in body
    assert b"circuit" not in body


async def test_the_last_event_of_the_rest_may_lack_its_blank_line() -> None:
    upstream = Upstream(
        lambda: streamed(*HALF, RESET), lambda: streamed(ROLE, says("ld", "stop"), b"data: [DONE]")
    )
    body = await read(await send(resilient(upstream, GO_ON, TWICE)))
    assert text(body) == "Hello world"
    assert body.endswith(DONE)


# Several, and options


async def test_the_first_that_fits_is_done() -> None:
    either = Stream(resume=["continue", "buffer"], prefill=["m"])
    upstream = Upstream(lambda: streamed(*HALF, RESET), lambda: streamed(*REST))
    came = await chunks(await send(resilient(upstream, either, TWICE)))
    assert text(b"".join(chunk for _, chunk in came)) == "Hello world!"
    assert len(came) > 2  # not buffered
    upstream = Upstream(lambda: streamed(*HALF, RESET), lambda: streamed(*WHOLE))
    other = {**ASK, "model": "other"}
    assert await chunks(await send(resilient(upstream, either, TWICE), other)) == [(0, b"".join(WHOLE))]

    both = Stream(resume=["buffer", "continue", "error"], prefill=["m"], hold_max=500)
    upstream = Upstream(lambda: streamed(ROLE, says("a" * 600), RESET), lambda: streamed(*REST))
    assert text(await read(await send(resilient(upstream, both, TWICE)))) == "a" * 600 + "ld!"
    upstream = Upstream(lambda: streamed(*HALF, RESET), lambda: streamed(*WHOLE))
    assert await read(await send(resilient(upstream, both, TWICE))) == b"".join(WHOLE)


NO_UTF8 = says("\u1234").replace(b"\\u1234", b"\xff\xfe").replace(b"\n", b"\r\n")


@pytest.mark.parametrize("cut", [1, 5, 40, 1000])
@pytest.mark.parametrize("broken", [b'data: {"choices": [{"delta": {"con\r\n\r\n', NO_UTF8])
async def test_malformed_events_are_passed_or_skipped(cut: int, broken: bytes) -> None:
    whole = [ROLE, broken, says("Hello "), b": c\n\n", broken, broken, says("world", "stop"), DONE]
    stream = b"".join(whole)
    parts = [stream[at : at + cut] for at in range(0, len(stream), cut)]
    assert await read(await send(resilient(Upstream(lambda: streamed(*parts)), TWICE))) == stream
    skipped = await read(
        await send(resilient(Upstream(lambda: streamed(*parts)), Stream(malformed="skip"), TWICE))
    )
    left = stream.replace(broken, b"")
    assert skipped.replace(b"\n", b"") == left.replace(b"\n", b"")  # a blank line of theirs may stay
    assert text(skipped) == "Hello world"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"resume": "retry"}, "resume='retry': allowed are 'error', 'continue', 'buffer'"),
        ({"resume": []}, r"resume=\[\]"),
        ({"resume": ["buffer", "x"]}, "resume="),
        ({"resume": "buffer", "prefill": ["m"]}, "allowed only with resume='continue'"),
        ({"resume": "continue", "prefill": "gpt-4o"}, "prefill='gpt-4o': a collection"),
        ({"hold_max": -1}, "hold_max=-1"),
        ({"max_event_size": 0}, "max_event_size=0"),
        ({"malformed": "drop"}, "malformed='drop': allowed are 'pass' and 'skip'"),
        ({"resume": None}, "resume=None: allowed are 'error'"),
        ({"resume": 5}, "resume=5: allowed are 'error'"),
        ({"resume": [["error"]]}, r"resume=\[\['error'\]\]: allowed are 'error'"),
        ({"resume": {"buffer"}}, "resume={'buffer'}"),
        ({"resume": ["buffer", "buffer"]}, "each may be named once"),
        ({"resume": ["error", "buffer"]}, "'error' always fits, so nothing may come after it"),
        ({"include_usage": "yes"}, "include_usage='yes': allowed are True and False"),
        ({"name": 3}, "name=3: allowed are strings"),
        ({"resume": "continue", "prefill": 5}, "prefill=5: allowed are collections"),
        ({"resume": "continue", "prefill": [5]}, r"prefill=\[5\]: allowed are collections"),
    ],
)
def test_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Stream(**options)


def test_somebody_must_say_which_models_go_on() -> None:
    with pytest.raises(ConfigurationError, match=r"needs prefill=.*or a Router"):
        Pipeline([Stream(resume="continue"), Retry()])
    silent = Router([Target(name="a", url="http://a.test/v1")])
    with pytest.raises(ConfigurationError, match=r"needs prefill=.*or a Router"):
        Pipeline([Stream(resume="continue"), Retry(), silent])


def test_where_it_stands() -> None:
    with pytest.raises(ConfigurationError, match="a stream is resumed outside the retries"):
        Pipeline([Retry(), Stream()])
    with pytest.raises(ConfigurationError, match="two policies of one kind"):
        Pipeline([Stream(), Stream(resume="buffer"), Retry()])
    assert "resume='error'" in str(Pipeline([Stream(), Retry()]).describe())
