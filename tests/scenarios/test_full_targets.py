"""Targets whose own limits are used up when a call needs them."""

from __future__ import annotations

import anyio
import pytest

from resilient_llm import Bulkhead, Retry, Router
from resilient_llm.lab import Outage, Upstream
from resilient_llm.routing.balancers import Priority
from tests.scenarios.support import Caller, network, target

pytestmark = pytest.mark.anyio


def caller(*outages: Outage) -> Caller:
    """Give a client of `a` and, in second place, of `b`, which takes one call at a time and ten seconds for it."""
    room = Bulkhead(max_concurrent=1, max_queued=0, key="target")
    return Caller(
        network(a=Upstream(first_token=0.5, outages=outages), b=Upstream(first_token=10.0)),
        Retry(max_attempts=3),
        Router([target("a"), target("b", room)], balancer=Priority()),
    )


async def call_twice(call: Caller) -> list[tuple[int, str | None]]:
    """Make a call that fails at `a` and fills `b`, and two seconds later another; give what they got."""
    answers: list[tuple[int, str | None]] = []

    async def one() -> None:
        answer = await call()
        answers.append((answer.status, answer.target))

    async with anyio.create_task_group() as group:
        group.start_soon(one)
        await anyio.sleep(2)
        group.start_soon(one)
    return answers


async def test_a_call_passes_by_a_target_that_is_full() -> None:
    assert await call_twice(caller(Outage(0, 1))) == [(200, "a"), (200, "b")]


async def test_a_call_that_failed_where_there_was_room_tries_there_again_after_backoff() -> None:
    call = caller(Outage(0, 1), Outage(2, 2.01))
    assert await call_twice(call) == [(200, "a"), (200, "b")]
    assert [request.url.split("/")[2] for request in call.sent] == ["a.test", "b.test", "a.test", "a.test"]
