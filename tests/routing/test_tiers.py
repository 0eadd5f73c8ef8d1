"""Virtual models: which model a call goes to, by its complexity, its class, and what it needs."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_llm import (
    Call,
    ConfigurationError,
    Pipeline,
    Profile,
    Reply,
    Request,
    Retry,
    Router,
    Target,
    Telemetry,
    TokenEstimate,
)
from resilient_llm.httpx import ResilientTransport
from resilient_llm.pricing import Price
from resilient_llm.routing.complexity import Complexity, ComplexityWeights
from resilient_llm.routing.intent import IntentClassifier
from resilient_llm.routing.keywords import Keywords
from resilient_llm.routing.tiers import Tier, TierChoice, TierRouter, estimate_cost
from resilient_llm.telemetry.silent import SILENT
from resilient_llm.testing import FakeProvider
from tests.signals import Recording
from tests.support import FAILURE, Door, Provider

pytestmark = pytest.mark.anyio

FAST, SMART, BEST = Tier("fast", up_to=0.25), Tier("smart", up_to=0.5), Tier("best")
TIERS = {"auto": [FAST, SMART, BEST]}
HI = {"messages": [{"role": "user", "content": "hi"}]}
PROVE = {"messages": [{"role": "user", "content": "Prove it step by step"}]}
PLAN = {**PROVE, "reasoning_effort": "high"}
PICTURE = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}


class Seen:
    """A policy further in that keeps the calls that come to it."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    async def __call__(self, call: Call, call_next: Callable[[Call], Awaitable[Reply]]) -> Reply:
        self.calls.append(call)
        return await call_next(call)


async def chosen(
    policy: TierRouter, body: object, *, model: str = "auto", telemetry: Telemetry | None = None
) -> str | None:
    """Give the logical model that a call has further in."""
    seen = Seen()
    await Door(policy, seen, provider=Provider(), telemetry=telemetry)(
        model=model, body=json.dumps(body).encode()
    )
    return seen.calls[0].logical_model


async def test_a_call_goes_to_the_first_tier_that_its_complexity_fits() -> None:
    policy = TierRouter(TIERS)
    assert await chosen(policy, HI) == "fast"
    assert await chosen(policy, PROVE) == "smart"
    assert await chosen(policy, PLAN) == "best"
    assert await chosen(policy, {}) == "fast"


@pytest.mark.parametrize("model", ["gpt-4o", "fast", "AUTO", ""])
async def test_a_concrete_model_passes_untouched(model: str) -> None:
    def never(_call: Call) -> Awaitable[str]:
        raise AssertionError

    assert await chosen(TierRouter(TIERS, classifier=never), PLAN, model=model) is None


async def test_the_tiers_of_a_batch() -> None:
    tiers = [Tier("cheapest", up_to=0.05), Tier("cheap", up_to=0.18), Tier("strong")]
    policy = TierRouter({"auto": tiers})
    for question, model in {
        "Classify this ticket: my invoice is wrong": "cheapest",
        "Summarize the minutes in one sentence": "cheapest",
        "How do I compile it?": "cheap",
        "Write a proposal for our new customer": "strong",
    }.items():
        assert await chosen(policy, {"messages": [{"role": "user", "content": question}]}) == model


async def test_a_virtual_model_may_have_any_name_and_tiers_of_its_own() -> None:
    policy = TierRouter({**TIERS, "our/helper": [Tier("small")]})
    assert await chosen(policy, PLAN, model="our/helper") == "small"
    assert await chosen(policy, PLAN) == "best"


async def test_the_model_that_was_chosen_further_out_is_what_counts() -> None:
    outer = TierRouter({"any": [Tier("auto")]}, name="outer")
    seen = Seen()
    await Door(outer, TierRouter(TIERS), seen, provider=Provider())(
        model="any", body=json.dumps(PROVE).encode()
    )
    assert seen.calls[0].logical_model == "smart"


