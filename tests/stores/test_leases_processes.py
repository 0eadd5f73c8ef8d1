"""Leases on real servers: from several processes, some of which are killed, and through what servers go through."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from benchmarks._children import Watch
from resilient_llm import Bulkhead, BulkheadFullError, StoreUnavailableError
from resilient_llm.core.leases import LeaseAnswer, LeaseLimit
from resilient_llm.stores import RedisStore
from resilient_llm.stores.protocol_leases import Lease
from tests.stores.cluster import wait_for
from tests.stores.inside import runner_of
from tests.support import Door, Provider, cancel_at_every_await, stalls, until

pytestmark = [pytest.mark.anyio, pytest.mark.realtime]

ROOT = Path(__file__).parents[2]
SLOTS = "resilient_llm:{slots:all}:lease:all"
KEY = "resilient_llm:{p}:lease:k"


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start processes that take slots, and end them."""
    started: list[tuple[subprocess.Popen[str], Watch]] = []

    def begin(server: Any, **options: Any) -> subprocess.Popen[str]:
        options = {
            "lease": 1.5,
            "most": 5,
            "seed": len(started),
            "hold": 0.02,
            "callers": 6,
            "seconds": 3,
        } | options
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.stores.lease_worker", server.url, json.dumps(options)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append((process, Watch(process)))
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "ready"
        return process

    yield begin
    for process, watch in started:
        watch.release()
        process.kill()
        process.communicate()


def notes(server: Any) -> list[dict[str, Any]]:
    with server.admin as admin:
        return [json.loads(note) for note in admin.lrange(f"{SLOTS}:notes", 0, -1)]


def test_three_processes_never_hold_more_than_there_are(
    server: Any, start: Callable[..., subprocess.Popen[str]]
) -> None:
    processes = [start(server, cancel=0.3) for _ in range(3)]
    results = [json.loads(process.communicate(timeout=60)[0]) for process in processes]
    grants = notes(server)
    assert max(each["out"] for each in grants) == 5, "all are used, and never one more"
    served = [each["served"] for each in results]
    stalled = max(each["stalled"] for each in results)
    if stalled < 0.5:  # a third of a lease
        assert sum(each["lost"] for each in results) == 0
        assert sum(served) > 200 * (1 - stalled)
        assert max(served) <= 2 * min(served) / (1 - stalled), f"served in turn: {served}"
    with server.admin as admin:
        assert admin.zcard(SLOTS) == 0, "nothing is left behind"
        assert admin.zcard(f"{SLOTS}:queue") == 0


def test_slots_of_a_killed_process_come_back_after_the_lease_time_and_not_before(
    server: Any, start: Callable[..., subprocess.Popen[str]]
) -> None:
    lease = 3.0
    victim = start(server, callers=5, hold=100, seconds=100, lease=lease)
    with server.admin as admin:

        def clock() -> float:
            seconds, micro = admin.time()
            return float(seconds + micro / 1e6)

        wait_for(lambda: admin.zcard(SLOTS) == 5, "five leases")
        time.sleep(1.5 * lease)  # longer than a lease: it is renewed
        assert admin.zcard(SLOTS) == 5
        others = [start(server, callers=3, hold=0.05, seconds=3 * lease, lease=lease) for _ in range(2)]
        wait_for(lambda: admin.zcard(f"{SLOTS}:queue") > 0, "somebody in line")
        before = len(notes(server))
        assert before == 5, "while it lives nobody else is let in"
        victim.kill()
        victim.wait()
        killed = clock()
        ends = dict(admin.zrange(SLOTS, 0, -1, withscores=True))
    theirs = {name.decode(): end for name, end in ends.items()}
    results = [json.loads(process.communicate(timeout=60)[0]) for process in others]
    assert min(each["served"] for each in results) > 0
    after = notes(server)[before:]
    # Whatever is granted, the leases that have not ended are never more than five with it.
    assert max(each["out"] for each in after) <= 5
    first = min(each["at"] for each in after)
    assert first >= min(theirs.values()) - 1e-6, "not before the first lease has ended"
    full = next(each["at"] for each in after if each["out"] == 5 and each["at"] > max(theirs.values()))
    assert max(theirs.values()) - killed <= lease + 1e-3
    stalled = sum(each["stalled"] for each in results)
    assert full - killed <= lease + 0.5 + stalled, "all are back within one lease time, but for asking"


