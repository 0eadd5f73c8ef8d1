"""OBS-05: whatever callers and providers send, the number of time series stays what it is."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import anyio
import httpx2
import pytest

from resilient_llm import Bulkhead, CircuitBreaker, Retry, ambient
from tests.signals import Recording
from tests.telemetry.observed import FIXED, client_of, telemetry_of

pytestmark = pytest.mark.anyio

MANY = 600


async def flood(recording: Recording, **options: Any) -> Counter[str]:
    """Make calls with everything at random; count the series of each metric."""
    rng = random.Random(5)

    def word() -> str:
        return "".join(rng.choices("abcdefghijklmnopqrstuvwxyz_", k=12))

    def answer(_request: httpx2.Request) -> httpx2.Response:
        if rng.random() < 0.5:
            return httpx2.Response(200, json={})
        status = rng.choice([400, 404, 429, 500, 503, rng.randrange(400, 600)])
        return httpx2.Response(status, json={"error": {"code": word(), "type": word(), "message": word()}})

    policies = (
        Bulkhead(max_concurrent=1, max_queued=1),
        Retry(max_attempts=2, backoff=FIXED),
        CircuitBreaker(key=("target", "model"), consecutive_failures=1),
        CircuitBreaker(key="tenant", name="by tenant"),
    )
    async with client_of(telemetry_of(recording, **options), answer, *policies) as client:

        async def call() -> None:
            with ambient(tenant=word()):
                url = f"http://{word()}.example/{word()}/chat/completions?{word()}={word()}"
                await client.post(url, json={"model": word(), "user": word()})

        for _ in range(MANY // 30):
            async with anyio.create_task_group() as tasks:
                for _ in range(30):
                    tasks.start_soon(call)
    return Counter(point.name for point in recording.points)


async def test_series_do_not_grow_with_what_callers_send() -> None:
    recording = Recording()
    await flood(recording)
    series = await flood(recording)
    values: dict[str, set[Any]] = {}
    for point in recording.points:
        for label, value in point.attributes.items():
            values.setdefault(label, set()).add(value)
    assert max(len(of_one) for of_one in values.values()) <= 101
    assert "other" in values["gen_ai.request.model"]
    assert "resilient_llm.tenant" not in values

    # Where nothing that callers choose is a label, there is nothing more to come.
    again = await flood(recording)
    assert again["resilient_llm.breaker.state"] <= 102
    assert again["resilient_llm.rejections"] == series["resilient_llm.rejections"]


async def test_with_models_and_tenants_configured_the_number_is_known() -> None:
    recording = Recording()
    telemetry = {"models": ["gpt-4o"], "tenants": ["acme"]}
    await flood(recording, **telemetry)

    def answer(_request: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(200, json={})

    async with client_of(telemetry_of(recording, **telemetry), answer) as client:
        with ambient(tenant="acme"):
            await client.post("http://api.example/v1/chat/completions", json={"model": "gpt-4o"})

    points = recording.points
    durations = points.of("gen_ai.client.operation.duration")
    assert {point.attributes["gen_ai.request.model"] for point in durations} == {"gpt-4o", "other"}
    assert {point.attributes["resilient_llm.tenant"] for point in durations} == {"acme", "other"}
    refusals = points.of("resilient_llm.rejections")
    assert {point.attributes.get("resilient_llm.tenant") for point in refusals} <= {"other"}