async def test_a_tier_of_a_model_that_the_router_does_not_know_is_found_when_the_pipeline_is_made() -> None:
    router = Router({"small": Target(name="s")})
    known = TierRouter({"auto": [Tier("small")]})
    unknown = TierRouter({"auto": [Tier("small", up_to=0.5), Tier("smal")]})
    with pytest.raises(
        ConfigurationError, match=r"models\['auto'\]='smal': the Router has no targets for it"
    ):
        Pipeline([unknown, Retry(), router], door="client")
    outer = TierRouter({"any": [Tier("auto")]}, name="outer")
    assert Pipeline([outer, known, Retry(), router], door="client")
    assert Pipeline([unknown, Retry(), Router([Target(name="s")])], door="client")


async def test_preferring_speed_or_quality_moves_the_limits() -> None:
    for prefer, models in {
        "speed": ["fast", "fast", "smart"],
        "balance": ["fast", "smart", "best"],
        "quality": ["fast", "best", "best"],
    }.items():
        policy = TierRouter(TIERS, prefer=prefer, shift=0.2)  # type: ignore[arg-type]
        assert [await chosen(policy, body) for body in (HI, PROVE, PLAN)] == models
    assert await chosen(TierRouter(TIERS, prefer="quality", shift=0.3), HI) == "smart"


async def test_each_virtual_model_may_have_a_preference() -> None:
    tiers = TIERS["auto"]
    policy = TierRouter({"auto": tiers, "auto-best": tiers}, prefer={"auto-best": "quality"}, shift=1.0)
    assert await chosen(policy, HI) == "fast"
    assert await chosen(policy, HI, model="auto-best") == "best"


async def test_what_a_call_needs_may_force_a_tier() -> None:
    blind = Tier("blind", up_to=0.3, lacks=["vision", "tools"])
    handless = Tier("handless", up_to=0.6, lacks=["tools"])
    policy = TierRouter({"auto": [blind, handless, Tier("able")]})
    assert await chosen(policy, HI) == "blind"
    assert await chosen(policy, PICTURE) == "handless"
    assert await chosen(policy, {**HI, "tools": [{}]}) == "able"
    down = TierRouter({"auto": [Tier("sees", up_to=0.1), Tier("thinks", lacks=["vision"])]})
    assert await chosen(down, {**PICTURE, "reasoning_effort": "high"}) == "sees"
    none = TierRouter({"auto": [Tier("a", up_to=0.5, lacks=["audio"]), Tier("b", lacks=["audio"])]})
    sound = {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}
    assert await chosen(none, sound) == "a"


BY_CLASS = [Tier("small", up_to=0.3, classes=["simple"]), Tier("coder", up_to=0.6, classes=["code"])]
CLASSES = {"auto": [*BY_CLASS, Tier("thinker", classes={"reason"}), Tier("eyes", classes=("vision",))]}


async def test_a_classifier_chooses_by_class() -> None:
    policy = TierRouter(CLASSES, classifier=IntentClassifier())
    assert await chosen(policy, HI) == "small"
    assert await chosen(policy, PROVE) == "thinker"
    assert await chosen(policy, PICTURE) == "eyes"
    assert (
        await chosen(policy, {"messages": [{"role": "user", "content": "Debug it:\n```\nx\n```"}]}) == "coder"
    )


@pytest.mark.parametrize("answer", [None, "other", ["code"], ValueError("no"), 5])
async def test_where_it_cannot_tell_the_score_does(answer: Any) -> None:
    async def classify(_call: Call) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    policy = TierRouter(CLASSES, classifier=classify)
    assert await chosen(policy, HI) == "small"
    assert await chosen(policy, PROVE) == "coder"


async def test_the_choice_is_made_once_for_all_attempts() -> None:
    asked = []

    async def classify(call: Call) -> str:
        asked.append(call)
        return "reason"

    provider = Provider(FAILURE, FAILURE)
    door = Door(TierRouter(CLASSES, classifier=classify), Retry(), provider=provider)
    await door(model="auto")
    assert (len(provider.attempts), len(asked)) == (3, 1)


