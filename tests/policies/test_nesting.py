"""Calls inside of calls: nobody waits for a slot that a call above holds."""

from __future__ import annotations

from collections.abc import Callable

import anyio
import anyio.from_thread
import httpx
import pytest
from starlette.types import Receive, Scope, Send

from resilient_llm import (
    Bulkhead,
    ConcurrencyLimit,
    ConfigurationError,
    Pipeline,
    Policy,
    RateLimit,
    Retry,
    ambient,
)
from resilient_llm.asgi import ResilienceMiddleware
from resilient_llm.httpx import ResilientTransport
from resilient_llm.testing import FakeProvider
from tests.asgi.server import Connection, respond

pytestmark = pytest.mark.anyio

INSIDE = "inside of another that holds one"


def one_slot() -> Bulkhead:
    return Bulkhead(max_concurrent=1)


def one_slot_for_all() -> Bulkhead:
    return Bulkhead(max_concurrent=1, shared=1)


def one_attempt() -> ConcurrencyLimit:
    return ConcurrencyLimit(initial=1, max=1, key="tenant")


every_limit = pytest.mark.parametrize("make", [one_slot, one_slot_for_all, one_attempt])


async def answer() -> int:
    return 1


@every_limit
async def test_a_function_that_calls_its_own_pipeline_is_told(make: Callable[[], Policy]) -> None:
    pipeline = Pipeline([make()])

    async def outer() -> int:
        return await pipeline.run(answer)

    with pytest.raises(ConfigurationError, match=INSIDE):
        await pipeline.run(outer)
    assert anyio.current_time() == 0
    assert await pipeline.run(answer) == 1


@every_limit
async def test_so_is_one_that_calls_another_pipeline_with_the_same_limit(make: Callable[[], Policy]) -> None:
    limit = make()
    inner = Pipeline([limit])
    between = Pipeline([])

    async def middle() -> int:
        return await inner.run(answer)

    async def outer() -> int:
        with ambient(timeout=5):
            return await between.run(middle)

    with pytest.raises(ConfigurationError, match=INSIDE):
        await Pipeline([limit]).run(outer)
    assert await inner.run(answer) == 1


@every_limit
async def test_so_is_one_around_a_client_with_the_same_limit(make: Callable[[], Policy]) -> None:
    limit = make()
    transport = ResilientTransport(FakeProvider().transport(), policies=[limit])
    async with httpx.AsyncClient(transport=transport, base_url="http://provider/v1") as client:

        async def agent() -> int:
            response = await client.post("/chat/completions", json={"model": "m", "messages": []})
            return response.status_code

        with pytest.raises(ConfigurationError, match=INSIDE):
            await Pipeline([limit]).run(agent)
        assert await agent() == 200


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_so_is_a_function_on_a_thread() -> None:
    pipeline = Pipeline([one_slot()])

    def outer() -> int:
        return anyio.from_thread.run(pipeline.run, answer)

    with pytest.raises(ConfigurationError, match=INSIDE):
        await pipeline.run(outer)


@pytest.mark.parametrize("make", [one_slot, one_slot_for_all])
async def test_so_are_two_middlewares_with_one_bulkhead(make: Callable[[], Policy]) -> None:
    bulkhead = make()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await respond(send)

    inner = ResilienceMiddleware(app, tenant=None, policies=[bulkhead])
    connection = await Connection().run(ResilienceMiddleware(inner, tenant=None, policies=[bulkhead]))
    assert isinstance(connection.error, ConfigurationError)
    assert INSIDE in str(connection.error)


async def test_limits_of_their_own_nest() -> None:
    outer = Pipeline([one_slot(), Retry(), one_attempt()])
    inner = Pipeline([one_slot(), Retry(), one_attempt()])

    async def nested() -> int:
        return await inner.run(answer)

    assert await outer.run(nested) == 1


async def test_slots_of_other_keys_are_not_what_the_call_above_holds() -> None:
    bulkhead = one_slot()
    pipeline = Pipeline([bulkhead])

    async def outer() -> int:
        with ambient(tenant="b"):
            return await pipeline.run(answer)

    with ambient(tenant="a"):
        assert await pipeline.run(outer) == 1


async def test_what_goes_on_after_its_call_holds_nothing() -> None:
    pipeline = Pipeline([one_slot()])
    done: list[int] = []

    async def later() -> None:
        await anyio.sleep(1)
        done.append(await pipeline.run(answer))

    async with anyio.create_task_group() as tasks:

        async def outer() -> None:
            tasks.start_soon(later)

        await pipeline.run(outer)
    assert done == [1]


@every_limit
async def test_a_limit_that_stands_twice_in_one_list_is_refused_when_it_is_built(
    make: Callable[[], Policy],
) -> None:
    limit = make()
    for policies in ([limit, limit], [limit, Retry(), limit]):
        with pytest.raises(ConfigurationError, match="stands twice in the list"):
            Pipeline(policies)
    rate = RateLimit(requests_per_minute=60)
    with pytest.raises(ConfigurationError, match="rate_limit stands twice in the list"):
        Pipeline([rate, Retry(), rate])
