"""An agent's calls against models that fail, are overloaded and cost money (mission E)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Literal

import anyio
import pytest

from resilient_llm import (
    Backoff,
    Call,
    CallNext,
    CircuitBreaker,
    Deadline,
    Policy,
    Price,
    Reply,
    Retry,
    Router,
    Target,
)
from resilient_llm.lab import Chat, Exchange, Outage, Paced, Poisson, Report, Traffic, Upstream, simulate
from resilient_llm.routing.balancers import Priority
from tests.scenarios.support import Caller, network, target, times

BOTH = pytest.mark.parametrize("backend", ["asyncio", "trio"])
Backend = Literal["asyncio", "trio"]

CIRCUITS: Mapping[str, tuple[int, float]] = {
    "m1": (5, 60.0),
    "m2": (3, 30.0),
    "m3": (7, 90.0),
    "m4": (4, 45.0),
}
"""Failures that open a model's circuit, and seconds until it is tried again."""


def breaker(failures: int, seconds: float) -> CircuitBreaker:
    return CircuitBreaker(
        failure_ratio=None,
        consecutive_failures=failures,
        break_duration=seconds,
        break_multiplier=1.0,
        max_break_duration=seconds,
        success_threshold=3,
    )


def chain(**outages: Outage) -> Report:
    """Call once a second through a chain of four models, some of which are down, with one attempt of each."""
    models = {name: target(name, breaker(*CIRCUITS[name])) for name in CIRCUITS}
    router = Router(models, fallbacks={"m1": ["m2", "m3", "m4"]})
    upstreams = {
        name: Upstream(first_token=0.2, outages=[outages[name]] if name in outages else [])
        for name in CIRCUITS
    }
    traffic = Traffic(arrivals=Paced(1.0), request=Chat(model="m1"))
    return simulate([Retry(max_attempts=1), router], network(**upstreams), traffic, duration=150)


def rounded(report: Report, name: str) -> list[int]:
    """Give the seconds in which requests came to an upstream."""
    return [int(at) for at in times(report, name)]


def test_each_model_of_the_chain_has_a_circuit_with_settings_of_its_own() -> None:
    report = chain(m1=Outage(0, 1e6), m2=Outage(0, 1e6), m3=Outage(0, 1e6))
    assert report.success_ratio == 1
    assert rounded(report, "m1") == [0, 1, 2, 3, 4, 65, 126], "five failures, and then a call a minute"
    assert rounded(report, "m2") == [0, 1, 2, 33, 64, 95, 126], "three, and one each half minute"
    assert rounded(report, "m3") == [0, 1, 2, 3, 4, 5, 6, 97], "seven, and one after 90 s"
    assert set(report.answered_by) == {"m4.test"}


def test_a_circuit_that_is_open_is_that_of_its_model_alone() -> None:
    report = chain(m1=Outage(0, 1e6))
    assert rounded(report, "m1") == [0, 1, 2, 3, 4, 65, 126]
    assert set(report.answered_by) == {"m2.test"}
    assert "m3.test" not in report.answered_by
    assert report.upstreams["m3.test"].requests == 0


def test_it_closes_after_three_successes_and_has_all_traffic_again() -> None:
    report = chain(m1=Outage(0, 30))
    assert rounded(report, "m1") == [0, 1, 2, 3, 4, *range(65, 150)]
    failed_again = chain(m1=Outage(0, 66.5))
    assert rounded(failed_again, "m1")[5] == 65
    assert rounded(failed_again, "m1")[6:] == list(range(126, 150)), "the probe at 65 s failed: a minute more"


@BOTH
def test_it_waits_as_long_as_the_provider_says_and_never_less(backend: Backend) -> None:
    """429 with `Retry-After: 7` for the first twenty seconds; calls come at random, none goes to another model."""
    upstreams = network(
        m1=Upstream(first_token=0.2, outages=[Outage(0, 20, "429", retry_after=7)]), m2=Upstream()
    )
    router = Router({"m1": target("m1"), "m2": target("m2")}, fallbacks={"m1": "m2"})
    traffic = Traffic(arrivals=Poisson(2.0), request=Chat(model="m1"))
    report = simulate([Retry(max_attempts=5), router], upstreams, traffic, duration=30, backend=backend)
    assert report.success_ratio == 1
    assert report.upstreams["m2.test"].requests == 0, "a few seconds are waited for"
    sent = report.upstreams["m1.test"].exchanges
    told = [(one.ended or 0.0) for one in sent if one.status == 429]
    for at in told:
        assert not [one for one in sent if at < one.arrived < at + 7], "left alone, by every call"


