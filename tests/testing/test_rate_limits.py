import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_llm.testing import RateLimits
from resilient_llm.testing._openai import duration
from resilient_llm.testing._rate_limits import Quota


def admitted(quota: Quota, tokens: int, now: float) -> bool:
    if quota.refusal(tokens, now) is not None:
        return False
    quota.charge(tokens)
    return True


@given(
    limit=st.integers(1, 600),
    window=st.sampled_from([1.0, 10.0, 60.0]),
    gaps=st.lists(st.floats(0, 5), min_size=1, max_size=60),
    tokens=st.lists(st.integers(0, 400), min_size=1, max_size=10),
)
def test_what_is_let_in_never_exceeds_capacity_and_rate(
    limit: int, window: float, gaps: list[float], tokens: list[int]
) -> None:
    limits = RateLimits(requests_per_minute=limit, tokens_per_minute=100 * limit, window=window)
    quota = Quota(limits)
    now = 0.0
    grants: list[tuple[float, int]] = []
    for index, gap in enumerate(gaps):
        now += gap
        size = tokens[index % len(tokens)]
        if admitted(quota, size, now):
            grants.append((now, size))
    for first, (start, _) in enumerate(grants):
        for last, (end, _) in enumerate(grants[first:], first):
            sizes = [size for _, size in grants[first : last + 1]]
            assert len(sizes) <= max(1, limit * window / 60) + limit / 60 * (end - start) + 1e-6
            assert sum(sizes) <= max(1, 100 * limit * window / 60) + 100 * limit / 60 * (end - start) + 1e-3


@given(limit=st.integers(1, 10_000), used=st.integers(1, 200), tokens=st.integers(1, 5000))
def test_coming_back_when_told_is_never_too_early(limit: int, used: int, tokens: int) -> None:
    quota = Quota(RateLimits(requests_per_minute=limit, tokens_per_minute=1000))
    now = 0.0
    for _ in range(used):
        refusal = quota.refusal(tokens, now)
        if refusal is not None:
            if math.isinf(refusal.wait):
                assert tokens > 1000
                return
            now += refusal.wait
            assert quota.refusal(tokens, now) is None
        quota.charge(tokens)


def test_the_bucket_that_makes_one_wait_longest_refuses() -> None:
    quota = Quota(RateLimits(requests_per_minute=60, tokens_per_minute=600))
    for _ in range(60):
        assert admitted(quota, 10, 0)
    refusal = quota.refusal(10, 0)
    assert refusal is not None
    assert (refusal.wait, refusal.level.dimension) == (1, "requests")
    refusal = quota.refusal(50, 0)
    assert refusal is not None
    assert (refusal.wait, refusal.level.dimension, refusal.requested) == (5, "tokens", 50)
    assert [(level.limit, level.remaining, level.reset) for level in quota.levels(6)] == [
        (60, 6, 54),
        (600, 60, 54),
    ]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (0.0001, "1ms"),
        (0.017, "17ms"),
        (1, "1s"),
        (1.5, "1.5s"),
        (90.951, "1m30.951s"),
        (360, "6m0s"),
        (5400, "1h30m0s"),
        (86399.9999, "24h0m0s"),
    ],
)
def test_durations_as_openai_writes_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text
