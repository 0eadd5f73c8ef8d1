"""What a trace, the metrics and the reply say of where attempts went."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest

from resilient_llm import CircuitBreaker, Deadline, Policy, Retry, Router, Target
from resilient_llm.credentials import Credential
from resilient_llm.pricing import Price
from resilient_llm.routing.balancers import Priority, WeightedLeastConnections
from resilient_llm.testing import FakeProvider, Fault
from tests.signals import Recording
from tests.telemetry.observed import FIXED, client_of, the_call

pytestmark = pytest.mark.anyio

PRICE = Price(input=1.0, output=2.0)


def targets() -> dict[str, Any]:
    return {
        "chat": [
            Target(
                name="azure", url="http://azure.example/v1", model="gpt-4o-eu", provider="openai", price=PRICE
            ),
            Target(
                name="openai", url="http://openai.example/v1", model="gpt-4o", provider="openai", price=PRICE
            ),
        ],
        "small": Target(name="mini", url="http://mini.example/v1", model="gpt-4o-mini", price=PRICE),
    }


async def ask(client: httpx2.AsyncClient, **body: Any) -> httpx2.Response:
    messages = [{"role": "user", "content": "hi"}]
    return await client.post(
        "http://any.example/v1/chat/completions", json={"model": "chat", "messages": messages, **body}
    )


async def test_a_call_that_goes_round_a_failure_shows_its_way() -> None:
    recording, provider = Recording(), FakeProvider()
    provider.script("gpt-4o-eu", [Fault(status=503)] * 9)
    provider.script("gpt-4o", [Fault(status=500)] * 9)
    router = Router(targets(), fallbacks={"chat": ["small"]}, balancer=Priority())
    policies: list[Policy] = [Deadline(60), Retry(max_attempts=2, backoff=FIXED), router]
    async with client_of(recording, provider, *policies) as client:
        reply = await ask(client)
    assert reply.status_code == 200
    assert reply.headers["x-resilient-llm-target"] == "mini"
    assert reply.json()["model"] == "gpt-4o-mini"

    spans, call = the_call(recording)
    assert spans.tree().splitlines() == [
        "chat chat",
        "  route",
        "  attempt openai/gpt-4o-eu",
        "  route",
        "  attempt openai/gpt-4o",
        "  route",
        "  route",
        "  attempt openai/gpt-4o-mini",
    ]
    first, second, moved, third = (span.attributes for span in spans.named("route"))
    assert first == {
        "resilient_llm.route.strategy": "priority",
        "resilient_llm.route.reason": "priority",
        "resilient_llm.route.candidates": ("azure", "openai"),
        "resilient_llm.route.scores": (0.0, 1.0),
        "resilient_llm.route.rejected": (),
        "resilient_llm.route.selected": "azure",
    }
    assert second["resilient_llm.route.rejected"] == ("azure:tried",)
    assert second["resilient_llm.route.from"] == "azure"
    assert moved["resilient_llm.route.rejected"] == ("azure:tried", "openai:tried")
    assert "resilient_llm.route.selected" not in moved
    assert third["resilient_llm.route.reason"] == "fallback"
    assert third["resilient_llm.route.selected"] == "mini"
    assert [span.attributes["resilient_llm.attempt.reason"] for span in spans.named("attempt")] == [
        "initial",
        "retry",
        "fallback",
    ]
    assert call.attributes["resilient_llm.outcome"] == "fallback"
    assert call.attributes["resilient_llm.fallbacks"] == 1
    assert float(str(call.attributes["resilient_llm.cost.usd"])) > 0
    assert recording.points.one("resilient_llm.fallbacks").value == 1


async def test_a_wait_shows_whom_it_is_for() -> None:
    recording, provider = Recording(), FakeProvider()
    provider.script("gpt-4o-eu", [Fault(status=429, headers={"retry-after": "4"})])
    provider.script("gpt-4o", [Fault(status=429, headers={"retry-after": "6"})])
    router = Router({"chat": targets()["chat"]}, balancer=Priority())
    async with client_of(recording, provider, Retry(max_attempts=2, backoff=FIXED), router) as client:
        assert (await ask(client)).status_code == 429
        assert (await ask(client)).status_code == 200
    waiting, found = recording.spans.named("route")[-2:]
    assert waiting.attributes["resilient_llm.route.rejected"] == ("azure:cooling_down", "openai:cooling_down")
    assert "resilient_llm.route.selected" not in waiting.attributes
    assert found.attributes["resilient_llm.route.selected"] == "azure"


async def test_a_refusal_by_every_target_is_a_503_that_says_when() -> None:
    recording, provider = Recording(), FakeProvider()
    for model in ("gpt-4o-eu", "gpt-4o"):
        provider.script(model, [Fault(status=500)] * 9)
    router = Router({"chat": targets()["chat"]}, balancer=Priority())
    breaker = CircuitBreaker(consecutive_failures=1, break_duration=7.0)
    async with client_of(
        recording, provider, Retry(max_attempts=2, backoff=FIXED), router, breaker
    ) as client:
        assert (await ask(client)).status_code == 500
        reply = await ask(client)
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "7")
    assert reply.headers["x-should-retry"] == "false"
    assert reply.json()["error"]["code"] == "no_target"
    route = recording.spans.named("route")[-1]
    assert route.attributes["resilient_llm.route.rejected"] == ("azure:circuit_open", "openai:circuit_open")
    assert "resilient_llm.route.selected" not in route.attributes


async def test_an_unknown_model_is_a_404_as_the_provider_would_say_it() -> None:
    async with client_of(Recording(), FakeProvider(), Router(targets())) as client:
        reply = await ask(client, model="gpt-9")
    assert reply.status_code == 404
    assert reply.json()["error"]["code"] == "model_not_found"


async def test_no_key_appears_in_telemetry_or_errors() -> None:
    recording, provider = Recording(), FakeProvider()
    secret = "sk-very-secret-1234"
    provider.script("gpt-4o", [Fault(status=500)])
    target = Target(
        name="openai",
        url="http://openai.example/v1",
        model="gpt-4o",
        provider="openai",
        credential=Credential(name="key", value=lambda: secret),
    )
    router = Router([target], balancer=WeightedLeastConnections())
    async with client_of(recording, provider, Retry(backoff=FIXED), router) as client:
        reply = await client.post(
            "http://any.example/v1/chat/completions",
            json={"model": "m", "messages": []},
            headers={"authorization": "Bearer sk-of-the-caller"},
        )
    seen = [request.headers["authorization"] for request in provider.requests]
    assert seen == [f"Bearer {secret}"] * 2
    told = repr(recording.spans.tree()) + repr([span.attributes for span in recording.spans])
    assert secret not in told + repr(target) + repr(router) + repr(dict(reply.headers))
    assert "sk-of-the-caller" not in told
