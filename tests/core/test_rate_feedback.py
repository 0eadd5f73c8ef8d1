"""What a reply's headers do to the buckets that mirror the provider's limits."""

from __future__ import annotations

import math

import pytest

from resilient_llm.core.quota import Reservation
from resilient_llm.core.rate_feedback import LONGEST_PAUSE, learn, learn_refusal
from resilient_llm.core.ratelimit_headers import Dimension, Level
from resilient_llm.core.token_bucket import TokenBucket

BOTH = {"requests": [0], "tokens": [1]}


WINDOW_TEN, WINDOW_SECOND = 10.0, 1.0


def said(
    dimension: Dimension = "requests",
    *,
    limit: int | None = 60,
    remaining: int | None = None,
    reset: float | None = None,
) -> Level:
    return Level(dimension, limit, remaining, reset)


class Mirror:
    """A bucket of 60 requests a minute and one of 6,000 tokens, of which a call has just taken 1 and 100."""

    def __init__(self) -> None:
        self.requests = TokenBucket(60.0, 1.0, 0.0)
        self.tokens = TokenBucket(6_000.0, 100.0, 0.0)
        self.reservation = self.call(0.0)

    def call(self, now: float) -> Reservation:
        reservation = Reservation([(self.requests, 1.0), (self.tokens, 100.0)], marked=(0, 1))
        reservation.take(now)
        return reservation

    def learn(self, *levels: Level, now: float = 0.0) -> None:
        learn(levels, self.reservation, BOTH, now)

    def levels(self, now: float = 0.0) -> tuple[float, float]:
        return self.requests.level(now), self.tokens.level(now)


def test_a_level_is_lowered_to_what_the_provider_says_remains() -> None:
    mirror = Mirror()
    mirror.learn(said(remaining=10), said("tokens", remaining=250))
    assert mirror.levels() == (10, 250)


def test_a_level_is_never_raised() -> None:
    mirror = Mirror()
    mirror.requests.lower(5.0, 0.0)
    mirror.learn(said(remaining=59), said("tokens", remaining=1_000_000))
    assert mirror.levels() == (5, 5_900)


def test_what_was_taken_since_is_taken_off_and_what_was_refilled_since_is_added() -> None:
    mirror = Mirror()
    for _ in range(4):
        mirror.call(1.0)
    mirror.learn(said(remaining=10), now=3.0)
    assert mirror.levels(3.0)[0] == 10 - 4 + 3


def test_what_was_taken_in_the_same_instant_may_have_come_before() -> None:
    # Sent together, it is anybody's guess which the provider counted first; our own level knows of them all.
    mirror = Mirror()
    others = [mirror.call(0.0) for _ in range(40)]
    mirror.learn(said(remaining=0), now=0.5)
    assert mirror.levels(0.5)[0] == 0.5
    learn([said(remaining=40)], others[-1], BOTH, 0.5)
    assert mirror.levels(0.5)[0] == 0.5


def test_the_same_news_twice_changes_nothing() -> None:
    mirror = Mirror()
    second = mirror.call(0.0)
    mirror.learn(said(remaining=11))
    learn([said(remaining=10)], second, BOTH, 0.0)
    mirror.learn(said(remaining=11))
    assert mirror.levels()[0] == 10


def test_what_has_been_given_back_since_counts() -> None:
    mirror = Mirror()
    later = mirror.call(0.0)
    later.cancel(0.0)
    mirror.learn(said(remaining=10))
    assert mirror.levels()[0] == 10


@pytest.mark.parametrize("level", [said(), said("tokens"), said(reset=30.0)])
def test_ra_11_what_does_not_say_what_remains_changes_nothing(level: Level) -> None:
    mirror = Mirror()
    mirror.learn(level)
    assert mirror.levels() == (59, 5_900)
    assert mirror.requests.reset(0.0) == 1


def test_the_least_of_several_limits_of_one_kind_counts() -> None:
    mirror = Mirror()
    mirror.learn(said(remaining=20), said(remaining=7, limit=10_000), said(remaining=30))
    assert mirror.levels()[0] == 7


@pytest.mark.parametrize("kind", ["input_tokens", "output_tokens"])
def test_a_bucket_of_all_tokens_listens_to_one_kind_only_when_it_is_used_up(kind: Dimension) -> None:
    mirror = Mirror()
    mirror.learn(said(kind, remaining=5))
    assert mirror.levels()[1] == 5_900
    mirror.learn(said(kind, remaining=0))
    assert mirror.levels()[1] == 0


def test_buckets_that_mirror_nothing_hear_nothing() -> None:
    mirror = Mirror()
    learn([said(remaining=0), said("tokens", remaining=0)], mirror.reservation, {"tokens": [1]}, 0.0)
    assert mirror.levels() == (59, 0)


