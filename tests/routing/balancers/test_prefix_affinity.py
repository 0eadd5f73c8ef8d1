"""Prefix affinity: the same prefix to the same target, nobody beyond its share."""

from __future__ import annotations

import math
from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient_llm.core.target_load import Pool, TargetLoad
from resilient_llm.routing.balancers import PrefixAffinity
from tests.routing.balancers.balancing import Answer, Call, Traffic, busy, failed, first, pool_of

BALANCER = PrefixAffinity()
SLOTS = 4096


def home(pool: Pool, prefix: int) -> TargetLoad:
    return first(BALANCER, pool, Random(0), call=Call(hashed=prefix))


def test_a_prefix_stays_where_it_is() -> None:
    for size in (3, 40):
        pool, again = pool_of(*[1] * size), pool_of(*[1] * size)
        for prefix in range(200):
            assert home(pool, prefix).name == home(pool, prefix).name == home(again, prefix).name


def test_where_a_prefix_goes_is_the_same_in_every_process_and_version() -> None:
    pool = Pool([TargetLoad("east"), TargetLoad("west"), TargetLoad("north")])
    assert [home(pool, prefix).name[0] for prefix in range(24)] == [*"nwwneewwwnnnwewweewweeee"]


@pytest.mark.parametrize("weights", [(1, 1), (1, 1, 1), (1, 2, 5), (0.5, 0.25, 0.25, 3), (1,) * 12])
def test_prefixes_are_shared_by_weight(weights: tuple[float, ...]) -> None:
    pool = pool_of(*weights)
    homes = Counter(home(pool, slot).name for slot in range(SLOTS))
    for load in pool:
        share = load.weight / sum(weights)
        assert abs(homes[load.name] - SLOTS * share) < 4 * math.sqrt(SLOTS * share * (1 - share))


@pytest.mark.parametrize("size", [2, 3, 8, 12, 60])
def test_taking_one_away_moves_only_its_own_prefixes(size: int) -> None:
    random = Random(size)
    loads = [TargetLoad(f"target-{number}", weight=random.choice([0.5, 1, 3])) for number in range(size)]
    whole, gone = Pool(loads), loads[size // 2]
    rest = Pool([load for load in loads if load is not gone])
    moved = 0
    for slot in range(0, SLOTS, 2):
        before, after = home(whole, slot), home(rest, slot)
        if before is gone:
            moved += 1
        else:
            assert after is before
    share = gone.weight / whole.total_weight
    assert abs(moved - SLOTS / 2 * share) < 4 * math.sqrt(SLOTS / 2 * share * (1 - share))


def test_what_a_target_cannot_take_goes_to_the_next_in_the_prefixs_order() -> None:
    pool = pool_of(*[1] * 12)
    order = list(BALANCER.order(pool, Call(hashed=7), 0, Random(1)))
    without = Pool([load for load in pool if load is not order[0]])
    assert list(BALANCER.order(without, Call(hashed=7), 0, Random(1))) == order[1:]


@settings(max_examples=60)
@given(
    weights=st.lists(st.sampled_from([0.5, 1, 1, 2, 10]), min_size=1, max_size=12),
    ratio=st.sampled_from([1.0, 1.25, 2.0]),
    steps=st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=120),
)
def test_no_target_takes_more_than_its_bounded_share(
    weights: list[float], ratio: float, steps: list[tuple[int, bool]]
) -> None:
    balancer, pool = PrefixAffinity(max_load_ratio=ratio), pool_of(*weights)
    out: list[TargetLoad] = []
    for prefix, ends in steps:  # few prefixes: all would go to one or two targets
        if ends and out:
            out.pop(prefix % len(out)).finished(0, 100, ok=True, first_token=0.5)
            continue
        load = first(balancer, pool, Random(1), call=Call(hashed=prefix))
        busy(load, 1)
        out.append(load)
        assert load.in_flight <= math.ceil(ratio * len(out) * load.weight / sum(weights) - 1e-9)


def test_one_prefix_alone_spreads_as_far_as_it_must() -> None:
    pool = pool_of(1, 1, 1)
    for _ in range(300):
        busy(home(pool, 1), 1)
    loads = sorted(load.in_flight for load in pool)
    assert loads[2] == 125
    assert loads[0] >= 50


def test_most_calls_of_a_conversation_go_where_its_cache_is() -> None:
    pool = pool_of(1, 1, 1, 1)
    homes = {prefix: home(pool, prefix) for prefix in range(200)}
    prefixes: list[int] = []
    at_home: list[bool] = []

    def make_call(random: Random) -> Call:
        prefixes.append(random.randrange(200))
        return Call(hashed=prefixes[-1])

    def answers(load: TargetLoad, _now: float) -> Answer:
        at_home.append(load is homes[prefixes[-1]])
        return Answer(2.0, 0.5)

    traffic = Traffic(BALANCER, pool, answers, Random(1), make_call=make_call)
    traffic.run(traffic.arrivals(20, stop=100))
    assert sum(at_home) / len(at_home) > 0.75  # by chance it would be a quarter


def test_one_that_came_back_has_a_smaller_share() -> None:
    pool = pool_of(1, 1)
    back, other = pool
    back.came_back(0)
    busy(back, 2)
    busy(other, 16)
    at_back = next(slot for slot in range(100) if BALANCER._table(pool).all(slot)[0] is back)
    assert first(BALANCER, pool, Random(1), now=1, call=Call(hashed=at_back)) is other
    assert first(BALANCER, pool, Random(1), now=31, call=Call(hashed=at_back)) is back


def test_where_nobody_has_room_the_least_busy_is_first() -> None:
    pool = pool_of(1, 1, 1)
    for load, times in zip(pool, (30, 10, 20), strict=True):
        failed(load, times=times)
    order = [load.name for load in BALANCER.order(pool, Call(), 0, Random(1))]
    assert order == ["b", "c", "a"]


def test_scores_are_places() -> None:
    pool = pool_of(*[1] * 12)
    order = list(BALANCER.order(pool, Call(hashed=5), 0, Random(1)))
    assert [BALANCER.score(load, pool, Call(hashed=5), 0) for load in order] == [*range(8), *[8] * 4]
    busy(order[0], 10)
    assert BALANCER.score(order[0], pool, Call(hashed=5), 0) == 12
