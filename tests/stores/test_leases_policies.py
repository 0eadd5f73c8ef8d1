"""Bulkheads and concurrency limits over a store: in virtual time, with a pipeline for each process."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any
from uuid import UUID

import anyio
import anyio.lowlevel
import pytest

from resilient_llm import (
    Bulkhead,
    BulkheadFullError,
    ConcurrencyLimit,
    DeadlineExceededError,
    StoreUnavailableError,
)
from resilient_llm.core.leases import LeaseAnswer, LeaseLimit
from resilient_llm.stores import MemoryStore
from resilient_llm.stores._memory_leases import MemoryLeasePool
from resilient_llm.stores.guard import OnStoreError, StoreGuard
from resilient_llm.stores.protocol_leases import Lease
from tests.support import THROTTLED, Door, Provider, cancel_at_every_await

pytestmark = pytest.mark.anyio


class Upstream(Provider):
    """One provider that several processes call; notes who was served, and refuses beyond what it can take."""

    def __init__(self, *, duration: float = 1.0, most: float = math.inf, spread: bool = False) -> None:
        super().__init__(duration=duration)
        self.served: list[str | None] = []
        self.most = most
        self.spread = spread

    async def __call__(self, attempt: Any) -> Any:
        self.served.append(attempt.tenant)
        if self.running >= self.most:
            self.script = [THROTTLED]
        if self.spread:  # a bottleneck that only gets slower: 20 at a time take a second, more take longer
            self.duration = max(1.0, (self.running + 1) / 20)
        return await super().__call__(attempt)


async def test_processes_share_slots_and_are_served_in_turn() -> None:
    store, upstream = MemoryStore(), Upstream()
    doors = [
        Door(Bulkhead(max_concurrent=3, store=store, key=lambda _: "all"), provider=upstream)
        for _ in range(2)
    ]

    async with anyio.create_task_group() as tasks:

        async def call(process: int, number: int) -> None:
            await doors[process](tenant=f"{process}.{number}")

        for number in range(12):
            tasks.start_soon(call, 0, number)
            await anyio.sleep(0.001)
        # The first process has all slots and nine in line when the other one comes.
        for number in range(6):
            tasks.start_soon(call, 1, number)
            await anyio.sleep(0.001)
    assert upstream.peak == 3
    assert len(upstream.served) == 18
    for process in ("0", "1"):
        order = [int(each.split(".")[1]) for each in upstream.served if each and each[0] == process]
        assert order == sorted(order), "within a process it is first come, first served"
    # While both wait they are served in turn: the second is done about as soon as an equal share allows.
    last = max(i for i, each in enumerate(upstream.served) if each and each[0] == "1")
    assert last <= 3 + 12 + 1


async def test_each_key_has_its_own_slots() -> None:
    store, upstream = MemoryStore(), Upstream()
    doors = [Door(Bulkhead(max_concurrent=2, max_queued=0, store=store), provider=upstream) for _ in range(3)]
    refused: Counter[str] = Counter()
    async with anyio.create_task_group() as tasks:

        async def call(door: Door, tenant: str) -> None:
            try:
                await door(tenant=tenant)
            except BulkheadFullError:
                refused[tenant] += 1

        for door in doors:
            for tenant in ("a", "b"):
                tasks.start_soon(call, door, tenant)
    assert refused == {"a": 1, "b": 1}
    assert Counter(upstream.served) == {"a": 2, "b": 2}


async def test_a_burst_beyond_the_queue_that_finds_slots_is_served() -> None:
    door = Door(Bulkhead(max_concurrent=50, max_queued=1, store=MemoryStore()), provider=Upstream())
    async with anyio.create_task_group() as tasks:
        for _ in range(51):
            tasks.start_soon(door)
    assert anyio.current_time() - door.calls[0].started == pytest.approx(2.0)


@pytest.mark.parametrize(("cap", "least"), [(4, 2.7), (3, 1.5)])
async def test_a_shared_pool_holds_over_processes_and_serves_tenants_by_weight(
    cap: int, least: float
) -> None:
    store, upstream = MemoryStore(), Upstream()
    doors = [
        Door(
            Bulkhead(max_concurrent=cap, shared=4, max_wait=math.inf, weights={"gold": 3}, store=store),
            provider=upstream,
        )
        for _ in range(2)
    ]
    with anyio.move_on_after(30.5):
        async with anyio.create_task_group() as tasks:

            async def call(door: Door, tenant: str) -> None:
                await door(tenant=tenant)

            for door in doors:
                for tenant in ("free", "gold"):
                    for _ in range(100):
                        tasks.start_soon(call, door, tenant)
    assert upstream.peak == 4
    served = Counter(upstream.served[8:])
    assert sum(served.values()) >= 4 * 27, "no slot stands idle while somebody waits"
    assert least <= served["gold"] / served["free"] <= 3.3


async def test_one_tenant_holds_no_more_than_its_own_over_all_processes() -> None:
    store, upstream = MemoryStore(), Upstream()
    doors = [Door(Bulkhead(max_concurrent=2, shared=5, store=store), provider=upstream) for _ in range(3)]
    running: Counter[str | None] = Counter()
    most: Counter[str | None] = Counter()

    class Counting(Upstream):
        async def __call__(self, attempt: Any) -> Any:
            running[attempt.tenant] += 1
            most[attempt.tenant] = max(most[attempt.tenant], running[attempt.tenant])
            try:
                return await upstream(attempt)
            finally:
                running[attempt.tenant] -= 1

    for door in doors:
        door.pipeline = Door(door.pipeline.policies[0], provider=Counting()).pipeline
    async with anyio.create_task_group() as tasks:

        async def call(door: Door, tenant: str) -> None:
            await door(tenant=tenant)

        for door in doors:
            for tenant in ("a", "b", "c", "d"):
                for _ in range(6):
                    tasks.start_soon(call, door, tenant)
        await anyio.sleep(0.5)
        assert sum(running.values()) == 5
    assert most == {"a": 2, "b": 2, "c": 2, "d": 2}
    assert upstream.peak == 5
    assert len(upstream.served) == 72


@pytest.mark.parametrize("shared", [None, 2])
async def test_cancelled_anywhere_it_leaves_nothing(shared: int | None) -> None:
    store = MemoryStore()
    bulkheads = [Bulkhead(max_concurrent=2, shared=shared, store=store) for _ in range(2)]
    doors = [Door(each, provider=Upstream(duration=0.3)) for each in bulkheads]

    async def scenario() -> None:
        async with anyio.create_task_group() as tasks:
            for _ in range(2):
                tasks.start_soon(doors[1])
            await anyio.lowlevel.checkpoint()
            for _ in range(3):
                tasks.start_soon(doors[0])
            await doors[0]()

    async def check() -> None:
        await anyio.lowlevel.checkpoint()
        for bulkhead in bulkheads:
            assert (bulkhead.in_use(), bulkhead.queued()) == (0, 0)
        for table in (store.leases._table,):
            assert not any(scope.ends or scope.places for scope in table._scopes.values())

    assert await cancel_at_every_await(scenario, check) > 2


async def test_waits_end_at_max_wait_and_at_the_deadline() -> None:
    store = MemoryStore()
    door = Door(Bulkhead(max_concurrent=1, max_wait=2, store=store), provider=Upstream(duration=10))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(door)
        await anyio.sleep(0.1)
        began = anyio.current_time()
        with pytest.raises(BulkheadFullError) as refusal:
            await door()
        assert refusal.value.retry_after is not None
        assert refusal.value.retry_after >= 1
        assert anyio.current_time() - began == pytest.approx(2)
        with pytest.raises(DeadlineExceededError):
            await door(deadline=anyio.current_time() + 1)
        assert anyio.current_time() - began == pytest.approx(3)


async def test_a_higher_priority_goes_first_within_a_process() -> None:
    upstream = Upstream()
    door = Door(Bulkhead(max_concurrent=1, store=MemoryStore(), key=lambda _: "x"), provider=upstream)
    async with anyio.create_task_group() as tasks:

        async def call(tenant: str, priority: int) -> None:
            await door(tenant=tenant, priority=priority)

        for tenant, priority in (("runs", 0), ("committed", 0), ("low", 0), ("high", 5)):
            tasks.start_soon(call, tenant, priority)
            await anyio.sleep(0.01)
    assert upstream.served.index("high") < upstream.served.index("low")


async def test_resizing_lets_more_in() -> None:
    store, upstream = MemoryStore(), Upstream(duration=10)
    bulkhead = Bulkhead(max_concurrent=1, store=store)
    door = Door(bulkhead, provider=upstream)
    async with anyio.create_task_group() as tasks:
        for _ in range(4):
            tasks.start_soon(door)
        await anyio.sleep(1)
        assert (bulkhead.in_use(), bulkhead.queued()) == (1, 3)
        bulkhead.resize(3)
        await anyio.sleep(1)
        assert (bulkhead.in_use(), bulkhead.queued()) == (3, 1)


async def test_a_dry_run_counts_in_the_store_and_lets_all_pass() -> None:
    store, upstream = MemoryStore(), Upstream()
    bulkhead = Bulkhead(max_concurrent=2, max_queued=1, dry_run=True, store=store)
    door = Door(bulkhead, provider=upstream)
    async with anyio.create_task_group() as tasks:
        for _ in range(5):
            tasks.start_soon(door)
        await anyio.sleep(0.5)
        assert upstream.running == 5
        assert (bulkhead.in_use(), bulkhead.queued()) == (2, 1)
    assert (bulkhead.in_use(), bulkhead.queued()) == (0, 0)


async def test_more_keys_than_are_kept_share_one() -> None:
    bulkhead = Bulkhead(max_concurrent=1, max_keys=1, max_queued=0, store=MemoryStore())
    door = Door(bulkhead, provider=Upstream())
    outcomes: list[str] = []
    async with anyio.create_task_group() as tasks:

        async def call(tenant: str) -> None:
            try:
                await door(tenant=tenant)
                outcomes.append("served")
            except BulkheadFullError:
                outcomes.append("refused")

        for tenant in ("a", "b", "c"):
            tasks.start_soon(call, tenant)
    assert sorted(outcomes) == ["refused", "served", "served"]


async def test_a_key_whose_call_is_still_asking_the_store_makes_no_room() -> None:
    class Slow(MemoryLeasePool):
        async def acquire(self, limits: Sequence[LeaseLimit], *, wait: bool = False) -> Lease | LeaseAnswer:
            await anyio.sleep(1)
            return await super().acquire(limits, wait=wait)

    store, upstream = MemoryStore(), Upstream(duration=10)
    leases = store.leases
    leases.pool = lambda name, on_free: Slow(  # type: ignore[method-assign]
        leases, leases._table, name, leases.name(), on_free
    )
    bulkhead = Bulkhead(max_concurrent=1, max_keys=1, store=store)
    door = Door(bulkhead, provider=upstream)

    async def call(tenant: str) -> None:
        await door(tenant=tenant)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(call, "a")
        await anyio.sleep(0.5)
        tasks.start_soon(call, "b")
        await anyio.sleep(2)
        assert upstream.running == 2
        assert bulkhead.in_use() == 2


async def test_keys_that_are_no_strings_are_the_same_in_every_process() -> None:
    upstream, store = Upstream(), MemoryStore()
    doors = [
        Door(Bulkhead(max_concurrent=1, key=lambda _: UUID(int=7), store=store), provider=upstream)
        for _ in range(2)
    ]
    began = anyio.current_time()
    async with anyio.create_task_group() as tasks:
        for door in doors:
            tasks.start_soon(door)
    assert anyio.current_time() - began == pytest.approx(2)


# A store that fails


class _Failing(MemoryLeasePool):
    down = False
    asked = 0

    async def acquire(self, limits: Sequence[LeaseLimit], *, wait: bool = False) -> Lease | LeaseAnswer:
        type(self).asked += 1
        if self.down:
            raise StoreUnavailableError("down", retry_after=1, name="memory")
        return await super().acquire(limits, wait=wait)


class FailingStore(MemoryStore):
    """A store of four processes that can be down."""

    processes = 4

    def __init__(self, on_error: OnStoreError) -> None:
        super().__init__()
        self.guard = StoreGuard("memory", on_error)
        leases = self.leases

        class Pool(_Failing):
            pass

        self.pool_type = Pool
        made = leases.pool

        def pool(name: str, on_free: Any) -> MemoryLeasePool:
            plain = made(name, on_free)
            wrapped = leases._places[plain._place] = Pool(leases, leases._table, name, plain._place, on_free)
            return wrapped

        leases.pool = pool  # type: ignore[method-assign]

    @property
    def down(self) -> bool:
        return self.pool_type.down

    @down.setter
    def down(self, value: bool) -> None:
        self.pool_type.down = value
        for _ in range(20):  # so that the guard's circuit is as it would be
            if not value:
                break
            try:
                self.guard.failed(self.guard.admit(), "down")
            except StoreUnavailableError:
                break


async def test_closed_refuses_those_who_come_and_those_who_wait() -> None:
    store = FailingStore("closed")
    door = Door(Bulkhead(max_concurrent=1, store=store), provider=Upstream(duration=2))
    outcomes: list[str] = []

    async def call() -> None:
        try:
            await door()
            outcomes.append("served")
        except StoreUnavailableError:
            outcomes.append("refused")

    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(call)
        await anyio.sleep(1)
        store.down = True
        await call()
        assert outcomes == ["refused"]
    assert sorted(outcomes) == ["refused", "refused", "refused", "served"]


async def test_open_lets_all_through_and_counts_them() -> None:
    store = FailingStore("open")
    store.down = True
    upstream = Upstream()
    door = Door(Bulkhead(max_concurrent=1, store=store), provider=upstream)
    async with anyio.create_task_group() as tasks:
        for _ in range(5):
            tasks.start_soon(door)
    assert upstream.peak == 5
    assert store.guard.unguarded == 5


@pytest.mark.parametrize("shared", [None, 6])
async def test_local_gives_this_process_its_share_and_counts_it_afterwards(shared: int | None) -> None:
    store = FailingStore("local")
    upstream = Upstream()
    bulkhead = Bulkhead(max_concurrent=6, shared=shared, store=store, key=lambda _: "all")
    door = Door(bulkhead, provider=upstream)
    store.down = True
    async with anyio.create_task_group() as tasks:
        for _ in range(6):
            tasks.start_soon(door)
        await anyio.sleep(0.5)
        assert (upstream.running, bulkhead.queued()) == (2, 4)  # a quarter of six, rounded up
        await anyio.sleep(1)
        assert upstream.running == 2
        store.down = False
        table = store.leases._table
        assert (
            sum(
                len(scope.ends)
                for key, scope in table._scopes.items()
                if key.endswith(":all") and ":of:" not in key
            )
            == 2
        )
    assert upstream.peak <= 6
    assert bulkhead.in_use() == 0
    assert len(upstream.served) == 6


# Adaptive limits


async def test_processes_find_one_limit_together() -> None:
    store, upstream = MemoryStore(), Upstream(duration=1, most=24)
    limits = [
        ConcurrencyLimit(initial=20, max_wait=math.inf, max_queued=10_000, store=store) for _ in range(3)
    ]
    doors = [Door(each, provider=upstream) for each in limits]
    served: Counter[int] = Counter()

    async def worker(process: int) -> None:
        while True:
            try:
                await doors[process]()
                served[process] += 1
            except Exception:  # noqa: BLE001 - throttled
                await anyio.sleep(0.01)

    seen: list[list[float]] = []
    with anyio.move_on_after(60):
        async with anyio.create_task_group() as tasks:
            for process in range(3):
                for _ in range(40):
                    tasks.start_soon(worker, process)
            await anyio.sleep(20)
            while True:
                seen.append([each.limit("api.example") for each in limits])
                await anyio.sleep(0.5)
    # At any one moment they may differ by what one has learned since the others heard from it.
    assert all(max(found) - min(found) <= 0.3 * max(found) for found in seen)
    means = [statistics.mean(found) for found in zip(*seen, strict=True)]
    assert max(means) - min(means) <= 1, "all have the same limit"
    assert all(14 <= mean <= 27 for mean in means)
    total = sum(served.values())
    assert total >= 0.75 * 24 * 60
    assert max(served.values()) <= 1.3 * min(served.values())


async def test_processes_find_a_knee_together() -> None:
    store, upstream = MemoryStore(), Upstream(spread=True)
    limits = [
        ConcurrencyLimit(initial=10, max=400, max_wait=math.inf, max_queued=10_000, store=store)
        for _ in range(3)
    ]
    doors = [Door(each, provider=upstream) for each in limits]

    async def worker(process: int) -> None:
        while True:
            await doors[process]()

    with anyio.move_on_after(240):
        async with anyio.create_task_group() as tasks:
            for process in range(3):
                for _ in range(150):
                    tasks.start_soon(worker, process)
    assert limits[0].limit("api.example") <= 60, "beyond 20 it only gets slower"
