"""OBS-01 and OBS-02: however a stream is left, its spans end once, and nobody is told of a context that is lost."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import suppress

import anyio
import httpx2
import pytest
from opentelemetry import trace

from resilient_llm import Bulkhead, Retry
from resilient_llm.httpx2 import ResilientTransport
from tests.signals import Recording
from tests.telemetry.observed import STREAM, URL, telemetry_of

pytestmark = pytest.mark.anyio


class Body(httpx2.AsyncByteStream):
    """Three chunks, a tenth of a second apart. No generator, which trio would miss when nobody closes it."""

    def __init__(self) -> None:
        self.left = 3
        self.closed = False

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        await anyio.sleep(0.1)
        if self.closed:
            raise httpx2.ReadError("closed")
        if not self.left:
            raise StopAsyncIteration
        self.left -= 1
        finish = b"null" if self.left else b'"stop"'
        return b'data: {"choices": [{"delta": {"content": "word "}, "finish_reason": %b}]}\n\n' % finish

    async def aclose(self) -> None:
        self.closed = True


Stream = httpx2.AsyncByteStream


async def exhaustion(stream: Stream) -> None:
    async for _ in stream:
        assert not trace.get_current_span().get_span_context().is_valid  # nothing is held while we have it


async def leaving_the_loop(stream: Stream) -> None:
    async for _ in stream:
        break
    await stream.aclose()


async def closing_it_at_once(stream: Stream) -> None:
    await stream.aclose()


async def closing_it_twice(stream: Stream) -> None:
    await stream.aclose()
    await stream.aclose()


async def an_error_of_the_consumer(stream: Stream) -> None:
    with suppress(ZeroDivisionError):
        try:
            async for _ in stream:
                raise ZeroDivisionError
        finally:
            await stream.aclose()


async def a_generator_that_is_closed(stream: Stream) -> None:
    async def relay() -> AsyncGenerator[bytes]:
        try:
            async for chunk in stream:
                yield chunk
        finally:
            await stream.aclose()

    chunks = relay()
    await anext(chunks)
    await chunks.aclose()


async def another_task_closing_it(stream: Stream) -> None:
    await anext(aiter(stream))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(stream.aclose)


async def another_task_closing_it_during_a_read(stream: Stream) -> None:
    async def read() -> None:
        with suppress(httpx2.ReadError):
            await anext(aiter(stream))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read)
        await anyio.sleep(0.05)
        await stream.aclose()


async def cancellation_during_a_read(stream: Stream) -> None:
    with anyio.move_on_after(0.15):
        async for _ in stream:
            pass


async def another_task_reading_the_rest(stream: Stream) -> None:
    chunks = aiter(stream)
    await anext(chunks)

    async def read() -> None:
        async for _ in chunks:
            pass

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read)


async def forgetting_it(stream: Stream) -> None:
    """Leave it to the garbage collector."""


async def forgetting_the_rest_of_it(stream: Stream) -> None:
    await anext(aiter(stream))


EXITS: list[Callable[[Stream], Awaitable[None]]] = [
    exhaustion,
    leaving_the_loop,
    closing_it_at_once,
    closing_it_twice,
    an_error_of_the_consumer,
    a_generator_that_is_closed,
    another_task_closing_it,
    another_task_closing_it_during_a_read,
    cancellation_during_a_read,
    another_task_reading_the_rest,
    forgetting_it,
    forgetting_the_rest_of_it,
]
READ_TO_THE_END = {exhaustion, another_task_reading_the_rest}


@pytest.mark.parametrize("leave", EXITS, ids=lambda leave: leave.__name__)
async def test_each_span_ends_once(
    leave: Callable[[Stream], Awaitable[None]], caplog: pytest.LogCaptureFixture
) -> None:
    recording = Recording()
    bulkhead = Bulkhead(max_concurrent=1)
    transport = ResilientTransport(
        httpx2.MockTransport(lambda _request: httpx2.Response(200, stream=Body())),
        policies=[bulkhead, Retry()],
        telemetry=telemetry_of(recording),
    )
    with caplog.at_level(logging.DEBUG):
        response = await transport.handle_async_request(httpx2.Request("POST", URL, json=STREAM))
        assert recording.open == 2
        assert isinstance(response.stream, Stream)
        await leave(response.stream)
        del response
        gc.collect()
        await anyio.sleep(0.01)

    assert recording.open == 0
    spans = recording.spans
    assert spans.tree() == "chat gpt-4o\n  attempt openai/gpt-4o"
    expected = "success" if leave in READ_TO_THE_END else "cancelled"
    assert [span.status for span in spans] == ["UNSET", "UNSET"]
    assert spans.one("chat").attributes["resilient_llm.outcome"] == expected
    assert spans.one("attempt").attributes["resilient_llm.attempt.outcome"] == expected
    assert recording.points.one("gen_ai.client.operation.duration").count == 1
    assert bulkhead.in_use() == 0
    assert not trace.get_current_span().get_span_context().is_valid
    assert [record.getMessage() for record in caplog.records if record.name != "asyncio"] == []


def test_a_call_that_outlives_its_event_loop_ends_quietly(caplog: pytest.LogCaptureFixture) -> None:
    """The garbage collector closes the coroutine, in whichever context it happens to run."""
    recording = Recording()

    async def never(_request: httpx2.Request) -> httpx2.Response:
        await anyio.sleep_forever()
        raise AssertionError

    transport = ResilientTransport(httpx2.MockTransport(never), telemetry=telemetry_of(recording))
    calls = [transport.handle_async_request(httpx2.Request("POST", URL, json=STREAM))]
    loop = asyncio.new_event_loop()

    async def begin() -> None:
        calls[0].send(None)
        await asyncio.sleep(0)

    loop.run_until_complete(begin())
    assert recording.open == 2
    loop.close()
    with caplog.at_level(logging.DEBUG):
        calls.clear()
        gc.collect()
    assert recording.open == 0
    assert {span.status for span in recording.spans} == {"UNSET"}
    assert [record.getMessage() for record in caplog.records if record.name.startswith("opentelemetry")] == []


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_stream_that_outlives_its_event_loop_ends_when_it_is_forgotten(backend: str) -> None:
    recording = Recording()
    kept: list[httpx2.Response] = []

    async def begin() -> None:
        transport = ResilientTransport(
            httpx2.MockTransport(lambda _request: httpx2.Response(200, stream=Body())),
            telemetry=telemetry_of(recording),
        )
        kept.append(await transport.handle_async_request(httpx2.Request("POST", URL, json=STREAM)))

    anyio.run(begin, backend=backend)
    assert recording.open == 2
    kept.clear()
    gc.collect()
    assert recording.open == 0
    call, attempt = recording.spans
    assert call.start < attempt.start < attempt.end == call.end
    assert recording.points.one("gen_ai.client.operation.duration").value == pytest.approx(
        call.seconds, abs=1e-6
    )
