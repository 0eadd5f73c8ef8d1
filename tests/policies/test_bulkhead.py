"""Compartments: who runs, who waits, who is refused, and that nothing is ever lost."""

from __future__ import annotations

import contextlib
import functools
import gc
import random

import anyio
import pytest
from anyio import wait_all_tasks_blocked

from resilient_llm import (
    Bulkhead,
    BulkheadFullError,
    ConfigurationError,
    Deadline,
    DeadlineExceededError,
    Reply,
)
from resilient_llm.outcome import CANCELLED
from tests.support import Door, Provider, cancel_at_every_await

pytestmark = pytest.mark.anyio


async def run_all(door: Door, tenants: list[str]) -> list[Reply | BaseException]:
    results: list[Reply | BaseException] = [BaseException()] * len(tenants)

    async def one(index: int, tenant: str) -> None:
        try:
            results[index] = await door(tenant=tenant)
        except Exception as error:  # noqa: BLE001 - it is a result
            results[index] = error

    async with anyio.create_task_group() as group:
        for index, tenant in enumerate(tenants):
            group.start_soon(one, index, tenant)
            await wait_all_tasks_blocked()
    return results


async def test_never_more_than_max_concurrent_at_once() -> None:
    provider = Provider(duration=1.0)
    bulkhead = Bulkhead(max_concurrent=3)
    started = anyio.current_time()
    await run_all(Door(bulkhead, provider=provider), ["a"] * 10)
    assert provider.peak == 3
    assert anyio.current_time() - started == pytest.approx(4)
    assert (bulkhead.in_use(), bulkhead.queued()) == (0, 0)


async def test_each_tenant_has_a_compartment_of_its_own() -> None:
    provider = Provider(duration=1.0)
    started = anyio.current_time()
    await run_all(Door(Bulkhead(max_concurrent=1), provider=provider), ["a", "b", "c"])
    assert anyio.current_time() - started == pytest.approx(1)


async def test_waiters_are_served_first_come_first_served() -> None:
    provider = Provider(duration=1.0)
    door = Door(Bulkhead(max_concurrent=1), provider=provider)
    await run_all(door, ["a"] * 5)
    order = [
        door.calls.index(attempt.parent) for _, attempt in provider.attempts if attempt.parent is not None
    ]
    assert order == [0, 1, 2, 3, 4]


async def test_a_full_queue_refuses_at_once_and_says_when_to_come_back() -> None:
    provider = Provider(duration=4.0)
    door = Door(Bulkhead(max_concurrent=1, max_queued=1), provider=provider)
    await door(tenant="a")
    results = await run_all(door, ["a"] * 3)
    refused = [result for result in results if isinstance(result, BulkheadFullError)]
    assert len(refused) == 1
    # One runs and one waits, and slots are held for 4 s.
    assert refused[0].retry_after == pytest.approx(8)
    assert refused[0].status == 429
    assert len(provider.attempts) == 3


async def test_max_wait_bounds_the_time_in_the_queue() -> None:
    provider = Provider(duration=10.0)
    bulkhead = Bulkhead(max_concurrent=1, max_wait=2)
    door = Door(bulkhead, provider=provider)
    started = anyio.current_time()
    async with anyio.create_task_group() as group:
        group.start_soon(door)
        await wait_all_tasks_blocked()
        with pytest.raises(BulkheadFullError, match="waited 2 s"):
            await door()
        assert anyio.current_time() - started == pytest.approx(2)
        assert bulkhead.queued() == 0
    assert door.calls[1].wait_time == pytest.approx(2)


async def test_the_deadline_counts_in_the_queue() -> None:
    provider = Provider(duration=10.0)
    bulkhead = Bulkhead(max_concurrent=1)
    door = Door(Deadline(60), bulkhead, provider=provider)
    async with anyio.create_task_group() as group:
        group.start_soon(door)
        await wait_all_tasks_blocked()
        with pytest.raises(DeadlineExceededError):
            await door(deadline=anyio.current_time() + 1)
        assert bulkhead.queued() == 0
    assert len(provider.attempts) == 1


async def test_a_wait_is_no_longer_than_it_must_be() -> None:
    provider = Provider(duration=1.0)
    door = Door(Bulkhead(max_concurrent=1), provider=provider)
    await run_all(door, ["a"] * 3)
    assert [round(call.wait_time, 9) for call in door.calls] == [0, 1, 2]


async def test_a_higher_priority_goes_first() -> None:
    provider = Provider(duration=1.0)
    door = Door(Bulkhead(max_concurrent=1), provider=provider)
    async with anyio.create_task_group() as group:
        for priority in (0, 0, 1):
            group.start_soon(functools.partial(door, priority=priority))
            await wait_all_tasks_blocked()
    assert [attempt.priority for _, attempt in provider.attempts] == [0, 1, 0]


async def test_resize_wakes_waiters_and_drains_when_shrunk() -> None:
    provider = Provider(duration=1.0)
    bulkhead = Bulkhead(max_concurrent=1)
    door = Door(bulkhead, provider=provider)
    async with anyio.create_task_group() as group:
        for _ in range(6):
            group.start_soon(door)
        await anyio.sleep(0.5)
        bulkhead.resize(3)
        await anyio.sleep(0.1)
        assert provider.running == 3
        bulkhead.resize(1)
        await anyio.sleep(0.5)
        assert provider.running == 2
    assert bulkhead.in_use() == 0


