"""After how long a reply is late: what has been learned, of whom, and what does not count."""

from __future__ import annotations

from typing import Any

import anyio
import httpx2
import pytest

from resilient_llm import Bulkhead, Deadline, Hedge, Policy, Retry
from resilient_llm.httpx2 import ResilientTransport
from tests.policies.hedging import Attempts, InTurn
from tests.streams.scripted import ASK, DONE, ROLE, Body, read, says, send
from tests.support import FAILURE, Door, Provider

pytestmark = pytest.mark.anyio

LEARNT = 20


class Setting:
    """A hedge that learns, between two targets."""

    def __init__(self, **options: Any) -> None:
        self.provider = Provider()
        self.attempts = Attempts()
        self.hedge = Hedge(**({"min_samples": LEARNT, "budget_ratio": 1.0} | options))
        self.door = Door(Retry(), self.hedge, InTurn(), self.attempts, provider=self.provider)

    async def learn(self, *latencies: float, **options: Any) -> None:
        """Let calls take so long."""
        for latency in latencies:
            self.provider.script = [latency]
            await self.door(**options)

    async def hedged_after(self, **options: Any) -> float | None:
        """Make a call that takes long, and give the seconds until it was hedged."""
        self.provider.script = [60.0, 0.0]
        self.provider.attempts.clear()
        await self.door(**options)
        return self.provider.times[1] if len(self.provider.times) > 1 else None


async def test_nothing_is_late_before_enough_is_known() -> None:
    setting = Setting(window=3600)
    await setting.learn(*[1.0] * (LEARNT - 2))
    assert await setting.hedged_after() is None
    assert await setting.hedged_after() is None  # that was the twentieth
    assert await setting.hedged_after() is not None


async def test_late_is_what_most_replies_are_not() -> None:
    setting = Setting(percentile=0.9, max_medians=100, min_samples=100, window=3600)
    await setting.learn(*[1.0] * 89, 4.0, *[8.0] * 10)
    assert await setting.hedged_after() == pytest.approx(4.0, rel=0.05)


async def test_it_waits_for_no_more_than_a_few_usual_replies() -> None:
    # One in ten is slow: the slowest of the fast 95 % of calls is a slow one.
    setting = Setting(min_samples=100, window=3600)
    await setting.learn(*[1.0] * 90, *[10.0] * 10)
    assert await setting.hedged_after() == pytest.approx(3.0, rel=0.06)


async def test_it_is_not_after_less_than_that() -> None:
    setting = Setting(at_least=0.7)
    await setting.learn(*[0.01] * LEARNT)
    assert await setting.hedged_after() == pytest.approx(0.7)


async def test_what_is_known_is_forgotten() -> None:
    setting = Setting(window=600)
    await setting.learn(*[1.0] * LEARNT)
    await anyio.sleep(400)
    assert await setting.hedged_after() is not None
    await anyio.sleep(601)
    assert await setting.hedged_after() is None


async def test_one_that_was_overtaken_counts_as_long_as_it_took() -> None:
    # Without it a target that gets slower would seem as fast as ever: its slow replies are all cancelled.
    setting = Setting(percentile=0.5, max_medians=100)
    await setting.learn(*[1.0] * LEARNT)
    for _ in range(LEARNT + 1):
        setting.provider.script = [60.0, 2.0]
        await setting.door()
    assert await setting.hedged_after() == pytest.approx(3.0, rel=0.06)


async def test_failures_are_not_quick_replies() -> None:
    setting = Setting(percentile=0.5, max_medians=100)
    await setting.learn(*[1.0] * LEARNT)
    for _ in range(3 * LEARNT):
        setting.provider.script = [[0.01, FAILURE], 1.0]
        await setting.door()
    assert await setting.hedged_after() == pytest.approx(1.0, rel=0.05)


async def test_each_model_has_its_own() -> None:
    setting = Setting()
    await setting.learn(*[1.0] * LEARNT, model="small")
    await setting.learn(*[5.0] * LEARNT, model="large")
    assert await setting.hedged_after(model="small") == pytest.approx(1.0, rel=0.05)
    assert await setting.hedged_after(model="large") == pytest.approx(5.0, rel=0.05)
    assert await setting.hedged_after(model="new") is None


