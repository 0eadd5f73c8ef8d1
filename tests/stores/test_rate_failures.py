"""What calls meet when their store fails: each way a server has of failing, and each way of going on without it."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from redis.asyncio import Redis, RedisCluster
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from resilient_llm import EventLoopError, RateLimit, RateLimitedError, StoreUnavailableError
from resilient_llm.core.shared_rate import Change, RateCharge, Verdict
from resilient_llm.stores import RedisStore
from tests.support import A_HANG, Door, Provider, until

pytestmark = [pytest.mark.anyio, pytest.mark.realtime]

Make = Callable[..., RedisStore]

PLENTY = RateCharge("k", 1_000.0, 1e-3, 1.0, own=True)


async def taken(store: RedisStore, charge: RateCharge = PLENTY) -> bool:
    return (await store.rates.take("account", [charge])).verdict is Verdict.TAKEN


async def left(store: RedisStore, charge: RateCharge = PLENTY) -> float:
    return (await store.rates.take("account", [charge._replace(amount=0)])).levels[0].level


async def is_left(store: RedisStore, amount: float, *, within: float = 0.1) -> bool:
    """Tell whether so much is left; not while the store cannot say."""
    try:
        return await left(store) == pytest.approx(amount, abs=within)
    except StoreUnavailableError:
        return False


@asynccontextmanager
async def hogged(server: Any, client: Redis, connections: int) -> AsyncIterator[None]:
    """Have all the connections of a client in use meanwhile."""
    async with anyio.create_task_group() as group:
        for _ in range(connections):
            group.start_soon(client.execute_command, "BLPOP", "nothing", 0)
        with server.admin as admin:
            await until(lambda: admin.info("clients")["blocked_clients"] == connections)
            yield
            admin.rpush("nothing", *range(connections))


async def refuses(store: RedisStore) -> StoreUnavailableError:
    with anyio.fail_after(A_HANG), pytest.raises(StoreUnavailableError) as error:
        await store.rates.take("account", [PLENTY])
    return error.value


async def works(store: RedisStore) -> None:
    """Take one at last, however often it fails before."""

    async def is_taken() -> bool:
        try:
            return await taken(store)
        except StoreUnavailableError:
            return False

    await until(is_taken)


async def test_red_01_a_script_that_the_server_forgot_is_sent_again_and_counts_once(
    server: Any, make_store: Make
) -> None:
    store = make_store(server)
    assert await taken(store)
    with server.admin as admin:
        admin.script_flush()
        assert await taken(store)
        assert await left(store) == pytest.approx(998, abs=0.1)
        admin.script_flush()
        # In one batch: a neighbour that the server knows, and several scripts that it does not.
        async with anyio.create_task_group() as group:
            group.start_soon(store.runner.command, "INCR", "neighbour")
            for _ in range(20):
                group.start_soon(taken, store)
        assert await left(store) == pytest.approx(978, abs=0.1)
        assert admin.get("neighbour") == b"1"


async def test_red_02_the_keys_of_one_decision_share_a_slot_and_numbers_are_no_keys(
    server: Any, make_store: Make
) -> None:
    from redis.crc import key_slot  # noqa: PLC0415

    store = make_store(server)
    names = ["tenant:requests:a", "tenant:tokens:a", "account:requests:!none"]
    await store.rates.take("limit", [PLENTY._replace(key=name) for name in names])
    with server.admin as admin:
        keys = [key for key in admin.scan_iter() if b":rate:" in key]
    assert sorted(keys) == sorted(f"resilient_llm:{{limit}}:rate:{name}".encode() for name in names)
    assert len({key_slot(key) for key in keys}) == 1


async def test_red_02_an_error_in_a_script_is_a_failure_of_the_store_and_never_lets_through(
    server: Any, make_store: Make
) -> None:
    store = make_store(server)
    with server.admin as admin:
        admin.set("resilient_llm:{account}:rate:k", "not a bucket")
    assert "too short" in str(await refuses(store))


async def test_red_04_every_key_expires_and_one_that_would_not_is_mended(
    server: Any, make_store: Make
) -> None:
    store = make_store(server)
    fast = RateCharge("fast", 1.0, 1_000.0, 1.0, own=True)
    began = time.perf_counter()
    await store.rates.take("account", [fast, PLENTY])
    await store.rates.take("account", [fast], most_wait=9, mode="h")
    with server.admin as admin:
        for key in admin.scan_iter():
            left = admin.pttl(key)
            assert left != -1, "it would stay for ever"
            assert left >= 500 - 1_000 * (time.perf_counter() - began) - 2, key  # -2 is gone
        name = "resilient_llm:{account}:rate:k"
        admin.persist(name)
        assert admin.ttl(name) == -1
        assert await taken(store)
        assert admin.ttl(name) > 0


@pytest.mark.parametrize("skew", [30.0, -30.0])
async def test_red_05_the_clocks_of_clients_do_not_matter(
    server: Any, make_store: Make, monkeypatch: pytest.MonkeyPatch, skew: float
) -> None:
    here, there = make_store(server), make_store(server)
    charge = RateCharge("k", 10.0, 0.01, 5.0, own=True)
    began = time.perf_counter()
    assert await taken(here, charge)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + skew)
    assert await taken(there, charge)
    refused = await there.rates.take("account", [charge])
    monkeypatch.undo()
    again = await here.rates.take("account", [charge])
    assert refused.verdict is again.verdict is Verdict.REFUSED
    took = time.perf_counter() - began
    assert refused.wait == pytest.approx(500, abs=took)
    assert again.wait == pytest.approx(500, abs=took)


async def test_red_05_with_the_clock_of_clients_a_step_back_mints_nothing(
    server: Any, make_store: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store(server, clock="client")
    charge = RateCharge("k", 10.0, 0.1, 5.0, own=True)
    began = time.perf_counter()
    assert await taken(store, charge)
    behind = make_store(server, clock="client")
    behind.rates._clock = lambda: time.time() - 30
    assert await left(behind, charge) == pytest.approx(5, abs=0.001)
    assert await left(store, charge) == pytest.approx(5, abs=0.1 * (time.perf_counter() - began) + 0.001)


async def test_who_comes_back_for_a_place_and_never_gets_through_gives_it_up(
    own_server: Any, make_store: Make
) -> None:
    store = make_store(own_server, timeout=0.5)
    one = RateCharge("k", 1.0, 1e-6, 1.0, own=True)

    async def back() -> RateCharge:
        """Take a place in line, and give what says that it is come back for."""
        decision = await store.rates.take("account", [one], most_wait=1e9, mode="h")
        assert decision.verdict is Verdict.HELD
        return one._replace(held=decision.held[0])

    async def none_is_kept() -> bool:
        try:
            return await left(store, one) > -0.5
        except StoreUnavailableError:
            return False

    assert await taken(store, one)
    with anyio.CancelScope() as scope:
        again = await back()
        scope.cancel()
        await store.rates.take("account", [again], most_wait=1e9, mode="h")
    await until(none_is_kept)
    again = await back()
    with own_server.frozen():
        for _ in range(5):  # the first are on their way, the others are not, and then it is given up on
            with pytest.raises(StoreUnavailableError):
                await store.rates.take("account", [one._replace(amount=0.0)])
        with pytest.raises(StoreUnavailableError):
            await store.rates.take("account", [again], most_wait=1e9, mode="h")
    await until(none_is_kept)


async def test_red_07_a_cancelled_command_leaves_nobody_the_reply_of_another(
    server: Any, make_store: Make
) -> None:
    client = Redis.from_url(server.url, max_connections=2)
    store = make_store(client)
    wrong: list[tuple[int, float]] = []

    async def one(index: int, patience: float) -> None:
        # Each has a bucket of its own size: the reply says whose it is.
        charge = RateCharge(f"k{index}", 1_000.0 + index, 1e-3, 0.0)
        with anyio.move_on_after(patience):
            level = (await store.rates.take("account", [charge])).levels[0].level
            if level != 1_000.0 + index:
                wrong.append((index, level))

    for round_ in range(30):
        async with anyio.create_task_group() as group:
            for index in range(20):
                group.start_soon(one, index, 5.0 if index % 2 else round_ * 5e-5)
    assert wrong == []
    await client.aclose()


async def test_red_07_what_was_granted_to_a_caller_whose_time_was_up_is_given_back(
    own_server: Any, make_store: Make
) -> None:
    store = make_store(own_server, timeout=0.3)
    await works(store)
    before = own_server.scripts_run()
    with own_server.frozen():
        assert "no answer within" in str(await refuses(store))
    await until(lambda: own_server.scripts_run() > before)
    await until(lambda: is_left(store, 999))


async def test_red_08_each_mode_without_a_server(own_server: Any, make_store: Make) -> None:
    own_server.kill()
    limit: dict[str, Any] = {"requests_per_minute": 3, "max_wait": 0}

    def door(mode: str) -> Door:
        store = make_store(own_server, on_store_error=mode)
        return Door(RateLimit(store=store, **limit), provider=Provider())

    opened, closed, local = door("open"), door("closed"), door("local")
    for _ in range(10):
        await opened(tenant="a")
        with pytest.raises(StoreUnavailableError) as error:
            await closed(tenant="a")
        assert error.value.status == 503
    for _ in range(3):
        await local(tenant="a")
    with pytest.raises(RateLimitedError):
        await local(tenant="a")


async def test_red_08_once_given_up_on_a_store_costs_no_time_and_is_told_of_once(
    own_server: Any, make_store: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store(own_server, on_store_error="open", timeout=0.3)
    door = Door(RateLimit(store=store, requests_per_minute=1e6), provider=Provider())
    await works(store)
    known = store.guard.transitions, store.guard.unguarded
    store.guard.drain()
    asked = 0
    ask = store.runner.run

    async def counted(*args: Any, **options: Any) -> Any:
        nonlocal asked
        asked += 1
        return await ask(*args, **options)

    monkeypatch.setattr(store.runner, "run", counted)
    with own_server.frozen():
        began = time.perf_counter()
        for _ in range(100):
            await door(tenant="a")
            await anyio.sleep(0.001)
        took = time.perf_counter() - began
    assert 5 <= asked <= 5 + took / 0.5, "five in a row open it, and then few probe"
    assert store.guard.transitions == known[0] + 1
    assert store.guard.unguarded == known[1] + 100
    assert store.guard.changes == [], "told on a call"

    async def is_closed() -> bool:
        await door(tenant="a")
        return store.guard.closed

    await until(is_closed)
    assert store.guard.transitions == known[0] + 2


async def test_red_08_a_share_of_the_limit_is_reconciled_when_the_server_is_back(
    own_server: Any, make_store: Make
) -> None:
    stores = [make_store(own_server, on_store_error="local") for _ in range(2)]
    doors = [
        Door(RateLimit(store=store, requests_per_minute=1, window=3_600, max_wait=0), provider=Provider())
        for store in stores
    ]
    for each in doors:
        await each(tenant="a")

    async def have_heard_how_many_there_are() -> bool:
        for store in stores:
            store._presence.say()
        return [store.processes for store in stores] == [2, 2]

    await until(have_heard_how_many_there_are)
    own_server.kill()
    granted = [0, 0]
    for index, each in enumerate(doors):
        for _ in range(60):
            try:
                await each(tenant="a")
            except RateLimitedError:
                break
            else:
                granted[index] += 1
    # Each has half of what remains of the whole: 58 or so of 60.
    assert all(24 <= number <= 32 for number in granted), granted
    own_server.start()
    for store in stores:
        await works(store)
    key = RateCharge("tenant:requests:a", 60.0, 1 / 60, 0.0, own=True)

    async def is_counted() -> bool:
        level = (await stores[0].rates.take("rate_limit:a", [key])).levels[0].level
        return level == pytest.approx(60 - sum(granted), abs=4)

    await until(is_counted)


async def test_red_10_a_pool_that_is_exhausted_is_waited_for_and_is_no_outage(
    server: Any, make_store: Make
) -> None:
    async with Redis.from_url(server.url, max_connections=2) as client:
        store = make_store(client)
        assert await taken(store)
        async with anyio.create_task_group() as decisions, hogged(server, client, 2):
            for _ in range(20):
                decisions.start_soon(taken, store)
        assert await is_left(store, 979)
        assert store.guard.closed


async def test_red_10_so_are_few_connections_to_each_node_of_a_cluster(
    cluster_of: Any, make_store: Make
) -> None:
    port = cluster_of("valkey9")[0].port
    async with RedisCluster(
        host="127.0.0.1", port=port, max_connections=2, retry=Retry(NoBackoff(), 0), reinitialize_steps=0
    ) as client:
        store = make_store(client)
        async with anyio.create_task_group() as group:
            for _ in range(50):
                group.start_soon(taken, store)
        assert (store.guard.closed, store.guard.lost) == (True, 0)


async def test_red_11_a_primary_that_became_a_replica_is_a_failure_until_it_is_one_again(
    own_server: Any, make_server: Any, make_store: Make
) -> None:
    primary = make_server(own_server.kind)
    store = make_store(own_server)
    assert await taken(store)
    with own_server.admin as admin:
        admin.replicaof("127.0.0.1", primary.port)
        assert "read only" in str(await refuses(store)).lower()
        admin.replicaof("NO", "ONE")
    await works(store)


async def test_a_server_without_memory_is_a_failure(own_server: Any, make_store: Make) -> None:
    store = make_store(own_server)
    assert await taken(store)
    with own_server.admin as admin:
        admin.config_set("maxmemory-policy", "noeviction")
        admin.config_set("maxmemory", "1mb")
        assert "maxmemory" in str(await refuses(store))
        admin.config_set("maxmemory", "0")
    await works(store)


async def test_what_a_server_refuses_to_settle_is_told_again(own_server: Any, make_store: Make) -> None:
    store = make_store(own_server)
    assert await taken(store)
    with own_server.admin as admin:
        admin.config_set("maxmemory-policy", "noeviction")
        admin.config_set("maxmemory", "1mb")
        store.rates.settle("account", [Change("k", 1_000.0, 1e-3, -99.0)])
        await until(lambda: admin.info("errorstats").get("errorstat_OOM"))
        admin.config_set("maxmemory", "0")
    await until(lambda: is_left(store, 900))
    assert store.guard.lost == 0


async def test_a_reply_that_comes_far_too_late_reaches_nobody(own_server: Any, make_store: Make) -> None:
    store = make_store(own_server, timeout=0.1)
    await works(store)
    with own_server.frozen():
        await refuses(store)
        await anyio.sleep(1.5)  # longer than a connection is waited for
    own = [RateCharge(f"of {size}", float(size), 1e-3, 0.0) for size in range(1, 9)]
    for charge in own:
        with anyio.fail_after(A_HANG):
            while True:
                try:
                    assert await left(store, charge) == charge.capacity
                    break
                except StoreUnavailableError:
                    await anyio.sleep(0.05)


async def test_killed_connections_are_made_anew(server: Any, make_store: Make) -> None:
    store = make_store(server)
    for _ in range(5):
        assert await taken(store)
        with server.admin as admin:
            admin.client_kill_filter(_type="normal", skipme=True)
            await until(lambda: len(admin.client_list()) == 1)
        await anyio.sleep(0.02)  # one that was used just now is not looked at
    assert store.guard.transitions == 0


async def test_a_server_that_is_killed_and_started_again_is_found_again(
    own_server: Any, make_store: Make
) -> None:
    store = make_store(own_server)
    assert await taken(store)
    own_server.kill()
    for _ in range(20):
        await refuses(store)
    own_server.start()
    await works(store)


async def test_what_is_to_be_settled_is_sent_when_the_store_is_closed(server: Any, make_store: Make) -> None:
    store = RedisStore(server.url, on_store_error="closed", timeout=5.0)
    charge = PLENTY._replace(amount=500.0)
    assert await taken(store, charge)
    for _ in range(500):
        store.rates.settle("account", [Change("k", 1_000.0, 1e-3, 1.0)])
    await store.aclose()
    assert store.guard.lost == 0
    assert await left(make_store(server)) == pytest.approx(1_000, abs=0.1)


async def test_what_is_told_while_the_server_is_away_is_kept_for_later(
    own_server: Any, make_store: Make
) -> None:
    store = make_store(own_server)
    assert await taken(store)
    own_server.kill()
    for _ in range(6):
        await refuses(store)
    for _ in range(50):
        store.rates.settle("account", [Change("k", 1_000.0, 1e-3, -2.0)])
    own_server.start()
    await until(lambda: is_left(store, 900))
    assert store.guard.lost == 0


async def test_the_commands_that_the_docs_name_are_enough(own_server: Any, make_store: Make) -> None:
    page = (Path(__file__).parents[2] / "docs" / "stores.md").read_text()
    (rule,) = re.findall(r"^ACL SETUSER limits on >secret (.*)$", page, re.MULTILINE)
    if own_server.kind == "redis7":
        rule = rule.replace("+client|setinfo ", "")
    with own_server.admin as admin:
        admin.execute_command("ACL", "SETUSER", "limits", "on", ">secret", *rule.split())
        admin.acl_log_reset()
        async with RedisStore(
            f"redis://limits:secret@127.0.0.1:{own_server.port}/0", on_store_error="closed", timeout=5.0
        ) as store:
            assert await taken(store)
            charge = PLENTY._replace(amount=999.0)
            assert not (
                await store.rates.take("account", [charge._replace(amount=1_000.0)], mode="n")
            ).verdict
            store.rates.settle("account", [Change("k", 1_000.0, 1e-3, 1.0)])
            store.rates.lower("account", [charge], [1.0])
            admin.script_flush()
            assert await left(store) == pytest.approx(999, abs=0.1)
        refused = {entry["object"] for entry in admin.acl_log()}
        assert refused <= {"client|setinfo", "client"}, "which redis-py does without"


async def test_each_settlement_while_the_server_is_away_is_told_in_one_for_its_bucket(
    own_server: Any, make_store: Make
) -> None:
    store = make_store(own_server)
    assert await taken(store)
    own_server.kill()
    for _ in range(6):
        await refuses(store)
    for turn in range(30_000):
        store.rates.settle("account", [Change("k", 1_000.0, 1e-3, 0.01 if turn % 3 else -0.05)])
    own_server.start()
    await works(store)
    await until(lambda: is_left(store, 1_000 - 500 + 200 - 1, within=0.2))
    assert store.guard.lost == 0


async def test_a_store_that_is_asked_again_can_be_closed_with_settlements_left(
    own_server: Any, make_store: Make
) -> None:
    store = make_store(own_server)
    assert await taken(store)
    own_server.kill()
    for _ in range(6):
        await refuses(store)
    for number in range(3):
        store.rates.settle(f"account {number}", [Change("k", 1_000.0, 1e-3, -100.0)])
    own_server.start()
    # A call finds out that it is back before those who wake to send what is left.
    store.guard._clock = lambda: time.perf_counter() + 10
    await works(store)
    with anyio.fail_after(A_HANG):
        await store.aclose()
    assert store.guard.lost == 0
    other = make_store(own_server)
    look = PLENTY._replace(amount=0)
    for number in range(3):
        decision = await other.rates.take(f"account {number}", [look])
        assert decision.levels[0].level == pytest.approx(900, abs=0.1)


async def test_another_event_loop_is_told_so() -> None:
    import trio  # noqa: PLC0415

    store = RedisStore("redis://127.0.0.1:1")

    async def use() -> None:
        with pytest.raises(EventLoopError, match="asyncio"):
            await taken(store)

    await anyio.to_thread.run_sync(trio.run, use)
