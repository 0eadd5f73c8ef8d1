"""The histogram of latencies against a list of all samples that is filtered and sorted anew each time."""

from __future__ import annotations

import math
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_llm.core.latency_window import LatencyWindow

WIDTH = 10.0
DURATION = 6 * WIDTH

# Multiples of 1/8 are exact in binary: both sides see the same slice boundaries.
STEPS = st.integers(-16, 80).map(lambda eighths: eighths / 8) | st.integers(0, 100).map(float)
LATENCIES = st.floats(0.001, 3600)
QUANTILES = st.floats(0, 1)


def exact(latencies: list[float], q: float) -> float:
    """Give the sample of that rank."""
    return sorted(latencies)[max(1, math.ceil(q * len(latencies) - 1e-9)) - 1]


@given(samples=st.lists(st.tuples(STEPS, LATENCIES), min_size=1, max_size=60), q=QUANTILES)
def test_an_estimate_is_at_most_a_twentieth_above_the_exact_quantile_and_never_below_it(
    samples: list[tuple[float, float]], q: float
) -> None:
    window = LatencyWindow(DURATION)
    now = latest = 0.0
    seen: list[tuple[float, float]] = []
    for step, latency in samples:
        now += step
        latest = max(latest, now) if seen else now
        seen.append((latest, latency))
        window.record(now, latency)
        recent = [taken for at, taken in seen if latest // WIDTH - at // WIDTH < 6]
        assert window.samples(now) == len(recent)
        estimate = window.quantile(now, q)
        assert estimate is not None
        assert exact(recent, q) * (1 - 1e-9) <= estimate <= exact(recent, q) * 1.05 * (1 + 1e-9)


@given(latencies=st.lists(LATENCIES, min_size=1, max_size=40), lower=QUANTILES, upper=QUANTILES)
def test_quantiles_are_in_order(latencies: list[float], lower: float, upper: float) -> None:
    window = LatencyWindow(DURATION)
    for latency in latencies:
        window.record(0.0, latency)
    lower, upper = sorted((lower, upper))
    below, above = window.quantile(0.0, lower), window.quantile(0.0, upper)
    assert below is not None
    assert above is not None
    assert below <= above


@given(start=st.floats(-1e6, 1e6), age=st.floats(0, 2), duration=st.floats(0.01, 1e4))
def test_a_sample_counts_for_less_than_the_duration_and_for_at_least_five_sixths_of_it(
    start: float, age: float, duration: float
) -> None:
    window = LatencyWindow(duration)
    window.record(start, 1.0)
    samples = window.samples(start + age * duration)
    if age <= 5 / 6 * 0.999:
        assert samples == 1
    elif age >= 1.001:
        assert samples == 0


def test_nothing_is_estimated_from_too_few_samples() -> None:
    window = LatencyWindow(DURATION, min_samples=3)
    for _ in range(2):
        window.record(0.0, 1.0)
        assert window.quantile(0.0, 0.5) is None
    window.record(30.0, 1.0)
    assert window.quantile(30.0, 0.5) == pytest.approx(1.0, rel=0.05)
    assert window.quantile(60.0, 0.5) is None  # the first two are too old by now


@pytest.mark.parametrize(
    ("latency", "counts_as"), [(0.0, 0.001), (1e-9, 0.001), (3601.0, 3600.0), (math.inf, 3600.0)]
)
def test_what_is_out_of_range_counts_as_its_end(latency: float, counts_as: float) -> None:
    window = LatencyWindow(DURATION)
    window.record(0.0, latency)
    assert window.quantile(0.0, 1.0) == counts_as


def test_all_is_forgotten_and_counting_goes_on() -> None:
    window = LatencyWindow(DURATION)
    for second in range(60):
        window.record(float(second), 5.0)
    assert window.samples(60.0) == 50
    assert window.samples(1e9) == 0
    assert window.quantile(1e9, 0.5) is None
    window.record(1e9, 0.25)
    assert window.quantile(1e9, 0.5) == pytest.approx(0.25, rel=0.05)


def test_memory_does_not_grow_with_samples() -> None:
    window = LatencyWindow(DURATION)

    def size() -> int:
        slices = sum(sys.getsizeof(counts) for _, counts in window._slices)
        return sys.getsizeof(window._counts) + sys.getsizeof(window._sums) + slices

    def run(samples: int) -> None:
        for n in range(samples):
            window.record(n / 100, 0.001 * 1.05 ** (n * 7 % 310))
        window.quantile(samples / 100, 0.95)

    run(10_000)
    before = size()
    run(100_000)
    assert size() <= before
    assert len(window._slices) <= 6


@pytest.mark.parametrize(
    ("duration", "min_samples", "message"),
    [
        (0.0, 1, "duration=0.0"),
        (-1.0, 1, "duration=-1.0"),
        (math.inf, 1, "duration=inf"),
        (math.nan, 1, "duration=nan"),
        (1.0, 0, "min_samples=0"),
    ],
)
def test_options_are_checked(duration: float, min_samples: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LatencyWindow(duration, min_samples=min_samples)
