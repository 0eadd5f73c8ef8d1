"""One pool for all keys: who waits, who is refused, what may be set and changed, and that nothing is ever lost."""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import random
import tracemalloc
from collections import deque
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import anyio
import pytest
from anyio import wait_all_tasks_blocked
from starlette.types import Receive, Scope, Send

from resilient_llm import (
    Bulkhead,
    BulkheadFullError,
    ConfigurationError,
    Deadline,
    DeadlineExceededError,
    Pipeline,
    Telemetry,
    TokenEstimate,
    ambient,
)
from tests.asgi.doubles import guard, of
from tests.asgi.server import respond
from tests.signals import Recording
from tests.support import Door, Provider, cancel_at_every_await

pytestmark = pytest.mark.anyio


async def run_all(door: Door, tenants: str, **options: Any) -> list[str]:
    """Make one call after the other without waiting for any; give who was refused, and wait for the rest."""
    refused: list[str] = []

    async def one(tenant: str) -> None:
        try:
            await door(tenant=tenant, **options)
        except BulkheadFullError:
            refused.append(tenant)

    async with anyio.create_task_group() as group:
        for tenant in tenants:
            group.start_soon(one, tenant)
            await wait_all_tasks_blocked()
    return refused


def served(provider: Provider) -> str:
    return "".join(attempt.tenant or "-" for _, attempt in provider.attempts)


async def test_a_free_slot_is_anybodys() -> None:
    provider = Provider(duration=1.0)
    bulkhead = Bulkhead(max_concurrent=4, shared=4)
    await run_all(Door(bulkhead, provider=provider), "aaaa")
    assert provider.times == [0, 0, 0, 0]


async def test_those_who_wait_are_served_in_turn_among_tenants() -> None:
    provider = Provider(duration=1.0)
    await run_all(Door(Bulkhead(max_concurrent=2, shared=2), provider=provider), "aa" + "aaaa" + "bb" + "c")
    assert served(provider)[:2] == "aa"
    assert sorted(served(provider)[2:6]) == ["a", "a", "b", "c"]
    assert provider.peak == 2


async def test_weights_are_shares_of_those_who_wait() -> None:
    provider = Provider(duration=1.0)
    bulkhead = Bulkhead(max_concurrent=1, shared=1, weights={"b": 3})
    await run_all(Door(bulkhead, provider=provider), "a" + "aaaa" + "bbbbbbbbb")
    assert sorted(served(provider)[1:9]) == ["a"] * 2 + ["b"] * 6


async def test_a_tenant_has_no_more_than_its_own_slots_and_stands_in_nobodys_way() -> None:
    provider = Provider(duration=1.0)
    bulkhead = Bulkhead(max_concurrent=2, shared=3)
    await run_all(Door(bulkhead, provider=provider), "aaaabc")
    starts = sorted(zip(provider.times, served(provider), strict=True))
    assert starts == [(0, "a"), (0, "a"), (0, "b"), (1, "a"), (1, "a"), (1, "c")]


async def test_inside_a_tenant_a_higher_priority_goes_first_and_waiting_counts_as_priority() -> None:
    provider = Provider(duration=10.0)
    door = Door(Bulkhead(max_concurrent=1, shared=1, max_wait=100, ageing=5.0), provider=provider)

    async with anyio.create_task_group() as group:
        for priority, pause in ((0, 1.0), (0, 2.0), (1, 4.0), (1, 0.0)):  # they come at 0, 1, 3 and 7
            group.start_soon(partial(door, tenant="a", priority=priority))
            await wait_all_tasks_blocked()
            await anyio.sleep(pause)
    assert [attempt.priority for _, attempt in provider.attempts] == [0, 1, 0, 1]


async def test_one_tenant_cannot_fill_the_queue_of_all() -> None:
    provider = Provider(duration=1.0)
    bulkhead = Bulkhead(max_concurrent=1, shared=1, max_queued=3, max_queued_total=5)
    refused = await run_all(Door(bulkhead, provider=provider), "a" + "aaaaaa" + "bbb" + "c")
    assert refused == ["a", "a", "a", "b", "a"], "c takes the place of the last of who has most of them"
    default = Bulkhead(max_concurrent=1, shared=1, max_queued=3)
    refused = await run_all(Door(default, provider=Provider(duration=1.0)), "a" + "aaaa" + "bcdefghi" * 3)
    assert refused == ["a"]


async def test_without_a_queue_nobody_waits() -> None:
    bulkhead = Bulkhead(max_concurrent=1, shared=2, max_queued=0, max_queued_total=10)
    assert await run_all(Door(bulkhead, provider=Provider(duration=1.0)), "aabc") == ["a", "c"]