async def test_each_key_has_its_own() -> None:
    setting = Setting(key="tenant")
    await setting.learn(*[1.0] * LEARNT, tenant="a", model="small")
    await setting.learn(*[5.0] * LEARNT, tenant="b", model="small")
    assert await setting.hedged_after(tenant="a", model="large") == pytest.approx(1.0, rel=0.05)
    assert await setting.hedged_after(tenant="b") == pytest.approx(5.0, rel=0.05)


async def test_a_model_chosen_for_the_call_counts_in_place_of_the_one_it_names() -> None:
    setting = Setting()

    async def choose(call: Any, call_next: Any) -> Any:
        call.logical_model = "chosen"
        return await call_next(call)

    chosen = Door(choose, setting.hedge, InTurn(), provider=setting.provider)
    setting.provider.script = [1.0] * LEARNT
    for n in range(LEARNT):
        await chosen(model=f"name {n}")
    assert await setting.hedged_after(model="chosen") == pytest.approx(1.0, rel=0.05)


# Over HTTP


class Paced(httpx2.AsyncBaseTransport):
    """Begin replies at once and give their content after so long, one time after another."""

    def __init__(self, *times: float) -> None:
        self.times = list(times)
        self.sent: list[float] = []

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        self.sent.append(anyio.current_time())
        wait = self.times.pop(0)
        if b'"stream"' not in request.read():
            await anyio.sleep(wait)
            body = {"choices": [{"index": 0, "message": {"content": "hi"}, "finish_reason": "stop"}]}
            return httpx2.Response(200, json=body)
        events = {"content-type": "text/event-stream"}
        stream = Body(ROLE, wait, says("hi", "stop"), 30.0, DONE)
        return httpx2.Response(200, headers=events, stream=stream)


async def test_streams_are_timed_to_their_first_content_and_whole_replies_apart() -> None:
    upstream = Paced(*[1.0, 20.0] * LEARNT, 60.0, 0.0, 60.0, 0.0)
    hedge = Hedge(min_samples=LEARNT, window=7200)
    transport = ResilientTransport(upstream, policies=[hedge, InTurn()])
    whole = {name: value for name, value in ASK.items() if name != "stream"}
    for body in [ASK, whole] * LEARNT:
        await read(await send(transport, body))
    for body, late in ((ASK, 1.0), (whole, 20.0)):
        await read(await send(transport, body))
        assert upstream.sent[-1] - upstream.sent[-2] == pytest.approx(late, rel=0.05)


async def hedged_behind_a_slot(upstream: Paced, *outer: Policy, queued: float, **options: Any) -> None:
    """Make a call whose first attempt waits so long for a slot before it is sent."""
    slots = Bulkhead(max_concurrent=1, key="target")
    hedged = ResilientTransport(upstream, policies=[*outer, Hedge(delay=2.0, **options), InTurn(), slots])
    before = ResilientTransport(upstream, policies=[Retry(), InTurn(), slots])

    async def occupy() -> None:
        with anyio.move_on_after(queued):
            await send(before)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(occupy)
        await anyio.wait_all_tasks_blocked()
        await read(await send(hedged))


@pytest.mark.parametrize("queued", [0.0, 1.5, 5.0, 17.25])
async def test_a_wait_for_a_slot_does_not_count(queued: float) -> None:
    upstream = Paced(60.0, 60.0, 0.0)
    await hedged_behind_a_slot(upstream, queued=queued)
    first, second, third = upstream.sent
    assert [second - first, third - second] == pytest.approx([queued, 2.0])


async def test_after_it_there_may_be_no_time_left() -> None:
    upstream = Paced(60.0, 60.0, 0.0)
    await hedged_behind_a_slot(upstream, Deadline(4.0), queued=1.5, min_remaining=1.0)
    assert len(upstream.sent) == 2  # the one before, and no second of this one
