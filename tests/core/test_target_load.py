"""What is known of a target, against the whole history it was learnt from."""

from __future__ import annotations

import math
from random import Random
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_llm.core.target_load import MIN_SUCCESS, Pool, TargetLoad


class Ending(NamedTuple):
    gap: float
    tokens: float
    ok: bool | None
    first_token: float | None


endings = st.builds(
    Ending,
    st.floats(0, 60),
    st.floats(0, 1e6),
    st.sampled_from([True, True, False, None]),
    st.none() | st.floats(0, 100),
)
histories = st.lists(endings, max_size=30)


def live_through(load: TargetLoad, history: list[Ending], now: float = 0.0) -> float:
    for end in history:
        load.sent(now, end.tokens)
        now += end.gap
        load.finished(now, end.tokens, ok=end.ok, first_token=end.first_token)
    return now


def called(
    load: TargetLoad, now: float, *, ok: bool | None = True, first_token: float | None = None, times: int = 1
) -> None:
    for _ in range(times):
        load.sent(now, 100)
        load.finished(now, 100, ok=ok, first_token=first_token)


def test_a_new_target_is_idle_sound_and_cold() -> None:
    load = TargetLoad("a", weight=2)
    assert (load.in_flight, load.outstanding, load.busy(0)) == (0, 0, 0)
    assert load.success_ratio(0) == load.ramp(0) == load.reliability(0) == 1
    assert load.latency(0) is None
    assert load.peak_latency(0) is None
    assert load.effective_weight(0) == 2
    assert load.relative_load(0) == 0.5
    assert repr(load) == "<TargetLoad a: 0 in flight>"


def test_calls_and_tokens_in_flight_are_counted() -> None:
    load = TargetLoad("a")
    load.sent(0, 0.1)
    load.sent(0, 0.2)
    assert load.in_flight == 2
    assert load.outstanding == pytest.approx(0.3)
    load.finished(1, 0.1, ok=True, first_token=None)
    load.finished(1, 0.2, ok=None, first_token=None)
    assert (load.in_flight, load.outstanding) == (0, 0.0)


@given(histories, st.floats(0, 100))
def test_latency_is_a_mean_weighted_by_age(history: list[Ending], later: float) -> None:
    counted = [end._replace(ok=True) for end in history]
    load = TargetLoad("a")
    now = live_through(load, counted) + later
    at, samples = 0.0, list[tuple[float, float]]()
    for end in counted:
        at += end.gap
        if end.first_token is not None:
            samples.append((at, max(0.001, end.first_token)))
    if not samples or now - samples[-1][0] >= 30:
        assert load.latency(now) is None
        return
    last = samples[-1][0]
    weights = [math.exp((when - last) / 10) for when, _ in samples]
    mean = sum(weight * value for weight, (_, value) in zip(weights, samples, strict=True)) / sum(weights)
    assert load.latency(now) == pytest.approx(mean)
    peak = load.peak_latency(now)
    assert peak is not None
    assert mean * (1 - 1e-9) <= peak <= max(value for _, value in samples) * (1 + 1e-9)


@given(st.lists(endings, max_size=10), st.floats(0, 100))
def test_the_success_ratio_is_weighted_by_age(history: list[Ending], later: float) -> None:
    # Of up to ten calls nothing is forgotten but with time.
    load = TargetLoad("a")
    now = live_through(load, history) + later
    at = good = bad = 0.0
    for end in history:
        at += end.gap
        weight = math.exp((at - now) / 15)
        good += weight * (end.ok is True)
        bad += weight * (end.ok is False)
    assert load.success_ratio(now) == pytest.approx((good + 1) / (good + bad + 1), abs=1e-3)
    assert load.busy(now) == pytest.approx(bad, abs=1e-3)


@given(histories)
def test_what_is_known_stays_within_bounds(history: list[Ending]) -> None:
    load = TargetLoad("a", weight=3)
    now = live_through(load, history)
    for later in (0, 1, 10, 100, 1e6, 1e300):
        assert 0 < load.success_ratio(now + later) <= 1
        assert MIN_SUCCESS * 3 <= load.effective_weight(now + later) <= 3
        assert load.busy(now + later) >= load.in_flight == 0
        assert 0 < load.relative_load(now + later) < math.inf
        assert 0 < load.relative_tokens(now + later, 0) < math.inf
    assert load.success_ratio(now + 1e6) == load.effective_weight(now + 1e6) / 3 == 1
    assert load.busy(now + 1e6) == pytest.approx(0)