async def test_a_refusal_says_when_it_would_be_ones_turn() -> None:
    provider = Provider(duration=4.0)
    door = Door(Bulkhead(max_concurrent=2, shared=2, max_queued=5), provider=provider)
    await door(tenant="a")
    async with anyio.create_task_group() as group:
        for tenant in "aa" + "aaaaa" + "b":
            group.start_soon(partial(door, tenant=tenant))
            await wait_all_tasks_blocked()
        with pytest.raises(BulkheadFullError) as of_a:
            await door(tenant="a")
    # Slots are held for 4 s, and in two slots it would be the turn of the seventh: six wait.
    assert of_a.value.retry_after == pytest.approx(4.0 * 7 / 2)
    assert of_a.value.status == 429


async def test_max_wait_and_deadlines_count_in_the_shared_queue() -> None:
    provider = Provider(duration=10.0)
    bulkhead = Bulkhead(max_concurrent=1, shared=1, max_wait=2)
    door = Door(Deadline(60), bulkhead, provider=provider)
    async with anyio.create_task_group() as group:
        group.start_soon(partial(door, tenant="a"))
        await wait_all_tasks_blocked()
        with pytest.raises(BulkheadFullError, match="waited 2 s"):
            await door(tenant="b")
        with pytest.raises(DeadlineExceededError):
            await door(tenant="c", deadline=anyio.current_time() + 1)
        assert bulkhead.queued() == 0


async def test_the_pool_and_the_caps_are_resized_while_it_runs() -> None:
    provider = Provider(duration=1.0)
    bulkhead = Bulkhead(max_concurrent=1, shared=1)
    door = Door(bulkhead, provider=provider)
    async with anyio.create_task_group() as group:
        for tenant in "aaaabbbb":
            group.start_soon(partial(door, tenant=tenant))
        await anyio.sleep(0.5)
        assert provider.running == 1
        bulkhead.resize(shared=4)
        await anyio.sleep(0.1)
        assert provider.running == 2, "one of each: caps are what they were"
        bulkhead.resize(3)
        await anyio.sleep(0.1)
        assert provider.running == 4
        bulkhead.resize(max_concurrent=1, shared=2)
        await anyio.sleep(1.2)
        assert provider.running == 2
    assert (bulkhead.in_use(), bulkhead.queued()) == (0, 0)


async def test_keys_need_not_be_tenants() -> None:
    provider = Provider(duration=1.0)
    bulkhead = Bulkhead(max_concurrent=1, shared=1, key=lambda call: call.model)
    door = Door(bulkhead, provider=provider)
    async with anyio.create_task_group() as group:
        for model in ("large", "large", "large", "small"):
            group.start_soon(partial(door, model=model))
            await wait_all_tasks_blocked()
    assert [attempt.model for _, attempt in provider.attempts].index("small") <= 2


# --- Functions of the application


@pytest.mark.parametrize("answer", [0, -1, 10**400, float("inf"), float("nan"), "many", None])
@pytest.mark.parametrize("option", ["weights", "cost"])
async def test_a_function_that_gives_nonsense_breaks_no_call(
    option: str, answer: object, caplog: pytest.LogCaptureFixture
) -> None:
    provider = Provider(duration=1.0)
    options: dict[str, Any] = {option: lambda _: answer}
    bulkhead = Bulkhead(max_concurrent=1, shared=1, **options)
    assert await run_all(Door(bulkhead, provider=provider), "aabb") == []
    assert sorted(served(provider)[1:3]) == ["a", "b"], "it counts as 1"
    assert {record.levelno for record in caplog.records} == {logging.ERROR}
    assert option in caplog.text


async def test_weights_may_be_a_function() -> None:
    provider = Provider(duration=1.0)
    bulkhead = Bulkhead(max_concurrent=1, shared=1, weights=lambda tenant: 2 if tenant == "b" else 1)
    await run_all(Door(bulkhead, provider=provider), "a" + "aaa" + "bbbb")
    assert sorted(served(provider)[1:7]) == ["a"] * 2 + ["b"] * 4


async def test_a_cost_is_found_out_only_for_calls_that_wait() -> None:
    asked: list[str | None] = []

    def cost(call: Any) -> float:
        asked.append(call.tenant)
        return 1.0

    bulkhead = Bulkhead(max_concurrent=1, shared=1, max_queued=1, max_queued_total=2, cost=cost)
    assert await run_all(Door(bulkhead, provider=Provider(duration=1.0)), "abbcd") == ["b", "d"]
    assert asked == ["b", "c"]


