"""Hedging with the router there is: another target each time, none when there is none, and what it all costs."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest

from resilient_llm import AttemptTimeout, CircuitBreaker, Hedge, RateLimit, Retry, Router, Target
from resilient_llm.httpx2 import ResilientTransport
from resilient_llm.pricing import Price
from resilient_llm.routing.balancers import Priority
from resilient_llm.testing import FakeModel, FakeProvider, Fault, Latency
from tests.signals import Recording
from tests.telemetry.observed import BODY, STREAM, URL, outcomes, telemetry_of

pytestmark = pytest.mark.anyio

SLOW = Fault(delay_headers=20.0)


class Setting:
    """Targets of one fake provider, the first preferred, hedged after 2 seconds."""

    def __init__(self, *names: str, inner: tuple[Any, ...] = (), **faults: Any) -> None:
        self.recording = Recording()
        self.provider = FakeProvider(FakeModel(latency=Latency(headers=0.5), reply="one two"))
        price = Price(input=1.0, output=1.0)
        targets = [
            Target(name=name, url=f"http://{name}.example/v1", model=name, price=price) for name in names
        ]
        for name, fault in faults.items():
            self.provider.script(name, [fault] if isinstance(fault, Fault) else fault)
        self.router = Router(targets, balancer=Priority())
        self.hedge = Hedge(delay=2.0, budget_ratio=1.0)
        policies = [Retry(), self.hedge, self.router, *inner]
        self.client = httpx2.AsyncClient(
            transport=ResilientTransport(
                self.provider.httpx2_transport(), policies=policies, telemetry=telemetry_of(self.recording)
            ),
            timeout=60,
        )

    @property
    def asked(self) -> list[str]:
        """Say which targets were asked, in order."""
        return [request.model for request in self.provider.requests]


@pytest.mark.parametrize("body", [BODY, STREAM], ids=["whole", "streamed"])
async def test_the_hedge_goes_to_another_target_whose_name_the_reply_has(body: Any) -> None:
    setting = Setting("eu", "us", "asia", eu=SLOW)
    async with setting.client as client:
        response = await client.post(URL, json=body)
    assert response.headers["x-resilient-llm-target"] == "us"
    assert setting.asked == ["eu", "us"]
    spans = setting.recording.spans
    call = spans.one("chat")
    attempts = spans.named("attempt")
    assert outcomes(attempts) == ["cancelled", "success"]
    assert [span.attributes["resilient_llm.attempt.reason"] for span in attempts] == ["initial", "hedge"]
    assert [span.attributes["resilient_llm.route.selected"] for span in spans.named("route")] == ["eu", "us"]
    assert call.attributes["resilient_llm.attempts"] == 2
    spans.assert_accounted(call)
    for child in spans.children(call):
        assert call.start <= child.start <= child.end <= call.end
    assert {target.name: target.in_flight for target in setting.router.health().targets} == {
        "eu": 0,
        "us": 0,
        "asia": 0,
    }


async def test_the_loser_s_prompt_is_part_of_the_cost() -> None:
    costs: list[Any] = []
    for faults in ({}, {"eu": SLOW}):
        limit = RateLimit(tokens_per_minute=1_000_000, key="target")  # which estimates the tokens of calls
        setting = Setting("eu", "us", inner=(limit,), **faults)
        async with setting.client as client:
            await client.post(URL, json=BODY)
        costs.append(setting.recording.spans.one("chat").attributes["resilient_llm.cost.usd"])
    alone, hedged = costs
    assert hedged > alone > 0


async def test_both_fail_and_the_third_is_asked_at_once() -> None:
    setting = Setting(
        "eu", "us", "asia", eu=Fault(delay_headers=3.0, status=500), us=Fault(delay_headers=2.0, status=500)
    )
    async with setting.client as client:
        response = await client.post(URL, json=BODY)
    assert response.headers["x-resilient-llm-target"] == "asia"
    assert setting.asked == ["eu", "us", "asia"]
    asked = [request.arrived for request in setting.provider.requests]
    assert [at - asked[0] for at in asked] == pytest.approx([0.0, 2.0, 4.5], abs=0.01)


async def test_attempts_of_one_call_are_of_one_kind_whatever_their_targets_call_the_model() -> None:
    setting = Setting("eu", "us", eu=Fault(status=500))
    async with setting.client as client:
        await client.post(URL, json=BODY)
    assert setting.asked == ["eu", "us"]
    assert len(setting.hedge._paces) == 1


async def test_no_hedge_without_another_target() -> None:
    setting = Setting("eu", eu=SLOW)
    async with setting.client as client:
        assert (await client.post(URL, json=BODY)).status_code == 200
    assert setting.asked == ["eu"]
    (event,) = (
        event
        for event in setting.recording.spans.one("chat").events
        if event.name.endswith("hedge_suppressed")
    )
    assert event.attributes["resilient_llm.reason"] == "no_target"


async def test_no_hedge_to_a_target_whose_circuit_is_open() -> None:
    circuit = CircuitBreaker(key="target")
    setting = Setting("eu", "us", eu=SLOW, inner=(circuit,))
    async with setting.client as client:
        circuit.isolate("us")
        assert (await client.post(URL, json=BODY)).status_code == 200
    assert setting.asked == ["eu"]


async def test_silence_of_the_first_after_a_hedge_is_known_to_its_circuit() -> None:
    """A loser says nothing, but a first attempt that ran into its own clock is a failure like any other."""
    circuit = CircuitBreaker(key="target", consecutive_failures=1)
    clocks = AttemptTimeout(headers=3.0)
    setting = Setting("eu", "us", eu=SLOW, us=Fault(delay_headers=2.0), inner=(circuit, clocks))
    async with setting.client as client:
        response = await client.post(URL, json=STREAM)
    assert response.headers["x-resilient-llm-target"] == "us"
    assert {name: state.value for name, state in circuit.states().items()} == {"eu": "open", "us": "closed"}
