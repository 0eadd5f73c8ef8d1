"""What is read and changed by hand, from anywhere: admin pages, signal handlers, other threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

import anyio
import anyio.to_thread
import pytest

from resilient_llm import (
    Bulkhead,
    CircuitBreaker,
    CircuitOpenError,
    ConcurrencyLimit,
    EventLoopError,
    Pipeline,
)
from resilient_llm.core.circuit import CircuitState

real_time = pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])


async def _answer() -> int:
    return 1


async def until(met: Callable[[], bool]) -> None:
    """Wait for the loop to come to what a thread has posted."""
    for _ in range(5000):
        if met():
            return
        await anyio.sleep(0.001)
    pytest.fail("it was never done")


@pytest.mark.anyio
@real_time
@pytest.mark.parametrize("shared", [None, 1])
async def test_a_thread_resizes_and_those_who_wait_are_served_at_once(shared: int | None) -> None:
    bulkhead = Bulkhead(max_concurrent=1, shared=shared)
    pipeline = Pipeline([bulkhead])
    stop = anyio.Event()
    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(pipeline.run, stop.wait)
        await anyio.wait_all_tasks_blocked()
        assert (bulkhead.in_use(), bulkhead.queued()) == (1, 2)
        await anyio.to_thread.run_sync(lambda: bulkhead.resize(3, shared=None if shared is None else 3))
        await until(lambda: bulkhead.in_use() == 3)
        stop.set()
    assert (bulkhead.max_concurrent, bulkhead.in_use(), bulkhead.queued()) == (3, 0, 0)


def test_outside_of_any_loop_the_next_calls_find_the_new_size() -> None:
    bulkhead = Bulkhead(max_concurrent=1, max_queued=0)
    bulkhead.resize(2)
    pipeline = Pipeline([bulkhead])

    async def together(count: int) -> None:
        await asyncio.gather(*[pipeline.run(asyncio.sleep, 0.001) for _ in range(count)])

    asyncio.run(together(2))
    bulkhead.resize(3)
    asyncio.run(together(3))
    assert bulkhead.in_use() == 0


def test_between_two_runs_of_one_loop_a_change_is_kept() -> None:
    bulkhead = Bulkhead(max_concurrent=1, max_queued=0)
    pipeline = Pipeline([bulkhead])

    async def together(count: int) -> None:
        await asyncio.gather(*[pipeline.run(asyncio.sleep, 0.001) for _ in range(count)])

    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(together(1))
        bulkhead.resize(3)
        loop.run_until_complete(together(3))
    finally:
        loop.close()


@pytest.mark.anyio
@real_time
async def test_a_thread_isolates_and_closes() -> None:
    breaker = CircuitBreaker(key="model")
    pipeline = Pipeline([breaker])
    assert await pipeline.run(_answer) == 1
    for change, state in ((breaker.isolate, CircuitState.ISOLATED), (breaker.close, CircuitState.CLOSED)):
        await anyio.to_thread.run_sync(change, None)
        await until(partial(lambda wanted: breaker.state(None) is wanted, state))
        if state is CircuitState.ISOLATED:
            with pytest.raises(CircuitOpenError):
                await pipeline.run(_answer)
    assert await pipeline.run(_answer) == 1


def test_without_a_loop_nothing_is_isolated_by_half() -> None:
    breaker = CircuitBreaker()
    with pytest.raises(EventLoopError, match="outside an event loop"):
        breaker.isolate("provider")
    assert breaker.state("provider") is CircuitState.CLOSED
    asyncio.run(Pipeline([breaker]).run(_answer))
    with pytest.raises(EventLoopError, match="outside an event loop"):
        breaker.isolate("provider")  # its loop has ended: the next one would know nothing of it


@pytest.mark.anyio
async def test_looking_makes_nothing() -> None:
    limit, breaker = ConcurrencyLimit(max_keys=10, initial=7), CircuitBreaker(max_keys=10)
    pipeline = Pipeline([limit, breaker])
    await pipeline.run(_answer)
    for number in range(100):
        assert limit.limit(f"nobody {number}") == 7
        assert breaker.state(f"nobody {number}") is CircuitState.CLOSED
    assert (len(limit._limits), len(breaker._circuits)) == (1, 1)


def test_looking_needs_no_loop() -> None:
    assert ConcurrencyLimit(initial=7).limit("nobody") == 7
    assert CircuitBreaker().state("nobody") is CircuitState.CLOSED


@pytest.mark.anyio
async def test_what_is_isolated_takes_the_place_of_what_is_idle() -> None:
    breaker = CircuitBreaker(max_keys=2)
    for number in range(2):
        breaker.close(f"idle {number}")
    breaker.isolate("bad")
    assert breaker.state("bad") is CircuitState.ISOLATED
    assert len(breaker._circuits) <= 2
