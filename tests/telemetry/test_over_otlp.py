"""What a collector receives over a real socket, in real time."""

from __future__ import annotations

import anyio
import httpx2
import pytest

from resilient_llm import Backoff, Bulkhead, Retry, ambient
from resilient_llm.testing import FakeModel, FakeProvider, Fault, Latency
from tests.otlp import Receiver
from tests.support import stalls
from tests.telemetry.exporting import exporting_to
from tests.telemetry.observed import ask, client_of, read_stream

pytestmark = [pytest.mark.anyio, pytest.mark.realtime]

PACES = (0.5, 2.0, 8.0)
"""Seconds in which things take their turns: slower again where the machine was too slow for them."""

TREES = {
    "plain": "attempt",
    "retried": "attempt backoff attempt backoff attempt",
    "before": "attempt",
    "queued": "wait attempt backoff attempt",
    "streamed": "attempt",
    "left before head": "attempt",
    "left in stream": "attempt",
    "left in backoff": "attempt backoff",
    "left in queue": "wait",
}


async def leave(client: httpx2.AsyncClient, model: str, after: float) -> None:
    with anyio.move_on_after(after):
        await read_stream(client, model)


async def received(pace: float) -> tuple[Receiver, float]:
    """Make calls that end in every way, and give what a collector got of them, and by how much the machine was late."""
    answering = FakeModel(latency=Latency(headers=pace, per_token=0.1 * pace))
    silent = FakeModel(latency=Latency(headers=600.0))
    provider = FakeProvider(answering, models={"left before head": silent})
    after = {"retry-after-ms": f"{1_000 * pace:.0f}"}
    provider.script("retried", [Fault(status=503), Fault(status=429, headers=after)])
    provider.script("queued", [Fault(status=503)])
    provider.script("left in backoff", lambda _request: Fault(status=500))
    short = Backoff(initial=pace, maximum=pace, jitter="none")
    policies = (Bulkhead(max_concurrent=1), Retry(backoff=short, budget_min_per_second=100))

    with Receiver() as receiver, exporting_to(receiver.url) as exporting:
        client = client_of(exporting.telemetry, provider, *policies)

        async def of_tenant(tenant: str, call: object, *args: object) -> None:
            with ambient(tenant=tenant):
                await call(client, *args)  # type: ignore[operator]

        async with stalls(unless=0.001) as lost, client, anyio.create_task_group() as tasks:
            tasks.start_soon(of_tenant, "a", ask, "plain")
            tasks.start_soon(of_tenant, "b", ask, "retried")
            tasks.start_soon(of_tenant, "c", ask, "before")
            tasks.start_soon(of_tenant, "d", read_stream, "streamed")
            tasks.start_soon(of_tenant, "e", leave, "left before head", 1.6 * pace)
            tasks.start_soon(of_tenant, "f", leave, "left in stream", 1.6 * pace)
            tasks.start_soon(of_tenant, "g", leave, "left in backoff", 1.8 * pace)
            await anyio.sleep(0.2 * pace)
            tasks.start_soon(of_tenant, "c", ask, "queued")
            tasks.start_soon(of_tenant, "c", leave, "left in queue", 1.4 * pace)
        await anyio.to_thread.run_sync(exporting.flush)
        receiver.wait_for(lambda received: len(received.spans.named("chat")) == 9 and bool(received.points))
    return receiver, lost.total


def trees_of(receiver: Receiver) -> dict[str, str]:
    spans = receiver.spans
    return {
        call.name.removeprefix("chat "): " ".join(child.name.split()[0] for child in spans.children(call))
        for call in spans.named("chat")
    }


async def test_the_tree_of_every_call_and_that_it_accounts_for_the_time() -> None:
    for pace in PACES:
        receiver, stalled = await received(pace)
        trees = trees_of(receiver)
        if trees == TREES:
            break
    assert trees == TREES
    spans = receiver.spans
    for call in spans.named("chat"):
        assert (call.kind, call.parent_id, call.scope) == ("CLIENT", None, "resilient_llm")
        spans.assert_accounted(call, stalled=stalled)
    outcomes = {call.name: call.attributes["resilient_llm.outcome"] for call in spans.named("chat")}
    assert {name for name, outcome in outcomes.items() if outcome == "cancelled"} == {
        name for name in outcomes if "left" in name
    }
    assert len({call.trace_id for call in spans.named("chat")}) == 9

    durations = receiver.points.of("gen_ai.client.operation.duration")
    assert {point.attributes["gen_ai.request.model"] for point in durations} == trees.keys()
    assert durations[0].bounds == tuple(0.01 * 2**n for n in range(14))
    assert receiver.points.one("resilient_llm.call.retries", model="retried").value == 2
    assert sum(point.count for point in receiver.points.of("resilient_llm.wait.duration")) == 2