async def test_hammered_from_several_clients_it_is_exact(
    server: Any, make_store: Callable[..., RedisStore]
) -> None:
    upstream = Provider(duration=0.002)
    doors = [
        Door(
            Bulkhead(max_concurrent=3, shared=7, max_queued=500, store=make_store(server)),
            provider=upstream,
        )
        for _ in range(4)
    ]
    began = time.monotonic()
    async with stalls() as lost, anyio.create_task_group() as tasks:

        async def caller(door: Door, tenant: str) -> None:
            for _ in range(12):
                await door(tenant=tenant)

        for door in doors:
            for tenant in ("a", "b", "c", "d"):
                for _ in range(3):
                    tasks.start_soon(caller, door, tenant)
    assert upstream.peak <= 7
    assert len(upstream.attempts) == 4 * 4 * 3 * 12
    took = time.monotonic() - began
    assert took < 10 + 5 * lost.total, "nobody was forgotten until it asked by itself"


async def test_cancelled_anywhere_it_leaves_nothing(
    server: Any, make_store: Callable[..., RedisStore]
) -> None:
    bulkheads = [Bulkhead(max_concurrent=2, shared=2, store=make_store(server)) for _ in range(2)]
    doors = [Door(each, provider=Provider(duration=0.005)) for each in bulkheads]

    async def scenario() -> None:
        async with anyio.create_task_group() as tasks:
            for _ in range(2):
                tasks.start_soon(doors[1])
            for _ in range(2):
                tasks.start_soon(doors[0])
            await doors[0]()

    async def check() -> None:
        for bulkhead in bulkheads:
            assert (bulkhead.in_use(), bulkhead.queued()) == (0, 0)
        with server.admin as admin:
            await until(lambda: not any(admin.zcard(key) for key in admin.keys("*lease*")))

    assert await cancel_at_every_await(scenario, check) > 2


async def test_a_cancellation_that_meets_the_reply_leaves_no_lease(
    server: Any, make_store: Callable[..., RedisStore]
) -> None:
    store = make_store(server)
    pool = store.leases.pool("p", lambda _: None)
    limit = [LeaseLimit("k", 1)]
    for _ in range(20):
        task = asyncio.create_task(pool.acquire(limit))
        sender = runner_of(store).sender
        waiting = sender.resolve

        def resolve(request: Any, reply: Any, task: Any = task, waiting: Any = waiting) -> Any:
            result = waiting(request, reply)
            task.cancel()  # in the same turn of the loop as the reply came
            return result

        sender.resolve = resolve  # type: ignore[method-assign]
        with pytest.raises(asyncio.CancelledError):
            await task
        sender.resolve = waiting  # type: ignore[method-assign]
    with server.admin as admin:
        await until(lambda: admin.zcard(KEY) == 0)


async def test_who_is_late_in_renewing_learns_it_and_goes_on(
    server: Any, make_store: Callable[..., RedisStore]
) -> None:
    slow, quick = make_store(server, lease=1.0), make_store(server, lease=60.0)
    limit = [LeaseLimit("k", 1)]
    theirs, ours = (store.leases.pool("p", lambda _: None) for store in (slow, quick))
    lease = await theirs.acquire(limit)
    assert isinstance(lease, Lease)
    with server.admin as admin:  # as if its loop had stood still for longer than the lease
        admin.zadd(KEY, {lease.id: 1})
    got = await ours.acquire(limit)
    assert isinstance(got, Lease), "what has ended is for others"
    await until(lambda: slow.leases.lost == 1)
    assert lease.lost
    assert quick.leases.lost == 0
    ours.release(got)
    with server.admin as admin:
        await until(lambda: [each.decode() for each in admin.zrange(KEY, 0, -1)] == [lease.id])
    assert isinstance(await ours.acquire(limit), LeaseAnswer), "it runs on, and is counted"
    theirs.release(lease)

    async def is_free() -> bool:
        return isinstance(await ours.acquire(limit), Lease)

    await until(is_free)