@pytest.mark.parametrize(
    ("limit", "reset", "wait"),
    [
        pytest.param(60, 60.0, 1.0, id="RA-12 a minute until full again: it refills"),
        pytest.param(60, 59.2, 1.0, id="almost: what is left of one request is not shown"),
        pytest.param(3, 41.0, 1.0, id="of three a minute one takes 20 s"),
        pytest.param(None, 57.0, 1.0, id="limit not stated"),
        pytest.param(60, 40.0, 1.0, id="what may be a refill is taken for one"),
        pytest.param(60, 1.0, 1.0, id="enforced by the second"),
        pytest.param(60, 0.5, 1.0, id="sooner than the next is due"),
        pytest.param(60, 90.0, 90.0, id="a window of more than a minute"),
        pytest.param(14_400, 3_000.0, LONGEST_PAUSE, id="a limit per day"),
        pytest.param(60, math.inf, LONGEST_PAUSE, id="beyond any wait"),
        pytest.param(60, None, 1.0, id="reset not stated"),
        pytest.param(60, 0.0, 1.0, id="reset now"),
    ],
)
def test_when_nothing_remains_a_window_is_waited_for_and_a_refill_is_not(
    limit: int | None, reset: float | None, wait: float
) -> None:
    mirror = Mirror()
    mirror.learn(said(limit=limit, remaining=0, reset=reset))
    assert mirror.requests.wait(1.0, 0.0) == pytest.approx(wait)


@pytest.mark.parametrize(
    ("window", "reset", "pause"),
    [
        pytest.param(WINDOW_TEN, 10.0, 0.0, id="a provider that enforces by ten seconds, as we do"),
        pytest.param(WINDOW_TEN, 11.0, 0.0, id="the same, rounded up"),
        pytest.param(WINDOW_TEN, 20.0, 20.0, id="longer than ours takes to fill"),
        pytest.param(WINDOW_SECOND, 1.0, 0.0, id="by the second, as we do"),
        pytest.param(WINDOW_SECOND, 2.0, 0.0, id="by the second, rounded up to whole seconds"),
        pytest.param(WINDOW_SECOND, 40.0, 40.0, id="the end of a window"),
        pytest.param(WINDOW_SECOND, 60.0, 0.0, id="a minute"),
    ],
)
def test_a_reset_within_what_our_own_bucket_takes_to_fill_is_a_refill(
    window: float, reset: float, pause: float
) -> None:
    bucket = TokenBucket(window, 1.0, 0.0)
    reservation = Reservation([(bucket, 1.0)], marked=(0,))
    reservation.take(0.0)
    learn([said(remaining=0, reset=reset)], reservation, {"requests": [0]}, 0.0)
    assert bucket.wait(1.0, 0.0) == pytest.approx(max(1.0, pause))


def test_a_limit_per_second_beside_one_per_minute_does_not_pause_for_the_minute_s_refill() -> None:
    minute, burst = TokenBucket(60.0, 1.0, 0.0), TokenBucket(5.0, 5.0, 0.0)
    reservation = Reservation([(minute, 1.0), (burst, 1.0)], marked=(0, 1))
    reservation.take(0.0)
    learn([said(remaining=0, reset=30.0)], reservation, {"requests": [0, 1]}, 0.0)
    assert burst.wait(1.0, 0.0) == pytest.approx(0.2)


def test_a_refusal_tells_a_window_from_a_refill() -> None:
    mirror = Mirror()
    learn([said(remaining=0, reset=40.0)], mirror.reservation, BOTH, 0.0, refused=True)
    assert mirror.requests.wait(1.0, 0.0) == 40
    learn([said("tokens", remaining=0, reset=60.0)], mirror.reservation, BOTH, 0.0, refused=True)
    assert mirror.tokens.wait(1.0, 0.0) < 1


def test_ra_12_with_something_left_nobody_waits_for_the_reset() -> None:
    mirror = Mirror()
    mirror.learn(said(limit=5_000, remaining=4_999, reset=360.0))
    assert mirror.requests.wait(1.0, 0.0) == 0


def refuse(mirror: Mirror, *levels: Level, retry_after: float | None) -> tuple[float, float]:
    learn_refusal(levels, mirror.reservation, BOTH, 0.0, retry_after=retry_after)
    return mirror.requests.wait(1.0, 0.0), mirror.tokens.wait(50.0, 0.0)


def test_a_refusal_empties_what_refused_and_pauses_it_as_long_as_told() -> None:
    mirror = Mirror()
    waits = refuse(mirror, said(remaining=30), said("tokens", remaining=0), retry_after=7.0)
    assert waits == (0, 7)
    assert mirror.levels() == (59, 0)


def test_a_refusal_that_marks_none_pauses_all() -> None:
    assert refuse(Mirror(), retry_after=7.0) == (7, 7)
    assert refuse(Mirror(), said(remaining=30), retry_after=7.0) == (7, 7)


def test_a_refusal_that_says_nothing_changes_nothing() -> None:
    assert refuse(Mirror(), retry_after=None) == (0, 0)


def test_a_refusal_without_a_hint_empties_what_it_marks() -> None:
    assert refuse(Mirror(), said(remaining=0), retry_after=None) == (1, 0)


def test_a_pause_is_bounded() -> None:
    assert refuse(Mirror(), retry_after=86_400.0) == (LONGEST_PAUSE, LONGEST_PAUSE)
