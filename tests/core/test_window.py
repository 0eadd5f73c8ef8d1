"""The counting windows against lists that are filtered anew each time."""

from __future__ import annotations

import gc
import math
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_llm.core.window import CountWindow, TimeWindow

# Multiples of 1/8 are exact in binary, and so are sums of them: both sides see the same slice boundaries.
STEPS = st.integers(-8, 16).map(lambda eighths: eighths / 8) | st.integers(0, 25).map(float)
CALLS = st.lists(st.tuples(STEPS, st.booleans(), st.booleans()), max_size=60)


def totals(window: TimeWindow | CountWindow) -> tuple[int, int, int]:
    return window.calls, window.failures, window.slow


@given(calls=CALLS, buckets=st.integers(1, 12), width=st.sampled_from([0.25, 1.0, 6.0]))
def test_time_window_totals_the_slices_not_yet_expired(
    calls: list[tuple[float, bool, bool]], buckets: int, width: float
) -> None:
    window = TimeWindow(buckets * width, buckets)
    now = latest = 0.0
    seen: list[tuple[float, bool, bool]] = []
    for step, failed, slow in calls:
        now += step
        latest = max(latest, now) if seen else now
        seen.append((latest, failed, slow))
        window.expire(now)
        window.record(now, failed=failed, slow=slow)
        recent = [call for call in seen if latest // width - call[0] // width < buckets]
        assert totals(window) == (len(recent), sum(f for _, f, _ in recent), sum(s for *_, s in recent))
        assert window.slices <= buckets


@given(
    duration=st.floats(0.01, 1e4),
    buckets=st.integers(1, 20),
    start=st.floats(-1e6, 1e6),
    age=st.floats(0, 2),
)
def test_a_call_counts_for_no_more_than_the_duration_and_no_less_than_all_slices_but_one(
    duration: float, buckets: int, start: float, age: float
) -> None:
    window = TimeWindow(duration, buckets)
    window.record(start, failed=True, slow=True)
    window.expire(start + age * duration)
    if age <= (1 - 1 / buckets) * 0.999:
        assert totals(window) == (1, 1, 1)
    elif age >= 1.001:
        assert totals(window) == (0, 0, 0)


def test_time_going_back_counts_as_the_last_time() -> None:
    window = TimeWindow(10.0)
    window.record(100.0, failed=True, slow=False)
    window.expire(20.0)
    window.record(50.0, failed=True, slow=False)
    assert totals(window) == (2, 2, 0)
    assert window.slices == 1
    window.expire(109.9)
    assert totals(window) == (2, 2, 0)
    window.expire(110.0)
    assert totals(window) == (0, 0, 0)


def test_a_time_window_expires_without_new_calls_and_keeps_counting() -> None:
    window = TimeWindow(10.0, buckets=5)
    for second in range(10):
        window.record(float(second), failed=second % 2 == 0, slow=second == 9)
    assert totals(window) == (10, 5, 1)
    window.expire(10.0)
    assert totals(window) == (8, 4, 1)
    window.expire(1e9)
    assert totals(window) == (0, 0, 0)
    window.record(1e9, failed=False, slow=True)
    assert totals(window) == (1, 0, 1)


def test_memory_of_a_time_window_is_bounded_by_its_buckets() -> None:
    window = TimeWindow(60.0)
    most = 0
    for call in range(20_000):
        window.record(call * 0.1, failed=False, slow=False)
        most = max(most, window.slices)
    assert most == 10
    assert 540 <= window.calls <= 600


def test_a_full_time_window_takes_less_than_700_bytes() -> None:
    windows = 200

    def full() -> TimeWindow:
        window = TimeWindow(60.0)
        for call in range(100):
            window.record(call * 3.0, failed=call % 3 == 0, slow=False)
        assert window.slices == 10
        return window

    gc.collect()
    tracemalloc.start()
    try:
        kept = [full() for _ in range(windows)]
        size = tracemalloc.get_traced_memory()[0] / len(kept)
    finally:
        tracemalloc.stop()
    assert 100 < size < 700


@given(calls=st.lists(st.tuples(st.booleans(), st.booleans()), max_size=60), size=st.integers(1, 20))
def test_count_window_totals_the_last_calls(calls: list[tuple[bool, bool]], size: int) -> None:
    window = CountWindow(size)
    for index, (failed, slow) in enumerate(calls):
        window.record(float(index), failed=failed, slow=slow)
        window.expire(math.inf)
        last = calls[: index + 1][-size:]
        assert totals(window) == (len(last), sum(f for f, _ in last), sum(s for _, s in last))
        assert len(window._ring) <= size


@pytest.mark.parametrize("window", [TimeWindow(10.0), CountWindow(10)], ids=["time", "count"])
def test_clear_forgets_everything(window: TimeWindow | CountWindow) -> None:
    for second in range(30):
        window.record(float(second), failed=True, slow=True)
    window.clear()
    assert totals(window) == (0, 0, 0)
    window.record(3.0, failed=True, slow=False)
    assert totals(window) == (1, 1, 0)


@pytest.mark.parametrize("duration", [0.0, -1.0, math.inf, math.nan])
def test_an_impossible_duration_is_refused(duration: float) -> None:
    with pytest.raises(
        ValueError, match=rf"duration={duration!r}: must be a finite number of seconds above 0"
    ):
        TimeWindow(duration)


def test_an_impossible_size_is_refused() -> None:
    with pytest.raises(ValueError, match="buckets=0: must be at least 1"):
        TimeWindow(1.0, buckets=0)
    with pytest.raises(ValueError, match="size=0: must be at least 1"):
        CountWindow(0)
