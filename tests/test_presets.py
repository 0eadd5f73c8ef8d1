"""Presets: every one of them builds, can be overridden, does what it says, and says where its numbers come from."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import date

import anyio
import httpx
import pytest

from resilient_llm import (
    AttemptError,
    CircuitBreaker,
    CircuitOpenError,
    CircuitState,
    ConcurrencyLimit,
    ConfigurationError,
    Limit,
    Pipeline,
    Policy,
    RateLimit,
    RateLimitedError,
    Retry,
    presets,
)
from resilient_llm.httpx import ResilientTransport
from resilient_llm.presets import PRESETS, Preset
from resilient_llm.testing import FakeModel, FakeProvider, RateLimits
from tests.pages import ROOT
from tests.support import FAILURE, Door, Provider

EVERY = pytest.mark.parametrize("preset", PRESETS.values(), ids=lambda preset: preset.name)
PUBLISHED = [
    pytest.param(preset, tier, model, id=f"{preset.name} {tier} {model}")
    for preset in PRESETS.values()
    for tier, models in preset.tiers.items()
    for model in models
]
MODULES = {"circuits", "preset", "providers"}
STACK = ["Deadline", "Retry", "RateLimit", "ConcurrencyLimit", "CircuitBreaker"]


def stack(policies: list[Policy]) -> list[str]:
    """Build a client's pipeline, and say what it is made of."""
    return [policy.type for policy in Pipeline(policies, door="client").describe().policies]


@EVERY
def test_every_preset_builds_a_stack(preset: Preset) -> None:
    assert stack(preset.policies()) == [name for name in STACK if name != "RateLimit"]


@pytest.mark.parametrize(("preset", "tier", "model"), PUBLISHED)
def test_every_published_limit_builds_a_stack(preset: Preset, tier: str, model: str) -> None:
    assert stack(preset.policies(tier=tier, model=model)) == STACK
    [limit] = preset.rate_limit(tier=tier, model=model).limits
    assert limit == preset.limit(tier=tier, model=model)
    assert dataclasses.replace(limit, burst=None) == preset.tiers[tier][model]


@pytest.mark.parametrize("name", presets.CIRCUITS)
def test_every_circuit_builds_a_stack(name: str) -> None:
    breaker = presets.circuit_breaker(name)
    assert stack(presets.OPENAI.policies(circuit_breaker=breaker))[-1] == "CircuitBreaker"
    assert breaker is not presets.CIRCUITS[name]


