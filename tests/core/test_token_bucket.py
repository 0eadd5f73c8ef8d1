"""One bucket: what it grants in any time, and what debts, pauses and clocks do to it."""

from collections.abc import Callable
from fractions import Fraction
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient_llm.core.token_bucket import TokenBucket

SLACK = 1e-6
"""Seconds of refill that the bucket may be early by."""


def drained(capacity: float = 10.0, rate: float = 1.0) -> TokenBucket:
    bucket = TokenBucket(capacity, rate, 0.0)
    bucket.take(capacity, 0.0)
    return bucket


def grab(bucket: TokenBucket, amount: float, now: float) -> bool:
    if bucket.wait(amount, now):
        return False
    bucket.take(amount, now)
    return True


def at_once(bucket: TokenBucket, amount: float, now: float) -> bool:
    return bucket.take_at_once(amount, now)


Take = Callable[[TokenBucket, float, float], bool]
BOTH_WAYS = pytest.mark.parametrize("take", [grab, at_once])


@BOTH_WAYS
def test_it_is_full_at_first_and_empty_when_that_is_taken(take: Take) -> None:
    bucket = TokenBucket(3.0, 1.0, 100.0)
    assert [take(bucket, 1.0, 100.0) for _ in range(4)] == [True, True, True, False]


@BOTH_WAYS
def test_the_wait_is_exactly_long_enough(take: Take) -> None:
    bucket = drained(capacity=10.0, rate=0.3)
    wait = bucket.wait(7.0, 0.0)
    assert wait == pytest.approx(7 / 0.3)
    assert not take(bucket, 7.0, wait - 0.01)
    assert take(bucket, 7.0, wait)


def test_more_than_the_capacity_waits_until_it_is_full_and_leaves_a_debt() -> None:
    bucket = drained(capacity=10.0, rate=1.0)
    assert bucket.wait(25.0, 0.0) == pytest.approx(10)
    assert not bucket.take_at_once(25.0, 10.0), "not unless somebody means it"
    bucket.take(25.0, 10.0)
    assert bucket.level(10.0) == -15
    assert bucket.wait(1.0, 10.0) == pytest.approx(16)


def test_what_others_take_before_is_waited_for_too() -> None:
    bucket = drained(capacity=10.0, rate=2.0)
    assert bucket.wait(4.0, 0.0, ahead=100.0) == pytest.approx(52)
    assert bucket.wait(40.0, 0.0, ahead=100.0) == pytest.approx(55)


def test_nothing_costs_no_wait_even_in_debt() -> None:
    bucket = drained()
    bucket.charge(5.0, 0.0)
    assert bucket.wait(0.0, 0.0) == 0
    assert bucket.take_at_once(0.0, 0.0)


def test_what_is_given_back_never_makes_more_than_the_capacity() -> None:
    bucket = TokenBucket(10.0, 1.0, 0.0)
    bucket.take(4.0, 0.0)
    bucket.give_back(3.0, 0.0)
    assert bucket.level(0.0) == 9
    bucket.give_back(3.0, 0.0)
    assert bucket.level(0.0) == 10


def test_debt_is_bounded_by_one_capacity() -> None:
    bucket = drained(capacity=10.0)
    bucket.charge(1_000.0, 0.0)
    assert bucket.level(0.0) == -10
    bucket.charge(1.0, 0.0)
    assert bucket.level(0.0) == -10


def test_a_debt_of_more_is_not_forgiven_by_a_charge() -> None:
    bucket = TokenBucket(10.0, 1.0, 0.0)
    bucket.take(35.0, 0.0)
    bucket.charge(5.0, 0.0)
    assert bucket.level(0.0) == -25


def test_a_level_is_lowered_never_raised() -> None:
    bucket = TokenBucket(10.0, 1.0, 0.0)
    bucket.lower(3.0, 0.0)
    assert bucket.level(0.0) == 3
    bucket.lower(8.0, 0.0)
    assert bucket.level(0.0) == 3
    bucket.lower(-1_000.0, 0.0)
    assert bucket.level(0.0) == -10


@BOTH_WAYS
def test_a_pause_gives_nothing_and_goes_on_refilling(take: Take) -> None:
    bucket = TokenBucket(10.0, 1.0, 0.0)
    bucket.take(8.0, 0.0)
    bucket.pause(5.0)
    bucket.pause(4.0)
    assert bucket.wait(1.0, 0.0) == pytest.approx(5)
    assert not take(bucket, 1.0, 4.9)
    assert bucket.wait(9.0, 0.0) == pytest.approx(7)
    assert bucket.reset(0.0) == pytest.approx(8)
    assert take(bucket, 7.0, 5.0)


