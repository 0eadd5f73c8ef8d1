"""Functions of the application's that fail or give what they must not: no call breaks of it, the log stays short."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from typing import Any

import anyio
import pytest

from resilient_llm import Bulkhead, Call, CircuitBreaker, ConcurrencyLimit, Pipeline, RateLimit, ambient
from resilient_llm.policies._hooks import hook_failed, hook_gave
from resilient_llm.stores import MemoryStore

pytestmark = pytest.mark.anyio


def raises(call: Call) -> Hashable:
    raise KeyError(call.tenant)


def gives_a_list(call: Call) -> Any:
    return [call.tenant]


async def _tenant(call: Call) -> str | None:
    return call.tenant


def gives_a_coroutine(call: Call) -> object:
    return _tenant(call)


LIMITS: dict[str, Callable[..., Any]] = {
    "bulkhead": lambda **more: Bulkhead(max_concurrent=1, **more),
    "bulkhead, shared": lambda **more: Bulkhead(max_concurrent=1, shared=5, **more),
    "concurrency_limit": lambda **more: ConcurrencyLimit(initial=1, max=1, **more),
    "rate_limit": lambda **more: RateLimit(requests_per_minute=60, window=1, **more),
}


async def ends_of(limit: Any) -> list[float]:
    """Run three calls, of as many tenants, and say when each ended."""
    pipeline, began, ends = Pipeline([limit]), anyio.current_time(), []

    async def work() -> None:
        await anyio.sleep(1)

    async def one(tenant: str) -> None:
        with ambient(tenant=tenant):
            await pipeline.run(work)
        ends.append(anyio.current_time() - began)

    async with anyio.create_task_group() as group:
        for tenant in "abc":
            group.start_soon(one, tenant)
    return ends


@pytest.mark.parametrize("key", [raises, gives_a_list, gives_a_coroutine])
@pytest.mark.parametrize("store", [None, MemoryStore])
@pytest.mark.parametrize("kind", LIMITS)
async def test_calls_whose_key_cannot_be_had_share_one(
    kind: str, store: Any, key: Any, caplog: pytest.LogCaptureFixture
) -> None:
    limit = LIMITS[kind](key=key, store=store and store())
    assert await ends_of(limit) == pytest.approx([1, 2, 3])
    said = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(said) == 1
    assert "key=" in said[0].message


@pytest.mark.parametrize("key", [lambda call: frozenset({call.tenant}), lambda call: (call.tenant, object())])
@pytest.mark.parametrize("kind", LIMITS)
async def test_so_do_those_whose_key_other_processes_may_write_otherwise(
    kind: str, key: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert await ends_of(LIMITS[kind](key=key)) == pytest.approx([1, 1, 1])  # here they are keys like others
    assert not caplog.records
    assert await ends_of(LIMITS[kind](key=key, store=MemoryStore())) == pytest.approx([1, 2, 3])
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert "allowed are with a store str, int, float" in caplog.text
    assert await ends_of(LIMITS[kind](key=key, store=MemoryStore(), dry_run=True)) == pytest.approx([1, 1, 1])


async def test_so_does_a_circuit_in_a_store() -> None:
    circuit = CircuitBreaker(key=lambda _call: frozenset("a"), consecutive_failures=1, store=MemoryStore())

    def fail() -> None:
        raise ConnectionError

    with pytest.raises(ConnectionError):
        await Pipeline([circuit]).run(fail)
    assert [(repr(key), state.name) for key, state in circuit.states().items()] == [("other", "OPEN")]


@pytest.mark.parametrize("key", [raises, gives_a_list])
@pytest.mark.parametrize("kind", LIMITS)
async def test_nor_does_a_dry_run_break_of_it(kind: str, key: Any) -> None:
    assert await ends_of(LIMITS[kind](key=key, dry_run=True)) == pytest.approx([1, 1, 1])


async def test_a_circuit_whose_key_cannot_be_had_is_one_of_all() -> None:
    circuit = CircuitBreaker(key=raises, consecutive_failures=2)

    def fail() -> None:
        raise ConnectionError

    for _ in range(2):
        with pytest.raises(ConnectionError):
            await Pipeline([circuit]).run(fail)
    assert [(repr(key), state.name) for key, state in circuit.states().items()] == [("other", "OPEN")]


def test_a_failure_is_told_once_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "resilient_llm")

    def ask() -> None: ...

    for error in (KeyError("a"), KeyError("b"), ValueError("c")):
        hook_failed("cost", ask, error, instead="it counts as 1")
    told = [(record.levelname, record.exc_info is not None) for record in caplog.records]
    assert told == [("ERROR", True), ("DEBUG", False), ("ERROR", True)]
    assert caplog.messages[1].endswith("failed again: KeyError; it counts as 1")


def test_so_is_what_it_must_not_give(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "resilient_llm")

    class Asked:
        __slots__ = ()

        def ask(self) -> None: ...

    one, another = Asked(), Asked()
    for hook in (one, another, one.ask, another.ask):
        hook_gave("cost", hook, -1, "numbers from 0")
    assert [record.levelname for record in caplog.records] == ["ERROR", "DEBUG", "ERROR", "DEBUG"]
    assert caplog.messages[0].endswith("gave -1: allowed are numbers from 0")


async def test_a_cost_that_fails_leaves_one_traceback_behind(caplog: pytest.LogCaptureFixture) -> None:
    def cost(_call: Call) -> float:
        raise ZeroDivisionError

    async def work() -> None: ...

    pipeline = Pipeline([RateLimit(requests_per_minute=6_000, cost=cost)])
    for _ in range(100):
        await pipeline.run(work)
    assert caplog.text.count("Traceback") == 1
