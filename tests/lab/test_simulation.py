"""`simulate` reproduces what is known of the policies, exactly where nothing is left to chance."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from random import Random
from typing import Literal

import anyio
import pytest

from resilient_llm import (
    Backoff,
    Bulkhead,
    Call,
    CallNext,
    CircuitBreaker,
    ConcurrencyLimit,
    ConfigurationError,
    Deadline,
    Hedge,
    Policy,
    RateLimit,
    Reply,
    Request,
    Retry,
    Router,
    Target,
)
from resilient_llm.lab import (
    Burst,
    Chat,
    ClosedLoop,
    Constant,
    Exponential,
    LogNormal,
    Network,
    Outage,
    Paced,
    Poisson,
    Report,
    Sharing,
    Slots,
    Steps,
    Traffic,
    Uniform,
    Upstream,
    drive,
    simulate,
    table,
)
from resilient_llm.routing.balancers import Priority
from resilient_llm.testing import RateLimits, run_virtual

BOTH = pytest.mark.parametrize("backend", ["asyncio", "trio"])
Backend = Literal["asyncio", "trio"]

PATIENT = Retry(max_attempts=10, backoff=Backoff(initial=1, jitter="none"), budget_ratio=1.0)


# Clients


@BOTH
@pytest.mark.parametrize("stream_ratio", [0.0, 1.0])
def test_with_constant_latency_every_figure_is_known(backend: Backend, stream_ratio: float) -> None:
    network = Network(
        Upstream(first_token=0.5, per_token=0.01, output_tokens=151, input_price=1, output_price=10)
    )
    traffic = Traffic(arrivals=Paced(0.25), request=Chat(stream_ratio=stream_ratio, prompt_tokens=100))
    report = simulate([], network, traffic, calls=100, backend=backend)
    assert report.success_ratio == 1
    assert report.ended == pytest.approx(99 * 0.25 + 2)
    for figure in (report.latency.mean, report.latency.p50, report.latency.p99, report.latency.max):
        assert figure == pytest.approx(2)
    assert report.first_token.mean == pytest.approx(0.5 if stream_ratio else 2)
    assert report.usd == pytest.approx(100 * (100 * 1 + 151 * 10) / 1e6)
    [upstream] = report.upstreams.values()
    assert upstream.requests == 100
    assert upstream.in_flight_max == 8, "2 s each, four a second"
    assert upstream.longest_gap == pytest.approx(0.25)
    assert (upstream.between(0, 1), upstream.between(1, 2)) == (4, 4)
    assert report.answered_by == {"upstream.test": 100}


@BOTH
def test_a_closed_loop_waits_for_its_calls(backend: Backend) -> None:
    network = Network(Upstream(first_token=1))
    report = simulate([], network, ClosedLoop(5, think=Constant(1)), duration=10, backend=backend)
    assert len(report.calls) == 25
    assert sorted({round(call.started, 6) for call in report.calls}) == [0, 2, 4, 6, 8]
    assert report.ended == pytest.approx(10)


@BOTH
def test_time_goes_on_where_calls_are_refused_on_the_spot(backend: Backend) -> None:
    network = Network(Upstream(first_token=1, failures={"500": 1.0}))
    breaker = CircuitBreaker(consecutive_failures=1, break_duration=60, max_break_duration=60)
    report = simulate([breaker], network, ClosedLoop(1, after_failure=1), duration=30.5, backend=backend)
    assert report.outcomes == {"failed": 1, "rejected": 30}


def test_time_goes_on_where_answers_take_none() -> None:
    report = simulate([], Network(Upstream(first_token=0)), ClosedLoop(1, after_failure=0.5), duration=10)
    assert len(report.calls) == 20


def test_both_kinds_of_end() -> None:
    network = Network(Upstream(first_token=1))
    assert len(simulate([], network, Paced(1), duration=10).calls) == 10, "none begins at its end"
    assert len(simulate([], network, Paced(1), duration=10, calls=3).calls) == 3
    assert len(simulate([], network, Burst(7), duration=10).calls) == 7
    mixed = [Traffic(arrivals=Burst(7)), Traffic(arrivals=ClosedLoop(2))]
    assert len(simulate([], network, mixed, calls=20).calls) == 20
    with pytest.raises(ConfigurationError, match="no end"):
        simulate([], network, Paced(1))
    with pytest.raises(ValueError, match="calls=0: allowed"):
        simulate([], network, Paced(1), calls=0)
    with pytest.raises(ValueError, match="duration=0: allowed"):
        simulate([], network, Paced(1), duration=0)


@BOTH
@pytest.mark.parametrize(
    "policies", [[], [Retry(), Hedge(), Router([Target(name="a", url="https://b.test/v1")])]]
)
def test_a_call_to_where_no_upstream_is_ends_the_simulation(policies: list[Policy], backend: Backend) -> None:
    network = Network({"https://a.test/v1": Upstream()})
    there = r"nothing is at https://(upstream|b)\.test/v1, .*; upstreams are at https://a\.test/v1"
    with pytest.raises(ConfigurationError, match=there):
        simulate(policies, network, Poisson(5), calls=50, backend=backend)


def test_tenants_models_and_priorities_of_a_mix() -> None:
    seen: set[tuple[str | None, int]] = set()

    async def look(call: Call, call_next: CallNext) -> Reply:
        seen.add((call.tenant, call.priority))
        return await call_next(call)

    quiet = Traffic(arrivals=Paced(1), tenant="quiet", priority=5, request=Chat(model="small"))
    noisy = Traffic(
        arrivals=Steps([(0, 1), (10, 20)]), tenant="noisy", request=Chat(model={"small": 1, "large": 3})
    )
    report = simulate([look], Network(Upstream()), [quiet, noisy], duration=110)
    assert seen == {("quiet", 5), ("noisy", 0)}
    assert len(report.where(tenant="quiet").calls) == 110
    assert report.where(tenant="quiet", model="large").calls == ()
    early, late = (report.where(tenant="noisy", since=at, until=at + 10) for at in (0, 50))
    assert len(early.calls) < 30
    assert len(late.calls) > 120
    large = len(report.where(tenant="noisy", model="large").calls)
    assert large / len(report.where(tenant="noisy").calls) == pytest.approx(0.75, abs=0.05)


def test_a_timeout_of_the_caller() -> None:
    report = simulate(
        [Deadline(60)], Network(Upstream(first_token=10)), Traffic(arrivals=Burst(3), timeout=4), calls=3
    )
    assert report.outcomes == {"timeout": 3}
    assert report.latency.max == pytest.approx(4)
    assert report.upstreams["upstream.test"].failures == {"abandoned": 3}


@BOTH
def test_the_same_seed_gives_the_same_report(backend: Backend) -> None:
    def run(seed: int) -> str:
        upstream = Upstream(
            first_token=LogNormal(0.5, 0.4),
            per_token=Uniform(0.001, 0.02),
            failures={"503": 0.05, "cut": 0.02, "reset": 0.02},
            failure_latency=Uniform(0.01, 0.1),
        )
        traffic = Traffic(arrivals=Poisson(5), request=Chat(stream_ratio=0.5))
        retry = Retry(backoff=Backoff(jitter="none"))
        return simulate([retry], Network(upstream), traffic, calls=300, seed=seed, backend=backend).to_json()

    assert run(1) == run(1)
    assert run(1) != run(2)


def test_what_comes_does_not_depend_on_what_becomes_of_it() -> None:
    traffic = Traffic(arrivals=Poisson(5), request=Chat(prompt_tokens=Uniform(10, 1000)))
    fast, slow = (simulate([], Network(Upstream(first_token=each)), traffic, calls=200) for each in (0.1, 9))
    assert [call.started for call in fast.calls] == [call.started for call in slow.calls]
    sizes = [[call.exchanges[0].input_tokens for call in report.calls] for report in (fast, slow)]
    assert sizes[0] == sizes[1]


def test_repeated_questions_are_the_same_to_the_byte() -> None:
    bodies: list[bytes | None] = []
    ask = Chat(questions=5, prompt_tokens=Uniform(10, 100), system_tokens=20)

    def remember(rng: Random) -> Request:
        request = ask(rng)
        bodies.append(request.body)
        return request

    simulate([], Network(Upstream()), Traffic(arrivals=Paced(1), request=remember), calls=100)
    assert len(set(bodies)) == 5


@pytest.mark.anyio
async def test_it_can_be_driven_in_any_event_loop() -> None:
    await anyio.sleep(1000)
    network = Network(Upstream(first_token=1, failure_latency=0, outages=[Outage(5, 8)]))
    report = await drive([], network, Paced(1), calls=10)
    assert [call.status for call in report.calls] == [200] * 5 + [503] * 3 + [200] * 2
    assert anyio.current_time() == pytest.approx(1010)


# Policies


@BOTH
def test_backoff_goes_round_an_outage(backend: Backend) -> None:
    """1 + 2 + 4 + 8 s of backoff: the fifth attempt of the first call comes at 15 s."""
    network = Network(Upstream(first_token=1, failure_latency=0, outages=[Outage(0, 15)]))
    report = simulate([PATIENT], network, Burst(1), calls=1, backend=backend)
    assert report.upstreams["upstream.test"].times == pytest.approx([0, 1, 3, 7, 15])
    [call] = report.calls
    assert (call.ok, call.attempts) == (True, 5)
    assert call.seconds == pytest.approx(16)


def test_attempts_that_fail_by_chance_multiply() -> None:
    """Of calls that fail with a chance of p, a share of p ** 3 is left after three attempts."""
    ratio, calls = 0.3, 2000
    network = Network(Upstream(first_token=0.1, failures={"500": ratio}))
    retry = Retry(max_attempts=3, budget_ratio=1.0, budget_min_per_second=100)
    report = simulate([retry], network, Poisson(20), calls=calls)
    left = ratio**3
    assert 1 - report.success_ratio == pytest.approx(left, abs=5 * math.sqrt(left * (1 - left) / calls))
    assert report.requests / calls == pytest.approx(1 + ratio + ratio**2, rel=0.05)
    assert report.outcomes["exhausted"] == sum(call.attempts == 3 and not call.ok for call in report.calls)


@BOTH
def test_an_open_circuit_spares_an_upstream_that_is_down(backend: Backend) -> None:
    network = Network(Upstream(first_token=0.1, failure_latency=0, outages=[Outage(0, 60)]))
    breaker = CircuitBreaker(consecutive_failures=5, break_duration=15, max_break_duration=15)
    report = simulate([breaker], network, Paced(1), duration=100, backend=backend)
    upstream = report.upstreams["upstream.test"]
    assert upstream.between(0, 60) == 5 + 3, "five failures, then a probe each 15 s"
    assert [at for at in upstream.times if at < 60] == pytest.approx([0, 1, 2, 3, 4, 19, 34, 49])
    assert upstream.between(64, 100) == 36, "it is back within one break"
    assert report.outcomes == {"failed": 8, "rejected": 100 - 8 - 36, "success": 36}


def test_a_rate_limit_that_knows_the_providers_avoids_its_refusals() -> None:
    limits = RateLimits(requests_per_minute=60, window=1)
    network = Network(Upstream(first_token=0.5, rate_limits=limits, failure_latency=0))
    unlimited = simulate([], network, Burst(20), calls=20)
    assert unlimited.upstreams["upstream.test"].statuses == {200: 1, 429: 19}
    limit = RateLimit(requests_per_minute=60, burst=1, key="target", max_wait=60)
    limited = simulate([limit], network, Burst(20), calls=20)
    assert limited.upstreams["upstream.test"].statuses == {200: 20}
    assert limited.ended == pytest.approx(19.5, abs=0.1)


def test_a_bulkhead_limits_what_is_in_flight() -> None:
    network = Network(Upstream(first_token=1))
    report = simulate([Bulkhead(max_concurrent=4, max_queued=100, max_wait=60)], network, Burst(20), calls=20)
    assert report.upstreams["upstream.test"].in_flight_max == 4
    assert sorted(round(call.seconds, 6) for call in report.calls) == [
        n for n in (1, 2, 3, 4, 5) for _ in range(4)
    ]


def test_an_adaptive_limit_finds_the_knee() -> None:
    network = Network(Upstream(first_token=LogNormal(0.5, 0.2), capacity=Sharing(20)))
    limit = ConcurrencyLimit(initial=5, max_queued=1000, max_wait=math.inf)
    report = simulate(
        [limit],
        network,
        ClosedLoop(100),
        duration=120,
        gauges={"limit": lambda: limit.limit("upstream.test")},
    )
    late = [bucket.gauges["limit"] for bucket in report.timeline(10)][3:]
    assert all(14 <= each <= 45 for each in late), late
    unlimited = simulate([], network, ClosedLoop(60), duration=60)
    seconds = [one.upstreams["upstream.test"].latency.p50 for one in (report, unlimited)]
    assert seconds[0] < 0.6 * seconds[1]


@pytest.mark.parametrize(("servers", "load_ratio"), [(1, 0.5), (4, 0.7)])
def test_queues_are_as_long_as_erlang_says(servers: int, load_ratio: float) -> None:
    """M/M/c: the share of calls that wait is Erlang's C, and they wait 1 / (c mu - lambda) on average."""
    offered = servers * load_ratio
    network = Network(Upstream(first_token=Exponential(1), output_tokens=1, capacity=Slots(servers)))
    report = simulate([], network, Poisson(offered), calls=4000, seed=3)
    tail = offered**servers / math.factorial(servers) / (1 - load_ratio)
    waits = tail / (sum(offered**k / math.factorial(k) for k in range(servers)) + tail)
    assert report.latency.mean == pytest.approx(1 + waits / (servers - offered), rel=0.1)


