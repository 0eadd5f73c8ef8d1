"""Peak EWMA: the quicker one of two, and never by failing."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from resilient_llm.core.target_load import Pool, TargetLoad
from resilient_llm.routing.balancers import PeakEWMA
from tests.routing.balancers.balancing import Answer, Call, Traffic, answered, busy, failed, first, pool_of

BALANCER = PeakEWMA()


def test_of_two_idle_targets_the_slow_one_is_never_taken() -> None:
    pool = pool_of(1, 1)
    answered(pool.loads[0], 0.5)
    answered(pool.loads[1], 0.6)
    assert {first(BALANCER, pool, Random(seed)).name for seed in range(200)} == {"a"}


def test_of_three_idle_targets_the_slowest_is_never_taken() -> None:
    pool = pool_of(1, 1, 1)
    for load, latency in zip(pool, (0.5, 0.6, 0.7), strict=True):
        answered(load, latency)
    drawn = Counter(first(BALANCER, pool, Random(seed)).name for seed in range(3000))
    assert drawn.keys() == {"a", "b"}
    assert drawn["a"] / 3000 == pytest.approx(2 / 3, abs=0.05)  # two of the three pairs


def test_the_quick_one_is_taken_until_its_queue_makes_it_as_slow() -> None:
    pool = pool_of(1, 1)
    answered(pool.loads[0], 1.0)
    answered(pool.loads[1], 4.0)
    busy(pool.loads[0], 2)
    assert first(BALANCER, pool, Random(1)).name == "a"  # 3 to 4
    busy(pool.loads[0], 2)
    assert first(BALANCER, pool, Random(1)).name == "b"  # 5 to 4


def test_one_late_token_counts_at_once() -> None:
    pool = pool_of(1, 1)
    answered(pool.loads[0], 0.5, times=50)
    answered(pool.loads[1], 0.6, times=50)
    answered(pool.loads[0], 5.0)
    assert first(BALANCER, pool, Random(1)).name == "b"
    assert BALANCER.score(pool.loads[0], pool, Call(), 0) == 5.0
    answered(pool.loads[0], 0.5, now=25)
    answered(pool.loads[1], 0.6, now=25)
    assert BALANCER.score(pool.loads[0], pool, Call(), 25) < 1.0


def test_a_cold_target_counts_as_the_quickest() -> None:
    pool = pool_of(1, 1, 1)
    answered(pool.loads[0], 0.5)
    answered(pool.loads[1], 5.0)
    scores = [BALANCER.score(load, pool, Call(), 0) for load in pool]
    assert scores == [0.5, 5.0, 0.5]


def test_where_all_are_cold_the_least_busy_is_taken() -> None:
    pool = pool_of(1, 1)
    busy(pool.loads[0], 1)
    assert {first(BALANCER, pool, Random(seed)).name for seed in range(50)} == {"b"}
    assert BALANCER.score(pool.loads[0], pool, Call(), 0) == 2.0


def test_failing_makes_a_target_dear_not_quick() -> None:
    pool = pool_of(1, 1)
    answered(pool.loads[0], 0.5)
    answered(pool.loads[1], 0.5)
    failed(pool.loads[0], times=3)
    assert {first(BALANCER, pool, Random(seed)).name for seed in range(50)} == {"b"}


def test_the_pair_is_drawn_by_weight_and_the_better_one_comes_first() -> None:
    pool, random = pool_of(1, 1, 1, 97), Random(1)
    for load, latency in zip(pool, (0.1, 0.2, 0.3, 40.0), strict=True):
        answered(load, latency)
    order = list(BALANCER.order(pool, Call(), 0, random))
    assert (
        order[1].name == "d"
    )  # drawn nearly always, and dearer for all its weight than the one it is drawn with
    scores = [BALANCER.score(load, pool, Call(), 0) for load in order]
    assert scores[2] <= scores[3]


def test_a_pair_is_found_beside_one_that_has_all_the_weight() -> None:
    pool = pool_of(1e12, 1, 1)
    for seed in range(50):
        assert len(set(BALANCER.order(pool, Call(), 0, Random(seed)))) == 3


def test_a_target_that_gets_slow_loses_its_traffic_and_gets_it_back() -> None:
    def answers(load: TargetLoad, now: float) -> Answer:
        latency = 5.0 if load.name == "c" and 60 <= now < 120 else 0.5
        return Answer(latency + 1.5, latency)

    traffic = Traffic(BALANCER, pool_of(1, 1, 1), answers, Random(1))
    shares = []
    for start in (0, 60, 120, 180):
        sent = traffic.run(traffic.arrivals(20, start=start, stop=start + 60))
        shares.append(sent["c"] / sent.total())
    assert shares[0] == pytest.approx(1 / 3, abs=0.05)
    assert shares[1] < 0.1
    assert shares[3] == pytest.approx(1 / 3, abs=0.05)


def test_of_three_hundred_two_are_looked_at() -> None:
    class Looked(TargetLoad):
        __slots__ = ("looked",)

        def peak_latency(self, now: float) -> float | None:
            looked.append(self)
            return super().peak_latency(now)

    looked: list[TargetLoad] = []
    pool = Pool([Looked(f"{number}") for number in range(300)])
    order = BALANCER.order(pool, Call(), 0, Random(1))
    next(order)
    assert len(looked) == 2
