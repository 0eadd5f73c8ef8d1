"""What a function on a thread holds of a `MemoryStore` when its event loop ends before it."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Awaitable, Callable, Sequence

import anyio
import anyio.to_thread
import pytest

from resilient_llm import Bulkhead, Call, CircuitBreaker, ConcurrencyLimit, Pipeline, RateLimit, Reply
from resilient_llm.call import CallNext
from resilient_llm.core.shared_rate import Change, RateCharge, RateLevel, Verdict
from resilient_llm.stores import MemoryStore

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