@pytest.mark.parametrize("cost", ["tokens", TokenEstimate(bytes_per_token=2)])
async def test_the_estimate_of_tokens_is_kept_for_other_policies(cost: Any) -> None:
    door = Door(Bulkhead(max_concurrent=1, shared=1, cost=cost), provider=Provider(duration=1.0))
    body = b'{"max_tokens": 10, "messages": [{"role": "user", "content": "What is this?"}]}'
    await run_all(door, "ab", body=body)
    assert door.calls[0].tokens is None
    assert door.calls[1].tokens == TokenEstimate(bytes_per_token=4 if cost == "tokens" else 2)(door.calls[1])


async def test_requests_without_tokens_count_as_one() -> None:
    provider = Provider(duration=1.0)
    door = Door(Bulkhead(max_concurrent=1, shared=1, cost="tokens"), provider=provider)
    assert await run_all(door, "a" + "aaa" + "bbb", body=None) == []
    assert sorted(served(provider)[1:5]) == ["a", "a", "b", "b"]


# --- Trying it out


def rehearsed(recording: Recording) -> list[str]:
    return sorted(
        event.removeprefix("resilient_llm.") for span in recording.spans for event in span.event_names()
    )


def observed(bulkhead: Bulkhead, recording: Recording) -> Pipeline:
    telemetry = Telemetry(tracer_provider=recording.tracer_provider, meter_provider=recording.meter_provider)
    return Pipeline([bulkhead], telemetry=telemetry)


async def visit(pipeline: Pipeline, tenant: str, duration: float) -> None:
    with ambient(tenant=tenant):
        await pipeline.run(anyio.sleep, duration)


@pytest.mark.parametrize("shared", [2, None])
async def test_a_dry_run_neither_waits_nor_refuses_but_says_what_would_have_been(shared: int | None) -> None:
    recording = Recording()
    bulkhead = Bulkhead(max_concurrent=2, shared=shared, max_queued=2, dry_run=True)
    pipeline = observed(bulkhead, recording)
    started = anyio.current_time()
    async with anyio.create_task_group() as group:
        for _ in range(5):
            group.start_soon(visit, pipeline, "a", 1.0)
        await anyio.sleep(0.5)
        assert (bulkhead.in_use(), bulkhead.queued()) == (2, 2), "as it would have been"
    assert anyio.current_time() - started == pytest.approx(1)
    assert rehearsed(recording) == ["rejected", "would_wait", "would_wait"]
    rejections = recording.points.one("resilient_llm.rejections", reason="bulkhead_full")
    assert (rejections.value, rejections.attributes["resilient_llm.dry_run"]) == (1, True)
    assert (bulkhead.in_use(), bulkhead.queued()) == (0, 0)


async def test_a_dry_run_is_fair_too() -> None:
    """Another tenant's calls would have waited behind one of a's, and found room in the queue."""
    recording = Recording()
    bulkhead = Bulkhead(max_concurrent=1, shared=1, max_queued=1, dry_run=True)
    pipeline = observed(bulkhead, recording)
    async with anyio.create_task_group() as group:
        for tenant in "aaaab":
            group.start_soon(visit, pipeline, tenant, 1.0)
            await wait_all_tasks_blocked()
    assert rehearsed(recording) == ["rejected"] * 2 + ["would_wait"] * 2


async def test_a_dry_run_says_who_would_have_waited_too_long() -> None:
    recording = Recording()
    bulkhead = Bulkhead(max_concurrent=1, shared=1, max_wait=2.0, dry_run=True)
    pipeline = observed(bulkhead, recording)
    async with anyio.create_task_group() as group:
        group.start_soon(visit, pipeline, "a", 5.0)
        await wait_all_tasks_blocked()
        group.start_soon(visit, pipeline, "a", 3.0)
        group.start_soon(visit, pipeline, "b", 1.0)
    assert rehearsed(recording) == ["rejected", "would_wait", "would_wait"]
    assert (bulkhead.in_use(), bulkhead.queued()) == (0, 0)


async def test_a_dry_run_has_nothing_against_long_calls() -> None:
    recording = Recording()
    bulkhead = Bulkhead(max_concurrent=1, shared=1, max_wait=2.0, dry_run=True)
    pipeline = observed(bulkhead, recording)
    async with anyio.create_task_group() as group:
        group.start_soon(visit, pipeline, "a", 1.0)
        await wait_all_tasks_blocked()
        group.start_soon(visit, pipeline, "a", 9.0)
        await anyio.sleep(8.0)
        assert (bulkhead.in_use(), bulkhead.queued()) == (1, 0), "it has had its slot since the first second"
    assert rehearsed(recording) == ["would_wait"]


