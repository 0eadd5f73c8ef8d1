"""Field cases: rate limits, their waits and their memory.

LIM-11 (a spoofed tenant) is the ASGI door's; what headers mean is told by tests/cases/test_retry_after_hints.py.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial
from pathlib import Path

import anyio
import pytest

from resilient_llm import CostExceedsCapacityError, RateLimit, RateLimitedError
from resilient_llm.core.token_bucket import TokenBucket
from tests.policies.rate_limiting import Answer, Answers, by_body, refusals, together
from tests.support import THROTTLED, Door

pytestmark = pytest.mark.anyio

DOCS = Path(__file__).parents[2] / "docs"


async def test_lim_01_a_cost_over_the_capacity_is_refused_at_once_and_for_good() -> None:
    provider = Answers()
    door = Door(RateLimit(tokens_per_minute=100, estimate=by_body, max_wait=1e9), provider=provider)
    with pytest.raises(CostExceedsCapacityError, match=r"200 .* holds 100") as refused:
        await door(body=b"200")
    assert refused.value.retry_after is None
    assert anyio.current_time() == door.calls[0].started
    assert not provider.attempts


async def test_lim_01_or_borrowed_if_that_is_asked_for() -> None:
    provider = Answers()
    limit = RateLimit(tokens_per_minute=100, estimate=by_body, max_wait=1e9, oversize="borrow")
    door = Door(limit, provider=provider)
    for _ in range(2):
        await door(body=b"200")
    assert provider.times == [0, 120], "until the debt is paid and the bucket full again"


async def test_lim_04_what_is_reserved_counts_before_anything_is_used() -> None:
    provider = Answers(*[Answer(tokens=380, duration=5.0)] * 5)
    door = Door(RateLimit(tokens_per_minute=1_000, estimate=by_body, max_wait=0), provider=provider)
    results = await together([partial(door, body=b"400")] * 5)
    assert provider.times == [0, 0]
    assert len(refusals(results)) == 3


async def test_lim_04_or_the_others_queue() -> None:
    provider = Answers(*[Answer(tokens=400)] * 5)
    door = Door(RateLimit(tokens_per_minute=1_000, estimate=by_body, max_wait=1e9), provider=provider)
    await together([partial(door, body=b"400")] * 5)
    assert provider.times == [0, 0, 12, 36, 60]


@pytest.mark.parametrize("tokens_per_minute", [950_000, 100])
async def test_lim_06_no_wait_is_longer_than_allowed_however_low_the_rate(
    tokens_per_minute: float, caplog: pytest.LogCaptureFixture
) -> None:
    limit = RateLimit(tokens_per_minute=tokens_per_minute, window=15, estimate=by_body, max_wait=90)
    # The capacity is a quarter of a minute of whatever the rate is, so the wait for a full bucket is 15 s.
    door = Door(limit, provider=Answers())
    started = anyio.current_time()
    if tokens_per_minute == 100:
        with pytest.raises(CostExceedsCapacityError, match="holds 25"):
            await door(body=b"200000")
    else:
        await together([partial(door, body=b"200000")] * 8)
        assert anyio.current_time() - started < 90
        caplog.set_level("INFO", logger="resilient_llm")
        await together([partial(door, body=b"200000")] * 7)
        assert "a call waits for 63 s or more" in caplog.text


async def test_lim_06_a_throttle_holds_calls_back_no_longer_than_two_minutes() -> None:
    throttled = Answer(
        outcome=THROTTLED.__class__(verdict=THROTTLED.verdict, status=429, retry_after=120_000.0)
    )
    door = Door(
        RateLimit(key="target", requests_per_minute=60, max_wait=1e9), provider=Answers(*[throttled] * 20)
    )
    await together([door] * 20)
    before = anyio.current_time()
    await door()
    assert anyio.current_time() - before <= 120


async def test_lim_07_an_idle_hour_saves_up_no_more_than_one_bucket() -> None:
    provider = Answers()
    door = Door(RateLimit(requests_per_minute=600, window=1, max_wait=0), provider=provider)
    await door()
    await anyio.sleep(3_600)
    await together([door] * 100)
    assert len(provider.attempts) == 1 + 10


def test_lim_08_a_clock_that_steps_back_and_forth_neither_locks_out_nor_gives_away() -> None:
    bucket = TokenBucket(10.0, 1.0, 1_000.0)
    taken = [bucket.take_at_once(1.0, now) for now in (1_000.0, 989.0, 1_000.0)]
    assert taken == [True] * 3
    assert bucket.level(1_000.0) == 7
    assert bucket.wait(8.0, 989.0) < 13


async def test_lim_09_a_million_tenants_leave_no_more_than_is_allowed() -> None:
    limit = RateLimit(requests_per_minute=60, window=1, max_wait=0, max_keys=500)
    door = Door(limit, provider=Answers())
    for number in range(2_000):
        with suppress(RateLimitedError):  # of the overflow that tenants beyond the bound share
            await door(tenant=f"tenant {number}")
        call = door.calls.pop()
        call.tenant = f"only asked about {number}"
        limit.levels(call)
        assert len(limit._quotas) <= 501
    await anyio.sleep(60)
    for _ in range(1_000):
        await door(tenant="one")
        await anyio.sleep(1)
        door.calls.clear()
    assert len(limit._quotas) < 100, "the map shrinks when they are idle"


async def test_lim_12_two_workers_let_twice_as_much_through_and_the_docs_say_so() -> None:
    provider = Answers()
    workers = [Door(RateLimit(requests_per_minute=10, max_wait=0), provider=provider) for _ in range(2)]
    await together(workers * 10)
    assert len(provider.attempts) == 20
    assert RateLimit.__doc__ is not None
    assert "in this process only" in RateLimit.__doc__
    assert "number of workers" in (DOCS / "rate-limit.md").read_text()


def test_can_13_a_limit_made_at_import_works_in_one_loop_after_the_other() -> None:
    limit = RateLimit(requests_per_minute=6_000, window=0.01, max_wait=1)

    async def main() -> int:
        provider = Answers()
        door = Door(limit, provider=provider)
        waiting = asyncio.gather(*[door() for _ in range(5)])
        await asyncio.sleep(0.025)
        waiting.cancel()
        return len(provider.attempts)

    assert asyncio.run(main()) >= 1
    assert asyncio.run(main()) >= 1
    assert limit.queued() == 0
