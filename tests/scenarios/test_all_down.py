"""Every target is down: calls fail at once and are told when to come back, and nobody hammers what is down.

And then all come back, where many wait: what reaches the targets in each tenth of a second.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from random import Random
from typing import Literal

import anyio
import pytest

from resilient_llm import (
    CircuitBreaker,
    ConcurrencyLimit,
    NoTargetError,
    Policy,
    Retry,
    Router,
)
from resilient_llm.core.target_load import Pool, TargetLoad
from resilient_llm.lab import (
    ClosedLoop,
    Exponential,
    LogNormal,
    Outage,
    Phase,
    Poisson,
    Report,
    Traffic,
    Upstream,
    simulate,
)
from resilient_llm.routing.balancers import (
    Balancer,
    LeastOutstandingTokens,
    Need,
    Priority,
    WeightedLeastConnections,
    WeightedRandom,
)
from tests.scenarios.support import BALANCERS, Caller, between, network, target

Backend = Literal["asyncio", "trio"]

NAMES = ("a", "b", "c")
DOWN, UP = 30.0, 90.0


@cache
def run(balancer: type[Balancer]) -> Report:
    upstream = Upstream(first_token=0.5, outages=[Outage(DOWN, UP)])
    router = Router([target(name, CircuitBreaker()) for name in NAMES], balancer=balancer())
    policies: list[Policy] = [Retry(), router]
    return simulate(policies, network(**dict.fromkeys(NAMES, upstream)), Poisson(5.0), duration=130)


@pytest.mark.parametrize("balancer", BALANCERS)
def test_what_is_down_is_probed_and_not_hammered(balancer: type[Balancer]) -> None:
    report = run(balancer)
    for name in NAMES:
        upstream = report.upstreams[f"{name}.test"]
        assert upstream.between(DOWN, DOWN + 5) <= 20, "until its circuit has opened"
        assert upstream.between(DOWN + 5, UP) == 2, "breaks of 15, 22.5 and 30 s: two probes"
    down = report.where(since=DOWN + 5, until=UP)
    refused = [call for call in down.calls if call.outcome == "rejected"]
    assert len(refused) >= len(down.calls) - 6, "the probes are calls, too"
    assert {(call.error_type, call.status) for call in refused} == {("no_target", 503)}
    assert max(call.seconds for call in refused) == 0, "refused on the spot"
    assert down.latency.max < 11, "a probe that fails waits up to `patience` for the next to reopen"


@pytest.mark.parametrize("balancer", BALANCERS)
def test_all_is_well_within_a_break_of_the_recovery(balancer: type[Balancer]) -> None:
    report = run(balancer)
    assert report.where(until=DOWN).success_ratio == 1
    assert report.where(since=UP + 30).success_ratio == 1
    # Those who are not preferred come back as well, if not at once.
    assert report.where(since=UP + 10).success_ratio == 1, "the breaks end together here, 8 s later"


@pytest.mark.anyio
async def test_the_refusal_says_when_and_a_call_made_then_goes_through() -> None:
    upstream = Upstream(first_token=0.5, outages=[Outage(0, 20)])
    breakers = [CircuitBreaker(consecutive_failures=1, break_duration=seconds) for seconds in (5, 8, 13)]
    targets = [target(name, breaker) for name, breaker in zip(NAMES, breakers, strict=True)]
    router = Router(targets, balancer=Priority())
    net = network(**dict.fromkeys(NAMES, upstream))
    call = Caller(net, Retry(), router)
    assert (await call()).status == 503, "three attempts, one of each"
    assert [exchange.upstream for exchange in net.log] == ["a.test", "b.test", "c.test"]

    with pytest.raises(NoTargetError) as refusal:
        await call()
    assert refusal.value.rejected == ("a:circuit_open", "b:circuit_open", "c:circuit_open")
    told = refusal.value.retry_after or 0.0
    assert told == pytest.approx(4.9), "a's is the first to let one through, 5 s after it failed"

    await anyio.sleep(told - 0.01)
    with pytest.raises(NoTargetError):
        await call()
    assert len(net.log) == 3, "too early: nobody was asked"
    await anyio.sleep(0.01 + 1e-9)
    began = anyio.current_time()
    assert (await call()).status == 503, "all are still down"
    probes = [(exchange.upstream, round(exchange.arrived - began, 2)) for exchange in net.log[3:]]
    assert probes == [("a.test", 0.0), ("b.test", 3.05), ("a.test", 7.55)], (
        "a call that has failed is patient"
    )

    await anyio.sleep(20)
    assert (await call()).status == 200


@pytest.mark.anyio
async def test_of_many_who_come_when_the_break_is_over_one_goes_through() -> None:
    upstream = Upstream(first_token=0.5, outages=[Outage(0, 4)])
    net = network(a=upstream)
    call = Caller(
        net,
        Retry(max_attempts=1),
        Router([target("a", CircuitBreaker(consecutive_failures=1, break_duration=5))]),
    )
    await call()
    await anyio.sleep(5)
    refused: list[NoTargetError] = []

    async def one() -> None:
        try:
            await call()
        except NoTargetError as error:
            refused.append(error)

    async with anyio.create_task_group() as group:
        for _ in range(200):
            group.start_soon(one)
    assert len(net.log) == 2
    assert len(refused) == 199
    assert (await call()).status == 200


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_those_who_wait_for_a_throttled_target_do_not_all_come_at_once(backend: Backend) -> None:
    """It was told to all of them: come back in ten seconds. 200 have come meanwhile."""
    throttling = Outage(0, 5, "429", retry_after=10)
    report = simulate(
        [Retry(max_attempts=4), Router([target("a")])],
        network(a=Upstream(first_token=0.5, outages=[throttling])),
        Poisson(20.0),
        duration=20,
        backend=backend,
    )
    assert report.success_ratio == 1
    last_told = max(sent.ended or 0 for sent in report.upstreams["a.test"].exchanges if sent.status == 429)
    asked_in_vain = report.upstreams["a.test"].between(0, last_told)
    assert asked_in_vain <= 8, "those who were on the way when the first was told"
    assert report.upstreams["a.test"].between(last_told, last_told + 10) == 0, "never earlier than told"
    waves = between(report, "a", last_told + 10, last_told + 11)
    assert sum(waves) >= 200
    assert max(waves) <= 40, "spread over a tenth of what they were told"


def test_who_is_throttled_again_sends_the_others_back_to_wait() -> None:
    throttling = Outage(0, 12, "429", retry_after=10)
    report = simulate(
        [Retry(max_attempts=4), Router([target("a")])],
        network(a=Upstream(first_token=0.5, outages=[throttling])),
        Poisson(20.0),
        duration=9,
    )
    assert report.success_ratio == 1
    second = between(report, "a", 10, 20, every=1.0)
    assert len(report.calls) > 160
    assert sum(second) <= 18, "of all that wait those who came in the 50 ms until the first was told again"
    assert report.upstreams["a.test"].statuses[429] <= 26


class Scripted:
    """Prefer the target that the test names."""

    strategy = "scripted"
    reason = "priority"
    spreads = False

    def __init__(self) -> None:
        self.first = "a"
        self._pool: Sequence[TargetLoad] = ()

    def order(self, pool: Pool, need: Need, now: float, random: Random) -> Iterator[TargetLoad]:
        self._pool = pool.loads
        return iter(sorted(pool, key=lambda load: load.name != self.first))

    def score(self, load: TargetLoad, pool: Pool, need: Need, now: float) -> float:
        return 1.0

    def ramp(self, name: str) -> float:
        """Give the share of its weight that a target has while it starts slowly."""
        [load] = [load for load in self._pool if load.name == name]
        return load.ramp(anyio.current_time())


def two_targets(upstream: Upstream) -> tuple[Caller, Scripted]:
    """Give a client of `a`, whose circuit opens at the first failure, and of `b`, which is well."""
    balancer = Scripted()
    targets = [target("a", CircuitBreaker(consecutive_failures=1)), target("b")]
    return Caller(network(a=upstream, b=Upstream()), Retry(), Router(targets, balancer=balancer)), balancer


@pytest.mark.anyio
async def test_who_comes_back_starts_slowly_though_nobody_missed_it() -> None:
    """While its circuit was open another one was preferred, as balancers do that go by success."""
    call, balancer = two_targets(Upstream(outages=[Outage(0, 5)]))
    assert (await call()).target == "b", "a fails, and its circuit opens"
    balancer.first = "b"
    await anyio.sleep(20)
    assert (await call()).target == "b"
    balancer.first = "a"
    assert (await call()).target == "a", "the probe"
    assert balancer.ramp("a") == pytest.approx(0.1, abs=0.01)


@pytest.mark.anyio
async def test_an_answer_from_before_its_circuit_opened_does_not_bring_it_back() -> None:
    first_is_slow = [Phase(0, 1, latency_factor=20)]
    call, balancer = two_targets(Upstream(first_token=0.5, phases=first_is_slow, outages=[Outage(1, 5)]))
    answers: list[str | None] = []

    async def slow() -> None:
        answers.append((await call()).target)

    async with anyio.create_task_group() as group:
        group.start_soon(slow)
        await anyio.sleep(2)
        assert (await call()).target == "b", "a fails, and its circuit opens"
    assert answers == ["a"], "ten seconds later"
    assert balancer.ramp("a") == 1.0, "its circuit is open"
    await anyio.sleep(20)
    assert (await call()).target == "a"
    assert balancer.ramp("a") == pytest.approx(0.1, abs=0.01)


BOUNDED: list[Balancer] = [
    WeightedLeastConnections(),
    LeastOutstandingTokens(),
    WeightedRandom(),
]


def comeback(
    balancer: Balancer, first_token: LogNormal | Exponential, *, workers: int = 45, until: float = 72
) -> tuple[list[int], float]:
    """Give the requests a second to one of three that comes back, from then on, and what it had before."""
    always = Upstream(first_token=first_token)
    breaker = CircuitBreaker(consecutive_failures=2)
    report = simulate(
        [Retry(), Router([target(name, breaker) for name in NAMES], balancer=balancer)],
        network(a=Upstream(first_token=first_token, outages=[Outage(20, 30)]), b=always, c=always),
        ClosedLoop(workers),
        duration=until,
    )
    assert report.success_ratio == 1
    usual = between(report, "a", 5, 20, every=1.0)
    answered = next(
        sent.ended for sent in report.upstreams["a.test"].exchanges if sent.arrived >= 30 and sent.ended
    )
    assert report.upstreams["a.test"].between(30, answered) == 1, "one probe until that has answered"
    return between(report, "a", answered, until, every=1.0), sum(usual) / len(usual)


@pytest.mark.parametrize("balancer", BOUNDED, ids=lambda one: one.strategy)
def test_who_comes_back_gets_its_share_slowly(balancer: Balancer) -> None:
    requests, usual = comeback(balancer, LogNormal(1.5, 0.3))
    assert sum(requests[:5]) / 5 <= 0.4 * usual
    assert sum(requests[:8]) / 8 < 0.5 * usual
    settled = requests[28:36]
    assert sum(settled) / len(settled) == pytest.approx(usual, rel=0.25), "after the slow start of 30 s"


def test_who_comes_back_is_not_rushed_because_its_first_answers_are_its_quickest() -> None:
    """Where latencies differ much, those that are in first are the quick ones, and nothing else is known of it."""
    requests, usual = comeback(WeightedLeastConnections(), Exponential(1.5), workers=150, until=50)
    assert max(requests[:5]) <= 0.6 * usual


def test_priority_gives_it_everything_at_once() -> None:
    requests, usual = comeback(Priority(), LogNormal(1.5, 0.3))
    assert sum(requests[:5]) / 5 >= 0.9 * usual


@pytest.mark.parametrize("limited", [False, True])
def test_an_adaptive_limit_bounds_what_comes_after_the_probe(*, limited: bool) -> None:
    """Of a single target there is nothing to divide: who calls again after a refusal goes there, all of them."""
    limit = [ConcurrencyLimit(initial=10, max_queued=500)] if limited else []
    report = simulate(
        [Retry(), Router([target("a", *limit, CircuitBreaker())])],
        network(a=Upstream(first_token=0.5, outages=[Outage(10, 30)])),
        Traffic(arrivals=ClosedLoop(100, after_failure=2.0)),
        duration=56,
    )
    first = next(at for at in report.upstreams["a.test"].times if at >= 30)
    waves = between(report, "a", first, first + 3)
    assert waves[0] == 1
    assert sum(waves[:5]) == 1, "half-open: one probe for the half second that it takes"
    if limited:
        assert max(waves) <= 20
        assert max(between(report, "a", first + 3, 56)) <= 30, "it grows by one a round trip"
    else:
        assert max(waves) >= 90