async def test_lim_09_keys_are_bounded_and_idle_ones_forgotten() -> None:
    bulkhead = Bulkhead(max_concurrent=1, max_keys=10)
    door = Door(bulkhead, provider=Provider())
    for number in range(1000):
        await door(tenant=f"tenant {number}")
    assert len(bulkhead._compartments) <= 10


async def test_keys_in_use_beyond_the_bound_share_one_compartment() -> None:
    provider = Provider(duration=1.0)
    bulkhead = Bulkhead(max_concurrent=1, max_keys=2)
    started = anyio.current_time()
    await run_all(Door(bulkhead, provider=provider), ["a", "b", "c", "d"])
    assert anyio.current_time() - started == pytest.approx(2)  # c and d one after the other
    assert bulkhead.in_use() == 0


async def test_a_key_stays_in_the_shared_compartment_until_its_calls_there_have_ended() -> None:
    provider = Provider(duration=1.0)
    bulkhead = Bulkhead(max_concurrent=1, max_keys=1)
    door = Door(bulkhead, provider=provider)
    began = anyio.current_time()
    ends: list[float] = []

    async def call(tenant: str, after: float) -> None:
        await anyio.sleep(after)
        await door(tenant=tenant)
        ends.append(anyio.current_time() - began)

    async with anyio.create_task_group() as group:
        group.start_soon(call, "a", 0.0)
        group.start_soon(call, "b", 0.5)  # no room for it beside a
        group.start_soon(call, "b", 1.2)  # room, but the other one runs
        group.start_soon(call, "b", 2.6)  # and now in one of its own
    assert ends == pytest.approx([1, 1.5, 2.5, 3.6])
    assert bulkhead._compartments._overflowing == {}
    assert [key for key, _ in bulkhead._compartments.items()] == ["b"]


async def test_nothing_is_held_whenever_a_waiting_call_is_cancelled() -> None:
    bulkhead = Bulkhead(max_concurrent=1)
    provider = Provider(duration=1.0)
    door = Door(bulkhead, provider=provider)

    async def scenario() -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(door)
            await anyio.sleep(0.1)
            await door()

    async def check() -> None:
        assert (bulkhead.in_use(), bulkhead.queued(), provider.running) == (0, 0, 0)
        await door()  # and it still works

    assert await cancel_at_every_await(scenario, check) >= 3


async def test_a_permit_granted_to_a_cancelled_waiter_is_passed_on() -> None:
    bulkhead = Bulkhead(max_concurrent=1)
    door = Door(bulkhead, provider=Provider(duration=1.0))
    done: list[str] = []

    async def waiter(name: str, scope: anyio.CancelScope) -> None:
        with scope:
            await door()
            done.append(name)

    first, second = anyio.CancelScope(), anyio.CancelScope()
    async with anyio.create_task_group() as group:
        group.start_soon(waiter, "holder", anyio.CancelScope())
        await wait_all_tasks_blocked()
        group.start_soon(waiter, "first", first)
        group.start_soon(waiter, "second", second)
        await anyio.sleep(
            1.0
        )  # the holder is done in this very instant: the permit is on its way to the first
        first.cancel()
    assert done in (["holder", "second"], ["holder", "first", "second"])
    assert bulkhead.in_use() == 0


@pytest.mark.parametrize("seed", range(5))
async def test_permits_are_conserved_under_random_cancellation(seed: int) -> None:
    rng = random.Random(seed)
    bulkhead = Bulkhead(max_concurrent=3, max_queued=20, max_wait=3)
    provider = Provider(duration=0.5)
    door = Door(bulkhead, provider=provider)

    async def one(tenant: str, patience: float) -> None:
        with anyio.move_on_after(patience):
            with contextlib.suppress(BulkheadFullError):
                await door(tenant=tenant)

    async with anyio.create_task_group() as group:
        for _ in range(200):
            group.start_soon(one, rng.choice("ab"), rng.uniform(0, 4))
            await anyio.sleep(rng.uniform(0, 0.1))
    assert (bulkhead.in_use(), bulkhead.queued()) == (0, 0)
    assert provider.peak <= 6


async def test_a_permit_is_released_from_another_thread_through_the_loop() -> None:
    bulkhead = Bulkhead(max_concurrent=1)

    async def hand_over(attempt: object) -> Reply:
        return await Provider()(attempt)  # type: ignore[arg-type]

    door = Door(bulkhead, provider=hand_over)
    await door()
    call = door.calls[0]
    assert call.finished
    compartment = bulkhead._compartments.peek(None)
    assert compartment is not None
    compartment.slots.acquire(None, anyio.current_time())
    call._open.append(True)  # a call that is still open, and holds the slot
    call.on_finish(lambda _outcome: compartment.wake(compartment.slots.release(None, call.loop.time())))
    await anyio.to_thread.run_sync(call.finish, CANCELLED)
    await anyio.sleep(0.01)
    assert bulkhead.in_use() == 0
    gc.collect()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_concurrent": 0}, "max_concurrent=0"),
        ({"max_concurrent": 1, "max_queued": -1}, "max_queued=-1"),
        ({"max_concurrent": 1, "max_wait": -1}, "max_wait=-1"),
        ({"max_concurrent": 1, "key": "user"}, "key='user'"),
        ({"max_concurrent": 1.5}, "max_concurrent=1.5"),
        ({"max_concurrent": 1, "max_keys": 0}, "max_keys=0"),
    ],
)
async def test_options_that_cannot_work_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Bulkhead(**options)  # type: ignore[arg-type]
