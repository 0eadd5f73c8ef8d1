"""A target that answers at once with a 500 has nothing in flight and is quick: it must not attract traffic by that."""

from __future__ import annotations

from random import Random

import pytest

from resilient_llm.core.target_load import TargetLoad
from resilient_llm.routing.balancers import Balancer
from tests.routing.balancers.balancing import BY_LOAD, Answer, Traffic, pool_of

each_balancer = pytest.mark.parametrize("balancer", BY_LOAD, ids=lambda balancer: balancer.strategy)


def failing_until(end: float, random: Random) -> Traffic:
    def answers(load: TargetLoad, now: float) -> Answer:
        if load.name == "c" and now < end:
            return Answer(0.01, ok=False)
        return Answer(random.expovariate(1 / 3), random.uniform(0.3, 0.9))

    return Traffic(BY_LOAD[0], pool_of(1, 1, 1), answers, random)


@each_balancer
@pytest.mark.parametrize("rate", [2, 10, 100])
@pytest.mark.parametrize("seed", range(2))
def test_it_gets_less_than_a_tenth_without_any_circuit(balancer: Balancer, rate: float, seed: int) -> None:
    traffic = failing_until(float("inf"), Random(seed))
    traffic.balancer = balancer
    sent = traffic.run(traffic.arrivals(rate, stop=max(20, 1000 / rate)))
    assert sent["c"] / sent.total() < 0.1
    assert sent["c"] > 0  # it is found out when it recovers


@each_balancer
@pytest.mark.parametrize("rate", [1, 20])
def test_it_gets_its_share_again_after_it_has_recovered(balancer: Balancer, rate: float) -> None:
    traffic = failing_until(60, Random(1))
    traffic.balancer = balancer
    traffic.run(traffic.arrivals(rate, stop=60))
    traffic.run(traffic.arrivals(rate, start=60, stop=180))
    sent = traffic.run(traffic.arrivals(rate, start=180, stop=300))
    assert sent["c"] / sent.total() > 0.2