@BOTH
def test_the_wait_in_all_is_capped_by_the_deadline(backend: Backend) -> None:
    """`Retry-After: 100`, again and again: two waits fit into five minutes, and the third is not begun."""
    upstreams = network(m1=Upstream(outages=[Outage(0, 1e6, "429", retry_after=100)]))
    policies: list[Policy] = [
        Deadline(300),
        Retry(max_attempts=10, max_retry_after=120),
        Router([target("m1")], max_wait=120),
    ]
    report = simulate(policies, upstreams, Paced(1.0), calls=1, backend=backend)
    [call] = report.calls
    assert call.attempts == 3
    assert 200 <= call.ended <= 221, "it ends when it is known to be in vain, not at 300 s"
    assert call.outcome == "exhausted"
    assert call.status == 429, "the provider's own words"


@pytest.mark.anyio
async def test_a_hint_that_is_longer_than_it_would_wait_ends_the_call_at_once() -> None:
    call = Caller(
        network(m1=Upstream(outages=[Outage(0, 1e6, "429", retry_after=400)])),
        Deadline(300),
        Retry(),
        Router([target("m1")]),
    )
    began = anyio.current_time()
    assert (await call()).status == 429
    assert anyio.current_time() - began < 0.1


KEY = b"idempotency-key"
UUID4 = re.compile(rb"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")


def keys(call: Caller) -> list[bytes | None]:
    return [request.header(KEY) for request in call.sent]


def openai(name: str) -> Target:
    return target(name, provider="openai")


@pytest.mark.anyio
async def test_one_idempotency_key_goes_with_every_attempt_to_whichever_target() -> None:
    down = Upstream(outages=[Outage(0, 1)])
    models: dict[str, list[Target]] = {"m1": [openai("a"), openai("b")], "m2": [openai("c")]}
    router = Router(models, fallbacks={"m1": "m2"}, balancer=Priority())
    call = Caller(
        network(a=down, b=down, c=Upstream()),
        Retry(max_attempts=2, backoff=Backoff(initial=0.1)),
        router,
        url="https://api.openai.com/v1",
    )
    answer = await call(model="m1")
    assert answer.target == "c"
    assert [request.url.split("/")[2] for request in call.sent] == ["a.test", "b.test", "c.test"]
    [key] = set(keys(call))
    assert key is not None
    assert UUID4.fullmatch(key)
    await anyio.sleep(2)
    await call(model="m1")
    assert keys(call)[-1] not in (None, key), "another call, another key"


@pytest.mark.anyio
async def test_the_callers_own_idempotency_key_is_kept() -> None:
    router = Router([openai("a"), openai("b")], balancer=Priority())
    call = Caller(
        network(a=Upstream(outages=[Outage(0, 9)]), b=Upstream()),
        Retry(),
        router,
        url="https://api.openai.com/v1",
    )
    await call(headers=[(KEY, b"order-17")])
    assert keys(call) == [b"order-17", b"order-17"]


class Watch:
    """Keep the calls that pass, to see what they have cost."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    async def __call__(self, call: Call, call_next: CallNext) -> Reply:
        self.calls.append(call)
        return await call_next(call)


async def cost_of_a_fallback(first: Outage) -> tuple[float, Sequence[Exchange]]:
    """Give what a call says it has cost, and what the upstreams say, when the first model fails like this."""
    dear, cheap = Price(input=2.5, output=10.0), Price(input=0.15, output=0.6)
    net = network(
        m1=Upstream(outages=[first], input_price=2.5, output_price=10.0),
        m2=Upstream(input_price=0.15, output_price=0.6),
    )
    router = Router({"m1": target("m1", price=dear), "m2": target("m2", price=cheap)}, fallbacks={"m1": "m2"})
    watch = Watch()
    call = Caller(net, watch, Retry(max_attempts=1), router)
    assert (await call(model="m1")).target == "m2"
    [seen] = watch.calls
    return seen.cost, net.log


@pytest.mark.anyio
async def test_what_a_call_has_cost_is_that_of_who_answered_at_its_price() -> None:
    cost, [refused, answered] = await cost_of_a_fallback(Outage(0, 99))
    assert refused.usd == 0
    assert cost == pytest.approx(answered.usd)
    assert answered.usd == pytest.approx((100 * 0.15 + 100 * 0.6) / 1e6)


@pytest.mark.anyio
async def test_a_reply_that_broke_off_has_cost_at_least_its_prompt() -> None:
    cost, [broken, answered] = await cost_of_a_fallback(Outage(0, 99, "cut"))
    assert broken.usd == pytest.approx((100 * 2.5 + 100 * 10) / 1e6)
    assert cost >= answered.usd + 100 * 2.5 / 1e6
