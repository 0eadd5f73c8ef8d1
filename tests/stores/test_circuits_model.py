"""Breakers that share circuits over a store that is slow, out of order, and loses what it was told, in virtual time."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import anyio
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient_llm import AttemptError, CircuitBreaker, CircuitOpenError, CircuitState, StoreUnavailableError
from resilient_llm.core.circuit import Admission, Refusal
from resilient_llm.core.circuit_state import CircuitSnapshot
from resilient_llm.outcome import SUCCESS
from resilient_llm.stores._memory_circuits import MemoryCircuits
from resilient_llm.stores.guard import StoreGuard
from resilient_llm.stores.protocol_circuits import Agreed, HearAgreed, HearChange
from resilient_llm.testing import run_virtual
from tests.support import FAILURE, THROTTLED, Door, Provider, Step

KEY = "api.example"
MOST = 2


class Network:
    """A store in memory, and what lies between it and the processes."""

    processes = 1

    def __init__(self, seed: int, *, lossy: bool, failing: bool) -> None:
        self.rng = random.Random(seed)
        self.lossy = lossy
        self.failing = failing
        self.memory = MemoryCircuits()
        self.granted: list[int] = []
        self.most = 0

    @property
    def up(self) -> bool:
        return not self.failing or self.rng.random() < 0.7

    def delay(self) -> float:
        return self.rng.choice([0.0, 0.001, 0.02, 0.3])

    def lost(self) -> bool:
        return self.lossy and self.rng.random() < 0.3

    def reach(self, what: Callable[[], None]) -> None:
        """Do something at the store, later, or never."""
        if not self.lost() and self.up:
            asyncio.get_running_loop().call_later(self.delay(), what)

    def note(self, snapshot: CircuitSnapshot) -> None:
        """Note what is agreed on at the store."""
        self.most = max(self.most, len(snapshot.probes))


class Far:
    """The store as one process reaches it."""

    processes = 1

    def __init__(self, network: Network) -> None:
        self.guard = StoreGuard("far")
        self.network = network
        self.circuits = self

    def join(self, group: str, hear: HearChange) -> Any:
        return Member(self.network, group, hear)

    async def aclose(self) -> None:
        """Hold nothing."""


class Member:
    def __init__(self, network: Network, group: str, hear: HearChange) -> None:
        self.network = network
        self.hear = hear
        self.made = 0
        self.ticking = False
        self.near = network.memory.join(group, lambda _key, _agreed: None)

    def fresh(self, now: float) -> bool:
        if not self.ticking:
            self.ticking = True
            self._tick()
        return self.made > 0

    def _tick(self) -> None:
        self.network.reach(self._read)
        asyncio.get_running_loop().call_later(0.25, self._tick)

    def _read(self) -> None:
        changes: list[tuple[str | None, Agreed | None]] = []
        self.near._hear = lambda key, agreed: changes.append((key, agreed))
        coroutine = self.near.refresh()
        with suppress(StopIteration):
            coroutine.send(None)
        self.near._hear = lambda _key, _agreed: None

        def told() -> None:
            self.made = self.near.made
            for change in changes:
                self.hear(*change)

        self.network.reach(told)

    async def refresh(self) -> None:
        await anyio.sleep(self.network.delay())
        if not self.network.up:
            raise StoreUnavailableError("down", name="far")
        self._read()
        await anyio.sleep(0.5)

    async def swap(self, key: str, expected: int, snapshot: CircuitSnapshot, late: HearAgreed) -> Agreed:
        await anyio.sleep(self.network.delay())
        if not self.network.up:
            raise StoreUnavailableError("down", name="far")
        agreed = self.near._swap(key, expected, snapshot)
        self.network.note(agreed.snapshot)
        try:
            await anyio.sleep(self.network.delay())
        except BaseException:
            self.network.reach(lambda: late(agreed))
            raise
        if not self.network.up:
            raise StoreUnavailableError("down", name="far")
        return agreed

    def swap_soon(self, key: str, expected: int, snapshot: CircuitSnapshot, heard: HearAgreed) -> None:
        def swap() -> None:
            agreed = self.near._swap(key, expected, snapshot)
            self.network.note(agreed.snapshot)
            self.network.reach(lambda: heard(agreed))

        self.network.reach(swap)


class Process:
    def __init__(self, network: Network) -> None:
        self.breaker = CircuitBreaker(
            store=Far(network),
            consecutive_failures=2,
            break_duration=2.0,
            max_break_duration=4.0,
            half_open_max_calls=MOST,
            success_threshold=2,
            probe_timeout=10.0,
        )
        self.provider = Provider()
        self.door = Door(self.breaker, provider=self.provider)
        shared = self.breaker._shared
        assert shared is not None
        admit = shared.admit

        async def noted(call: Any, copy: Any) -> Admission | Refusal:
            admission = await admit(call, copy)
            if isinstance(admission, Admission) and admission.is_probe:
                network.granted.append(admission.generation)
            return admission

        shared.admit = noted  # type: ignore[method-assign]

    async def call(self, step: Step, duration: float, patience: float = math.inf) -> None:
        self.provider.script.append([duration, step])
        with anyio.move_on_after(patience):
            with suppress(AttemptError, CircuitOpenError):
                await self.door()


calls = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.sampled_from([SUCCESS, FAILURE, FAILURE, THROTTLED]),
        st.sampled_from([0.0, 0.1, 3.0, 20.0]),
        st.sampled_from([math.inf, math.inf, 0.005, 1.0]),
        st.sampled_from([0.0, 0.0, 0.05, 1.0, 2.5]),
    ),
    min_size=5,
    max_size=40,
)


async def scenario(network: Network, script: list[Any]) -> list[Process]:
    processes = [Process(network) for _ in range(3)]
    async with anyio.create_task_group() as tasks:
        for which, step, duration, patience, pause in script:
            tasks.start_soon(processes[which].call, step, duration, patience)
            await anyio.sleep(pause)
    return processes


async def healed(network: Network, processes: list[Process]) -> None:
    """Let all hear of all, and see that they agree and that the circuit closes when the target is well."""
    network.lossy = network.failing = False
    for process in processes:
        process.provider.script.clear()
    for _ in range(40):
        for process in processes:
            process.provider.script.clear()
            await process.call(SUCCESS, 0.0)
        await anyio.sleep(1.0)
    assert {process.breaker.state(KEY) for process in processes} == {CircuitState.CLOSED}
    versions = {process.breaker._shared._copies[KEY].version for process in processes}  # type: ignore[union-attr]
    assert len(versions) == 1
    for process in processes:
        assert not process.breaker._shared._behind  # type: ignore[union-attr]


@settings(max_examples=60)
@given(script=calls, seed=st.integers(0, 2**32), lossy=st.booleans())
def test_no_probe_is_anybodys_that_all_have_not_agreed_on(script: list[Any], seed: int, lossy: bool) -> None:
    async def run() -> None:
        network = Network(seed, lossy=lossy, failing=False)
        processes = await scenario(network, script)
        assert network.most <= MOST
        assert len(network.granted) == len(set(network.granted)), "a probe was granted twice"
        await healed(network, processes)

    run_virtual(run)


@settings(max_examples=40)
@given(script=calls, seed=st.integers(0, 2**32))
def test_a_store_that_fails_now_and_then_leaves_them_in_agreement(script: list[Any], seed: int) -> None:
    async def run() -> None:
        network = Network(seed, lossy=True, failing=True)
        await healed(network, await scenario(network, script))

    run_virtual(run)


class Wire(Network):
    """A network without surprises, which can be cut."""

    connected = True

    def __init__(self) -> None:
        super().__init__(0, lossy=False, failing=False)

    @property
    def up(self) -> bool:
        return self.connected

    def delay(self) -> float:
        return 0.01


async def opened(network: Network) -> list[Process]:
    """Have one process open the circuit, let the others hear of it, and the break be over."""
    processes = [Process(network) for _ in range(2)]
    await processes[1].call(SUCCESS, 0.0)
    for _ in range(2):
        await processes[0].call(FAILURE, 0.0)
    await anyio.sleep(2.5)
    assert {process.breaker.state(KEY) for process in processes} == {CircuitState.OPEN}
    return processes


def test_probes_that_end_at_the_same_time_all_count() -> None:
    async def run() -> None:
        processes = await opened(Wire())
        ends = anyio.current_time() + 1.0
        async with anyio.create_task_group() as tasks:
            for process in processes:
                # Minus what it takes until all have agreed on it, so that both end at once.
                tasks.start_soon(process.call, SUCCESS, ends - anyio.current_time() - 0.02)
                await anyio.sleep(0.1)
        await anyio.sleep(0.5)
        assert {process.breaker.state(KEY) for process in processes} == {CircuitState.CLOSED}

    run_virtual(run)


def test_a_probe_without_the_store_is_nobodys_once_others_have_agreed() -> None:
    async def run() -> None:
        network = Wire()
        alone, other = await opened(network)
        async with anyio.create_task_group() as tasks:
            network.connected = False
            tasks.start_soon(alone.call, FAILURE, 3.0)
            await anyio.sleep(0.1)
            assert alone.breaker.state(KEY) is CircuitState.HALF_OPEN
            network.connected = True
            tasks.start_soon(other.call, SUCCESS, 5.0)
        await anyio.sleep(0.5)
        assert [process.breaker.state(KEY) for process in (alone, other)] == [CircuitState.HALF_OPEN] * 2

    run_virtual(run)
