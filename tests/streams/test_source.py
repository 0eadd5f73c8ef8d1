"""Reading a body until it is late, with one timer for all reads, and no mistake about who cancelled whom."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from typing import Any

import anyio
import pytest

from resilient_llm._loop import EventLoop
from resilient_llm.source import ReadTimedOutError, Source

pytestmark = pytest.mark.anyio
ASYNCIO = pytest.mark.parametrize("anyio_backend", ["asyncio"], indirect=True)


class Stream:
    """Give what it is told to, in time."""

    def __init__(self, *steps: Any) -> None:
        self.steps = list(steps)
        self.closed = False
        self.swallows = False

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        while self.steps:
            step = self.steps.pop(0)
            if isinstance(step, bytes):
                return step
            try:
                await (anyio.sleep_forever() if step == math.inf else anyio.sleep(step))
            except BaseException as error:
                if self.swallows:
                    raise OSError("interrupted") from error
                raise
        raise StopAsyncIteration

    async def aclose(self) -> None:
        self.closed = True


def source(*steps: Any) -> tuple[Source, Stream]:
    stream = Stream(*steps)
    return Source(stream, EventLoop.current()), stream


def take(chunk: bytes) -> bytes:
    return chunk


def later(seconds: float) -> float:
    return anyio.current_time() + seconds


async def test_a_read_that_is_late_is_given_up() -> None:
    reading, stream = source(b"a", 1.0, b"b", math.inf)
    assert await reading.read(take, later(2)) == b"a"
    assert await reading.read(take, later(2)) == b"b"
    began = anyio.current_time()
    with pytest.raises(ReadTimedOutError):
        await reading.read(take, later(2))
    assert anyio.current_time() - began == pytest.approx(2)
    assert stream.closed
    assert await reading.read(take) is None


@pytest.mark.parametrize("limits", [(100, 1), (1, 100), (3, 3, 3), (5, 1, 5, 1), (math.inf, 1)])
async def test_each_read_has_a_limit_of_its_own(limits: tuple[float, ...]) -> None:
    reading, _ = source(*[step for _ in limits for step in (0.5, b"x")], math.inf)
    for limit in limits:
        assert await reading.read(take, later(limit)) == b"x"
        await anyio.sleep(7)  # a consumer who takes his time
    began = anyio.current_time()
    with pytest.raises(ReadTimedOutError):
        await reading.read(take, later(limits[-1]))
    assert anyio.current_time() - began == pytest.approx(limits[-1])


class Showing(Stream):
    """Show what comes before it is given."""

    async def offering(self, offer: Callable[[bytes], bytes | None]) -> bytes:
        while (left := offer(await anext(self))) is None:
            pass
        return left


async def test_a_read_lasts_as_long_as_it_is_told_to_meanwhile() -> None:
    stream = Showing(8.0, b"a", 8.0, b"b", 1.0, b"c", 9.0, b"d", 8.0, b"e", math.inf)
    reading, shown = Source(stream, EventLoop.current()), []

    def offer(chunk: bytes) -> bytes | None:
        shown.append(chunk)
        if chunk in b"ad":
            reading.last_until(later(10))
        return chunk if chunk == b"c" else None

    assert await reading.read(take, later(10), offer) == b"c"
    began = anyio.current_time()
    with pytest.raises(ReadTimedOutError):
        await reading.read(take, later(10), offer)
    assert anyio.current_time() - began == pytest.approx(9 + 10)
    assert shown == [b"a", b"b", b"c", b"d", b"e"]
    assert stream.closed


async def test_a_read_lasts_no_longer_than_it_is_told_to_meanwhile() -> None:
    stream = Showing(8.0, b"a", math.inf)
    reading = Source(stream, EventLoop.current())

    def offer(_chunk: bytes) -> None:
        reading.last_until(later(1))

    began = anyio.current_time()
    with pytest.raises(ReadTimedOutError):
        await reading.read(take, later(100), offer)
    assert anyio.current_time() - began == pytest.approx(8 + 1)
    assert stream.closed


async def test_what_is_there_comes_though_it_is_late() -> None:
    reading, _ = source(b"a", b"b")
    assert await reading.read(take, anyio.current_time() - 1) == b"a"


async def test_a_cancelled_reader_is_cancelled_and_not_late() -> None:
    for limit in (5, 5.0001, math.inf):
        reading, stream = source(math.inf)
        with anyio.CancelScope(deadline=later(5)) as scope:
            await reading.read(take, later(limit))
        assert scope.cancelled_caught
        assert stream.closed


async def test_a_reader_is_sent_away_by_whoever_closes_the_body() -> None:
    reading, stream = source(math.inf)
    began = anyio.current_time()

    async def close() -> None:
        await anyio.sleep(1)
        await reading.aclose()

    async with anyio.create_task_group() as group:
        group.start_soon(close)
        with pytest.raises(anyio.ClosedResourceError):
            await reading.read(take, later(100))
    assert anyio.current_time() - began == pytest.approx(1)
    assert stream.closed


@ASYNCIO
async def test_both_at_once() -> None:
    """Whoever is first, the one who wants the task to end is heard."""
    reading, stream = source(math.inf)
    ended: list[str] = []

    async def reader() -> None:
        try:
            await reading.read(take, later(1))
        except ReadTimedOutError:
            ended.append("late")
            await anyio.sleep(1)
        ended.append("went on")

    task = asyncio.ensure_future(reader())
    await anyio.sleep(0.999_999)
    asyncio.get_running_loop().call_at(later(0.000_001), task.cancel)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert "went on" not in ended
    assert stream.closed


@ASYNCIO
async def test_a_task_is_left_as_it_was() -> None:
    task = asyncio.current_task()
    assert task is not None
    for swallows in (False, True):
        reading, stream = source(math.inf)
        stream.swallows = swallows
        with pytest.raises(OSError if swallows else ReadTimedOutError):
            await reading.read(take, later(1))
        assert task.cancelling() == 0
        assert stream.closed
        with anyio.move_on_after(1) as scope:  # and can still be cancelled, and not
            await anyio.sleep(2)
        assert scope.cancelled_caught
        await anyio.sleep(1)


@ASYNCIO
async def test_a_cleanup_is_not_cut_short_by_the_clock() -> None:
    class Slow(Stream):
        async def __anext__(self) -> bytes:
            await anyio.sleep(0.5)
            raise OSError("reset")

        async def aclose(self) -> None:
            await anyio.sleep(0.8)
            self.closed = True

    stream = Slow()
    reading = Source(stream, EventLoop.current())
    with pytest.raises(OSError, match="reset"):
        await reading.read(take, later(1))
    assert stream.closed


@ASYNCIO
@pytest.mark.parametrize("end", ["read", "closed", "late", "failed"])
async def test_no_timer_outlives_the_body(end: str) -> None:
    loop: Any = asyncio.get_running_loop()
    reading, _ = source(b"a", *([math.inf] if end == "late" else []))
    await reading.read(take, later(1000))
    if end == "read":
        assert await reading.read(take, later(1000)) is None
    elif end == "late":
        with pytest.raises(ReadTimedOutError):
            await reading.read(take, later(1))
    await reading.aclose()
    assert not [timer for timer in loop._scheduled if not timer.cancelled()]


@ASYNCIO
async def test_one_timer_for_many_reads() -> None:
    loop: Any = asyncio.get_running_loop()
    reading, _ = source(*[b"x"] * 1000)
    for _ in range(1000):
        await reading.read(take, later(10))
        await anyio.sleep(0.001)
    assert len(loop._scheduled) < 20
    await reading.aclose()


async def test_a_generator_too() -> None:
    left: list[str] = []

    async def chunks() -> AsyncIterator[bytes]:
        try:
            yield b"a"
            await anyio.sleep_forever()
        finally:
            left.append("generator")

    class Generated:
        def __aiter__(self) -> AsyncIterator[bytes]:
            return chunks()

        async def aclose(self) -> None:
            left.append("stream")

    reading = Source(Generated(), EventLoop.current())
    assert await reading.read(take, later(1)) == b"a"
    with pytest.raises(ReadTimedOutError):
        await reading.read(take, later(1))
    assert left == ["generator", "stream"]


async def test_a_generator_that_another_task_is_in() -> None:
    """CAN-07: `asynchronous generator is already running` is no answer to who wants to close it."""

    class Generated:
        def __init__(self) -> None:
            self.left = anyio.Event()

        async def __aiter__(self) -> AsyncIterator[bytes]:
            yield b"a"
            await self.left.wait()
            raise OSError("closed")

        async def aclose(self) -> None:
            self.left.set()

    reading = Source(Generated(), EventLoop.current())
    assert await reading.read(take) == b"a"

    async def read() -> None:
        with pytest.raises((OSError, anyio.ClosedResourceError)):
            await reading.read(take)

    async with anyio.create_task_group() as group:
        group.start_soon(read)
        await anyio.sleep(1)
        await reading.aclose()


async def test_a_stream_that_adds_an_error_to_its_cancellation_is_closed() -> None:
    class Grouping(Stream):
        async def __anext__(self) -> bytes:
            try:
                return await super().__anext__()
            except BaseException as error:  # noqa: BLE001 - told on, in company
                raise BaseExceptionGroup("both", [error, ValueError("and this")]) from None

    stream = Grouping(math.inf)
    read = Source(stream, EventLoop.current())
    with pytest.raises((ValueError, BaseExceptionGroup)):
        await read.read(take, later(1))
    assert stream.closed
    assert await read.read(take) is None, "nobody reads on"
