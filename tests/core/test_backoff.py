"""Backoff: growth, cap before jitter, and a hint that is never undercut."""

import dataclasses
import math
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_llm.core.backoff import Backoff, floor_with_jitter

options = st.fixed_dictionaries(
    {
        "initial": st.floats(1e-3, 10),
        "multiplier": st.floats(1, 10),
        "maximum": st.floats(10, 1e4),
        "jitter": st.sampled_from(["full", "none"]),
    }
)


class Highest(Random):
    def random(self) -> float:
        return math.nextafter(1.0, 0.0)


class Lowest(Random):
    def random(self) -> float:
        return 0.0


def test_without_jitter_the_wait_doubles_up_to_the_cap() -> None:
    backoff = Backoff(jitter="none")
    assert [backoff.delay(retry, Random(1)) for retry in range(1, 8)] == [0.5, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0]


def test_full_jitter_reaches_from_nothing_to_the_cap() -> None:
    backoff = Backoff(initial=1.0, multiplier=3.0, maximum=20.0)
    for retry, ceiling in ((1, 1.0), (2, 3.0), (3, 9.0), (4, 20.0), (50, 20.0)):
        assert backoff.delay(retry, Lowest()) == 0.0
        assert backoff.delay(retry, Highest()) == pytest.approx(ceiling)


def test_full_jitter_is_even_at_the_cap_too() -> None:
    random = Random(7)
    delays = [Backoff().delay(30, random) for _ in range(4000)]
    for quarter in range(4):
        share = sum(quarter * 2 <= delay < quarter * 2 + 2 for delay in delays) / len(delays)
        assert share == pytest.approx(0.25, abs=0.03)


@given(options, st.integers(1, 10**30), st.integers())
def test_a_wait_is_never_above_its_ceiling(settings: dict[str, Any], retry: int, seed: int) -> None:
    ceiling = Backoff(**settings | {"jitter": "none"}).delay(retry, Random(seed))
    delay = Backoff(**settings).delay(retry, Random(seed))
    assert 0.0 <= delay <= ceiling <= settings["maximum"]
    assert ceiling >= settings["initial"]


@given(options, st.integers(1, 200))
def test_ceilings_never_shrink(settings: dict[str, Any], retry: int) -> None:
    backoff = Backoff(**settings | {"jitter": "none"})
    assert backoff.delay(retry, Random(1)) <= backoff.delay(retry + 1, Random(1))


@given(options, st.integers(1, 100), st.integers())
def test_the_same_seed_gives_the_same_wait(settings: dict[str, Any], retry: int, seed: int) -> None:
    backoff = Backoff(**settings)
    assert backoff.delay(retry, Random(seed)) == backoff.delay(retry, Random(seed))


@pytest.mark.parametrize("retry", [1025, 10**6, 10**400])
def test_a_huge_retry_number_does_not_overflow(retry: int) -> None:
    assert Backoff(jitter="none").delay(retry, Random(1)) == 8.0


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("initial", value) for value in (0.0, -1.0, math.inf, math.nan)),
        *(("multiplier", value) for value in (0.0, 0.99, -2.0, math.inf, math.nan)),
        *(("maximum", value) for value in (0.0, 0.49, -1.0, math.inf, math.nan)),
        *(("jitter", value) for value in ("", "half", None)),
    ],
)
def test_an_option_out_of_range_is_named(option: str, value: object) -> None:
    wrong: dict[str, Any] = {option: value}
    with pytest.raises(ValueError, match=rf"^{option}={value!r}: allowed are "):
        Backoff(**wrong)


def test_options_are_keywords_of_a_frozen_value() -> None:
    backoff = Backoff()
    assert backoff == Backoff(initial=0.5, multiplier=2.0, maximum=8.0, jitter="full")
    assert not hasattr(backoff, "__dict__")
    with pytest.raises(TypeError):
        Backoff(0.5)  # type: ignore[call-arg]
    with pytest.raises(dataclasses.FrozenInstanceError):
        backoff.initial = 1.0  # type: ignore[misc]


@pytest.mark.parametrize("retry", [0, -1])
def test_retries_count_from_one(retry: int) -> None:
    with pytest.raises(ValueError, match=rf"^retry={retry}: allowed are numbers from 1"):
        Backoff().delay(retry, Random(1))


@given(st.floats(0, 1e300), st.floats(0, 10), st.integers())
def test_a_hint_is_a_floor_with_jitter_upwards_only(hint: float, spread: float, seed: int) -> None:
    delay = floor_with_jitter(hint, Random(seed), spread)
    assert hint <= delay <= math.nextafter(hint * (1 + spread), math.inf)


def test_the_jitter_above_a_hint_uses_the_whole_spread() -> None:
    assert floor_with_jitter(20.0, Lowest()) == 20.0
    assert floor_with_jitter(20.0, Highest()) == pytest.approx(22.0)
    assert floor_with_jitter(20.0, Highest(), 0.5) == pytest.approx(30.0)
    assert floor_with_jitter(20.0, Highest(), 0.0) == 20.0


def test_a_hint_without_end_stays_without_end_and_zero_stays_zero() -> None:
    assert floor_with_jitter(math.inf, Lowest()) == math.inf
    assert floor_with_jitter(math.inf, Highest()) == math.inf
    assert floor_with_jitter(0.0, Highest()) == 0.0


@pytest.mark.parametrize("hint", [-0.1, -math.inf, math.nan])
def test_a_hint_cannot_be_negative(hint: float) -> None:
    with pytest.raises(ValueError, match=rf"^hint={hint!r}: allowed are seconds from 0"):
        floor_with_jitter(hint, Random(1))


@pytest.mark.parametrize("spread", [-0.1, math.inf, math.nan])
def test_a_spread_cannot_be_negative(spread: float) -> None:
    with pytest.raises(ValueError, match=rf"^spread={spread!r}: allowed are finite ratios from 0"):
        floor_with_jitter(1.0, Random(1), spread)