# Reports


def example(policies: list[Policy] | None = None) -> Report:
    upstreams = {
        "https://a.test/v1": Upstream(
            first_token=1, output_price=10, failure_latency=0, outages=[Outage(60, 90)]
        ),
        "https://b.test/v1": Upstream(first_token=2, output_price=20),
    }
    a, b = (Traffic(arrivals=Paced(1), request=Chat(url=url), tenant=url[8]) for url in upstreams)
    return simulate(policies or [], Network(upstreams), [a, b], duration=120)


def test_a_timeline() -> None:
    buckets = example().timeline(30)
    assert [bucket.calls for bucket in buckets] == [60, 60, 60, 60, 0]
    assert [bucket.success_ratio for bucket in buckets[:4]] == [1, 1, 0.5, 1]
    assert [bucket.seconds for bucket in buckets[:4]] == pytest.approx([1.5, 1.5, 1, 1.5])
    assert buckets[2].requests == {"a.test": 30, "b.test": 30}
    assert math.isnan(buckets[4].success_ratio)


def test_a_report_as_json() -> None:
    report = json.loads(example().to_json(every=30))
    assert report["calls"] == 240
    assert report["success_ratio"] == 0.875
    assert report["outcomes"] == {"failed": 30, "success": 210}
    assert report["upstreams"]["a.test"]["statuses"] == {"200": 90, "503": 30}
    assert report["upstreams"]["a.test"]["failures"] == {"503": 30}
    assert report["usd"] == pytest.approx((90 * 10 + 120 * 20) * 100 / 1e6)
    assert report["timeline"][4]["success_ratio"] is None


