"""Distributions have the moments they say they have."""

import math
from random import Random
from statistics import fmean, quantiles, stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_llm import ConfigurationError
from resilient_llm.lab import (
    Bimodal,
    Constant,
    Distribution,
    Empirical,
    Exponential,
    LogNormal,
    Uniform,
)

DRAWS = 20_000

ALL = {
    "constant": (Constant(2.0), 2.0, 0.0),
    "uniform": (Uniform(1.0, 4.0), 2.5, 3 / math.sqrt(12)),
    "exponential": (Exponential(3.0), 3.0, 3.0),
    "lognormal": (LogNormal(1.0, 0.5), math.exp(0.125), math.exp(0.125) * math.sqrt(math.exp(0.25) - 1)),
    "lognormal of mean": (LogNormal.of_mean(2.0, 0.3), 2.0, 2.0 * math.sqrt(math.exp(0.09) - 1)),
    "bimodal": (Bimodal(1.0, share=0.05, factor=10), 1.45, 9 * math.sqrt(0.05 * 0.95)),
    "empirical": (Empirical([1.0, 2.0, 6.0]), 3.0, math.sqrt(14 / 3)),
    "weighted": (Empirical([1.0, 5.0], weights=[3, 1]), 2.0, math.sqrt(3)),
}


@pytest.mark.parametrize(("drawn", "mean", "deviation"), ALL.values(), ids=ALL)
def test_moments(drawn: Distribution, mean: float, deviation: float) -> None:
    rng = Random(1)
    values = [drawn.draw(rng) for _ in range(DRAWS)]
    assert drawn.mean == pytest.approx(mean)
    # Five standard errors: a right sampler fails once in a million seeds, and this seed is fixed.
    assert fmean(values) == pytest.approx(mean, abs=5 * deviation / math.sqrt(DRAWS))
    assert stdev(values) == pytest.approx(deviation, rel=0.05)
    assert min(values) >= 0


def test_half_of_lognormal_is_under_its_median_and_its_tail_is_as_long_as_it_says() -> None:
    rng = Random(2)
    drawn = LogNormal(0.5, 0.3)
    percentiles = quantiles((drawn.draw(rng) for _ in range(DRAWS)), n=100)
    assert percentiles[49] == pytest.approx(0.5, rel=0.02)
    assert percentiles[98] == pytest.approx(1.0, rel=0.05)


def test_bimodal_has_exactly_two_modes() -> None:
    rng = Random(3)
    values = [Bimodal(0.2, share=0.25, factor=5).draw(rng) for _ in range(DRAWS)]
    assert set(values) == {0.2, 1.0}
    assert values.count(1.0) / DRAWS == pytest.approx(0.25, abs=0.015)


@given(
    values=st.lists(st.floats(0, 100), min_size=1, max_size=8),
    seed=st.integers(0, 100),
    draws=st.integers(1, 20),
)
def test_empirical_draws_nothing_else(values: list[float], seed: int, draws: int) -> None:
    rng = Random(seed)
    assert {Empirical(values).draw(rng) for _ in range(draws)} <= set(values)


def test_what_has_no_weight_is_never_drawn() -> None:
    rng = Random(4)
    drawn = Empirical([1.0, 2.0, 3.0], weights=[0, 1, 0])
    assert {drawn.draw(rng) for _ in range(1000)} == {2.0}


@pytest.mark.parametrize(
    "make",
    [
        lambda: Constant(-1),
        lambda: Uniform(2, 1),
        lambda: Exponential(0),
        lambda: LogNormal(0, 1),
        lambda: LogNormal(1, -1),
        lambda: Bimodal(1.0, share=2, factor=1),
        lambda: Bimodal(1.0, share=0.5, factor=-1),
        lambda: Empirical([]),
        lambda: Empirical([-1.0]),
        lambda: Empirical([1.0], weights=[1, 2]),
        lambda: Empirical([1.0], weights=[0]),
    ],
)
def test_what_cannot_be_is_refused(make: "type[object]") -> None:
    with pytest.raises(ConfigurationError, match="allowed are"):
        make()
