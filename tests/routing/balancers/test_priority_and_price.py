"""Priority and price: strict orders, whatever the load."""

from __future__ import annotations

import math
from random import Random

import pytest

from resilient_llm.core.target_load import Pool, TargetLoad
from resilient_llm.routing.balancers import Cheapest, Priority
from tests.routing.balancers.balancing import Call, busy, failed, first, pool_of


def test_priority_is_the_order_of_the_list() -> None:
    pool = pool_of(0.1, 5, 1)
    busy(pool.loads[0], 1000)
    failed(pool.loads[0], times=1000)
    pool.loads[0].came_back(0)
    assert list(Priority().order(pool, Call(), 0, Random(1))) == list(pool.loads)
    assert [Priority().score(load, pool, Call(), 0) for load in pool] == [0, 1, 2]


def priced(*prices: float) -> Pool:
    return Pool([TargetLoad(f"{number}", price=price) for number, price in enumerate(prices)])


def test_the_lowest_price_is_first_and_an_unknown_one_last() -> None:
    pool = priced(3, 0, 0.5, 10)
    busy(pool.loads[2], 1000)
    order = list(Cheapest().order(pool, Call(), 0, Random(1)))
    assert [load.price for load in order] == [0.5, 3, 10, 0]
    assert [Cheapest().score(load, pool, Call(), 0) for load in order] == [0.5, 3, 10, math.inf]


def test_among_equals_the_least_busy_is_first() -> None:
    pool = priced(0.5, 0.5, 3, 0.5)
    for load, calls in zip(pool, (3, 1, 0, 2), strict=True):
        busy(load, calls)
    order = list(Cheapest().order(pool, Call(), 0, Random(1)))
    assert [load.name for load in order] == ["1", "3", "0", "2"]


def test_many_equals_share_the_load() -> None:
    pool, random = priced(*[0.5] * 100, *[3.0] * 100), Random(1)
    for _ in range(1000):
        busy(first(Cheapest(), pool, random), 1)
    loads = [load.in_flight for load in pool]
    assert sum(loads[:100]) == 1000
    assert max(loads) <= 14  # ten each, and hardly more: the least busy of eight


@pytest.mark.parametrize("prices", [(0.0, 0.0), (1.0, 1.0)])
def test_what_is_worked_out_of_a_pool_is_another_pools_no_more(prices: tuple[float, float]) -> None:
    balancer = Cheapest()
    for pool in (priced(*prices), priced(2.0, 1.0)):
        assert set(balancer.order(pool, Call(), 0, Random(1))) == set(pool)