@given(histories, st.floats(0, 100))
def test_relative_load_is_what_it_says(history: list[Ending], later: float) -> None:
    load = TargetLoad("a", weight=3)
    load.came_back(0)
    now = live_through(load, history) + later
    load.sent(now, 7)
    assert load.relative_load(now) == pytest.approx((load.busy(now) + 1) / load.effective_weight(now))
    if not any(end.ok is False for end in history):
        assert load.relative_tokens(now, 2) == pytest.approx((7 + 1 + 2 + 1) / load.effective_weight(now))


@given(histories, st.floats(0, 60), st.floats(0, 60))
def test_left_alone_it_recovers(history: list[Ending], some: float, more: float) -> None:
    load = TargetLoad("a")
    now = live_through(load, history)
    assert load.success_ratio(now + some) <= load.success_ratio(now + some + more) + 1e-12
    assert load.relative_load(now + some + more) <= load.relative_load(now + some) + 1e-9


@given(histories, st.none() | st.floats(0, 1))
def test_a_failure_never_makes_it_look_quicker_or_less_busy(
    history: list[Ending], first_token: float | None
) -> None:
    load = TargetLoad("a")
    now = live_through(load, history)
    before = load.latency(now), load.peak_latency(now), load.busy(now), load.success_ratio(now)
    called(load, now, ok=False, first_token=first_token)
    after = load.latency(now), load.peak_latency(now), load.busy(now), load.success_ratio(now)
    if before[0] is not None and before[1] is not None:
        assert after[0] is not None
        assert after[1] is not None
        assert after[0] >= before[0] * (1 - 1e-9)
        assert after[1] >= before[1] * (1 - 1e-9)
    assert after[2] > before[2]
    assert after[3] < before[3]


def test_a_target_that_only_fails_has_no_latency_unless_it_had_begun_to_answer() -> None:
    load = TargetLoad("a")
    called(load, 0, ok=False)
    assert load.latency(0) is None
    called(load, 0, ok=False, first_token=2.0)
    assert load.latency(0) == 2.0


def test_a_cancelled_call_says_nothing_but_how_long_its_first_token_took() -> None:
    load = TargetLoad("a")
    called(load, 0, ok=None)
    assert (load.success_ratio(0), load.busy(0), load.latency(0)) == (1, 0, None)
    called(load, 0, ok=None, first_token=0.5)
    assert load.latency(0) == 0.5


def test_a_failed_call_counts_as_in_flight_until_it_is_forgotten() -> None:
    load = TargetLoad("a")
    called(load, 0, ok=False)
    assert load.busy(0) == 1
    assert load.busy(15) == pytest.approx(1 / math.e)
    assert load.relative_tokens(0, 10) == pytest.approx((100 + 1 + 10 + 1) / 0.25)
    assert load.success_ratio(0) == 0.5


def test_successes_make_it_sound_for_good() -> None:
    load = TargetLoad("a")
    called(load, 0, ok=False)
    for now in range(1, 200):
        called(load, now)
    assert load.success_ratio(200) == 1
    assert load.busy(200) == 0


def test_a_failure_is_forgotten_in_its_time_however_many_calls_succeed_meanwhile() -> None:
    load = TargetLoad("t")
    live_through(load, [Ending(0.0, 0.0, ok=False, first_token=None)])
    now = live_through(
        load, [Ending(0.001, 0.0, ok=True, first_token=0.01)] * 10_000
    )  # its share is 1e-400 of them
    assert load.busy(now) == pytest.approx(math.exp(-10 / 15))
    live_through(load, [Ending(0.001, 0.0, ok=True, first_token=0.01)], now=110.0)
    assert load.busy(110.001) == 0


def test_many_failures_weigh_no_more_on_the_ratio_than_ten() -> None:
    few, many = TargetLoad("a"), TargetLoad("b")
    called(few, 0, ok=False, times=10)
    called(many, 0, ok=False, times=1000)
    assert few.success_ratio(0) == pytest.approx(many.success_ratio(0)) == pytest.approx(1 / 11)
    assert many.success_ratio(60) > 0.8
    assert many.busy(0) == 1000


def test_the_peak_rises_at_once_and_falls_towards_the_mean() -> None:
    load = TargetLoad("a")
    called(load, 0, first_token=1.0, times=9)
    called(load, 0, first_token=11.0)
    assert load.latency(0) == pytest.approx(2.0)
    assert load.peak_latency(0) == 11.0
    assert load.peak_latency(10) == pytest.approx(2 + 9 / math.e)
    called(load, 10, first_token=1.0)
    mean = load.latency(10)
    assert mean is not None
    assert load.peak_latency(10) == pytest.approx(mean + (11 - mean) / math.e)