async def test_a_lease_that_ended_and_nobody_needed_is_not_lost(
    server: Any, make_store: Callable[..., RedisStore]
) -> None:
    store = make_store(server, lease=1.0)
    lease = await store.leases.pool("p", lambda _: None).acquire([LeaseLimit("k", 2)])
    assert isinstance(lease, Lease)
    with server.admin as admin:
        admin.zadd(KEY, {lease.id: 1})
        await until(lambda: admin.zscore(KEY, lease.id) != 1)  # it has been renewed
    await anyio.sleep(0.05)
    assert not lease.lost
    assert store.leases.lost == 0


async def test_a_release_that_overtakes_a_renewal_frees_the_slot_all_the_same(
    server: Any, make_store: Callable[..., RedisStore]
) -> None:
    store = make_store(server)
    pool = store.leases.pool("p", lambda _: None)
    lease = await pool.acquire([LeaseLimit("k", 1)])
    assert isinstance(lease, Lease)
    pool.release(lease)
    with server.admin as admin:
        await until(lambda: admin.zcard(KEY) == 0)
    store.leases._held[lease] = pool  # as if it was renewed on the other connection, and arrived later
    store.leases._send(pool, [lease], 0.0)
    store.leases._held.pop(lease)
    await store.runner.command("TIME")  # behind what was sent
    with server.admin as admin:
        await until(lambda: admin.zcard(KEY) == 0)


async def test_what_runs_is_counted_again_after_the_server_forgot_it(
    server: Any, make_store: Callable[..., RedisStore]
) -> None:
    store = make_store(server, lease=0.6)
    pool = store.leases.pool("p", lambda _: None)
    assert isinstance(await pool.acquire([LeaseLimit("k", 1)]), Lease)
    with server.admin as admin:
        admin.flushall()
        admin.script_flush()
        await until(lambda: admin.zcard(KEY) == 1)
    assert isinstance(await pool.acquire([LeaseLimit("k", 1)]), LeaseAnswer)


async def test_waiters_go_on_when_their_subscription_is_cut(
    server: Any, make_store: Callable[..., RedisStore]
) -> None:
    stores = [make_store(server) for _ in range(2)]
    doors = [
        Door(Bulkhead(max_concurrent=1, key=lambda _: "x", store=store), provider=Provider(duration=0.1))
        for store in stores
    ]
    async with anyio.create_task_group() as tasks:
        for door in doors:
            for _ in range(5):
                tasks.start_soon(door)
        for _ in range(3):
            await anyio.sleep(0.1)
            with server.admin as admin:
                admin.client_kill_filter(_type="pubsub")
    assert all(len(door.calls) == 5 for door in doors)


async def test_without_a_connection_to_spare_waiters_ask_now_and_then(
    server: Any, make_store: Callable[..., RedisStore]
) -> None:
    from redis.asyncio import Redis  # noqa: PLC0415 - an extra

    client = Redis.from_url(server.url, max_connections=1)
    stores = [make_store(client), make_store(server)]
    doors = [
        Door(Bulkhead(max_concurrent=1, key=lambda _: "x", store=store), provider=Provider(duration=0.05))
        for store in stores
    ]
    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            for door in doors:
                for _ in range(4):
                    tasks.start_soon(door)
    assert stores[0].leases.wakeups._listener is None
    await stores[0].aclose()
    await client.aclose()


