"""Several buckets as one decision."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient_llm.core.quota import LimitLevel, Quota, Reservation
from resilient_llm.core.token_bucket import TokenBucket


def buckets(*capacities: float) -> list[TokenBucket]:
    some = [TokenBucket(capacity, 1.0, 0.0) for capacity in capacities]
    for bucket in some:
        bucket.mark(0.0, 0.0)  # from here on it is added up what is spent
    return some


def levels(some: list[TokenBucket], now: float = 0.0) -> list[float]:
    return [bucket.level(now) for bucket in some]


def test_all_are_taken() -> None:
    requests, tokens = some = buckets(10.0, 1_000.0)
    assert Reservation([(requests, 1.0), (tokens, 400.0)]).take_at_once(0.0)
    assert levels(some) == [9, 600]


@pytest.mark.parametrize("dry", range(3))
def test_none_is_taken_where_one_is_dry(dry: int) -> None:
    some = buckets(10.0, 10.0, 10.0)
    some[dry].take(8.0, 0.0)
    before = levels(some)
    assert not Reservation([(bucket, 3.0) for bucket in some]).take_at_once(0.0)
    assert levels(some) == before
    assert [bucket.spent for bucket in some] == [8 * (index == dry) for index in range(3)]


def test_a_cancelled_one_gives_everything_back() -> None:
    some = buckets(10.0, 10.0)
    reservation = Reservation([(bucket, 3.0) for bucket in some])
    reservation.take(0.0)
    reservation.cancel(0.0)
    assert levels(some) == [10, 10]
    assert [bucket.spent for bucket in some] == [0, 0]


def test_settling_gives_back_what_was_too_much_and_charges_what_was_too_little() -> None:
    some = buckets(10.0, 10.0, 10.0)
    reservation = Reservation([(bucket, 5.0) for bucket in some])
    reservation.take(0.0)
    reservation.settle([5.0, 2.0, 9.0], 0.0)
    assert levels(some) == [5, 8, 1]


def test_what_can_never_pass_is_found() -> None:
    some = buckets(10.0, 10.0)
    assert Reservation([(some[0], 10.0), (some[1], 10.5)]).oversized() == 1
    assert Reservation([(some[0], 10.0), (some[1], 10.0)]).oversized() is None


def test_what_a_bucket_lends_is_a_minute_s_worth_or_one_capacity() -> None:
    short, long = TokenBucket(10.0, 1.0, 0.0), TokenBucket(600.0, 1.0, 0.0)
    assert (short.lends, long.lends) == (60, 600)
    assert Reservation([(short, 70.0), (long, 1_200.0)]).oversized(borrow=True) is None
    assert Reservation([(short, 70.5), (long, 1.0)]).oversized(borrow=True) == 0
    assert Reservation([(short, 1.0), (long, 1_200.5)]).oversized(borrow=True) == 1


def test_a_quota_is_idle_only_when_nobody_could_tell_it_from_a_new_one() -> None:
    quota = Quota(buckets(10.0))
    reservation = Reservation([(quota.buckets[0], 4.0)], quotas=[quota])
    assert quota.idle(0.0)
    reservation.take(0.0)
    assert not quota.idle(0.0)
    assert not quota.idle(100.0), "full again, but what it settles to is not known yet"
    reservation.settle([50.0], 100.0)
    assert not quota.idle(100.0), "in debt"
    assert quota.idle(1_000.0)
    quota.buckets[0].pause(1_010.0)
    assert not quota.idle(1_000.0)


def test_a_level_has_a_name_for_people() -> None:
    level = LimitLevel(scope="tenant", dimension="tokens", limit=10, remaining=3, reset=7, window=10)
    assert level.name == "tokens of tenant"


@settings(max_examples=100)
@given(
    st.lists(
        st.tuples(
            st.lists(st.sampled_from([0.0, 0.1, 3.3, 7.0]), min_size=3, max_size=3), st.sampled_from("kcs")
        ),
        max_size=30,
    ),
)
def test_tokens_are_conserved(calls: list[tuple[list[float], str]]) -> None:
    some = buckets(1e6, 1e6, 1e6)  # never full, never dry: nothing is lost, and no time passes
    for bucket in some:
        bucket.take(5e5, 0.0)
    used = [5e5] * 3
    quota = Quota(some)
    for amounts, end in calls:
        reservation = Reservation(list(zip(some, amounts, strict=True)), quotas=[quota])
        assert reservation.take_at_once(0.0)
        if end == "k":
            reservation.keep()
            used = [total + amount for total, amount in zip(used, amounts, strict=True)]
        elif end == "c":
            reservation.cancel(0.0)
        else:
            reservation.settle([4.2] * 3, 0.0)
            used = [total + 4.2 for total in used]
    assert [bucket.spent for bucket in some] == pytest.approx(used)
    assert levels(some) == pytest.approx([1e6 - total for total in used])
    assert quota.outstanding == 0
