"""Ten thousand streams at once in one process, in virtual time: what each costs, and that nothing of them stays."""

from __future__ import annotations

import asyncio
import gc
import math
import tracemalloc
from collections.abc import AsyncIterator

import anyio
import httpx2
import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider

from resilient_llm import AttemptTimeout, Bulkhead, CircuitBreaker, Deadline, RateLimit, Retry, Telemetry
from resilient_llm.httpx2 import ResilientTransport
from tests.streams.scripted import ASK, DONE, EVENTS, ROLE, URL, Body, says, usage

pytestmark = pytest.mark.anyio

KIB = 1024
MANY = 10_000
TOKEN = [says(f"token {number} ") for number in range(5)]
END = [says("end", "stop"), usage(10, 6), DONE]
REQUEST = httpx2.Request("POST", URL, json=ASK)
EACH = len(ROLE) + sum(map(len, TOKEN)) + len(b"".join(END))


class Provider(httpx2.AsyncBaseTransport):
    """Answer with a stream that says a token a second."""

    def __init__(self) -> None:
        self.running = 0
        self.peak = 0

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        self.running += 1
        self.peak = max(self.peak, self.running)
        return httpx2.Response(200, headers=EVENTS, stream=_Stream(self))


class _Stream(httpx2.AsyncByteStream):
    __slots__ = ("_at", "_provider")
    ALL = (ROLE, *TOKEN, *END)

    def __init__(self, provider: Provider) -> None:
        self._provider: Provider | None = provider
        self._at = 0

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        at, self._at = self._at, self._at + 1
        if at >= len(self.ALL):
            raise StopAsyncIteration
        if at > 1:
            await anyio.sleep(1)
        return self.ALL[at]

    async def aclose(self) -> None:
        if self._provider is not None:
            self._provider.running -= 1
            self._provider = None


def policies() -> list[object]:
    return [
        Deadline(1000),
        Bulkhead(max_concurrent=MANY),
        Retry(),
        RateLimit(requests_per_minute=10_000_000, tokens_per_minute=1_000_000_000, key="target"),
        CircuitBreaker(),
        AttemptTimeout(headers=50, first_content=50, content_gap=50),
    ]


async def call(transport: httpx2.AsyncBaseTransport, park: anyio.Event | None = None) -> int:
    """Read one stream to its end; with `park` wait for that after three events."""
    response = await transport.handle_async_request(REQUEST)
    assert isinstance(response.stream, httpx2.AsyncByteStream)
    size = events = 0
    async for chunk in response.stream:
        size += len(chunk)
        events += 1
        if events == 3 and park is not None:
            await park.wait()
    await response.stream.aclose()
    return size


async def test_ten_thousand_streams_at_once(anyio_backend: tuple[str, object]) -> None:
    many = MANY if anyio_backend[0] == "asyncio" else MANY // 10  # trio is slower, and does the same
    provider, ours = Provider(), policies()
    transport = ResilientTransport(provider, policies=ours)  # type: ignore[arg-type]
    sizes: list[int] = []
    began = anyio.current_time()

    async def one(number: int) -> None:
        # A tenth of them leaves in the middle, in one way or another.
        if number % 10:
            sizes.append(await call(transport))
        elif number % 20:
            with anyio.move_on_after(2.5):
                await call(transport)
        else:
            response = await transport.handle_async_request(REQUEST)
            await anyio.sleep(1)
            await response.stream.aclose()  # type: ignore[union-attr]

    async with anyio.create_task_group() as group:
        for number in range(many):
            group.start_soon(one, number)
    assert provider.peak == many
    assert sizes == [EACH] * (many * 9 // 10)
    assert anyio.current_time() - began == pytest.approx(7)  # nobody waited for anybody
    await anyio.sleep(2)
    assert provider.running == 0
    assert ours[1].in_use() == 0  # type: ignore[attr-defined]
    if anyio_backend[0] == "asyncio":
        assert len(asyncio.all_tasks()) <= 2  # this one, and the runner's


async def footprint(transport: httpx2.AsyncBaseTransport, count: int) -> float:
    """Give the bytes that a stream takes which its caller has read three events of."""
    await call(transport)  # imports, caches, the policies' own state
    gc.collect()
    tracemalloc.start()
    try:
        park = anyio.Event()
        async with anyio.create_task_group() as group:
            for _ in range(count):
                group.start_soon(call, transport, park)
            await anyio.sleep(5)
            gc.collect()
            size, _ = tracemalloc.get_traced_memory()
            park.set()
        gc.collect()
        left, _ = tracemalloc.get_traced_memory()
        assert left < size / 10, "what streams took is given back"
    finally:
        tracemalloc.stop()
    return size / count


@pytest.mark.parametrize("anyio_backend", ["asyncio"], indirect=True)
@pytest.mark.parametrize(
    ("recorded", "bound"), [(False, 12 * KIB), (True, 20 * KIB)], ids=["no SDK", "with an SDK"]
)
async def test_what_a_stream_takes(recorded: bool, bound: int) -> None:
    """On top of what it takes without us: a task and a response. Figures are in docs/streams.md."""
    telemetry = Telemetry()
    if recorded:
        telemetry = Telemetry(
            tracer_provider=TracerProvider(),
            meter_provider=MeterProvider(metric_readers=[InMemoryMetricReader()]),
        )
    count = 1_000
    bare = await footprint(Provider(), count)
    ours = await footprint(
        ResilientTransport(Provider(), policies=policies(), telemetry=telemetry),  # type: ignore[arg-type]
        count,
    )
    assert 0 < ours - bare < bound, f"{ours - bare:.0f} bytes a stream, {bare:.0f} without us"
    print(f"{ours - bare:.0f} bytes a stream, {bare:.0f} without us")  # noqa: T201 - for the page


@pytest.mark.parametrize("anyio_backend", ["asyncio"], indirect=True)
async def test_a_slow_reader_holds_the_provider_back_and_no_more_than_one_read() -> None:
    """A caller who takes one event an hour: what the provider has to say stays with the provider."""
    large = says("x" * 60_000)
    body = Body(ROLE, *[large] * 500, *END)

    class Fast(httpx2.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
            return httpx2.Response(200, headers=EVENTS, stream=body)

    transport = ResilientTransport(Fast(), policies=[Retry(), AttemptTimeout(content_gap=5)])
    response = await transport.handle_async_request(httpx2.Request("POST", URL, json=ASK))
    stream = aiter(response.stream)  # type: ignore[arg-type]
    tracemalloc.start()
    try:
        got = 0
        for _ in range(100):
            got += len(await anext(stream))
            await anyio.sleep(3600)
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert got > 99 * 60_000
    assert body.reads <= 101
    assert size < 4 * len(large)
    await response.stream.aclose()  # type: ignore[union-attr]
    assert body.closed is not None
    assert math.isfinite(body.closed)