async def test_clocks_of_clients_do_not_matter(
    server: Any, make_store: Callable[..., RedisStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = make_store(server), make_store(server)
    limit = [LeaseLimit("k", 1)]
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 30)
    assert isinstance(await first.leases.pool("p", lambda _: None).acquire(limit), Lease)
    monkeypatch.setattr(time, "time", lambda: real() - 30)
    assert isinstance(await second.leases.pool("p", lambda _: None).acquire(limit), LeaseAnswer)


async def test_through_an_outage_each_process_has_its_share_and_then_all_is_counted(
    own_server: Any, make_store: Callable[..., RedisStore]
) -> None:
    stores = [make_store(own_server, on_store_error="local", lease=9.0) for _ in range(2)]
    upstreams = [Provider(duration=0.01) for _ in stores]
    bulkheads = [
        Bulkhead(max_concurrent=4, key=lambda _: "x", store=store, max_queued=20) for store in stores
    ]
    doors = [
        Door(bulkhead, provider=upstream) for bulkhead, upstream in zip(bulkheads, upstreams, strict=True)
    ]
    for store in stores:
        await store.leases.pool("warm", lambda _: None).acquire([LeaseLimit("k", 10)])

    def have_heard_how_many_there_are() -> bool:
        for store in stores:
            store._presence.say()
        return [store.processes for store in stores] == [2, 2]

    await until(have_heard_how_many_there_are)
    for door, upstream in zip(doors, upstreams, strict=True):
        await door()
        upstream.duration = 600
    own_server.kill()
    async with anyio.create_task_group() as tasks:
        for door in doors:
            for _ in range(4):
                tasks.start_soon(door)
        await until(lambda: [upstream.running for upstream in upstreams] == [2, 2])  # half of four each
        await anyio.sleep(0.5)
        assert [upstream.running for upstream in upstreams] == [2, 2], "and no more"
        own_server.start()
        with own_server.admin as admin:
            # What runs is counted.
            await until(lambda: admin.zcard("resilient_llm:{bulkhead:x}:lease:all") == 4)
        await anyio.sleep(0.5)
        assert [upstream.running for upstream in upstreams] == [2, 2]
        tasks.cancel_scope.cancel()
    assert [bulkhead.in_use() for bulkhead in bulkheads] == [0, 0]


async def test_closed_refuses_while_the_server_is_down(
    own_server: Any, make_store: Callable[..., RedisStore]
) -> None:
    store = make_store(own_server)
    ended = anyio.Event()
    bulkhead = Bulkhead(max_concurrent=1, key=lambda _: "x", store=store)
    door = Door(bulkhead, provider=Provider([ended]))
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
        await until(lambda: (bulkhead.in_use(), bulkhead.queued()) == (1, 2))
        own_server.kill()
        await call()
        assert outcomes[0] == "refused"
        await until(lambda: len(outcomes) == 3)
        ended.set()
    assert sorted(outcomes) == ["refused"] * 3 + ["served"]


async def test_refused_by_a_full_queue_without_asking(
    server: Any, make_store: Callable[..., RedisStore]
) -> None:
    store = make_store(server)
    bulkhead = Bulkhead(max_concurrent=1, max_queued=1, max_wait=60, key=lambda _: "x", store=store)
    ended = anyio.Event()
    door = Door(bulkhead, provider=Provider([ended]))
    async with anyio.create_task_group() as tasks:
        for _ in range(2):
            tasks.start_soon(door)
        await until(lambda: (bulkhead.in_use(), bulkhead.queued()) == (1, 1))
        await anyio.sleep(0.2)
        asked: list[str] = []
        runner: Any = store.runner
        runner._tell = lambda request: asked.append("told")
        run = runner.run

        async def count(*args: Any, **options: Any) -> Any:
            asked.append("asked")
            return await run(*args, **options)

        runner.run = count
        with pytest.raises(BulkheadFullError):
            await door()
        assert asked == []
        del runner.run, runner._tell
        ended.set()
