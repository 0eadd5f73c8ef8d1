"""A cluster of which a server fails, or that moves what it keeps: others are not held up, and nothing is lost."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from redis.asyncio import RedisCluster
from redis.crc import key_slot

from resilient_llm import Bulkhead, RateLimit, RejectedError, StoreUnavailableError
from resilient_llm.core.leases import LeaseAnswer, LeaseLimit
from resilient_llm.core.shared_rate import Change, RateCharge, Verdict
from resilient_llm.stores import RedisStore
from resilient_llm.stores.protocol_leases import Lease
from tests.stores.cluster import SLOTS, cluster_of_three
from tests.stores.conftest import Server
from tests.support import Door, Provider, until

pytestmark = [pytest.mark.anyio, pytest.mark.realtime]

TENANTS = [f"tenant-{number}" for number in range(18)]


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[Server]]:
    """Give a cluster of three of the test's own, which goes on as far as it can when one of them is lost."""
    with cluster_of_three("valkey9", tmp_path, "--cluster-require-full-coverage", "no") as started:
        yield started


@asynccontextmanager
async def store_on(nodes: list[Server], **options: Any) -> AsyncIterator[RedisStore]:
    async with RedisCluster(host="127.0.0.1", port=nodes[0].port) as client:
        options.setdefault("timeout", 5.0)
        options.setdefault("on_store_error", "closed")
        store = RedisStore(client, **options)
        try:
            yield store
        finally:
            await store.aclose()


