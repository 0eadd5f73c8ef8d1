"""However a stream ends, and whoever ends it: once, at once, and with nothing left behind."""

from __future__ import annotations

import asyncio
import gc
import math
from contextlib import aclosing, suppress
from typing import Any

import anyio
import httpx2
import pytest

from resilient_llm import (
    AttemptTimeout,
    Backoff,
    Bulkhead,
    CircuitBreaker,
    CircuitState,
    Deadline,
    Retry,
    Stream,
)
from resilient_llm.outcome import Usage, Verdict
from tests.streams.scripted import (
    ASK,
    DONE,
    PING,
    ROLE,
    WHOLE,
    Body,
    Spy,
    Step,
    Upstream,
    read,
    resilient,
    says,
    send,
    streamed,
)
from tests.support import cancel_at_every_await

pytestmark = pytest.mark.anyio

SOON = Backoff(initial=0.5, maximum=0.5, jitter="none")
SLOW = (0.1, PING, 0.1, ROLE, 0.1, says("one "), 0.1, says("two "), 0.1, says("three", "stop"), DONE)
POLICIES = {
    "no clocks": [],
    "a deadline": [Deadline(100)],
    "clocks": [AttemptTimeout(headers=10, first_content=10, content_gap=10)],
}
WITH_POLICIES = pytest.mark.parametrize("policies", POLICIES.values(), ids=POLICIES)


def bytes_stream(*steps: bytes | float) -> httpx2.Response:
    return httpx2.Response(200, headers={"content-type": "audio/mpeg"}, stream=Body(*steps))


@pytest.mark.parametrize(
    ("kind", "least"), [("events", 10), ("buffered events", 10), ("events gone on with", 7), ("bytes", 6)]
)
async def test_nothing_is_left_wherever_a_call_is_cancelled(kind: str, least: int) -> None:
    bulkhead, spy = Bulkhead(max_concurrent=1), Spy()
    breaker = CircuitBreaker(consecutive_failures=2, break_duration=0.1)
    broken: list[Step] = [0.1, PING, 0.1, httpx2.ReadError("reset")]
    if kind == "events gone on with":
        broken.insert(1, says("zero "))
    policies: list[Any] = [Deadline(100), bulkhead]
    if kind == "buffered events":
        policies.append(Stream(resume="buffer"))
    if kind == "events gone on with":
        policies.append(Stream(resume="continue", prefill=["m"]))
    policies += [
        Retry(backoff=SOON, budget_ratio=1.0),
        AttemptTimeout(headers=10, content_gap=10),
        breaker,
        spy,
    ]
    upstream = Upstream(Exception("replaced below"))
    transport = resilient(upstream, *policies)
    url = "http://h.example/v1/audio/speech" if kind == "bytes" else "http://h.example/v1/chat/completions"

    async def scenario() -> None:
        first = httpx2.ConnectError("no") if kind == "bytes" else lambda: streamed(*broken, closing=0.1)
        upstream.replies = [
            first,
            lambda: bytes_stream(*SLOW) if kind == "bytes" else streamed(*SLOW, closing=0.1),
        ]
        upstream.bodies.clear()
        response = await send(transport, ASK, url=url)
        try:
            assert len(await read(response)) > 100
        finally:
            await response.stream.aclose()  # type: ignore[union-attr]

    async def check() -> None:
        assert upstream.all_closed
        assert (bulkhead.in_use(), bulkhead.queued()) == (0, 0)
        assert len(spy.ended) == len(spy.calls)  # each attempt once
        assert all(call.finished for call in spy.calls)
        await anyio.sleep(10)
        upstream.replies = [lambda: streamed(*WHOLE)]
        assert await read(await send(transport)) == b"".join(WHOLE)
        assert breaker.state("h.example") is CircuitState.CLOSED

    assert await cancel_at_every_await(scenario, check) >= least


@WITH_POLICIES
async def test_closing_frees_everything_before_the_callers_next_step(policies: list[Any]) -> None:
    """CAN-08."""
    bulkhead = Bulkhead(max_concurrent=1)
    upstream = Upstream(lambda: streamed(ROLE, says("one"), math.inf))
    response = await send(resilient(upstream, bulkhead, *policies))
    async with aclosing(response.stream):  # type: ignore[type-var]
        async for _ in response.stream:  # type: ignore[union-attr]
            break
    assert bulkhead.in_use() == 0
    assert upstream.all_closed


