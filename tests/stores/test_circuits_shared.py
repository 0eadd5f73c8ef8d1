"""Circuit breakers that share their circuits: what one finds out all know, and probes are counted over all."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from resilient_llm import (
    AttemptError,
    CircuitBreaker,
    CircuitOpenError,
    CircuitState,
    ConfigurationError,
    Outcome,
    Retry,
)
from resilient_llm.outcome import SUCCESS
from resilient_llm.stores import MemoryStore, RedisStore
from tests.support import A_HANG, FAILURE, THROTTLED, Door, Provider, stalls, until

pytestmark = pytest.mark.anyio

Make = Callable[..., RedisStore]
KEY = "api.example"


class Process:
    """A breaker in a pipeline of its own, as another process would have it."""

    def __init__(
        self, store: Any, *script: Any, retry: bool = False, duration: float = 0.0, **options: Any
    ) -> None:
        defaults: dict[str, Any] = {"consecutive_failures": 2, "break_duration": 10.0}
        self.breaker = CircuitBreaker(store=store, **(defaults | options))
        self.provider = Provider(*script, duration=duration)
        policies = [Retry(max_attempts=2), self.breaker] if retry else [self.breaker]
        self.door = Door(*policies, provider=self.provider)

    async def call(self) -> Outcome | None:
        """Make a call; `None` when it was refused."""
        try:
            await self.door()
        except CircuitOpenError:
            return None
        except AttemptError as error:
            return error.outcome
        return SUCCESS

    @property
    def state(self) -> CircuitState:
        return self.breaker.state(KEY)


# In virtual time, on one store in memory: what breakers agree on


async def test_what_opens_in_one_is_open_in_all() -> None:
    store = MemoryStore()
    one, other = Process(store, FAILURE, FAILURE), Process(store)
    assert await other.call() is SUCCESS
    await one.call()
    await one.call()
    assert [one.state, other.state] == [CircuitState.OPEN] * 2
    assert await other.call() is None
    assert len(other.provider.attempts) == 1
    call = other.door.calls[-1]
    assert other.breaker.reopens_in(call) == pytest.approx(10.0)
    with pytest.raises(CircuitOpenError, match="consecutive_failures, last error: another process's"):
        await other.door()


async def test_one_that_comes_later_knows() -> None:
    store = MemoryStore()
    one = Process(store, FAILURE, FAILURE)
    await one.call()
    await one.call()
    await anyio.sleep(4)
    late = Process(store)
    assert await late.call() is None
    assert late.breaker.reopens_in(late.door.calls[-1]) == pytest.approx(6.0)
    assert late.breaker.states() == {KEY: CircuitState.OPEN}


async def test_windows_stay_local() -> None:
    store = MemoryStore()
    one, other = Process(store, FAILURE), Process(store, FAILURE)
    await one.call()
    await other.call()
    assert [one.state, other.state] == [CircuitState.CLOSED] * 2


@pytest.mark.parametrize("most", [1, 2])
async def test_probes_are_counted_over_all(most: int) -> None:
    store = MemoryStore()
    processes = [
        Process(store, *([FAILURE] * 2 if n == 0 else []), duration=5.0, half_open_max_calls=most)
        for n in range(4)
    ]
    for process in processes[1:]:
        await process.call()
    await processes[0].call()
    await processes[0].call()
    await anyio.sleep(10)
    before = sum(len(process.provider.attempts) for process in processes)
    results: list[Outcome | None] = []

    async def call(process: Process) -> None:
        results.append(await process.call())

    async with anyio.create_task_group() as tasks:
        for process in processes * 3:
            tasks.start_soon(call, process)
    assert sum(len(process.provider.attempts) for process in processes) - before == most
    assert results.count(None) == 12 - most
    assert {process.state for process in processes} == {CircuitState.CLOSED}


async def test_a_probe_that_fails_opens_it_for_longer_everywhere() -> None:
    store = MemoryStore()
    one, other = Process(store, *[FAILURE] * 3), Process(store, SUCCESS, FAILURE)
    await other.call()
    await one.call()
    await one.call()
    await anyio.sleep(10)
    assert (await one.call()) == FAILURE
    assert other.state == CircuitState.OPEN
    assert other.breaker.reopens_in(other.door.calls[-1]) == pytest.approx(15.0)
    await anyio.sleep(15)
    assert (await other.call()) == FAILURE
    assert one.breaker.reopens_in(one.door.calls[-1]) == pytest.approx(22.5)


async def test_a_probe_that_is_throttled_or_cancelled_makes_room_for_anothers() -> None:
    store = MemoryStore()
    one, other = Process(store, FAILURE, FAILURE, THROTTLED, 100.0), Process(store)
    await other.call()
    await one.call()
    await one.call()
    await anyio.sleep(10)
    assert (await one.call()) == THROTTLED
    assert [one.state, other.state] == [CircuitState.HALF_OPEN] * 2
    with anyio.move_on_after(1):
        await one.call()
    assert [one.state, other.state] == [CircuitState.HALF_OPEN] * 2
    assert await other.call() is SUCCESS
    assert one.state == CircuitState.CLOSED


async def test_the_probe_of_a_process_that_is_gone_is_given_up_after_its_time() -> None:
    store = MemoryStore()
    one, other = (
        Process(store, FAILURE, FAILURE, math.inf, probe_timeout=30.0),
        Process(store, probe_timeout=30.0),
    )
    await other.call()
    await one.call()
    await one.call()
    await anyio.sleep(10)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(one.call)
        await anyio.sleep(29)
        assert await other.call() is None
        await anyio.sleep(2)
        assert await other.call() is None  # a lost probe is a failed one
        assert other.state == CircuitState.OPEN
        await anyio.sleep(15)
        assert await other.call() is SUCCESS
        tasks.cancel_scope.cancel()
    assert one.state == CircuitState.CLOSED


async def test_results_from_an_older_generation_are_dropped() -> None:
    store = MemoryStore()
    one, other = Process(store, FAILURE, FAILURE), Process(store, SUCCESS, [20.0, FAILURE], [20.0, FAILURE])
    await other.call()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(other.call)
        tasks.start_soon(other.call)
        await anyio.sleep(1)
        await one.call()
        await one.call()
        await anyio.sleep(10)
        assert await one.call() is SUCCESS
        assert other.state == CircuitState.CLOSED
    assert other.state == CircuitState.CLOSED


async def test_by_hand_it_reaches_all() -> None:
    store = MemoryStore()
    one, other = Process(store), Process(store)
    await one.call()
    await other.call()
    one.breaker.isolate(KEY)
    await anyio.lowlevel.checkpoint()
    assert other.state == CircuitState.ISOLATED
    assert await other.call() is None
    other.breaker.close(KEY)
    await anyio.lowlevel.checkpoint()
    assert await one.call() is SUCCESS


async def test_one_that_was_isolated_before_anybody_called_is() -> None:
    store = MemoryStore()
    one, other = Process(store), Process(store)
    one.breaker.isolate(KEY)
    assert await other.call() is None


async def test_each_change_is_counted_once_by_who_made_it() -> None:
    store = MemoryStore()
    one, other = Process(store, FAILURE, FAILURE), Process(store)
    await other.call()
    await one.call()
    await one.call()
    assert await other.call() is None
    keyed = other.breaker._circuits.peek(KEY)
    assert keyed is not None
    assert keyed.circuit.transitions == []


async def test_a_retry_gives_up_at_once_where_another_has_opened_it() -> None:
    store = MemoryStore()
    one, other = Process(store, FAILURE, FAILURE), Process(store, FAILURE, retry=True, consecutive_failures=2)
    await one.call()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(one.call)
        outcome = await other.call()
    assert outcome == FAILURE
    assert len(other.provider.attempts) == 1


async def test_keys_that_mean_nothing_elsewhere_share_one_that_is_local() -> None:
    store = MemoryStore()
    one, other = (Process(store, FAILURE, FAILURE, key=lambda _call: object()) for _ in range(2))
    assert [await one.call() for _ in range(3)] == [FAILURE, FAILURE, None]
    assert await other.call() == FAILURE
    with pytest.raises(ConfigurationError, match="what is shared between processes"):
        one.breaker.state(object())


async def test_keys_beyond_the_most_share_one_that_is_local() -> None:
    store = MemoryStore()
    one = Process(store, *[FAILURE] * 4, key="tenant", max_keys=1)
    for tenant in ("a", "b", "b"):
        with pytest.raises(AttemptError):
            await one.door(tenant=tenant)
    with pytest.raises(CircuitOpenError):
        await one.door(tenant="c")


async def test_the_same_name_with_other_options_is_a_mistake() -> None:
    store = MemoryStore()
    CircuitBreaker(store=store)
    CircuitBreaker(store=store)
    CircuitBreaker(store=store, name="other", break_duration=1.0)
    with pytest.raises(ConfigurationError, match="name="):
        CircuitBreaker(store=store, break_duration=1.0)


# In real time, on servers: that it reaches them, and what happens when they fail

realtime = pytest.mark.realtime
LONG: dict[str, Any] = {"break_duration": 300.0, "max_break_duration": 300.0}
"""A break that outlasts a test."""


@realtime
async def test_others_see_within_a_second_what_one_has_opened(server: Any, make_store: Make) -> None:
    store = make_store(server)
    one = Process(store, FAILURE, FAILURE, **LONG)
    others = [Process(make_store(server), **LONG) for _ in range(3)]
    for other in others:
        assert await other.call() is SUCCESS
    async with stalls(lambda: store.runner.command("TIME")) as lost:
        await one.call()
        await one.call()
        began = anyio.current_time()
        await until(lambda: all(other.state is CircuitState.OPEN for other in others))
        assert anyio.current_time() - began < 1.0 + lost.total
    for other in others:
        assert await other.call() is None


@realtime
async def test_nothing_is_asked_while_it_is_closed(server: Any, make_store: Make) -> None:
    process = Process(make_store(server))
    await process.call()
    began, before = anyio.current_time(), server.scripts_run()
    for _ in range(200):
        assert await process.call() is SUCCESS
    took = anyio.current_time() - began
    assert server.scripts_run() - before < 10 + 5 * took, "now and then, however many calls there are"


@realtime
async def test_one_that_slept_asks_before_its_first_call(server: Any, make_store: Make) -> None:
    one = Process(make_store(server), FAILURE, FAILURE, **LONG)
    sleeper = Process(make_store(server), **LONG)
    assert await sleeper.call() is SUCCESS
    # Nobody asks for it any more, as if ten seconds had passed.
    group = sleeper.breaker._shared._group  # type: ignore[union-attr]
    group._used -= 60.0  # type: ignore[union-attr]
    await anyio.sleep(1.2)
    await until(lambda: not group._ticking)  # type: ignore[union-attr]
    await one.call()
    await one.call()
    await until(lambda: one.breaker._shared._copies[KEY].version > 0)  # type: ignore[union-attr]
    assert sleeper.state == CircuitState.CLOSED
    assert await sleeper.call() is None


@realtime
async def test_probes_are_counted_over_all_by_the_server(server: Any, make_store: Make) -> None:
    options: dict[str, Any] = {"break_duration": 0.5, "half_open_max_calls": 2, "success_threshold": 2}
    processes = [Process(make_store(server), *([FAILURE] * 2 if n == 0 else []), **options) for n in range(5)]
    for process in processes[1:]:
        await process.call()
    await processes[0].call()
    await processes[0].call()
    await until(lambda: all(process.state is CircuitState.OPEN for process in processes))
    await anyio.sleep(0.6)
    before = sum(len(process.provider.attempts) for process in processes)
    answered = anyio.Event()
    refused: list[Process] = []
    async with anyio.create_task_group() as tasks:

        async def call(process: Process) -> None:
            if await process.call() is None:
                refused.append(process)

        for process in processes:
            process.provider.script = [[answered, SUCCESS] for _ in range(4)]
            for _ in range(4):
                tasks.start_soon(call, process)
        await until(lambda: len(refused) == 18)
        answered.set()
    assert sum(len(process.provider.attempts) for process in processes) - before == 2
    await until(lambda: all(process.state is CircuitState.CLOSED for process in processes))


@realtime
async def test_isolating_reaches_all_and_outlives_a_script_flush_and_a_lost_connection(
    server: Any, make_store: Make
) -> None:
    one, other = Process(make_store(server)), Process(make_store(server))
    await one.call()
    await other.call()
    with server.admin as admin:
        admin.script_flush()
        one.breaker.isolate(KEY)
        await until(lambda: other.state is CircuitState.ISOLATED)
        admin.client_kill_filter(_type="normal", skipme=True)
        other.breaker.close(KEY)
        await until(one.call)


@realtime
async def test_what_the_server_forgot_is_told_again(server: Any, make_store: Make) -> None:
    one = Process(make_store(server))
    await one.call()
    one.breaker.isolate(KEY)
    await until(lambda: one.breaker._shared._copies[KEY].version > 0)  # type: ignore[union-attr]
    await one.call()
    await anyio.sleep(0.4)
    with server.admin as admin:
        admin.flushall()
        await one.call()
        await until(lambda: admin.keys("*circuit*"))
    late = Process(make_store(server))
    assert await late.call() is None
    assert late.state == CircuitState.ISOLATED


@realtime
@pytest.mark.parametrize("mode", ["local", "open", "closed"])
async def test_without_the_store_circuits_are_local_and_agree_when_it_is_back(
    own_server: Any, make_store: Make, mode: str
) -> None:
    options: dict[str, Any] = {"break_duration": 0.3, "max_break_duration": 0.3, "break_multiplier": 1.0}

    def process(*script: Any) -> Process:
        return Process(make_store(own_server, on_store_error=mode), *script, **options)

    one, other = process(SUCCESS, FAILURE, FAILURE, SUCCESS), process()
    assert await one.call() is SUCCESS
    assert await other.call() is SUCCESS
    own_server.kill()
    await one.call()
    await one.call()
    opened = anyio.current_time()
    refused = await one.call() is None
    assert refused or anyio.current_time() - opened > 0.29, "or the break was over"
    assert await other.call() is SUCCESS
    await anyio.sleep(0.35)
    assert await one.call() is SUCCESS  # its own probe
    assert one.breaker.states() == {KEY: CircuitState.CLOSED}
    assert one.breaker.store is not None
    assert one.breaker.store.guard.unguarded > 0
    own_server.start()
    one.breaker.isolate(KEY)

    async def is_isolated() -> bool:
        await one.call()
        await other.call()
        return other.state == CircuitState.ISOLATED

    await until(is_isolated)
    one.breaker.close(KEY)
    await until(other.call)


@realtime
async def test_a_store_that_does_not_answer_costs_little(own_server: Any, make_store: Make) -> None:
    one = Process(make_store(own_server, timeout=0.5))
    await one.call()
    with own_server.frozen():
        began = anyio.current_time()
        for _ in range(200):
            assert await one.call() is SUCCESS
        assert anyio.current_time() - began < A_HANG, "each that waited for it would have cost half a second"


@realtime
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_what_a_server_forgot_when_it_was_started_again_is_told_again(
    own_server: Any, make_store: Make
) -> None:
    one = Process(make_store(own_server, on_store_error="local"), FAILURE, FAILURE, **LONG)
    await one.call()
    await one.call()

    def known() -> bool:
        with own_server.admin as admin:
            return bool(admin.keys("*circuit*"))

    await until(known)
    await anyio.sleep(0.5)
    own_server.kill()
    await anyio.sleep(0.3)
    own_server.start()

    async def is_told() -> bool:
        await one.call()
        return known()

    await until(is_told)
    assert one.state is CircuitState.OPEN
