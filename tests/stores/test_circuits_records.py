"""What a server keeps of circuits: for how long, in which order, and how much of it is read at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import anyio
import pytest

from resilient_llm import CircuitBreaker, CircuitState
from resilient_llm.core.circuit_state import CircuitSnapshot
from resilient_llm.stores import RedisStore
from resilient_llm.stores._redis_circuits import RedisCircuits
from resilient_llm.stores.protocol_circuits import Agreed
from tests.support import A_HANG, Door, Provider, until

pytestmark = [pytest.mark.anyio, pytest.mark.realtime]

Make = Callable[..., RedisStore]

OPEN = CircuitSnapshot(
    generation=1,
    state=CircuitState.OPEN,
    reason="failure_ratio",
    wait=15.0,
    next_break=22.5,
    successes=0,
    probes={},
)
CLOSED = replace(OPEN, state=CircuitState.CLOSED, reason="probe_succeeded", wait=0.0)
ISOLATED = replace(OPEN, state=CircuitState.ISOLATED, reason="isolated", wait=0.0)


class Reader:
    """One who reads a group on a clock that the test sets."""

    def __init__(self, store: RedisStore, at: Callable[[], float]) -> None:
        self.heard: dict[str, Agreed] = {}
        self.group = RedisCircuits(store.runner, "p:", clock=at).join("g", self._hear)

    def _hear(self, key: str | None, agreed: Agreed | None) -> None:
        if key is not None and agreed is not None:
            self.heard[key] = agreed

    async def swap(self, key: str, expected: int, snapshot: CircuitSnapshot) -> Agreed:
        return await self.group.swap(key, expected, snapshot, lambda _agreed: None)

    async def read(self) -> dict[str, Agreed]:
        await self.group.refresh()
        return self.heard


async def test_a_circuit_that_has_not_changed_for_a_day_is_forgotten_unless_it_is_isolated(
    server: Any, make_store: Make
) -> None:
    now = 1_700_000_000.0
    store = make_store(server)
    one = Reader(store, lambda: now)
    for key, snapshot in (("closed", CLOSED), ("open", OPEN), ("isolated", ISOLATED)):
        assert (await one.swap(key, 0, snapshot)).accepted
    now += 86_000
    await one.swap("new", 0, OPEN)
    assert set(await Reader(store, lambda: now).read()) == {"closed", "open", "isolated", "new"}
    now += 500
    await one.swap("newer", 0, OPEN)
    assert set(await Reader(store, lambda: now).read()) == {"isolated", "new", "newer"}
    # Whoever still knows the old version is believed.
    assert (await one.swap("closed", one.group.made, OPEN)).accepted


async def test_versions_rise_whatever_the_servers_clock_does(server: Any, make_store: Make) -> None:
    now = 1_700_000_000.0
    store = make_store(server)
    one, other = Reader(store, lambda: now), Reader(store, lambda: now)
    first = await one.swap("k", 0, OPEN)
    await other.read()
    now -= 3_600  # another server took over
    second = await one.swap("k", first.version, CLOSED)
    assert second.accepted
    assert second.version > first.version
    assert (await other.read())["k"].snapshot.state is CircuitState.CLOSED


async def test_however_many_have_changed_all_are_heard(server: Any, make_store: Make) -> None:
    store = make_store(server)
    one = store.circuits.join("many", lambda _key, _agreed: None)
    left = 2_300
    done = anyio.Event()

    def heard(agreed: Agreed) -> None:
        nonlocal left
        assert agreed.accepted
        left -= 1
        if not left:
            done.set()

    for number in range(2_300):
        one.swap_soon(f"k{number}", 0, OPEN, heard)
    with anyio.fail_after(A_HANG):
        await done.wait()
    keys: set[str | None] = set()
    other = make_store(server).circuits.join("many", lambda key, _agreed: keys.add(key))
    await other.refresh()
    await until(lambda: len(keys) == 2_301)  # with the end of a round


async def test_every_key_of_circuits_expires(server: Any, make_store: Make) -> None:
    store = make_store(server)
    await store.circuits.join("g", lambda _key, _agreed: None).swap("k", 0, OPEN, lambda _agreed: None)
    with server.admin as admin:
        keys = [key for key in admin.keys("*") if b":circuit:" in key]
        assert len(keys) == 2
        assert all(86_400_000 < admin.pttl(key) <= 30 * 86_400_000 for key in keys)


async def test_isolating_from_another_thread_reaches_all(server: Any, make_store: Make) -> None:
    one, other = (CircuitBreaker(store=make_store(server)) for _ in range(2))
    for breaker in (one, other):
        await Door(breaker, provider=Provider())()
    thread = threading.Thread(target=one.isolate, args=("api.example",))
    thread.start()
    thread.join()
    await until(lambda: other.state("api.example") == CircuitState.ISOLATED)