def test_parts_of_a_report() -> None:
    report = example()
    assert report.where(tenant="b").success_ratio == 1
    assert report.where(tenant="a").success_ratio == 0.75
    assert report.latency.mean == pytest.approx((90 * 1 + 120 * 2) / 240)
    assert report.answered.latency.mean == pytest.approx((90 * 1 + 120 * 2) / 210)
    a, b = (report.where(tenant=tenant) for tenant in "ab")
    assert b.extra_cost_ratio(a) == pytest.approx(1)
    assert report.answered_by == {"a.test": 90, "b.test": 120}
    assert math.isnan(report.where(tenant="nobody").success_ratio)


def test_tables() -> None:
    report = example()
    assert str(report).splitlines() == [
        " calls success      mean       p50       p95       p99  requests/call   USD/1000",
        "   240  87.50%      1375      1000      2000      2000          1.000      1.571",
        "",
        "upstream requests  in flight      mean       p99        USD  failures",
        "a.test        120          1      1000      1000      0.090  30 503",
        "b.test        120          2      2000      2000      0.240",
    ]
    assert [line[:2] for line in table({"x": report, "yy": report}).splitlines()] == ["  ", "x ", "yy"]


# What is measured does not disturb


def test_policies_are_as_they_were_for_the_next_simulation() -> None:
    breaker = CircuitBreaker(consecutive_failures=1)
    network = Network(Upstream(outages=[Outage(0, 5)]))
    first, second = (simulate([breaker], network, Paced(1), calls=10).to_json() for _ in range(2))
    assert first == second