def home(tag: str) -> int:
    """Say which of the three servers keeps what has this hash tag."""
    return next(index for index in range(3) if key_slot(tag.encode()) <= SLOTS * (index + 1) // 3 - 1)


def lost_tenants(index: int) -> set[str]:
    return {tenant for tenant in TENANTS if home(f"rate_limit:{tenant}") == index}


class Load:
    """Calls of all tenants, one after another, each by itself, and what became of them."""

    def __init__(self, door: Door) -> None:
        self.passed: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.stopped = False
        self._door = door

    async def run(self) -> None:
        async with anyio.create_task_group() as tasks:
            for tenant in TENANTS:
                tasks.start_soon(self._call, tenant)

    async def _call(self, tenant: str) -> None:
        while not self.stopped:
            try:
                await self._door(tenant=tenant)
            except StoreUnavailableError:
                self.failed[tenant] += 1
            else:
                self.passed[tenant] += 1
            await anyio.sleep(0.005)

    async def all_pass(self, tenants: set[str]) -> None:
        """Wait until so many tenants have been let through several times more."""
        before = Counter(self.passed)
        await until(lambda: all(self.passed[tenant] > before[tenant] + 5 for tenant in tenants))


@contextmanager
def killed(server: Server) -> Iterator[None]:
    server.kill()
    yield
    server.start()


OUTAGES: dict[str, Callable[[Server], Any]] = {"killed": killed, "frozen": Server.frozen}


@pytest.mark.parametrize("outage", OUTAGES)
async def test_only_what_lay_on_a_lost_server_meets_on_store_error(nodes: list[Server], outage: str) -> None:
    gone = lost_tenants(1)
    others = set(TENANTS) - gone
    assert gone
    assert others
    async with store_on(nodes, timeout=2.0) as store:
        limit = RateLimit(requests_per_minute=60_000, key="tenant", store=store)
        load = Load(Door(limit, provider=Provider()))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(load.run)
            await load.all_pass(set(TENANTS))
            with OUTAGES[outage](nodes[1]):
                await until(lambda: all(load.failed[tenant] > 5 for tenant in gone))
                await load.all_pass(others)
                assert store.guard.closed, "the store is not given up on for one of its servers"
            await load.all_pass(set(TENANTS))
            load.stopped = True
        assert gone <= set(load.failed)
        # A machine that stands still for so long is an outage to everybody, once.
        assert all(load.failed[tenant] <= 1 for tenant in others)
        assert store.guard.transitions == 2, "given up on once, and asked again"
        assert store.guard.changes == []  # told, on calls


@pytest.mark.parametrize("mode", ["local", "open"])
async def test_no_call_fails_where_it_need_not(nodes: list[Server], mode: str) -> None:
    async with store_on(nodes, on_store_error=mode) as store:
        limit = RateLimit(requests_per_minute=60_000, key="tenant", store=store)
        load = Load(Door(limit, Bulkhead(max_concurrent=2, store=store), provider=Provider()))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(load.run)
            await load.all_pass(set(TENANTS))
            nodes[1].kill()
            await load.all_pass(set(TENANTS))
            nodes[1].start()
            unguarded = store.guard.unguarded
            assert unguarded > 0
            await until(lambda: store.guard.transitions >= 2)
            await load.all_pass(set(TENANTS))
            load.stopped = True
        assert not load.failed


async def test_what_is_to_be_settled_on_a_lost_server_waits_for_it_and_holds_up_nothing(
    nodes: list[Server],
) -> None:
    accounts = [f"account-{number}" for number in range(12)]
    there = [account for account in accounts if home(account) == 2]
    assert 0 < len(there) < len(accounts)
    charge = RateCharge("k", 1_000.0, 1e-6, 1.0, own=True)
    async with store_on(nodes) as store:
        for account in accounts:
            await store.rates.take(account, [charge])
        nodes[2].kill()
        await anyio.sleep(0.05)  # what is on its way when a server is lost may have been carried out
        for account in accounts:
            store.rates.settle(account, [Change("k", 1_000.0, 1e-6, -99.0)])
        for account in accounts:
            if account not in there:
                await until(lambda account=account: is_left(store, account, charge, 900.0))  # type: ignore[misc]
        nodes[2].start()  # and has forgotten what was taken of it
        for account in there:
            await until(lambda account=account: is_left(store, account, charge, 901.0))  # type: ignore[misc]
        assert store.guard.lost == 0


async def is_left(store: RedisStore, account: str, charge: RateCharge, amount: float) -> bool:
    try:
        decision = await store.rates.take(account, [charge._replace(amount=0.0)])
    except StoreUnavailableError:
        return False
    return math.isclose(decision.levels[0].level, amount, abs_tol=0.1)


async def test_a_cluster_that_is_not_there_at_first(nodes: list[Server]) -> None:
    ports = [node.port for node in nodes]
    for node in nodes:
        node.kill()
    charge = RateCharge("k", 1_000.0, 1e-6, 1.0, own=True)
    client = RedisCluster(host="127.0.0.1", port=ports[0])
    store = RedisStore(client, timeout=5.0, on_store_error="closed")
    for _ in range(8):
        with pytest.raises(StoreUnavailableError):
            await store.rates.take("account", [charge])
    assert not store.guard.closed, "there is no other"
    for node in nodes:
        node.start()
    for account in TENANTS:
        await until(lambda account=account: is_left(store, account, charge, 1_000.0))  # type: ignore[misc]
    assert store.guard.closed
    await store.aclose()
    await client.aclose()


# Slots that are moved


class Move:
    """Move the slot of a hash tag from the server that has it to another, step by step."""

    def __init__(self, nodes: list[Server], tag: str) -> None:
        self.slot = key_slot(tag.encode())
        self.source = nodes[home(tag)]
        self.target = nodes[(home(tag) + 1) % 3]
        self._nodes = nodes

    def begin(self) -> None:
        self._set(self.target, "IMPORTING", self._id(self.source))
        self._set(self.source, "MIGRATING", self._id(self.target))

    def keys(self) -> list[bytes]:
        with self.source.admin as admin:
            found: list[bytes] = admin.execute_command("CLUSTER", "GETKEYSINSLOT", self.slot, 1_000)
        return found

    def carry(self, *keys: bytes) -> None:
        with self.source.admin as admin:
            for key in keys:
                admin.execute_command("MIGRATE", "127.0.0.1", self.target.port, key, 0, 5_000)

    def end(self) -> None:
        while left := self.keys():
            self.carry(*left)
        for node in (self.target, self.source, *self._nodes):
            self._set(node, "NODE", self._id(self.target))

    def _set(self, node: Server, *words: str) -> None:
        with node.admin as admin:
            admin.execute_command("CLUSTER", "SETSLOT", self.slot, *words)

    def _id(self, node: Server) -> str:
        with node.admin as admin:
            name: bytes = admin.execute_command("CLUSTER", "MYID")
        return name.decode()


async def test_rate_limits_follow_their_slot_and_count_everything_once(nodes: list[Server]) -> None:
    charges = [RateCharge(f"k{number}", 1_000.0, 1e-6, 1.0, own=True) for number in range(3)]
    move = Move(nodes, "account")
    taken = failed = 0
    done = False

    async with store_on(nodes) as store, store_on(nodes[1:]) as other:

        async def draw(store: RedisStore) -> None:
            nonlocal taken, failed
            while not done:
                try:
                    decision = await store.rates.take("account", charges)
                except StoreUnavailableError:  # as long as some of its keys are here and some there
                    failed += 1
                else:
                    assert decision.verdict is Verdict.TAKEN
                    taken += 1
                await anyio.sleep(0.01)

        async def more() -> None:
            before = taken
            await until(lambda: taken > before + 10)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(draw, store)
            tasks.start_soon(draw, other)
            await more()
            move.begin()
            await more()  # all of its keys are where they were
            keys = move.keys()
            assert len(keys) == 3
            move.carry(keys[0])
            move.carry(*keys[1:])
            await more()  # all are there, and it is not official
            move.end()
            await more()
            done = True
        assert move.keys() == []
        decision = await store.rates.take("account", [each._replace(amount=0.0) for each in charges])
        assert [level.level for level in decision.levels] == pytest.approx([1_000.0 - taken] * 3, abs=0.1)
        assert (store.guard.lost, other.guard.lost) == (0, 0)


async def test_leases_and_places_follow_their_slot(nodes: list[Server]) -> None:
    limit = [LeaseLimit("all", 2)]
    move = Move(nodes, "slots:x")
    told: list[str] = []
    async with store_on(nodes) as store, store_on(nodes) as other:
        pool = store.leases.pool("slots:x", lambda _: None)
        theirs = other.leases.pool("slots:x", told.append)
        first, second = await pool.acquire(limit), await pool.acquire(limit)
        assert isinstance(first, Lease)
        assert isinstance(second, Lease)
        assert isinstance(await theirs.acquire(limit, wait=True), LeaseAnswer)
        move.begin()
        move.end()
        # Both are still held, and the place is still kept, where they are now.
        assert isinstance(await theirs.acquire(limit, wait=True), LeaseAnswer)
        with move.target.admin as admin:
            assert admin.zcard("resilient_llm:{slots:x}:lease:all") == 2
            assert admin.zcard("resilient_llm:{slots:x}:lease:all:queue") == 1
        told.clear()
        pool.release(first)
        await until(lambda: told)
        assert isinstance(await pool.acquire(limit), LeaseAnswer), "it is for whoever has waited"
        third = await theirs.acquire(limit, wait=True)
        assert isinstance(third, Lease)
        store.leases._renew_since(math.inf, store.leases.loop.time())
        pool.release(second)
        theirs.release(third)

        def free() -> bool:
            with move.target.admin as admin:
                return not admin.zcard("resilient_llm:{slots:x}:lease:all")

        await until(free)
        assert (store.leases.lost, store.guard.lost, other.guard.lost) == (0, 0, 0)


async def test_a_bulkhead_goes_on_while_its_slot_is_moved_back_and_forth(nodes: list[Server]) -> None:
    provider = Provider(duration=0.02)
    async with store_on(nodes) as store, store_on(nodes) as other:
        doors = [
            Door(
                Bulkhead(max_concurrent=3, key=lambda _: "x", name="moved", store=each),
                provider=provider,
            )
            for each in (store, other)
        ]
        done = False
        served = 0

        async def call(door: Door) -> None:
            nonlocal served
            while not done:
                try:
                    await door()
                except (StoreUnavailableError, RejectedError):
                    continue
                served += 1

        async with anyio.create_task_group() as tasks:
            for door in doors:
                for _ in range(5):
                    tasks.start_soon(call, door)
            for way in itertools.islice(itertools.cycle(([*nodes], None)), 4):
                before = served
                await until(lambda before=before: served > before + 20)  # type: ignore[misc]
                move = Move(nodes, "moved:x")
                if way is None:
                    move.source, move.target = move.target, move.source
                move.begin()
                move.end()
            before = served
            await until(lambda: served > before + 20)
            done = True
        assert provider.peak <= 3
