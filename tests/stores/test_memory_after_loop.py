"""What a function on a thread holds of a `MemoryStore` when its event loop ends before it."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import anyio
import anyio.to_thread
import pytest

from resilient_llm import (
    Bulkhead,
    Call,
    CircuitBreaker,
    ConcurrencyLimit,
    Pipeline,
    RateLimit,
    RateLimitedError,
    Reply,
)
from resilient_llm.call import CallNext
from resilient_llm.core.leases import LeaseLimit
from resilient_llm.core.shared_rate import Change, RateCharge, RateLevel, Verdict
from resilient_llm.stores import MemoryStore
from resilient_llm.stores._memory_leases import MemoryLeases
from resilient_llm.stores.protocol_leases import Lease

BACKENDS = ["asyncio", "trio"]


def _bulkhead(store: MemoryStore) -> Bulkhead:
    return Bulkhead(max_concurrent=1, max_wait=0, store=store)


def _concurrency_limit(store: MemoryStore) -> ConcurrencyLimit:
    return ConcurrencyLimit(initial=1, max=1, max_wait=0, store=store)


class _Left:
    """Leave a function on a thread behind, with its event loop, and let it end."""

    def __init__(self) -> None:
        self._begun, self._go_on, self._ended = (threading.Event() for _ in range(3))

    def __call__(self, call: Call, call_next: CallNext) -> Awaitable[Reply]:
        """Be the first policy, which is undone as the last."""
        call.on_finish(lambda _: self._ended.set())
        return call_next(call)

    async def leave(self, pipeline: Pipeline) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pipeline.run, self._work)
            await anyio.to_thread.run_sync(self._begun.wait, 5)
            tasks.cancel_scope.cancel()

    def end(self) -> None:
        self._go_on.set()
        assert self._ended.wait(5)

    def _work(self) -> None:
        self._begun.set()
        self._go_on.wait(5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("limit", [_bulkhead, _concurrency_limit])
def test_a_slot_comes_back_when_the_thread_ends(
    backend: str,
    limit: Callable[[MemoryStore], Bulkhead | ConcurrencyLimit],
    caplog: pytest.LogCaptureFixture,
) -> None:
    left = _Left()
    rates = RateLimit(requests_per_minute=60, store=MemoryStore(name="rates"))
    circuit = CircuitBreaker(store=MemoryStore(name="circuits"))
    pipeline = Pipeline([left, rates, limit(MemoryStore()), circuit])
    anyio.run(left.leave, pipeline, backend=backend)
    left.end()
    assert anyio.run(pipeline.run, str, backend=backend) == ""
    assert not caplog.records


@pytest.mark.parametrize("backend", BACKENDS)
def test_it_is_for_whoever_waits_in_another_event_loop_by_then(backend: str) -> None:
    left, store = _Left(), MemoryStore()
    anyio.run(left.leave, Pipeline([left, _bulkhead(store)]), backend=backend)

    async def next_one() -> None:
        bulkhead = Bulkhead(max_concurrent=1, store=store)
        with anyio.fail_after(5):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(Pipeline([bulkhead]).run, str)
                while not bulkhead.queued():  # noqa: ASYNC110 - that somebody waits has no event
                    await anyio.sleep(0.001)
                await anyio.to_thread.run_sync(left.end)

    anyio.run(next_one, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_was_not_used_of_a_rate_comes_back(backend: str) -> None:
    store = MemoryStore()
    heard: list[RateLevel] = []

    def hear(levels: Sequence[RateLevel]) -> None:
        heard.extend(levels)

    async def take() -> None:
        taken = await store.rates.take("all", [RateCharge("tokens", 100.0, 0.001, 80.0)])
        assert taken.verdict is Verdict.TAKEN

    anyio.run(take, backend=backend)
    store.rates.settle("all", [Change("tokens", 100.0, 0.001, 60.0)], hear)
    assert [level.level for level in heard] == [pytest.approx(80, abs=0.1)]


def test_a_call_that_is_collected_after_its_loop_was_closed_gives_its_slot_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pipeline = Pipeline([_bulkhead(MemoryStore())])
    loop = asyncio.new_event_loop()
    task = loop.create_task(pipeline.run(anyio.sleep, 60))
    loop.run_until_complete(asyncio.sleep(0.01))
    loop.close()
    task._log_destroy_pending = False  # type: ignore[attr-defined]  # which asyncio would rightly complain of
    del task
    gc.collect()
    assert asyncio.run(pipeline.run(str)) == ""
    assert not caplog.records


def _shared(store: MemoryStore) -> Bulkhead:
    return Bulkhead(max_concurrent=1, shared=1, store=store)


def _here(_store: MemoryStore) -> Bulkhead:
    return Bulkhead(max_concurrent=1)


def _concurrency_limit_that_waits(store: MemoryStore) -> ConcurrencyLimit:
    return ConcurrencyLimit(initial=1, max=1, store=store)


def _bulkhead_that_waits(store: MemoryStore) -> Bulkhead:
    return Bulkhead(max_concurrent=1, store=store)


def _close_while_some_wait(pipeline: Pipeline) -> list[asyncio.Task[object]]:
    """Close an event loop with one call that runs, which is collected then, and give those that waited."""
    loop = asyncio.new_event_loop()
    tasks: list[asyncio.Task[object]] = [loop.create_task(pipeline.run(anyio.sleep, 60)) for _ in range(3)]
    loop.run_until_complete(asyncio.sleep(0.01))
    loop.close()
    for task in tasks:
        task._log_destroy_pending = False  # type: ignore[attr-defined]  # which asyncio would rightly complain of
    del task
    del tasks[0]
    gc.collect()
    return tasks


async def _soon(pipeline: Pipeline) -> str:
    with anyio.fail_after(5):
        return await pipeline.run(str)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("anew", [False, True], ids=["the same", "another"])
@pytest.mark.parametrize("make", [_here, _bulkhead_that_waits, _shared, _concurrency_limit_that_waits])
def test_who_waited_in_a_loop_that_was_closed_is_in_nobody_s_way(
    backend: str,
    make: Callable[[MemoryStore], Bulkhead | ConcurrencyLimit],
    anew: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = MemoryStore()
    pipeline = Pipeline([make(store)])
    waited = _close_while_some_wait(pipeline)
    assert len(waited) == 2
    next_one = Pipeline([make(store)]) if anew else pipeline
    assert anyio.run(_soon, next_one, backend=backend) == ""
    assert not caplog.records


def test_a_slot_goes_to_whoever_waits_behind_those_whose_loop_was_closed() -> None:
    leases, limits = MemoryLeases(), [LeaseLimit("all", 1)]
    told: list[str] = []
    loops = [asyncio.new_event_loop() for _ in range(2)]
    pools = [leases.pool("slots", partial(told.append)) for _ in loops]
    lease = loops[0].run_until_complete(pools[0].acquire(limits))
    assert isinstance(lease, Lease)
    for loop, pool in zip(loops, pools, strict=True):
        loop.run_until_complete(pool.acquire(limits, wait=True))
    loops[0].close()
    pools[0].release(lease)
    loops[1].run_until_complete(asyncio.sleep(0))
    loops[1].close()
    assert told == ["all"]


@pytest.mark.parametrize("anew", [False, True], ids=["the same", "another"])
def test_a_place_at_a_rate_limit_is_given_up_with_its_loop(
    anew: bool, caplog: pytest.LogCaptureFixture
) -> None:
    store = MemoryStore()

    def made() -> RateLimit:
        return RateLimit(requests_per_minute=6, window=10, max_wait=15, store=store)

    limit = made()
    waited = _close_while_some_wait(Pipeline([limit]))
    assert len(waited) == 2

    async def next_one() -> float | None:
        with pytest.raises(RateLimitedError) as refused:
            await Pipeline([RateLimit(requests_per_minute=6, window=10, max_wait=0, store=store)]).run(str)
        return refused.value.retry_after

    async def same() -> None:
        with anyio.move_on_after(0.1):
            await Pipeline([limit]).run(str)
        assert limit.queued() == 0

    if not anew:
        asyncio.run(same())
    wait = asyncio.run(next_one())
    assert wait is not None
    assert wait < 10, "what is refilled next would be for one who waited"
    assert not caplog.records
