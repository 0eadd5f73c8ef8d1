"""A store that is slow and tells its news late, and callers that come, wait and go as they like: nobody is forgotten.

The store here never reminds anybody, as real ones do from time to time: one message that is lost or met at the wrong
moment, and somebody waits forever.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import anyio
from anyio.abc import TaskGroup
from hypothesis import example, given, settings
from hypothesis import strategies as st

from resilient_llm import Bulkhead, BulkheadFullError, DeadlineExceededError
from resilient_llm.core.leases import LeaseAnswer, LeaseLimit, LeaseTable
from resilient_llm.stores.guard import StoreGuard
from resilient_llm.stores.protocol_leases import Lease
from resilient_llm.testing import run_virtual
from tests.support import Door, Provider


class SlowStore:
    """A store whose requests and answers take their time, and overtake one another."""

    processes = 1

    def __init__(self, tasks: TaskGroup, rng: random.Random) -> None:
        self.guard = StoreGuard("slow", "closed")
        self.leases = self
        self.lost = 0
        self.table = LeaseTable()
        self.tasks = tasks
        self.rng = rng
        self.pools: dict[str, SlowPool] = {}
        self.serial = 0

    def pool(self, _name: str, on_free: Callable[[str], None]) -> SlowPool:
        place = f"place {len(self.pools)}"
        self.pools[place] = SlowPool(self, place, on_free)
        return self.pools[place]

    def observe(self, telemetry: Any) -> None:
        """Report nothing."""

    async def aclose(self) -> None:
        """Close nothing."""

    def later(self, callback: Callable[[], None]) -> None:
        async def wait() -> None:
            await anyio.sleep(self.rng.random() * 0.01)
            callback()

        self.tasks.start_soon(wait)

    def release(
        self, limits: Sequence[LeaseLimit], *, lease: str = "", place: str = "", again: SlowPool | None = None
    ) -> None:
        def do() -> None:
            for woken, key in self.table.release(limits, anyio.current_time(), lease=lease, place=place):
                self.later(lambda pool=self.pools[woken], key=key: pool.on_free(key))  # type: ignore[misc]
            if again is not None:  # the place of those who wait there may be gone
                for key, _ in limits:
                    self.later(lambda key=key: again.on_free(key))  # type: ignore[misc]

        self.later(do)


class SlowPool:
    """One process's access to it; what it asks and tells arrives in any order."""

    def __init__(self, store: SlowStore, place: str, on_free: Callable[[str], None]) -> None:
        self.store = store
        self.place = place
        self.on_free = on_free
        self.waiting: dict[str, str] = {}

    async def acquire(self, limits: Sequence[LeaseLimit], *, wait: bool = False) -> Lease | LeaseAnswer:
        store = self.store
        store.serial += 1
        name = str(store.serial)
        waited = dict(self.waiting)
        await anyio.sleep(store.rng.random() * 0.01)
        answer = store.table.acquire(
            name, limits, anyio.current_time(), place=self.place, place_lasts=math.inf if wait else 0.0
        )
        try:
            await anyio.sleep(store.rng.random() * 0.01)
        except BaseException:
            if answer.refused is None:
                store.release(limits, lease=name, again=self)
            elif wait and answer.refused not in self.waiting:
                left = [limit for limit in limits if limit.key == answer.refused]
                store.release(left, place=self.place, again=self)
            raise
        if answer.refused is None:
            for key, _ in limits:
                if self.waiting.get(key) == waited.get(key):
                    self.waiting.pop(key, None)
            return Lease(name, limits, answer.held, 0.0)
        if wait:
            self.waiting[answer.refused] = name
        return answer

    def adopt(self, limits: Sequence[LeaseLimit]) -> Lease:
        raise NotImplementedError

    def release(self, lease: Lease) -> None:
        self.store.release(lease.limits, lease=lease.id)

    def leave(self, limits: Iterable[LeaseLimit]) -> None:
        left = [limit for limit in limits if limit.key in self.waiting]
        if left:
            for key, _ in left:
                del self.waiting[key]
            self.store.release(left, place=self.place, again=self)

    def vote(self, number: float, heard: Callable[[float], None]) -> None:
        raise NotImplementedError


@settings(max_examples=150)
@given(
    seed=st.integers(0, 2**32),
    processes=st.integers(1, 3),
    limit=st.integers(1, 3),
    shared=st.sampled_from([None, 0, 2]),
    calls=st.integers(1, 25),
    cancelled=st.sampled_from([0.0, 0.3]),
    late=st.sampled_from([0.0, 0.3]),
)
@example(seed=4211920159, processes=2, limit=2, shared=0, calls=17, cancelled=0.0, late=0.3)
def test_everybody_who_waits_is_served(  # noqa: PLR0917 - all drawn
    seed: int, processes: int, limit: int, shared: int | None, calls: int, cancelled: float, late: float
) -> None:
    async def main() -> None:
        rng = random.Random(seed)
        upstream = Provider(duration=0.02)
        ends: list[str] = []
        async with anyio.create_task_group() as background:
            store = SlowStore(background, rng)
            bulkheads = [
                Bulkhead(
                    max_concurrent=limit,
                    shared=None if shared is None else limit + shared,
                    max_wait=60,
                    store=store,
                    key="tenant" if shared is not None else lambda _: "all",
                )
                for _ in range(processes)
            ]
            doors = [Door(each, provider=upstream) for each in bulkheads]

            async def call() -> None:
                await anyio.sleep(rng.random() * 0.2)
                deadline = anyio.current_time() + rng.random() * 0.1 if rng.random() < late else math.inf
                with anyio.move_on_after(
                    rng.random() * 0.1 if rng.random() < cancelled else math.inf
                ) as scope:
                    try:
                        await rng.choice(doors)(tenant=rng.choice("ab"), deadline=deadline)
                        ends.append("served")
                    except DeadlineExceededError:
                        ends.append("late")
                    except BulkheadFullError as error:
                        ends.append(str(error))
                if scope.cancelled_caught:
                    ends.append("cancelled")

            async with anyio.create_task_group() as tasks:
                for _ in range(calls):
                    tasks.start_soon(call)
            await anyio.sleep(1)  # for what is still under way
            assert upstream.peak <= (limit if shared is None else limit + shared)
            assert set(ends) <= {"cancelled", "late", "served"}, ends
            assert len(ends) == calls
            for bulkhead in bulkheads:
                assert (bulkhead.in_use(), bulkhead.queued()) == (0, 0)
            assert not any(scope.ends or scope.places for scope in store.table._scopes.values())
            assert anyio.current_time() < 20, "nobody waited for longer than it took"

    run_virtual(main)