async def test_gemini_names_its_model_in_the_url() -> None:
    provider = FakeProvider()
    seen = Seen()
    transport = ResilientTransport(provider.transport(), policies=[TierRouter(TIERS), seen])
    async with httpx.AsyncClient(transport=transport) as client:
        url = "http://provider/v1beta/models/auto:generateContent"
        await client.post(url, json={"contents": [{"parts": [{"text": "Prove it step by step"}]}]})
    assert seen.calls[0].logical_model == "smart"


async def test_the_span_says_what_was_chosen_and_why() -> None:
    recording = Recording()
    telemetry = Telemetry(tracer_provider=recording.tracer_provider)
    price = Price(input=1.0, output=4.0)
    blind = Tier("blind", up_to=0.3, lacks=["vision"])
    await chosen(
        TierRouter({"auto": [blind, Tier("best", price=price)]}),
        {**PICTURE, "max_tokens": 100},
        telemetry=telemetry,
    )
    eyes = TierRouter({"auto": [blind, Tier("eyes", classes=["vision"])]}, classifier=IntentClassifier())
    await chosen(eyes, PICTURE, telemetry=telemetry)
    by_score, by_class = (event for span in recording.spans for event in span.events)
    assert by_score.name == "resilient_llm.tier.chosen"
    attributes = dict(by_score.attributes)
    cost = attributes.pop("resilient_llm.tier.estimated_cost.usd")
    assert cost == pytest.approx((1_005 * 1.0 + 100 * 4.0) / 1e6)
    assert attributes.pop("resilient_llm.tier.score") == pytest.approx(0.1, abs=0.01)
    assert attributes == {
        "resilient_llm.route.reason": "tier",
        "resilient_llm.route.from": "auto",
        "resilient_llm.route.selected": "best",
        "resilient_llm.route.rejected": ("blind:vision",),
        "resilient_llm.tier.contributions": ("images +0.10",),
    }
    assert by_class.attributes["resilient_llm.tier.class"] == "vision"


