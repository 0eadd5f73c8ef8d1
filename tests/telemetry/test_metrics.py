"""What is counted and timed, under which names and labels."""

from __future__ import annotations

import gc
from typing import Any

import anyio
import pytest

from resilient_llm import Bulkhead, CircuitBreaker, ConfigurationError, Retry, Telemetry, ambient
from resilient_llm.stores import MemoryStore
from resilient_llm.testing import FakeModel, FakeProvider, Fault, Latency
from tests.signals import Recording
from tests.telemetry.observed import FIXED, ask, client_of, read_stream, telemetry_of

pytestmark = pytest.mark.anyio

SLOW = FakeModel(latency=Latency(headers=1.0))
SECONDS = tuple(0.01 * 2**n for n in range(14))


async def test_a_call_that_goes_well_takes_three_instruments() -> None:
    recording = Recording()
    async with client_of(recording, FakeProvider(SLOW), Bulkhead(max_concurrent=1), Retry()) as client:
        await ask(client)

    points = recording.points
    assert {point.name for point in points if point.kind != "gauge"} == {
        "gen_ai.client.operation.duration",
        "gen_ai.client.token.usage",
        "resilient_llm.attempt.duration",
    }
    duration = points.one("gen_ai.client.operation.duration")
    assert (duration.unit, duration.count, duration.value) == ("s", 1, 1.0)
    assert duration.bounds == SECONDS
    assert duration.attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "openai",
        "gen_ai.request.model": "gpt-4o",
        "resilient_llm.outcome": "success",
    }
    attempt = points.one("resilient_llm.attempt.duration")
    assert (attempt.unit, attempt.count, attempt.value) == ("s", 1, 1.0)
    assert attempt.attributes == {
        "resilient_llm.attempt.target": "provider.example:8080",
        "resilient_llm.attempt.provider": "openai",
        "resilient_llm.attempt.model": "gpt-4o",
        "resilient_llm.attempt.outcome": "success",
        "http.response.status_code": 200,
    }


async def test_retries_are_counted_and_their_delay_timed_once_for_each_call() -> None:
    recording = Recording()
    provider = FakeProvider()
    provider.script(None, [Fault(status=503), Fault(status=500)])
    async with client_of(recording, provider, Retry(backoff=FIXED)) as client:
        await ask(client)
        await ask(client)

    points = recording.points
    assert points.one("resilient_llm.call.retries").value == 2
    delay = points.one("resilient_llm.call.retry_delay")
    assert (delay.unit, delay.count, delay.value) == ("s", 1, 2.0)
    assert points.one("gen_ai.client.operation.duration").count == 2
    attempts = points.of("resilient_llm.attempt.duration")
    assert {
        (point.attributes["resilient_llm.attempt.outcome"], point.attributes["http.response.status_code"]): (
            point.count
        )
        for point in attempts
    } == {("retryable", 503): 1, ("retryable", 500): 1, ("success", 200): 2}


async def test_an_attempt_is_timed_without_the_wait_before_it() -> None:
    recording = Recording()
    policies = (Retry(), Bulkhead(max_concurrent=1, key="target"))
    client = client_of(recording, FakeProvider(SLOW), *policies)
    async with client, anyio.create_task_group() as tasks:
        tasks.start_soon(ask, client)
        tasks.start_soon(ask, client)
    points = recording.points
    assert points.one("resilient_llm.attempt.duration").value == 2.0
    assert points.one("gen_ai.client.operation.duration").value == 3.0
    wait = points.one("resilient_llm.wait.duration")
    assert (wait.unit, wait.count, wait.value) == ("s", 1, 1.0)
    assert wait.attributes == {
        "resilient_llm.limiter.name": "bulkhead",
        "resilient_llm.wait.outcome": "acquired",
    }
    assert wait.bounds == SECONDS


async def test_failures_are_told_apart_by_type() -> None:
    recording = Recording()
    provider = FakeProvider()
    provider.script(None, [Fault(status=400), Fault(status=429)])
    async with client_of(recording, provider, Retry(max_attempts=1)) as client:
        await ask(client)
        await ask(client)
        await ask(client)
    points = recording.points.of("gen_ai.client.operation.duration")
    assert [point.attributes.get("error.type") for point in points] == [
        "invalid_request_error",
        "rate_limit_exceeded",
        None,
    ]


async def test_a_caller_that_leaves_is_no_error() -> None:
    recording = Recording()
    async with client_of(recording, FakeProvider(SLOW)) as client:
        with anyio.move_on_after(0.5):
            await ask(client)
    assert "error.type" not in recording.points.one("gen_ai.client.operation.duration").attributes
    attempt = recording.points.one("resilient_llm.attempt.duration")
    assert attempt.attributes["resilient_llm.attempt.outcome"] == "cancelled"
    assert "error.type" not in attempt.attributes