def test_lim_07_an_idle_hour_makes_it_no_more_than_full() -> None:
    bucket = drained(capacity=10.0, rate=10.0)
    assert sum(bucket.take_at_once(1.0, 3_600.0) for _ in range(100)) == 10


@BOTH_WAYS
def test_lim_08_a_clock_that_steps_back_takes_nothing_away_and_gives_nothing(take: Take) -> None:
    bucket = TokenBucket(10.0, 1.0, 100.0)
    assert take(bucket, 7.0, 100.0)
    assert bucket.level(89.0) == 3
    assert take(bucket, 1.0, 89.0)
    assert bucket.wait(2.0, 89.0) == 0, "no lock-out"
    assert bucket.level(100.0) == 2, "no free refill when it steps forward again"
    assert bucket.level(101.0) == 3


@pytest.mark.parametrize(
    ("capacity", "rate"), [(0.0, 1.0), (1.0, 0.0), (-1.0, 1.0), (float("inf"), 1.0), (1.0, float("nan"))]
)
def test_options_that_cannot_work_are_refused(capacity: float, rate: float) -> None:
    with pytest.raises(ValueError, match="capacity"):
        TokenBucket(capacity, rate, 0.0)


STEPS = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.1, 0.5, 1.0, 7.0, 60.0, -3.0]),
        st.sampled_from(["take", "take", "take", "give back", "charge", "lower", "pause"]),
        st.floats(0.0, 30.0),
    ),
    max_size=60,
)


@settings(max_examples=200)
@given(
    capacity=st.sampled_from([1.0, 10.0, 25.0]),
    rate=st.sampled_from([0.01, 0.3, 5.0]),
    steps=STEPS,
    how=st.sampled_from([grab, at_once]),
)
def test_in_any_time_no_more_is_taken_than_the_capacity_and_the_refill(
    capacity: float, rate: float, steps: list[tuple[float, str, float]], how: Take
) -> None:
    bucket = TokenBucket(capacity, rate, 0.0)
    clock = latest = 0.0
    flows: list[tuple[float, float]] = []  # when, and how much came out
    for seconds, step, amount in steps:
        clock += seconds
        latest = max(latest, clock)
        if step == "take" and amount <= capacity:
            if how(bucket, amount, clock):
                flows.append((latest, amount))
        elif step == "give back":
            bucket.give_back(amount, clock)
            flows.append((latest, -amount))
        elif step == "charge":
            bucket.charge(amount, clock)  # the past's: it can only make the bucket give less
        elif step == "lower":
            bucket.lower(capacity - amount, clock)
        elif step == "pause":
            bucket.pause(clock + amount / 10)
        assert -capacity - SLACK * rate <= bucket.level(clock) <= capacity
    assert_promise(flows, capacity, rate)


def assert_promise(flows: list[tuple[float, float]], capacity: float, rate: float) -> None:
    totals = list(accumulate((amount for _, amount in flows), initial=0.0))
    for first, (begin, _) in enumerate(flows):
        for last in range(first, len(flows)):
            end = flows[last][0]
            allowed = capacity + rate * (end - begin + SLACK)
            assert totals[last + 1] - totals[first] <= allowed + 1e-6


@settings(max_examples=100)
@given(
    st.lists(
        st.tuples(st.integers(0, 400), st.booleans(), st.integers(0, 12)),
        max_size=60,
    )
)
def test_levels_are_those_of_exact_arithmetic(steps: list[tuple[int, bool, int]]) -> None:
    capacity, rate = 20, Fraction(1, 7)
    bucket = TokenBucket(float(capacity), float(rate), 0.0)
    exact, time = Fraction(capacity), Fraction(0)
    for ticks, takes, amount in steps:
        passed = Fraction(ticks, 16)
        time += passed
        exact = min(Fraction(capacity), exact + passed * rate)
        if takes:
            bucket.take(amount, float(time))
            exact -= amount
        else:
            bucket.give_back(amount, float(time))
            exact = min(Fraction(capacity), exact + amount)
        assert bucket.level(float(time)) == pytest.approx(float(exact), abs=1e-9)


@settings(max_examples=100)
@given(
    amounts=st.lists(st.floats(0.5, 20.0), min_size=1, max_size=40),
    rate=st.floats(0.01, 1e5),
    start=st.sampled_from([0.0, 12.7, 86_400.3, 1e7 + 0.1]),
)
def test_one_who_sleeps_as_long_as_told_finds_what_it_wants(
    amounts: list[float], rate: float, start: float
) -> None:
    bucket = TokenBucket(20.0, rate, start)
    now = start
    for amount in amounts:
        now += bucket.wait(amount, now)
        assert bucket.wait(amount, now) == 0
        assert bucket.take_at_once(amount, now)