def test_it_is_cold_when_no_token_came_for_30_seconds() -> None:
    load = TargetLoad("a")
    called(load, 0, first_token=1.0)
    assert load.latency(29.9) == load.peak_latency(29.9) == 1.0
    assert load.latency(30) is load.peak_latency(30) is None
    called(load, 40, first_token=3.0)
    assert load.latency(40) == pytest.approx(3.0 - 2 * math.exp(-4) / (1 + math.exp(-4)))


def test_one_that_came_back_starts_slowly_and_afresh() -> None:
    load = TargetLoad("a", weight=2)
    called(load, 0, ok=False, first_token=9.0, times=5)
    load.came_back(100)
    assert load.success_ratio(100) == 1
    assert load.busy(100) == 0
    assert load.latency(100) is None
    assert [load.ramp(100 + age) for age in (0, 1, 3, 15, 29, 30, 1e9)] == pytest.approx(
        [0.1, 0.1, 0.1, 0.5, 29 / 30, 1, 1]
    )
    assert load.effective_weight(115) == pytest.approx(1)
    assert load.relative_load(115) == pytest.approx(1)
    assert load.relative_tokens(115, 0) == pytest.approx(1)


def test_a_slow_start_can_be_had_in_other_lengths_or_not_at_all() -> None:
    slow, at_once = TargetLoad("a", slow_start=300), TargetLoad("b", slow_start=0)
    for load in (slow, at_once):
        load.came_back(0)
    assert slow.ramp(150) == 0.5
    assert at_once.ramp(0) == 1


def test_a_clock_that_stands_or_steps_back_does_no_harm() -> None:
    load = TargetLoad("a")
    called(load, 10, ok=False, first_token=1.0)
    called(load, 9, first_token=1.0)
    assert 0 < load.success_ratio(8) <= 1
    assert load.latency(8) == pytest.approx(1.0)
    assert load.peak_latency(8) == pytest.approx(1.0)


def test_what_it_keeps_does_not_grow() -> None:
    load = TargetLoad("a")
    random = Random(1)
    for number in range(5000):
        load.sent(number, 10)
        load.finished(number, 10, ok=random.random() < 0.9, first_token=random.random())
    assert not hasattr(load, "__dict__")
    kept = [getattr(load, name) for name in load.__slots__]
    assert all(isinstance(value, str | float | int) for value in kept)


def test_ending_more_calls_than_began_does_not_go_below_nothing() -> None:
    load = TargetLoad("a")
    load.finished(0, 100, ok=True, first_token=None)
    assert (load.in_flight, load.outstanding) == (0, 0)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("weight", value) for value in (0.0, -1.0, math.inf, math.nan)),
        *(("price", value) for value in (-1.0, math.inf, math.nan)),
        *(("slow_start", value) for value in (-1.0, math.inf, math.nan)),
    ],
)
def test_a_number_out_of_range_is_named(option: str, value: float) -> None:
    wrong: dict[str, Any] = {option: value}
    with pytest.raises(ValueError, match=rf"^{option}={value!r}: allowed are "):
        TargetLoad("a", **wrong)


def test_a_pool_keeps_its_targets_in_order() -> None:
    loads = [TargetLoad("a"), TargetLoad("b")]
    pool = Pool(loads)
    assert list(pool) == loads
    assert len(pool) == 2
    assert pool.total_weight == 2


def test_a_pool_is_never_empty() -> None:
    with pytest.raises(ValueError, match="at least one target"):
        Pool([])


@pytest.mark.parametrize("seed", range(3))
def test_targets_are_drawn_by_weight(seed: int) -> None:
    weights, draws = [0.5, 1, 1, 3.5], 8000
    pool, random = Pool([TargetLoad(f"{weight}", weight=weight) for weight in weights]), Random(seed)
    drawn = [pool.draw(random) for _ in range(draws)]
    for load, weight in zip(pool, weights, strict=True):
        share = weight / 6
        sigma = math.sqrt(draws * share * (1 - share))
        assert abs(drawn.count(load) - draws * share) < 4 * sigma


class Highest(Random):
    def random(self) -> float:
        return math.nextafter(1.0, 0.0)


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=20))
def test_the_last_draw_is_still_of_the_pool(weights: list[float]) -> None:
    pool = Pool([TargetLoad("x", weight=weight) for weight in weights])
    assert pool.draw(Highest()) in list(pool)


def test_the_best_latency_is_that_of_the_quickest_known() -> None:
    loads = [TargetLoad(name) for name in "abc"]
    pool = Pool(loads)
    assert pool.best_latency(0) is None
    called(loads[0], 1, first_token=3.0)
    called(loads[1], 1, first_token=2.0)
    assert pool.best_latency(1) == 2.0
    called(loads[2], 1, first_token=1.0)
    assert pool.best_latency(1.09) == 2.0
    assert pool.best_latency(1.11) == 1.0
    assert pool.best_latency(31) is None
