"""Weighted random: shares are the weights', to within chance."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from resilient_llm.core.target_load import Pool, TargetLoad
from resilient_llm.routing.balancers import WeightedRandom
from tests.routing.balancers.balancing import Call, busy, failed, first, four_sigma, pool_of

BALANCER = WeightedRandom()
DRAWS = 8000


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("weights", [(1, 1), (1, 2, 5), (0.1, 1, 10, 0.5), tuple(range(1, 13))])
def test_shares_are_as_weights(weights: tuple[float, ...], seed: int) -> None:
    pool, random = pool_of(*weights), Random(seed)
    busy(pool.loads[0], 1000)  # which makes no difference
    drawn = Counter(first(BALANCER, pool, random) for _ in range(DRAWS))
    for load in pool:
        share = load.weight / sum(weights)
        assert abs(drawn[load] - DRAWS * share) < four_sigma(DRAWS, share)


@pytest.mark.parametrize("seed", range(3))
def test_shares_are_as_what_is_left_of_weights(seed: int) -> None:
    pool, random = pool_of(1, 1, 2), Random(seed)
    failed(pool.loads[0], times=3)
    pool.loads[1].came_back(-15)
    weights = [load.effective_weight(0) for load in pool]
    assert weights == pytest.approx([1 / 16, 0.5, 2])
    drawn = Counter(first(BALANCER, pool, random) for _ in range(DRAWS))
    for load, weight in zip(pool, weights, strict=True):
        share = weight / sum(weights)
        assert abs(drawn[load] - DRAWS * share) < four_sigma(DRAWS, share)


def test_the_second_is_drawn_from_the_others_by_weight() -> None:
    pool, random = pool_of(1, 2, 5), Random(4)
    a, b, c = pool
    seconds = Counter[TargetLoad]()
    while seconds.total() < DRAWS:
        order = BALANCER.order(pool, Call(), 0, random)
        if next(order) is c:
            seconds[next(order)] += 1
    assert abs(seconds[a] - DRAWS / 3) < four_sigma(DRAWS, 1 / 3)
    assert seconds[a] + seconds[b] == DRAWS


def test_shares_hold_where_all_fail() -> None:
    pool, random = pool_of(1, 3), Random(5)
    for load in pool:
        failed(load, times=100)
    drawn = Counter(first(BALANCER, pool, random) for _ in range(DRAWS))
    assert abs(drawn[pool.loads[0]] - DRAWS / 4) < four_sigma(DRAWS, 1 / 4)


def test_three_hundred() -> None:
    pool, random = Pool([TargetLoad(f"{number}", weight=1 + number % 3) for number in range(300)]), Random(6)
    drawn = Counter(first(BALANCER, pool, random).weight for _ in range(DRAWS))
    for weight in (1, 2, 3):
        assert abs(drawn[weight] - DRAWS * weight / 6) < four_sigma(DRAWS, weight / 6)