@WITH_POLICIES
@pytest.mark.parametrize("held", [True, False], ids=["held", "not held"])
async def test_another_task_closes_the_stream_while_one_reads_it(policies: list[Any], held: bool) -> None:
    """CAN-06 and CAN-07. One without a scope of ours around its read leaves when the connection does."""
    bulkhead, spy = Bulkhead(max_concurrent=1), Spy()
    retry = [Retry()] if held else []
    body = _Closable(ROLE, says("one "), math.inf)
    upstream = Upstream(
        lambda: httpx2.Response(200, headers={"content-type": "text/event-stream"}, stream=body)
    )
    response = await send(resilient(upstream, bulkhead, *retry, *policies, spy))
    seen: list[object] = []

    async def reader() -> None:
        try:
            async for chunk in response.stream:  # type: ignore[union-attr]
                seen.append(chunk)  # noqa: PERF401 - what came before an error counts
        except (httpx2.ReadError, anyio.ClosedResourceError) as error:
            seen.append(type(error))

    async with anyio.create_task_group() as group:
        group.start_soon(reader)
        await anyio.sleep(1)
        began = anyio.current_time()
        await response.stream.aclose()  # type: ignore[union-attr]
        assert bulkhead.in_use() == 0
        assert anyio.current_time() - began < 1
    assert seen in (
        [ROLE + says("one "), anyio.ClosedResourceError],
        [ROLE, says("one "), anyio.ClosedResourceError],
        [ROLE + says("one "), httpx2.ReadError],
        [ROLE, says("one "), httpx2.ReadError],
    )
    assert [outcome.error_type for outcome in spy.ended] == ["cancelled"]  # and no failure of the target
    assert spy.ended[0].usage == Usage(output_tokens=1, estimated=True)
    assert [chunk async for chunk in response.stream] == []  # type: ignore[union-attr]


class _Closable(Body):
    """A body whose reader finds out that it was closed, as one on a socket does."""

    def __init__(self, *steps: bytes | float) -> None:
        super().__init__(*steps)
        self._left = anyio.Event()

    async def __anext__(self) -> bytes:
        if self.steps[0] == math.inf:
            await self._left.wait()
            raise httpx2.ReadError("closed")
        return await super().__anext__()

    async def aclose(self) -> None:
        await super().aclose()
        self._left.set()


@WITH_POLICIES
async def test_a_second_reader_is_told_so_and_harms_nobody(policies: list[Any]) -> None:
    upstream = Upstream(lambda: streamed(ROLE, says("one "), 1.0, *WHOLE[1:]))
    spy = Spy()
    response = await send(resilient(upstream, *policies, spy))
    read_by: dict[str, bytes] = {}

    async def first() -> None:
        read_by["first"] = await read(response)

    async def second() -> None:
        with pytest.raises(anyio.BusyResourceError):
            await read(response)

    async with anyio.create_task_group() as group:
        group.start_soon(first)
        await anyio.sleep(0.5)
        group.start_soon(second)
    assert read_by["first"].endswith(DONE)
    assert [outcome.verdict for outcome in spy.ended] == [Verdict.SUCCESS]


@pytest.mark.parametrize("headers", [{"content-type": "text/event-stream"}, {"content-type": "audio/mpeg"}])
async def test_a_connection_that_does_not_close_holds_a_permit_for_one_second(
    headers: dict[str, str],
) -> None:
    bulkhead = Bulkhead(max_concurrent=1)
    upstream = Upstream(lambda: streamed(ROLE, says("one"), math.inf, headers=headers, closing=math.inf))
    response = await send(resilient(upstream, bulkhead, Deadline(100)))
    await anext(aiter(response.stream))  # type: ignore[arg-type]
    began = anyio.current_time()
    await response.stream.aclose()  # type: ignore[union-attr]
    assert anyio.current_time() - began == pytest.approx(1)
    assert bulkhead.in_use() == 0


@pytest.mark.parametrize("steps", [(ROLE, math.inf), (ROLE, says("one "), math.inf)], ids=["held", "read"])
async def test_a_connection_that_does_not_close_does_not_keep_who_is_cancelled(
    steps: tuple[Any, ...],
) -> None:
    bulkhead = Bulkhead(max_concurrent=1)
    upstream = Upstream(lambda: streamed(*steps, closing=math.inf))
    began = anyio.current_time()
    with anyio.move_on_after(5):
        await read(await send(resilient(upstream, bulkhead, Retry())))
    assert anyio.current_time() - began == pytest.approx(6)
    assert bulkhead.in_use() == 0


@pytest.mark.parametrize("retry", [[Retry(max_attempts=1)], []], ids=["held", "not held"])
async def test_what_goes_wrong_while_closing_does_not_hide_what_went_wrong_first(retry: list[Any]) -> None:
    steps = (ROLE, says("one "), httpx2.ReadError("the first error"))
    upstream = Upstream(lambda: streamed(*steps, close_error=httpx2.CloseError("the second")))
    body = await read(
        await send(resilient(upstream, *retry, Deadline(10)) if not retry else resilient(upstream, *retry))
    )
    assert b"read_error" in body
    assert upstream.all_closed


