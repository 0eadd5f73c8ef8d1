"""Weighted least connections: who has least to do for what it can do."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from random import Random

import pytest

from resilient_llm.core.target_load import Pool, TargetLoad
from resilient_llm.routing.balancers import LeastOutstandingTokens, WeightedLeastConnections
from tests.routing.balancers.balancing import (
    Answer,
    Call,
    Traffic,
    answered,
    busy,
    failed,
    first,
    four_sigma,
    pool_of,
)

BALANCER = WeightedLeastConnections()


@pytest.mark.parametrize(
    ("in_flight", "weights", "best"),
    [
        ((1, 0), (1, 1), "b"),
        ((0, 1), (1, 1), "a"),
        ((5, 4, 6), (1, 1, 1), "b"),
        ((2, 5), (1, 3), "b"),  # 3 to 2
        ((1, 5), (1, 2), "a"),  # 2 to 3
        ((1, 0), (3, 1), "a"),  # 2/3 to 1
    ],
)
def test_the_lowest_load_for_its_weight_is_first(
    in_flight: tuple[int, ...], weights: tuple[float, ...], best: str
) -> None:
    pool = pool_of(*weights)
    for load, calls in zip(pool, in_flight, strict=True):
        busy(load, calls)
    for seed in range(20):
        assert first(BALANCER, pool, Random(seed)).name == best


def test_the_order_is_that_of_scores() -> None:
    pool = pool_of(1, 1, 1, 1)
    for load, calls in zip(pool, (4, 1, 3, 2), strict=True):
        busy(load, calls)
    order = list(BALANCER.order(pool, Call(), 0, Random(1)))
    assert "".join(load.name for load in order) == "bdca"
    assert [BALANCER.score(load, pool, Call(), 0) for load in order] == [2, 3, 4, 5]


def test_a_draw_between_busy_targets_is_decided_by_chance() -> None:
    pool, random = pool_of(1, 1, 1), Random(1)
    for load, calls in zip(pool, (3, 3, 4), strict=True):
        busy(load, calls)
    drawn = Counter(first(BALANCER, pool, random).name for _ in range(4000))
    assert drawn["c"] == 0
    assert abs(drawn["a"] - 2000) < four_sigma(4000, 0.5)


@pytest.mark.parametrize("seed", range(3))
def test_among_idle_targets_weights_decide(seed: int) -> None:
    pool, random = pool_of(1, 2, 5), Random(seed)
    drawn = Counter(first(BALANCER, pool, random) for _ in range(8000))
    for load in pool:
        share = load.weight / 8
        assert abs(drawn[load] - 8000 * share) < four_sigma(8000, share)


@pytest.mark.parametrize("balancer", [BALANCER, LeastOutstandingTokens()])
@pytest.mark.parametrize("rate", [0.05, 2, 50])
def test_shares_converge_to_weights_where_calls_take_as_long_everywhere(
    balancer: WeightedLeastConnections | LeastOutstandingTokens, rate: float
) -> None:
    pool, calls = pool_of(1, 2, 5), 6000
    traffic = Traffic(balancer, pool, lambda _load, _now: Answer(2.0, 0.5), Random(1))
    sent = traffic.run(islice(traffic.arrivals(rate, stop=1e9), calls))
    for load in pool:
        # Busy targets are kept even on purpose; chance has a say only where they are idle. At about four calls in
        # flight whole calls are a coarse measure of weights: half a call of eight is six per cent.
        assert abs(sent[load.name] - calls * load.weight / 8) < max(
            four_sigma(calls, load.weight / 8), 0.06 * calls
        )


def test_latency_counts_as_against_the_pools_best() -> None:
    # Time to first token of seconds, as language models have: against a fixed two seconds all would be the same.
    pool = pool_of(1, 1, 1)
    for load, latency in zip(pool, (3.0, 6.0, 60.0), strict=True):
        answered(load, latency)
    scores = [BALANCER.score(load, pool, Call(), 0) for load in pool]
    assert scores == pytest.approx([1, 1 / (1.25 / 2), 1 / 0.1])


def test_small_differences_of_latency_are_none() -> None:
    pool = pool_of(1, 1)
    answered(pool.loads[0], 1.0)
    answered(pool.loads[1], 1.2)
    assert [BALANCER.score(load, pool, Call(), 0) for load in pool] == [1, 1]
    strict = WeightedLeastConnections(slack_ratio=0)
    assert [strict.score(load, pool, Call(), 0) for load in pool] == pytest.approx([1, 1.2])


def test_a_cold_target_counts_as_quick() -> None:
    pool = pool_of(1, 1, 1)
    answered(pool.loads[0], 1.0)
    answered(pool.loads[1], 2.0)
    scores = [BALANCER.score(load, pool, Call(), 0) for load in pool]
    assert scores[2] == scores[0] < scores[1]


def test_failures_count_twice_for_the_weight_and_as_calls_in_flight() -> None:
    pool = pool_of(1, 1)
    failed(pool.loads[0])
    assert BALANCER.score(pool.loads[0], pool, Call(), 0) == (1 + 1) / 0.5**2


def test_of_many_the_least_busy_of_a_few_is_taken() -> None:
    pool, random = Pool([TargetLoad(f"{number}") for number in range(300)]), Random(1)
    for number, load in enumerate(pool):
        busy(load, 1 if number % 2 else 50)
    # Eight draws miss all of one half once in 256 times.
    wrong = sum(first(BALANCER, pool, random).in_flight > 1 for _ in range(4000))
    assert wrong < 4000 / 256 + four_sigma(4000, 1 / 256)


def test_many_share_by_weight_too() -> None:
    weights = [1.0] * 20 + [30.0]
    pool = pool_of(*weights)
    traffic = Traffic(BALANCER, pool, lambda _load, _now: Answer(2.0, 0.5), Random(1))
    sent = traffic.run(islice(traffic.arrivals(200, stop=1e9), 6000))
    assert sent[pool.loads[-1].name] / 6000 == pytest.approx(0.6, abs=0.05)


def test_tokens_count_where_calls_differ_in_length() -> None:
    balancer, pool = LeastOutstandingTokens(), pool_of(1, 1, 2)
    busy(pool.loads[0], 1, tokens=50_000)
    busy(pool.loads[1], 10, tokens=500)
    busy(pool.loads[2], 4, tokens=3_000)
    assert first(balancer, pool, Random(1)).name == "b"
    assert first(BALANCER, pool, Random(1)).name == "a"
    scores = [balancer.score(load, pool, Call(tokens=100), 0) for load in pool]
    assert scores == [50_000 + 1 + 101, 5_000 + 10 + 101, (12_000 + 4 + 101) / 2]


def test_calls_without_an_estimate_are_counted_all_the_same() -> None:
    balancer, pool = LeastOutstandingTokens(), pool_of(1, 1)
    busy(pool.loads[0], 3, tokens=0)
    busy(pool.loads[1], 2, tokens=0)
    assert first(balancer, pool, Random(1), call=Call(tokens=0)).name == "b"
