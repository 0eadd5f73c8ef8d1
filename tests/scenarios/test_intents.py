"""What is asked decides which model answers, and that model's own targets and fallbacks then apply (mission D)."""

from __future__ import annotations

from typing import Any

import pytest

from resilient_llm import Call, CallNext, CircuitBreaker, Price, Reply, Retry, Router
from resilient_llm.lab import Outage, Upstream
from resilient_llm.routing.intent import IntentClassifier
from resilient_llm.routing.tiers import Tier, TierRouter
from tests.scenarios.support import Caller, network, target

pytestmark = pytest.mark.anyio

PICTURE = [
    {"type": "text", "text": "What is this?"},
    {"type": "image_url", "image_url": {"url": "https://pictures.example/1.png"}},
]
QUESTIONS = {
    "small": "Translate to French: good morning",
    "coder": "Debug this Python function:\n```python\ndef f(x):\n    return x +\n```",
    "thinker": "Prove step by step that the square root of two is irrational.",
    "seer": PICTURE,
}


def tiers() -> TierRouter:
    return TierRouter(
        {
            "auto": [
                Tier(
                    "small",
                    up_to=0.3,
                    classes=["simple"],
                    lacks=["vision"],
                    price=Price(input=0.15, output=0.6),
                ),
                Tier("coder", up_to=0.5, classes=["code"], lacks=["vision"], price=Price(input=1, output=4)),
                Tier("seer", up_to=0.8, classes=["vision"], price=Price(input=2.5, output=10)),
                Tier("thinker", classes=["reason"], lacks=["vision"], price=Price(input=10, output=40)),
            ]
        },
        classifier=IntentClassifier(),
    )


def caller(**upstreams: Upstream) -> Caller:
    names = ("small", "coder", "seer", "thinker")
    router = Router(
        {name: target(name, CircuitBreaker(consecutive_failures=2), model=f"{name}-1") for name in names},
        fallbacks={"coder": "thinker"},
    )
    well = Upstream(first_token=0.2)
    return Caller(network(**dict.fromkeys(names, well) | upstreams), tiers(), Retry(), router)


@pytest.mark.parametrize(("model", "question"), QUESTIONS.items(), ids=QUESTIONS)
async def test_each_class_of_question_goes_to_its_model(model: str, question: object) -> None:
    call = caller()
    answer = await call(model="auto", messages=[{"role": "user", "content": question}])
    assert (answer.status, answer.target) == (200, model)
    assert [request.json["model"] for request in call.sent] == [f"{model}-1"]


async def test_who_names_a_model_gets_it() -> None:
    call = caller()
    answer = await call(model="thinker", messages=[{"role": "user", "content": QUESTIONS["small"]}])
    assert answer.target == "thinker"


async def test_a_class_whose_model_is_down_goes_to_the_fallback_of_that_model() -> None:
    call = caller(coder=Upstream(outages=[Outage(0, 60)]))
    ask: dict[str, Any] = {"model": "auto", "messages": [{"role": "user", "content": QUESTIONS["coder"]}]}
    assert (await call(**ask)).target == "thinker"
    sent = len(call.sent)
    assert (await call(**ask)).target == "thinker"
    assert len(call.sent) == sent + 1, "its circuit is open now"
    simple = await call(model="auto", messages=[{"role": "user", "content": QUESTIONS["small"]}])
    assert simple.target == "small", "which is nobody else's concern"


async def test_what_a_call_will_cost_is_known_before_anything_is_sent() -> None:
    told: list[tuple[float | None, bool]] = []
    choose = tiers()

    async def look(call: Call, call_next: CallNext) -> Reply:
        assert call.profile.model is not None
        told.append((choose.choose(call, call.profile.model, "code").estimated_cost, call.sent is False))
        return await call_next(call)

    upstreams = network(coder=Upstream(input_price=1, output_price=4, output_tokens=200))
    call = Caller(upstreams, choose, look, Retry(), Router({"coder": target("coder")}))
    words = "Debug this Python function, please. " * 100
    await call(model="auto", max_tokens=200, messages=[{"role": "user", "content": words}])
    [(estimated, unsent)] = told
    assert unsent
    assert estimated == pytest.approx(upstreams.log[0].usd, rel=0.25)