@pytest.mark.parametrize("seed", range(3))
async def test_a_dry_run_loses_no_slots_when_calls_are_cancelled(seed: int) -> None:
    rng = random.Random(seed)
    bulkhead = Bulkhead(max_concurrent=2, shared=3, max_queued=5, max_wait=1.0, dry_run=True)
    pipeline = Pipeline([bulkhead])

    async def one(tenant: str, patience: float) -> None:
        with anyio.move_on_after(patience):
            await visit(pipeline, tenant, 0.5)

    async with anyio.create_task_group() as group:
        for _ in range(200):
            group.start_soon(one, rng.choice("abc"), rng.uniform(0, 1))
            await anyio.sleep(rng.uniform(0, 0.1))
            assert bulkhead.in_use() <= 3
    assert (bulkhead.in_use(), bulkhead.queued()) == (0, 0)


# --- Nothing leaks


async def test_nothing_is_held_whenever_a_waiting_call_is_cancelled() -> None:
    bulkhead = Bulkhead(max_concurrent=1, shared=2)
    provider = Provider(duration=1.0)
    door = Door(bulkhead, provider=provider)

    async def scenario() -> None:
        async with anyio.create_task_group() as group:
            for tenant in "aab":
                group.start_soon(partial(door, tenant=tenant))
            await anyio.sleep(0.1)
            await door(tenant="c")

    async def check() -> None:
        assert (bulkhead.in_use(), bulkhead.queued(), provider.running) == (0, 0, 0)
        assert [pool.slots._held for pool in bulkhead._compartments.values()] == [{}]
        await door(tenant="a")

    assert await cancel_at_every_await(scenario, check) >= 3


@pytest.mark.parametrize("victim", [1, 2, 3])
async def test_nothing_is_lost_whichever_of_several_waiters_is_cancelled_wherever(victim: int) -> None:
    bulkhead = Bulkhead(max_concurrent=2, shared=2, max_wait=50)
    provider = Provider(duration=1.0)
    door = Door(bulkhead, provider=provider)

    async def scenario() -> None:
        async with anyio.create_task_group() as group:
            for tenant in "aabc"[:victim]:
                group.start_soon(partial(door, tenant=tenant))
                await wait_all_tasks_blocked()
            await door(tenant="d")

    async def check() -> None:
        assert (bulkhead.in_use(), bulkhead.queued(), provider.running) == (0, 0, 0)

    assert await cancel_at_every_await(scenario, check) >= 2


@pytest.mark.parametrize("seed", range(5))
async def test_permits_are_conserved_under_random_cancellation(seed: int) -> None:
    rng = random.Random(seed)
    bulkhead = Bulkhead(max_concurrent=2, shared=5, max_queued=6, max_queued_total=20, max_wait=3)
    provider = Provider(duration=0.5)
    door = Door(bulkhead, provider=provider)

    async def one(tenant: str, patience: float) -> None:
        with anyio.move_on_after(patience), contextlib.suppress(BulkheadFullError):
            await door(tenant=tenant)

    async with anyio.create_task_group() as group:
        for number in range(300):
            group.start_soon(one, rng.choice("abcde"), rng.uniform(0, 4))
            await anyio.sleep(rng.uniform(0, 0.1))
            if not number % 50:
                bulkhead.resize(rng.randint(1, 3), shared=rng.randint(3, 5))
    assert (bulkhead.in_use(), bulkhead.queued()) == (0, 0)
    assert provider.peak <= 5


async def test_lim_09_tenants_seen_leave_next_to_nothing_behind() -> None:
    """Each has had a call that waited while others saturated the pool, which is when they are remembered."""
    bulkhead = Bulkhead(max_concurrent=2, shared=2, max_queued=50, max_queued_total=500)
    pool = bulkhead._make(None)
    slots, room = pool.slots, pool.slots.room
    for _ in range(2):
        slots.acquire("noisy", 0.0)
    for _ in range(40):
        slots.acquire("noisy", 0.0)
    holders = deque[Hashable](["noisy", "noisy"])
    names = (f"tenant-{number}" for number in itertools.count())

    def see(tenants: int) -> None:
        for name in itertools.islice(names, tenants):
            slots.acquire(name, 0.0)
            holders.extend(ticket.tenant for ticket in slots.release(holders.popleft(), 0.0))
            while room.depth("noisy") < 40:
                slots.acquire("noisy", 0.0)

    tracemalloc.start()
    see(3_000)
    gc.collect()
    before = tracemalloc.get_traced_memory()[0]
    see(20_000)
    gc.collect()
    after = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert len(room._away) == 500
    assert before < 1_000 * (len(room._away) + len(room)), (
        "less than 1 kB for each tenant remembered and each call"
    )
    assert after < 1.5 * before
    assert len(slots._held) <= 2


