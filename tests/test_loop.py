"""Handles on event loops: which thread a loop runs in, and that none outlives its loop."""

from __future__ import annotations

import asyncio
import gc
import weakref
from threading import Thread

import anyio
import pytest

from resilient_llm import Bulkhead, Pipeline
from resilient_llm._loop import EventLoop


async def add(a: int) -> int:
    return a + 1


def test_a_loop_that_goes_on_in_another_thread_frees_slots_at_once() -> None:
    pipeline = Pipeline([Bulkhead(max_concurrent=1, max_queued=0)])
    loop = asyncio.new_event_loop()
    assert loop.run_until_complete(pipeline.run(add, 1)) == 2
    thread = Thread(target=loop.run_forever)
    thread.start()

    async def one_after_another() -> list[int]:
        return [await pipeline.run(add, number) for number in range(3)]

    try:
        there = asyncio.run_coroutine_threadsafe(one_after_another(), loop)
        assert there.result(30) == [1, 2, 3]
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_what_has_run_in_a_loop_does_not_keep_it(backend: str) -> None:
    handles: list[weakref.ref[EventLoop]] = []

    async def use() -> None:
        handles.append(weakref.ref(EventLoop.current()))
        assert await Pipeline([Bulkhead(max_concurrent=1)]).run(add, 1) == 2

    for _ in range(3):
        anyio.run(use, backend=backend)
    gc.collect()
    assert [handle() for handle in handles] == [None] * 3


def test_who_keeps_a_handle_has_the_one_there_is() -> None:
    async def use() -> None:
        kept = EventLoop.current()
        assert EventLoop.current() is kept

    asyncio.run(use())


def test_nobody_is_told_anything_in_a_loop_that_has_ended() -> None:
    async def handle() -> tuple[EventLoop, asyncio.Event, asyncio.Task[bool]]:
        event = asyncio.Event()
        waits = asyncio.ensure_future(event.wait())
        await asyncio.sleep(0)
        return EventLoop.current(), event, waits

    loop = asyncio.new_event_loop()
    here, event, waits = loop.run_until_complete(handle())
    assert not here.has_ended(), "it stands still, and may go on"
    assert not here.is_alive()
    loop.close()
    assert here.has_ended()
    here.tell(event.set)
    waits._log_destroy_pending = False  # type: ignore[attr-defined]  # which asyncio would rightly complain of


def test_what_fails_while_somebody_is_told_is_not_hidden() -> None:
    def fail() -> None:
        raise RuntimeError("of its own")

    async def tell() -> None:
        with pytest.raises(RuntimeError, match="of its own"):
            EventLoop.current().tell(fail)

    asyncio.run(tell())