@pytest.mark.parametrize(
    ("make", "policy"),
    [
        (presets.OPENAI.retry, Retry),
        (presets.OPENAI.concurrency_limit, ConcurrencyLimit),
        (presets.OPENAI.circuit_breaker, CircuitBreaker),
        (lambda **options: presets.OPENROUTER.rate_limit(tier="free", **options), RateLimit),
        (lambda **options: presets.circuit_breaker("service", **options), CircuitBreaker),
    ],
)
def test_each_call_makes_a_new_policy_with_the_options_given(
    make: Callable[..., Policy], policy: type
) -> None:
    first, second = make(), make(name="mine")
    assert type(first) is type(second) is policy
    assert (getattr(second, "name", None), first is second) == ("mine", False)
    with pytest.raises(TypeError, match="no_such_option"):
        make(no_such_option=1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: presets.get("open-ai"), "'open-ai' is no preset: 'openai', 'anthropic', 'azure', "),
        (lambda: presets.circuit_breaker("fast"), "'fast' is no circuit: 'agent-quick', "),
        (lambda: presets.OPENAI.limit(tier="1"), "'1' is no tier of openai: 'tier-1', 'tier-2', "),
        (lambda: presets.GEMINI.limit(tier="free"), "'free' is no tier of gemini: none published"),
        (
            lambda: presets.ANTHROPIC.limit(tier="build", model="claude-1"),
            "'claude-1' is no model of anthropic build: 'claude-opus-5-5', ",
        ),
        (lambda: presets.GROQ.limit(tier="developer"), "model=None: limits of groq developer are those of "),
        (presets.OPENAI.limit, "tier=None, model=None: give a tier, of 'tier-1', "),
        (
            lambda: presets.VLLM.rate_limit(max_wait=1),
            "model=None: give numbers of your own, without a model, for vllm",
        ),
        (lambda: presets.OPENAI.policies(model="gpt-4o"), "tier=None, model='gpt-4o': give a tier, "),
        (
            lambda: presets.OPENAI.policies(rate_limit=RateLimit(burst=1), tier="tier-1"),
            "rate_limit= and tier='tier-1', model=None exclude each other",
        ),
        (lambda: presets.OPENAI.retry(max_attempts=0), "max_attempts=0"),
        (lambda: presets.BEDROCK.rate_limit(requests_per_minute=-1), "requests_per_minute=-1"),
    ],
)
def test_what_cannot_be_is_refused_with_what_can(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        make()
    assert message in str(refused.value)


def test_numbers_of_ones_own_replace_those_of_the_preset() -> None:
    limit = presets.OPENAI.limit(tier="tier-2", model="gpt-4o", requests_per_minute=120)
    assert (limit.requests_per_minute, limit.tokens_per_minute, limit.burst) == (120, 450_000, 2)
    assert presets.OPENAI.limit(requests_per_minute=60).burst == 1
    assert presets.OPENAI.limit(tier="tier-2", model="gpt-4o", burst=None).burst is None
    own = presets.MISTRAL.limit(tokens_per_minute=500_000, burst=1)
    assert own == Limit(key=("target", "model"), tokens_per_minute=500_000, burst=1)


def test_a_model_may_be_left_out_where_the_tier_has_one_limit() -> None:
    assert presets.OPENROUTER.limit(tier="free") == presets.OPENROUTER.limit(tier="free", model="any:free")
    plan = presets.GROQ.limit(tier="free")
    assert all(plan == presets.GROQ.limit(tier="free", model=model) for model in presets.GROQ.tiers["free"])


def test_options_of_the_limit_and_of_the_policy_go_together_with_further_limits() -> None:
    tenant = Limit(key="tenant", requests_per_minute=30)
    limit = presets.GROQ.rate_limit(
        tier="free", model="openai/gpt-oss-20b", scope="plan", limits=[tenant], max_wait=5, dry_run=True
    )
    assert [one.name for one in limit.limits] == ["plan", "tenant"]
    assert (limit.max_wait, limit.dry_run) == (5, True)


def test_policies_that_are_given_take_the_place_of_the_preset_s() -> None:
    given = (Retry(), RateLimit(burst=1), ConcurrencyLimit(), CircuitBreaker())
    retry, rate, concurrency, breaker = given
    made = presets.OPENAI.policies(
        deadline=5, retry=retry, rate_limit=rate, concurrency_limit=concurrency, circuit_breaker=breaker
    )
    assert tuple(made[1:]) == given
    assert getattr(made[0], "total", None) == 5


def test_a_preset_of_ones_own() -> None:
    tiers = {"team": {"*": Limit(key=None, requests_per_minute=90)}}
    mine = dataclasses.replace(presets.VLLM, name="mine", tiers=tiers, paced=True)
    assert stack(mine.policies(tier="team", model="llama")) == STACK
    assert mine.limit(tier="team", model="llama").burst == 1.5


@pytest.mark.anyio
async def test_no_429_where_requests_are_counted_by_the_second() -> None:
    """`paced` is what does it: a minute's worth at once is more than such a provider takes."""
    for burst, refusals in ((None, True), (500 / 60, False)):
        model = FakeModel(rate_limits=RateLimits(requests_per_minute=500, window=1))
        provider = FakeProvider(models={"gpt-4o-mini": model})
        limit = presets.OPENAI.rate_limit(tier="tier-1", model="gpt-4o-mini", burst=burst, max_wait=60)
        await send(provider, "gpt-4o-mini", [*presets.OPENAI.policies(rate_limit=limit)], times=100)
        assert any(request.status == 429 for request in provider.requests) is refusals


@pytest.mark.anyio
async def test_a_minute_s_limit_is_kept_to() -> None:
    provider = FakeProvider(models={"any:free": FakeModel(rate_limits=RateLimits(requests_per_minute=20))})
    limit = presets.OPENROUTER.rate_limit(tier="free", max_wait=120)
    began = anyio.current_time()
    await send(provider, "any:free", presets.OPENROUTER.policies(rate_limit=limit), times=50)
    assert [request.status for request in provider.requests] == [200] * 50
    assert anyio.current_time() - began == pytest.approx(90)  # the first 20 at once, 30 at 20 a minute


async def send(provider: FakeProvider, model: str, policies: list[Policy], *, times: int) -> None:
    transport = ResilientTransport(provider.transport(), policies=policies)
    async with httpx.AsyncClient(transport=transport, base_url="http://provider/v1", timeout=None) as client:

        async def call() -> None:
            body = {"model": model, "messages": [], "max_tokens": 10}
            await client.post("/chat/completions", json=body)

        async with anyio.create_task_group() as tasks:
            for _ in range(times):
                tasks.start_soon(call)


@pytest.mark.anyio
async def test_models_in_common_share_what_others_have_each() -> None:
    models = ["claude-opus-4-8", "claude-opus-4-5", "claude-haiku-4-5"]
    for model, together in (("claude-opus-4-8", True), ("claude-haiku-4-5", False)):
        limit = presets.ANTHROPIC.rate_limit(
            tier="start", model=model, requests_per_minute=2, burst=None, tokens_per_minute=None, max_wait=0
        )
        provider = Provider()
        door = Door(limit, provider=provider)
        for name in models * 2:
            with suppress(RateLimitedError):
                await door(model=name)
        assert len(provider.attempts) == (2 if together else 6)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("name", "failures", "seconds"),
    [("agent-quick", 3, 30), ("agent-brisk", 4, 45), ("agent-steady", 5, 60), ("agent-patient", 7, 90)],
)
async def test_an_agent_s_circuit(name: str, failures: int, seconds: float) -> None:
    breaker = presets.circuit_breaker(name)
    door = Door(breaker, provider=Provider(*[FAILURE] * failures))
    for _ in range(failures):
        assert breaker.state("gpt-4o") is CircuitState.CLOSED
        with pytest.raises(AttemptError):
            await door()
    with pytest.raises(CircuitOpenError) as refused:
        await door()
    assert refused.value.retry_after == pytest.approx(seconds)
    await door(model="another")  # never one circuit for all
    await anyio.sleep(seconds)
    for _ in range(3):
        assert breaker.state("gpt-4o") is not CircuitState.CLOSED
        await door()
    assert breaker.state("gpt-4o") is CircuitState.CLOSED


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("preset", "attempts"), [(presets.OPENAI, 3), (presets.GEMINI, 5), (presets.MISTRAL, 5)]
)
async def test_it_tries_as_often_as_the_sdk(preset: Preset, attempts: int) -> None:
    provider = Provider(*[FAILURE] * 9)
    with pytest.raises(AttemptError):
        await Door(*preset.policies(circuit_breaker=presets.circuit_breaker("batch")), provider=provider)()
    assert len(provider.attempts) == attempts