async def test_refusals_are_counted_by_who_refused() -> None:
    recording = Recording()
    provider = FakeProvider(SLOW)
    provider.script(None, [Fault(), Fault(status=500)])
    breaker = CircuitBreaker(consecutive_failures=1)
    client = client_of(recording, provider, Bulkhead(max_concurrent=1, max_queued=0), breaker)
    async with client, anyio.create_task_group() as tasks:
        tasks.start_soon(ask, client)
        await anyio.sleep(0.1)
        await ask(client)
        await anyio.sleep(1)
        await ask(client)
        await ask(client)
    refusals = recording.points.of("resilient_llm.rejections")
    assert [(dict(point.attributes), point.value) for point in refusals] == [
        ({"resilient_llm.limiter.name": "bulkhead", "resilient_llm.reason": "bulkhead_full"}, 1),
        ({"resilient_llm.limiter.name": "circuit", "resilient_llm.reason": "circuit_open"}, 1),
    ]


async def test_what_a_dry_run_would_have_refused_is_marked() -> None:
    recording = Recording()
    provider = FakeProvider()
    provider.script(None, [Fault(status=500)])
    async with client_of(recording, provider, CircuitBreaker(consecutive_failures=1, dry_run=True)) as client:
        await ask(client)
        assert (await ask(client)).status_code == 200
    refused = recording.points.one("resilient_llm.rejections")
    assert refused.attributes["resilient_llm.dry_run"] is True
    assert recording.spans.named("chat")[-1].events[0].attributes["resilient_llm.dry_run"] is True


async def test_a_circuit_is_counted_and_shown_by_its_name() -> None:
    recording = Recording()
    provider = FakeProvider()
    provider.script(None, [Fault(status=500)])
    breaker = CircuitBreaker(consecutive_failures=1, break_duration=10)
    async with client_of(recording, provider, breaker) as client:
        await ask(client)
        state = recording.points.one("resilient_llm.breaker.state")
        assert (state.kind, state.value) == ("gauge", 2)
        assert state.attributes == {"resilient_llm.breaker.name": "circuit:provider.example:8080"}
        await anyio.sleep(10)
        await ask(client)
        breaker.isolate("provider.example:8080")
    points = recording.points
    assert points.one("resilient_llm.breaker.state").value == 3
    changes = points.of("resilient_llm.breaker.transitions")
    assert [
        (
            point.attributes["resilient_llm.breaker.from"],
            point.attributes["resilient_llm.breaker.to"],
            point.value,
        )
        for point in changes
    ] == [
        ("closed", "open", 1),
        ("open", "half_open", 1),
        ("half_open", "closed", 1),
        ("closed", "isolated", 1),
    ]


@pytest.mark.parametrize("key", ["tenant", ("tenant", "target"), lambda call: call.tenant])
async def test_a_circuit_of_a_tenant_does_not_name_it(key: Any) -> None:
    recording = Recording()
    provider = FakeProvider()
    provider.script(None, lambda _request: Fault(status=500))
    async with client_of(recording, provider, CircuitBreaker(consecutive_failures=1, key=key)) as client:
        for tenant in ("acme", "umbrella"):
            with ambient(tenant=tenant):
                await ask(client)
    points = recording.points
    assert points.one("resilient_llm.breaker.state").attributes == {"resilient_llm.breaker.name": "circuit"}
    assert points.one("resilient_llm.breaker.transitions").value == 2


async def test_bulkheads_of_several_pipelines_are_added_up_for_as_long_as_they_live() -> None:
    recording = Recording()

    async def look() -> tuple[float, float]:
        await anyio.sleep(0.1)
        points = recording.points
        return (
            points.one("resilient_llm.bulkhead.active").value,
            points.one("resilient_llm.bulkhead.queued").value,
        )

    first = client_of(recording, FakeProvider(SLOW), Bulkhead(max_concurrent=1))
    second = client_of(recording, FakeProvider(SLOW), Bulkhead(max_concurrent=2))
    async with first, second, anyio.create_task_group() as tasks:
        for client in (first, first, first, second):
            tasks.start_soon(ask, client)
        assert await look() == (2, 2)
        await anyio.sleep(1)
        assert await look() == (1, 1)
    assert await look() == (0, 0)
    del first, second, client, tasks
    gc.collect()
    assert recording.points.of("resilient_llm.bulkhead.active") == []