async def test_what_a_call_will_cost_is_estimated_before_it_is_sent() -> None:
    seen = Seen()
    await Door(seen, provider=Provider())(
        body=json.dumps({"prompt": "x" * 4_000, "max_tokens": 500}).encode()
    )
    call = seen.calls[0]
    assert estimate_cost(call, Price(input=2.0, output=8.0)) == pytest.approx(1_000 * 2e-6 + 500 * 8e-6)
    assert estimate_cost(call, Price(input=0.0, output=0.0)) == 0
    halved = TokenEstimate(bytes_per_token=8)
    assert estimate_cost(call, Price(input=2.0, output=0.0), halved) == pytest.approx(500 * 2e-6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TierRouter({}), r"models={}: allowed are mappings"),
        (lambda: TierRouter({"": [BEST]}), r"models=''"),
        (lambda: TierRouter({"auto": []}), r"models\['auto'\]=\[\]: allowed are lists of tiers"),
        (lambda: TierRouter({"auto": ["x"]}), r"allowed are lists of tiers"),  # type: ignore[list-item]
        (
            lambda: TierRouter({"auto": [SMART, FAST, BEST]}),
            r"up_to is \[0.5, 0.25, 1.0\]; allowed are tiers in",
        ),
        (lambda: TierRouter({"auto": [FAST]}), r"the last up to 1"),
        (lambda: TierRouter({"auto": [Tier("auto")]}), r"'auto' is a virtual model itself"),
        (lambda: TierRouter(TIERS, prefer="cheap"), r"prefer='cheap': allowed are 'speed'"),  # type: ignore[arg-type]
        (lambda: TierRouter(TIERS, prefer={"other": "speed"}), r"by virtual model"),
        (lambda: TierRouter(TIERS, shift=2), r"shift=2: allowed are numbers from 0 to 1"),
        (lambda: TierRouter(TIERS, classifier="m"), r"classifier='m'"),  # type: ignore[arg-type]
        (lambda: TierRouter(TIERS, name=""), r"name=''"),
        (lambda: Tier(""), r"model=''"),
        (lambda: Tier("x", up_to=1.5), r"up_to=1.5"),
        (lambda: Tier("x", classes="code"), r"classes='code': allowed are lists or sets of strings"),
        (lambda: Tier("x", lacks="vision"), r"lacks='vision': allowed are lists"),  # type: ignore[arg-type]
        (lambda: Tier("x", lacks=["sight"]), r"lacks=\['sight'\]: allowed are 'vision'"),  # type: ignore[list-item]
    ],
)
def test_options_that_cannot_work(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()


def test_classes_that_no_call_will_be_of() -> None:
    with pytest.raises(ConfigurationError, match=r"classes=\['code', .*\]: they need a classifier="):
        TierRouter(CLASSES)
    with pytest.raises(
        ConfigurationError, match=r"classes=\['hard'\]: the classifier's labels are \['code', 'reason'"
    ):
        TierRouter({"auto": [Tier("x", classes=["hard", "code"])]}, classifier=IntentClassifier())


def test_a_classifier_cannot_ask_a_virtual_model() -> None:
    class Asks:
        model = "auto"

        async def __call__(self, call: Call) -> str:
            raise AssertionError

    with pytest.raises(ConfigurationError, match=r"it asks 'auto', which is a virtual model here"):
        TierRouter(TIERS, classifier=Asks())


def test_where_it_stands() -> None:
    tiers = TierRouter(TIERS)
    assert Pipeline([tiers, Retry()]).describe().policies[0].name == "tiers"
    with pytest.raises(ConfigurationError, match="a tier is chosen once for a call"):
        Pipeline([Retry(), tiers])
    with pytest.raises(ConfigurationError, match="no meaning at the ASGI door"):
        Pipeline([tiers], door="asgi")


SILENT_WORDS = Keywords({})
NEEDS = ["vision", "audio", "files", "tools"]
MODELS = st.lists(st.tuples(st.floats(0, 1), st.lists(st.sampled_from(NEEDS))), min_size=1, max_size=5)


@given(
    MODELS,
    st.integers(0, 10),
    st.booleans(),
    st.sampled_from(["speed", "balance", "quality"]),
    st.floats(0, 1),
)
def test_every_call_has_a_tier(
    models: list[tuple[float, list[Any]]], tools: int, picture: bool, prefer: Any, shift: float
) -> None:
    limits = sorted(limit for limit, _ in models)
    limits[-1] = 1.0
    tiers = [
        Tier(f"m{index}", up_to=limit, lacks=lacks)
        for index, (limit, (_, lacks)) in enumerate(zip(limits, models, strict=True))
    ]
    weights = ComplexityWeights(tools=1.0, full_tools=10, images=0)
    policy = TierRouter(
        {"auto": tiers},
        prefer=prefer,
        shift=shift,
        complexity=Complexity(weights=weights, keywords=SILENT_WORDS),
    )
    body = {"tools": [{}] * tools, "messages": [{"role": "user", "content": [{"type": "image"}] * picture}]}
    choice = choose(policy, body)
    needs = {need for need, there in (("tools", tools), ("vision", picture)) if there}
    if any(needs.isdisjoint(tier.lacks) for tier in tiers):
        assert needs.isdisjoint(choice.tier.lacks)
    if not choice.rejected and needs.isdisjoint(choice.tier.lacks):
        assert choice.score.value == pytest.approx(tools / 10, abs=0.001)
        moved = choice.score.value + {"speed": -shift, "balance": 0, "quality": shift}[prefer]
        value = min(1.0, max(0.0, moved))
        assert value <= choice.tier.up_to
        assert all(tier.up_to < value for tier in tiers[: tiers.index(choice.tier)])


def choose(policy: TierRouter, body: object) -> TierChoice:
    call = Call(
        Request("POST", "https://api.example/v1/chat/completions", [], json.dumps(body).encode()),
        read=lambda _request: Profile(model="auto"),
        target=Target(name="api.example"),
        loop=None,  # type: ignore[arg-type]
        telemetry=SILENT,
        started=0.0,
    )
    return policy.choose(call, "auto")