@EVERY
def test_every_number_has_a_source(preset: Preset) -> None:
    assert preset.sources
    for source in preset.sources:
        assert source.about
        assert source.url.startswith("https://")
        assert date(2026, 1, 1) <= (source.as_of or source.read_on) <= source.read_on
    if preset.tiers:
        assert any("limits" in source.url or "/models/" in source.url for source in preset.sources)


def test_the_page_has_every_limit_and_every_source() -> None:
    page = (ROOT / "docs" / "presets.md").read_text()
    shown: dict[tuple[str, str, str], tuple[str, bool]] = {}
    for name, table in re.findall(r"^### ([a-z]+)\n\n((?:\|.+\n)+)", page, re.MULTILINE):
        header, _, *rows = table.splitlines()
        tiers = re.findall(r"`([^`]+)`", header)
        for row in rows:
            models, *rates = (part.strip() for part in row.strip("|").split(" | "))
            for tier, rate in zip(tiers, rates, strict=True):
                for model in re.findall(r"`([^`]+)`", models):
                    if rate != "-":
                        shown[name, tier, model] = rate, models.endswith("in common")
    assert shown == {
        (preset.name, tier, model): (as_shown(limit), limit.key == "target")
        for preset in PRESETS.values()
        for tier, models in preset.tiers.items()
        for model, limit in models.items()
    }
    for preset in PRESETS.values():
        for source in preset.sources:
            assert (
                f"| {preset.name} | {source.about} | <{source.url}> | {source.as_of or 'undated'} |" in page
            )
            assert f"Read on {source.read_on}" in page
    for name in presets.CIRCUITS:
        assert f"| `{name}` |" in page


def as_shown(limit: Limit) -> str:
    tokens = "-" if limit.tokens_per_minute is None else f"{limit.tokens_per_minute:,}"
    return f"{limit.requests_per_minute:,} / {tokens}"


def test_what_it_offers() -> None:
    assert set(presets.__all__) == {name for name in vars(presets) if name[0] != "_"} - MODULES
    assert {preset.name: preset for preset in vars(presets).values() if isinstance(preset, Preset)} == dict(
        PRESETS
    )
    assert all(presets.get(name) is preset for name, preset in PRESETS.items())


def test_it_loads_nothing_but_itself() -> None:
    program = """
import sys, resilient_llm
before = set(sys.modules)
from resilient_llm import presets
print(sorted(name for name in set(sys.modules) - before if not name.startswith("resilient_llm.presets")))
"""
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"
