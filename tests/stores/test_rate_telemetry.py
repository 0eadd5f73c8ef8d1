"""What a store that fails tells: an event and a metric for each change of its state, not for each call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import pytest

from resilient_llm import Limit, RateLimit, RateLimitedError, Telemetry
from resilient_llm.stores import MemoryStore, RedisStore
from tests.signals import Recording
from tests.support import Door, Provider, stalls, until

pytestmark = pytest.mark.anyio


def recorded(store: Any, recording: Recording, **options: Any) -> Door:
    telemetry = Telemetry(tracer_provider=recording.tracer_provider, meter_provider=recording.meter_provider)
    return Door(RateLimit(store=store, **options), provider=Provider(), telemetry=telemetry)


@pytest.mark.realtime
async def test_giving_up_and_coming_back_are_one_event_each(
    own_server: Any, make_store: Callable[..., RedisStore]
) -> None:
    recording = Recording()
    store = make_store(own_server, on_store_error="open", name="limits")
    door = recorded(store, recording, requests_per_minute=1e6)
    await door(tenant="a")
    own_server.kill()
    for _ in range(30):
        await door(tenant="a")
    own_server.start()

    async def is_closed() -> bool:
        await door(tenant="a")
        return store.guard.closed

    await until(is_closed)
    events = [
        event
        for span in recording.spans
        for event in span.events
        if event.name == "resilient_llm.store.state_change"
    ]
    assert [event.attributes["resilient_llm.store.state"] for event in events] == ["open", "closed"]
    assert {event.attributes["resilient_llm.store.name"] for event in events} == {"limits"}
    assert "Connect" in str(events[0].attributes["resilient_llm.reason"])
    values = {point.name: point.value for point in recording.points if "store" in point.name}
    assert values["resilient_llm.store.state"] == 0
    assert values["resilient_llm.store.transitions"] == 2
    assert values["resilient_llm.store.unguarded"] >= 30


@pytest.mark.realtime
async def test_a_slow_answer_is_a_span(own_server: Any, make_store: Callable[..., RedisStore]) -> None:
    recording = Recording()
    door = recorded(make_store(own_server), recording, requests_per_minute=1e6)
    await door(tenant="a")
    recording.clear()
    async with stalls(unless=0.001) as lost, anyio.create_task_group() as group:
        with own_server.frozen():
            group.start_soon(lambda: door(tenant="a"))
            await anyio.sleep(0.1)
    spans = recording.spans
    assert spans.one("store").seconds > 0.01
    spans.assert_accounted(spans.one("chat"), stalled=lost.total)


async def test_a_wait_is_a_span_and_a_refusal_is_counted_with_its_limit() -> None:
    recording = Recording()
    limits = [Limit(key="tenant", burst=4), Limit(key=None, requests_per_minute=6_000)]
    door = recorded(MemoryStore(), recording, limits=limits, max_wait=0.3)
    for _ in range(4):
        await door(tenant="a")
    recording.clear()
    await door(tenant="a")
    wait = recording.spans.one("wait")
    assert wait.seconds == pytest.approx(0.25)
    assert wait.attributes["resilient_llm.wait.outcome"] == "acquired"
    async with anyio.create_task_group() as group:
        group.start_soon(lambda: door(tenant="a"))
        await anyio.sleep(0.02)
        with pytest.raises(RateLimitedError) as refused:
            await door(tenant="a")
    assert refused.value.limit == "burst of tenant"
    rejections = [point for point in recording.points if point.name == "resilient_llm.rejections"]
    assert [point.value for point in rejections] == [1]
