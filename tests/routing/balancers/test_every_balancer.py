"""What holds for every balancer, whatever the pool."""

from __future__ import annotations

import dataclasses
import math
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient_llm.core.target_load import Pool, TargetLoad
from resilient_llm.routing import balancers
from resilient_llm.routing.balancers import Balancer, PrefixAffinity, WeightedLeastConnections
from tests.routing.balancers.balancing import BALANCERS, BY_LOAD, Call, answered, busy, failed, first, pool_of

each_balancer = pytest.mark.parametrize("balancer", BALANCERS, ids=lambda balancer: balancer.strategy)


def any_pool(size: int, seed: int) -> Pool:
    """Make a pool of targets that anything may have happened to in the last minute."""
    random, loads = Random(seed), []
    for number in range(size):
        load = TargetLoad(
            f"target-{number}",
            weight=random.choice([1e-6, 0.1, 1, 1, 1, 2, 1e6]),
            price=random.choice([0, 0.5, 2]),
            slow_start=random.choice([0, 30]),
        )
        if random.random() < 0.2:
            load.came_back(random.uniform(0, 60))
        if random.random() < 0.5:
            answered(load, random.choice([0, 0.3, 60]), now=random.uniform(0, 60))
        if random.random() < 0.3:
            failed(load, now=random.uniform(0, 60), times=random.randint(1, 50))
        busy(load, random.choice([0, 0, 1, 3, 100]), now=60, tokens=random.choice([0, 100, 1e12]))
        loads.append(load)
    return Pool(loads)


pools = st.builds(any_pool, st.sampled_from([1, 2, 3, 5, 8, 9, 12, 40]), st.integers(0, 2**32))
calls = st.builds(Call, st.sampled_from([0.0, 1.0, 500.0, 1e12]), st.integers(0, 2**64 - 1))


@each_balancer
@settings(max_examples=60)
@given(pool=pools, call=calls, seed=st.integers(), now=st.floats(60, 120))
def test_every_target_comes_out_once(
    balancer: Balancer, pool: Pool, call: Call, seed: int, now: float
) -> None:
    order = list(balancer.order(pool, call, now, Random(seed)))
    assert len(order) == len(pool)
    assert set(order) == set(pool)
    assert order == list(balancer.order(pool, call, now, Random(seed)))


@each_balancer
@settings(max_examples=30)
@given(pool=pools, call=calls, now=st.floats(60, 120))
def test_scores_are_numbers(balancer: Balancer, pool: Pool, call: Call, now: float) -> None:
    for load in pool:
        score = balancer.score(load, pool, call, now)
        assert score >= 0
        assert score < math.inf or (balancer.strategy == "cheapest" and not load.price)


@each_balancer
def test_three_hundred_come_out_once_too(balancer: Balancer) -> None:
    pool, random = Pool([TargetLoad(f"{number}") for number in range(300)]), Random(3)
    for load in pool:
        busy(load, random.randint(0, 5))
    order = list(balancer.order(pool, Call(), 0, random))
    assert len(order) == len(set(order)) == 300


@each_balancer
def test_one_target_is_always_the_one(balancer: Balancer) -> None:
    pool = pool_of(1)
    failed(pool.loads[0], times=100)
    assert list(balancer.order(pool, Call(), 0, Random(1))) == [pool.loads[0]]


@each_balancer
def test_it_changes_nothing_of_a_target(balancer: Balancer) -> None:
    pool = pool_of(1, 2, 3)
    failed(pool.loads[0])
    busy(pool.loads[1], 2)
    before = [[getattr(load, name) for name in load.__slots__] for load in pool]
    list(balancer.order(pool, Call(), 5, Random(1)))
    assert [[getattr(load, name) for name in load.__slots__] for load in pool] == before


@each_balancer
def test_what_it_keeps_of_a_pool_does_not_grow_with_calls(balancer: Balancer) -> None:
    pool, random = pool_of(1, 2, 3), Random(1)
    for number in range(1000):
        first(balancer, pool, random, call=Call(hashed=number))
    assert len(pool.cache) <= 1


@each_balancer
def test_it_says_what_it_is(balancer: Balancer) -> None:
    assert balancer.reason in {"priority", "weight", "latency", "cost", "affinity"}
    assert type(balancer).__name__ in balancers.__all__
    assert [other.strategy for other in BALANCERS].count(balancer.strategy) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        balancer.strategy = "another"  # type: ignore[misc]


@pytest.mark.parametrize("balancer", BY_LOAD, ids=lambda balancer: balancer.strategy)
def test_one_that_came_back_gets_its_share_slowly(balancer: Balancer) -> None:
    shares = []
    for age in (0.0, 15.0, 30.0):
        random, got = Random(5), 0
        for number in range(600):
            pool = pool_of(1, 1)
            pool.loads[0].came_back(100 - age)
            # All are about as busy as they should be: a tenth, a half, all of what the other has.
            busy(pool.loads[0], round(10 * pool.loads[0].ramp(100)) + random.randint(-1, 1))
            busy(pool.loads[1], 10 + random.randint(-1, 1))
            got += first(balancer, pool, random, now=100, call=Call(hashed=number)) is pool.loads[0]
        shares.append(got / 600)
    if balancer.strategy == "weighted_random":
        assert shares == pytest.approx([1 / 11, 1 / 3, 1 / 2], abs=0.08)
    else:
        assert all(0 < share < 1 for share in shares)


WRONG: list[tuple[type, str, object]] = [
    *((WeightedLeastConnections, "slack_ratio", value) for value in (-0.1, math.nan, math.inf, "1", True)),
    *((WeightedLeastConnections, "min_speed_ratio", value) for value in (0, -1, 1.1, math.nan, None)),
    *((PrefixAffinity, "max_load_ratio", value) for value in (0.9, math.nan, math.inf, "2")),
]


@pytest.mark.parametrize(("balancer", "option", "value"), WRONG)
def test_an_option_out_of_range_is_named(balancer: type, option: str, value: object) -> None:
    wrong: dict[str, Any] = {option: value}
    with pytest.raises(ValueError, match=rf"^{option}={value!r}: allowed are "):
        balancer(**wrong)
