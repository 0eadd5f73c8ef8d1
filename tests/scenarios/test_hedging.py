"""Two equal targets of which one answer in twenty begins ten times as late: what a second attempt brings, and costs."""

from __future__ import annotations

import math
from functools import cache
from typing import Literal

import pytest

from resilient_llm import Call, CallNext, Hedge, Policy, Price, Reply, Retry, Router
from resilient_llm.lab import Bimodal, Chat, Constant, Poisson, Report, Traffic, Upstream, simulate
from tests.scenarios.support import network, target

Backend = Literal["asyncio", "trio"]
CALLS = 1000
PRICE = Price(input=1.0, output=4.0)


class Watch:
    """Keep the calls that pass, to see what they have cost."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    async def __call__(self, call: Call, call_next: CallNext) -> Reply:
        self.calls.append(call)
        return await call_next(call)


@cache
def run(*, hedged: bool) -> tuple[Report, float]:
    """Give the report, and what the calls say they have cost."""
    upstream = Upstream(
        first_token=Bimodal(0.4, share=0.05, factor=10),
        per_token=0.002,
        input_price=1.0,
        output_price=4.0,
    )
    watch = Watch()
    policies: list[Policy] = [watch, Retry()]
    if hedged:
        policies.append(Hedge(budget_ratio=0.05))
    policies.append(Router([target(name, price=PRICE) for name in "ab"]))
    traffic = Traffic(arrivals=Poisson(5.0), request=Chat(stream_ratio=1.0))
    report = simulate(policies, network(a=upstream, b=upstream), traffic, calls=CALLS)
    return report, math.fsum(call.cost for call in watch.calls)


def test_a_budget_of_five_percent_cuts_the_p99_by_more_than_half() -> None:
    plain, hedged = run(hedged=False)[0], run(hedged=True)[0]
    assert plain.success_ratio == hedged.success_ratio == 1
    assert plain.first_token.p99 == pytest.approx(4.0)
    assert hedged.first_token.p99 <= 2.0
    assert hedged.first_token.p50 == plain.first_token.p50 == pytest.approx(0.4)


def test_it_costs_no_more_than_the_budget() -> None:
    plain, hedged = run(hedged=False)[0], run(hedged=True)[0]
    assert plain.requests == CALLS
    assert hedged.requests <= 1.05 * CALLS + 10, "and what is saved up at the start"
    assert 0 < hedged.usd / plain.usd - 1 <= 0.05


def test_a_second_attempt_goes_to_the_other_target_and_the_loser_is_cancelled() -> None:
    report, _ = run(hedged=True)
    pairs = [call for call in report.calls if len(call.exchanges) > 1]
    assert len(pairs) >= 30
    for call in pairs:
        first, second = call.exchanges
        assert {first.upstream, second.upstream} == {"a.test", "b.test"}
        winner, loser = (first, second) if first.answered else (second, first)
        assert (winner.failure, loser.failure) == (None, "abandoned")
        assert loser.ended is not None
        assert call.first_token is not None
        assert loser.ended == pytest.approx(call.first_token), "as soon as the other one begins"


def test_the_losers_are_part_of_what_calls_say_they_cost() -> None:
    (plain, plain_cost), (hedged, hedged_cost) = run(hedged=False), run(hedged=True)
    assert plain_cost == pytest.approx(plain.usd)
    assert hedged_cost > plain_cost
    assert hedged_cost == pytest.approx(hedged.usd, rel=0.01), "of a loser the prompt is counted"


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_with_a_fixed_delay_every_time_is_known(backend: Backend) -> None:
    """`a` takes four seconds to begin, `b` a half: the second attempt begins after one, and its answer is taken."""
    upstreams = network(a=Upstream(first_token=Constant(4.0)), b=Upstream(first_token=Constant(0.5)))
    router = Router([target("a", weight=1e6), target("b")])
    report = simulate(
        [Retry(), Hedge(delay=1.0, budget_ratio=1.0), router],
        upstreams,
        Traffic(arrivals=Poisson(0.01), request=Chat(stream_ratio=1.0)),
        calls=1,
        backend=backend,
    )
    [call] = report.calls
    assert call.to_first_token == pytest.approx(1.5)
    first, second = call.exchanges
    assert (first.upstream, second.upstream) == ("a.test", "b.test")
    assert second.arrived - first.arrived == pytest.approx(1.0)
    assert first.ended == pytest.approx(call.first_token)