def test_what_is_wrong_with_a_program_is_raised() -> None:
    async def broken(call: Call, call_next: CallNext) -> Reply:
        raise ZeroDivisionError

    with pytest.raises(BaseExceptionGroup) as raised:
        simulate([broken], Network(Upstream()), Burst(1), calls=1)
    assert raised.group_contains(ZeroDivisionError)


def test_nothing_is_left_in_flight() -> None:
    network = Network(Upstream(first_token=1, failures={"cut": 0.2, "reset": 0.2, "500": 0.2}))

    async def run() -> list[int]:
        await drive(
            [Deadline(3), PATIENT],
            network,
            Traffic(arrivals=Poisson(5), request=Chat(stream_ratio=0.5)),
            calls=200,
        )
        return [serving.in_flight for serving in network.serving.values()]

    assert run_virtual(run) == [0]


# Requests


def test_both_apis_are_spoken_streamed_or_not() -> None:
    network = Network(Upstream(first_token=1, per_token=0.01, output_tokens=101, input_price=1))
    ask = Chat(api="anthropic", stream_ratio=0.5, system_tokens=30, prompt_tokens=100)
    report = simulate([Retry()], network, Traffic(arrivals=Paced(1), request=ask), calls=100)
    assert report.success_ratio == 1
    assert report.usd == pytest.approx(100 * 100 / 1e6), "the system prompt is part of the prompt"
    assert {round(call.seconds, 6) for call in report.calls} == {2}
    assert 30 < sum(call.to_first_token == pytest.approx(1) for call in report.calls) < 70