@pytest.mark.parametrize("store", [None, MemoryStore()])
@pytest.mark.parametrize("shared", [None, 3])
async def test_a_bulkhead_tells_tenants_apart_that_are_labels(
    shared: int | None, store: MemoryStore | None
) -> None:
    named, unnamed = Recording(), Recording()
    telemetry = telemetry_of(named, tenants=["acme", "umbrella"])
    bulkhead = Bulkhead(max_concurrent=2, shared=shared, store=store)

    async def ask_as(client: Any, tenant: str) -> None:
        with ambient(tenant=tenant):
            await ask(client)

    def seen(recording: Recording, name: str) -> dict[object, float]:
        points = recording.points.of(f"resilient_llm.bulkhead.{name}")
        return {point.attributes.get("resilient_llm.tenant"): point.value for point in points}

    async with (
        client_of(telemetry, FakeProvider(SLOW), bulkhead) as first,
        client_of(unnamed, FakeProvider(SLOW), bulkhead) as second,
        anyio.create_task_group() as tasks,
    ):
        assert seen(named, "active") == seen(unnamed, "active") == {None: 0}
        for tenant in ("acme", "acme", "acme", "somebody"):
            tasks.start_soon(ask_as, first, tenant)
        await anyio.sleep(0.1)
        assert {key: value for key, value in seen(named, "active").items() if value} == {
            "acme": 2,
            "other": 1,
        }
        assert {key: value for key, value in seen(named, "queued").items() if value} == {"acme": 1}
        assert (seen(unnamed, "active"), seen(unnamed, "queued")) == ({None: 3}, {None: 1})
        tasks.start_soon(ask_as, second, "umbrella")


async def test_other_names_become_labels_while_it_runs() -> None:
    recording = Recording()
    telemetry = telemetry_of(recording, models=["gpt-4o"], tenants=["acme"])

    def labels(name: str) -> set[tuple[object, object]]:
        return {
            (point.attributes.get("gen_ai.request.model"), point.attributes.get("resilient_llm.tenant"))
            for point in recording.points.of(name)
        }

    async with client_of(telemetry, FakeProvider(SLOW), Bulkhead(max_concurrent=2)) as client:
        with ambient(tenant="umbrella"):
            await ask(client)
            telemetry.relabel(models=["another"], tenants=["umbrella"])
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(ask, client)
                await anyio.sleep(0.1)
                assert (None, "umbrella") in labels("resilient_llm.bulkhead.active")
            ended = "gen_ai.client.operation.duration"
            assert labels(ended) == {("gpt-4o", "other"), ("other", "umbrella")}
            telemetry.relabel(models=None, tenants=None)
            await ask(client)
            assert labels(ended) == {("gpt-4o", "other"), ("other", "umbrella"), ("gpt-4o", None)}
    with pytest.raises(ConfigurationError, match="tenants='acme': allowed are lists or sets of strings"):
        telemetry.relabel(models=None, tenants="acme")


async def test_a_duration_says_how_the_call_ended() -> None:
    recording = Recording()
    provider = FakeProvider()
    provider.script(None, [Fault(), Fault(status=400), Fault(status=503)])
    async with client_of(recording, provider, CircuitBreaker(consecutive_failures=1)) as client:
        for _ in range(4):
            await ask(client)
    ended = recording.points.of("gen_ai.client.operation.duration")
    assert [
        (point.attributes["resilient_llm.outcome"], point.attributes.get("error.type")) for point in ended
    ] == [
        ("success", None),
        ("failed", "invalid_request_error"),
        ("failed", "server_error"),
        ("rejected", "circuit_open"),
    ]


async def test_the_time_to_the_first_chunk_is_for_streams_only() -> None:
    recording = Recording()
    async with client_of(recording, FakeProvider(FakeModel(latency=Latency(first_token=0.5)))) as client:
        await ask(client)
        assert "gen_ai.client.operation.time_to_first_chunk" not in recording.points.names()
        await read_stream(client)
    first = recording.points.one("gen_ai.client.operation.time_to_first_chunk")
    assert (first.unit, first.count, first.bounds) == ("s", 1, SECONDS)


async def test_values_point_to_the_spans_they_are_of() -> None:
    recording = Recording()
    async with client_of(recording, FakeProvider()) as client:
        await read_stream(client)
    points, spans = recording.points, recording.spans
    assert points.one("gen_ai.client.operation.duration").exemplars == (spans.one("chat").span_id,)
    assert points.one("resilient_llm.attempt.duration").exemplars == (spans.one("attempt").span_id,)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"semconv": "latest"}, "semconv='latest': allowed are 'released', 'inference'"),
        ({"models": "gpt-4o"}, "models='gpt-4o': allowed are lists or sets of strings"),
        ({"tenants": "acme"}, "tenants='acme': allowed are lists or sets of strings"),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Telemetry(**options)