# --- Both doors


async def test_at_the_asgi_door_a_request_holds_its_slot_until_it_is_answered() -> None:
    bulkhead = Bulkhead(max_concurrent=1, shared=1)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await anyio.sleep(1)
        await respond(send)

    guarded = guard(app, bulkhead)
    connections = [of("a"), of("a"), of("a"), of("b")]
    async with anyio.create_task_group() as tasks:
        for connection in connections:
            tasks.start_soon(connection.run, guarded)
            await anyio.lowlevel.checkpoint()
    assert [connection.status for connection in connections] == [200] * 4
    assert connections[3].ended is not None
    assert connections[3].ended <= 3, "b had its turn before the last of a's"
    assert (bulkhead.in_use(), bulkhead.queued()) == (0, 0)


@pytest.mark.parametrize("shared", [2, None])
async def test_one_bulkhead_at_the_asgi_door_and_behind_it_is_an_error_and_no_deadlock(
    shared: int | None,
) -> None:
    bulkhead = Bulkhead(max_concurrent=2, shared=shared)
    client = Pipeline([bulkhead])
    errors: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await client.run(anyio.sleep, 1.0)
        except ConfigurationError as error:
            errors.append(str(error))
        await respond(send)
        await client.run(anyio.sleep, 1.0)  # a background task: its request holds no slot any more

    await of("a").run(guard(app, bulkhead))
    assert len(errors) == 1
    assert "asks for a slot of bulkhead inside of another that holds one" in errors[0]
    assert bulkhead.in_use() == 0


# --- Options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shared": 1}, "shared=1: allowed are whole numbers from 2"),
        ({"shared": 2.5}, "shared=2.5"),
        ({"shared": 0}, "shared=0"),
        ({"shared": 4, "max_queued": 10, "max_queued_total": 9}, "max_queued_total=9: allowed"),
        ({"shared": 4, "weights": {"a": 0}}, "weights: 0 for 'a': allowed"),
        ({"shared": 4, "weights": {"a": "much"}}, "weights: 'much' for 'a'"),
        (
            {"shared": 4, "weights": {"a": 1e17}},
            "weights: 1e.17 for 'a': allowed are numbers from 1e-6 to 1e6",
        ),
        ({"shared": 4, "weights": {"a": True}}, "weights: True for 'a'"),
        ({"shared": 4, "weights": 3}, "weights=3: allowed"),
        ({"shared": 4, "cost": "money"}, "cost='money': allowed"),
        ({"shared": 4, "cost": 3}, "cost=3: allowed"),
        ({"shared": 4, "ageing": -1}, "ageing=-1"),
        ({"weights": {"a": 2}}, "weights=.*: allowed only with shared="),
        ({"cost": "tokens"}, "cost='tokens': allowed only with shared="),
        ({"max_queued_total": 100}, "max_queued_total=100: allowed only with shared="),
    ],
)
async def test_options_that_cannot_work_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Bulkhead(max_concurrent=2, **options)


@pytest.mark.parametrize(
    ("resize", "message"),
    [
        (lambda bulkhead: bulkhead.resize(0), "max_concurrent=0"),
        (lambda bulkhead: bulkhead.resize(shared=0), "shared=0"),
        (lambda bulkhead: bulkhead.resize(100), "max_concurrent=100"),
        (lambda bulkhead: bulkhead.resize(3, shared=2), "shared=2: allowed are whole numbers from 3"),
        (lambda bulkhead: bulkhead.resize(shared=1), "shared=1: allowed are whole numbers from 2"),
        (lambda bulkhead: bulkhead.resize(1, shared=2.5), "shared=2.5"),
    ],
)
async def test_sizes_that_cannot_work_are_refused_and_change_nothing(
    resize: Callable[[Bulkhead], None], message: str
) -> None:
    bulkhead = Bulkhead(max_concurrent=2, shared=4)
    with pytest.raises(ConfigurationError, match=message):
        resize(bulkhead)
    assert (bulkhead.max_concurrent, bulkhead.shared) == (2, 4)


async def test_a_bulkhead_without_a_pool_has_none_to_resize() -> None:
    with pytest.raises(ConfigurationError, match="made without a shared pool"):
        Bulkhead(max_concurrent=2).resize(shared=4)