async def test_an_error_of_the_body_closes_it_though_its_transport_does_not() -> None:
    upstream = Upstream(
        lambda: httpx2.Response(
            200, headers={"content-type": "audio/mpeg"}, stream=Body(b"x", httpx2.ReadError("reset"))
        )
    )
    response = await send(resilient(upstream, Deadline(10)), url="http://h.example/v1/audio/speech")
    with pytest.raises(httpx2.ReadError, match="reset"):
        await read(response)
    assert upstream.all_closed


@pytest.mark.parametrize("read_first", [0, 1], ids=["unread", "half read"])
@pytest.mark.parametrize("resume", ["error", "continue"])
async def test_a_forgotten_stream_gives_everything_back(read_first: int, resume: str) -> None:
    bulkhead, spy = Bulkhead(max_concurrent=1), Spy()
    prefill = ["m"] if resume == "continue" else []
    stream = Stream(resume=resume, prefill=prefill)  # type: ignore[arg-type]
    upstream = Upstream(lambda: streamed(*WHOLE))
    response = await send(resilient(upstream, bulkhead, stream, Retry(), spy))
    for _ in range(read_first):
        await anext(aiter(response.stream))  # type: ignore[arg-type]
    del response
    gc.collect()
    await anyio.sleep(0.01)
    assert bulkhead.in_use() == 0
    assert [outcome.error_type for outcome in spy.ended] == ["cancelled"]


async def test_who_leaves_after_the_last_word_has_got_everything() -> None:
    spy = Spy()
    upstream = Upstream(lambda: streamed(*WHOLE[:-1], math.inf))
    response = await send(resilient(upstream, Retry(), spy))
    stream = aiter(response.stream)  # type: ignore[arg-type]
    while b'"stop"' not in await anext(stream):
        pass
    await response.stream.aclose()  # type: ignore[union-attr]
    assert [outcome.verdict for outcome in spy.ended] == [Verdict.SUCCESS]


async def test_nothing_is_awaited_that_comes_after_an_error() -> None:
    error = says("one ") + PING + b'data: {"error": {"message": "no", "code": "overloaded"}}\n\n'
    bulkhead = Bulkhead(max_concurrent=1)
    upstream = Upstream(lambda: streamed(ROLE, error + DONE, math.inf))
    response = await send(resilient(upstream, bulkhead))
    assert await read(response) == ROLE + error  # and no [DONE], though the provider says it
    assert upstream.all_closed
    assert bulkhead.in_use() == 0


@pytest.mark.parametrize("anyio_backend", ["asyncio"], indirect=True)
@pytest.mark.parametrize("steps", [(ROLE, math.inf), (ROLE, says("one "), math.inf)], ids=["held", "read"])
async def test_a_task_cancelled_by_asyncio_itself(steps: tuple[Any, ...]) -> None:
    """CAN-09: and again while it is cleaning up."""
    bulkhead, spy = Bulkhead(max_concurrent=1), Spy()
    upstream = Upstream(lambda: streamed(*steps, closing=0.3))
    transport = resilient(upstream, bulkhead, Retry(), AttemptTimeout(first_content=50, content_gap=50), spy)

    async def call() -> None:
        response = await send(transport)
        try:
            await read(response)
        finally:
            await response.stream.aclose()  # type: ignore[union-attr]

    task = asyncio.ensure_future(call())
    await anyio.sleep(1)
    task.cancel()
    await anyio.sleep(0.1)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    assert task.cancelled()
    assert bulkhead.in_use() == 0
    assert [outcome.error_type for outcome in spy.ended] == ["cancelled"]


async def test_the_reading_task_may_change_at_any_event() -> None:
    upstream = Upstream(
        lambda: streamed(ROLE, says("one "), 0.1, says("two "), 0.1, says("three", "stop"), 0.1, DONE)
    )
    response = await send(resilient(upstream, Deadline(50), Retry(), AttemptTimeout(content_gap=5)))
    stream = aiter(response.stream)  # type: ignore[arg-type]
    got: list[bytes] = []

    async def one() -> None:
        got.append(await anext(stream))

    for _ in range(4):
        async with anyio.create_task_group() as group:
            group.start_soon(one)
    assert b"".join(got) == ROLE + says("one ") + says("two ") + says("three", "stop") + DONE
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


@WITH_POLICIES
@pytest.mark.parametrize(
    "after", [[math.inf], [0.4, PING] * 100, [0.4, says("more")] * 100], ids=["nothing", "pings", "more"]
)
async def test_a_stream_that_has_said_its_last_word_and_stays_is_ended(
    policies: list[Any], after: list[Any]
) -> None:
    spy = Spy()
    upstream = Upstream(lambda: streamed(*WHOLE, *after))
    began = anyio.current_time()
    body = await read(await send(resilient(upstream, *policies, spy)))
    assert body.startswith(b"".join(WHOLE))
    assert anyio.current_time() - began == pytest.approx(1)
    assert [outcome.verdict for outcome in spy.ended] == [Verdict.SUCCESS]
    assert upstream.all_closed