def test_what_else_a_request_has() -> None:
    ask = Chat(
        model={"a": 1, "b": 0},
        system_tokens=10,
        max_tokens=Uniform(5, 6),
        key="secret",
        url="https://a.test/v1/",
        fields={"temperature": 0},
    )
    request = ask(Random(1))
    assert request.url == "https://a.test/v1/chat/completions"
    assert request.header(b"authorization") == b"Bearer secret"
    body = dict(request.json)
    assert [message["role"] for message in body.pop("messages")] == ["system", "user"]  # type: ignore[attr-defined]
    assert body.pop("max_tokens") in (5, 6)
    assert body == {"model": "a", "temperature": 0}


@pytest.mark.parametrize(
    "make",
    [
        lambda: Chat(stream_ratio=1.5),
        lambda: Chat(questions=0),
        lambda: Chat(system_tokens=-1),
        lambda: Chat(api="gemini"),  # type: ignore[arg-type]
        lambda: Chat(model={}),
    ],
)
def test_what_cannot_be_asked_is_refused(make: Callable[[], object]) -> None:
    with pytest.raises(ValueError):
        make()


def test_a_connection_that_fails_is_the_clients_to_see() -> None:
    report = simulate([], Network(Upstream(failures={"reset": 1.0})), Paced(1), calls=2)
    assert [(call.ok, call.status, call.error_type) for call in report.calls] == [
        (False, None, "read_error")
    ] * 2


# Routing


@BOTH
def test_a_router_goes_round_an_outage_and_comes_back(backend: Backend) -> None:
    network = Network(
        {
            "https://first.test/v1": Upstream(first_token=1, failure_latency=0.25, outages=[Outage(10, 20)]),
            "https://second.test/v1": Upstream(first_token=2, output_price=10),
        }
    )
    never = {
        name: CircuitBreaker(consecutive_failures=1000, minimum_throughput=1000)
        for name in ("first", "second")
    }
    targets = [
        Target(name=name, url=f"https://{name}.test/v1", policies=[breaker])
        for name, breaker in never.items()
    ]
    policies: list[Policy] = [Retry(), Router(targets, balancer=Priority())]
    report = simulate(policies, network, Paced(1), duration=30, backend=backend)
    assert report.success_ratio == 1
    assert report.answered_by == {"first.test": 20, "second.test": 10}
    assert [call.attempts for call in report.calls] == [1] * 10 + [2] * 10 + [1] * 10
    assert report.where(since=10, until=20).latency.mean == pytest.approx(2.25)
    assert report.usd == pytest.approx(10 * 100 * 10 / 1e6)
