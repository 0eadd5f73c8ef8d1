"""Who waits for a rate limit, in which order, and that nothing is lost when they leave."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from functools import partial

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient_llm import (
    Bulkhead,
    BulkheadFullError,
    DeadlineExceededError,
    Limit,
    Outcome,
    RateLimit,
    RateLimitedError,
    Usage,
    Verdict,
)
from resilient_llm.testing import run_virtual
from tests.policies.rate_limiting import Answers, by_body, refusals, together
from tests.support import Door, cancel_at_every_await

pytestmark = pytest.mark.anyio


def at_rest(limit: RateLimit) -> bool:
    sleepers = limit._waiters._sleepers
    return limit.queued() == 0 and not sleepers and sleepers._driver is None


async def test_waiters_of_one_tenant_are_served_first_come_first_served() -> None:
    provider = Answers()
    door = Door(RateLimit(tokens_per_minute=60, window=10, estimate=by_body), provider=provider)
    bodies = [b"10", b"3", b"1", b"5", b"2"]
    await together([partial(door, body=body) for body in bodies])
    assert [attempt.request.body for _, attempt in provider.attempts] == bodies
    assert provider.times == [0, 3, 4, 9, 11]


async def test_a_higher_priority_goes_first_inside_a_tenant() -> None:
    provider = Answers()
    door = Door(RateLimit(requests_per_minute=60, window=1), provider=provider)
    await together([partial(door, priority=priority) for priority in (0, 0, 0, 1)])
    assert [attempt.priority for _, attempt in provider.attempts] == [0, 1, 0, 0]


async def test_a_small_call_of_higher_priority_does_not_wait_for_what_a_large_one_needs() -> None:
    provider = Answers()
    door = Door(RateLimit(tokens_per_minute=60, estimate=by_body, max_wait=100), provider=provider)
    await together(
        [partial(door, body=b"60"), partial(door, body=b"50"), partial(door, body=b"2", priority=1)]
    )
    assert provider.times == [0, 2, 52]


async def test_a_newcomer_never_passes_those_who_wait() -> None:
    provider = Answers()
    door = Door(RateLimit(tokens_per_minute=60, window=10, estimate=by_body), provider=provider)
    await together([partial(door, body=body) for body in (b"5", b"8", b"1")])
    assert provider.times == [0, 3, 4]


async def test_a_tenant_whose_own_limit_is_reached_holds_up_nobody() -> None:
    provider = Answers()
    limit = RateLimit(
        limits=[
            Limit(key="tenant", requests_per_minute=6, window=10),
            Limit(key=None, requests_per_minute=600),
        ]
    )
    door = Door(limit, provider=provider)
    await together([partial(door, tenant=tenant) for tenant in "aaabcd"])
    assert provider.tenants == "abcdaa"
    assert provider.times == [0, 0, 0, 0, 10, 20]


async def test_a_model_whose_limit_is_reached_holds_up_no_other() -> None:
    provider = Answers()
    limit = RateLimit(
        limits=[
            Limit(key="model", requests_per_minute=6, window=10),
            Limit(key=None, requests_per_minute=600),
        ]
    )
    door = Door(limit, provider=provider)
    await together([partial(door, tenant="a", model=model) for model in "xxxyz"])
    assert [attempt.model for _, attempt in provider.attempts] == ["x", "y", "z", "x", "x"]
    assert provider.times == [0, 0, 0, 10, 20]


async def test_a_noisy_tenant_does_not_delay_another() -> None:
    provider = Answers(duration=0.5)
    door = Door(RateLimit(key=None, requests_per_minute=120, window=1, max_wait=1_000), provider=provider)

    async def quiet() -> None:
        for _ in range(20):
            await anyio.sleep(2)
            await door(tenant="quiet")

    async with anyio.create_task_group() as group:
        for _ in range(300):
            group.start_soon(partial(door, tenant="noisy"))
        await quiet()
        group.cancel_scope.cancel()
    waits = [call.wait_time for call in door.calls if call.tenant == "quiet"]
    assert len(waits) == 20
    assert max(waits) <= 2 * 0.5 + 1e-6, "the one being served, then its own"


async def cancellable(scope: anyio.CancelScope, call: Callable[[], Awaitable[object]]) -> None:
    with scope:
        await call()


async def test_a_cancelled_head_lets_the_next_one_go_at_once() -> None:
    provider = Answers()
    door = Door(RateLimit(tokens_per_minute=60, window=10, estimate=by_body), provider=provider)
    await door(body=b"6")
    scope = anyio.CancelScope()
    async with anyio.create_task_group() as group:
        group.start_soon(cancellable, scope, partial(door, body=b"10"))
        await anyio.sleep(0.1)
        group.start_soon(partial(door, body=b"4"))
        await anyio.sleep(0.1)
        scope.cancel()
    assert provider.times == [0, 0.2]


def test_whoever_is_cancelled_once_granted_passes_it_on() -> None:
    async def main() -> None:
        limit = RateLimit(key=None, tokens_per_minute=60, estimate=by_body, max_wait=1e6)
        provider = Answers(duration=1e6)
        door = Door(limit, provider=provider)
        calls = [asyncio.create_task(door(body=b"60")) for _ in range(3)]
        await anyio.sleep(1)
        assert len(provider.attempts) == 1
        first = provider.attempts[0][1].parent
        assert first is not None
        first.finish(Outcome(verdict=Verdict.SUCCESS, usage=Usage(input_tokens=0, output_tokens=0)))
        # In this very step the second has been granted what the first gave back, and has yet to run.
        assert limit.queued() == 1
        calls[1].cancel()
        await anyio.sleep(1)
        assert [attempt.parent for _, attempt in provider.attempts] == [door.calls[0], door.calls[2]]
        assert at_rest(limit)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)

    run_virtual(main)


async def test_nothing_is_lost_wherever_a_call_is_cancelled() -> None:
    limit = RateLimit(requests_per_minute=60, tokens_per_minute=600, window=1, estimate=by_body, key=None)
    provider = Answers(duration=0.2, marks_sent=True)
    door = Door(limit, provider=provider)
    before = 0

    async def scenario() -> None:
        async with anyio.create_task_group() as group:
            for tenant in "abc":
                group.start_soon(partial(door, tenant=tenant, body=b"5"))
                await anyio.sleep(0.1)
            await door(tenant="d", body=b"10")

    async def check() -> None:
        nonlocal before
        assert at_rest(limit)
        sent = [(at, int(attempt.request.body or 0)) for at, attempt in provider.attempts[before:]]
        requests, tokens = limit.levels(door.calls[0])
        # What was sent is paid for, and nothing else.
        assert requests.remaining == pytest.approx(refilled([(at, 1) for at, _ in sent], 1, 1), abs=1e-3)
        assert tokens.remaining == pytest.approx(refilled(sent, 10, 10), abs=1e-3)
        await anyio.sleep(5)
        await door(body=b"10")  # and it still works
        await anyio.sleep(5)
        before = len(provider.attempts)

    assert await cancel_at_every_await(scenario, check) >= 5


def refilled(grants: list[tuple[float, int]], capacity: float, rate: float) -> float:
    """Say what a bucket that was full has now."""
    level, then = capacity, 0.0
    for at, amount in [*grants, (anyio.current_time(), 0)]:
        level = min(capacity, level + rate * (at - then)) - amount
        then = at
    return level


async def test_the_role_of_the_driver_is_handed_on() -> None:
    provider = Answers()
    limit = RateLimit(requests_per_minute=60, window=1, key=None)
    door = Door(limit, provider=provider)
    await door()
    scopes = [anyio.CancelScope() for _ in range(5)]
    async with anyio.create_task_group() as group:
        for scope in scopes:
            group.start_soon(cancellable, scope, door)
            await anyio.sleep(0.01)
        for scope in scopes[:-1]:
            scope.cancel()
            await anyio.sleep(0.01)
    assert provider.times == [0, 1]
    assert at_rest(limit)


async def test_those_who_run_out_of_time_leave_the_others_in_good_hands() -> None:
    provider = Answers()
    door = Door(RateLimit(requests_per_minute=60, window=1, key=None, max_wait=60), provider=provider)
    deadline = anyio.current_time() + 2.5
    # At least 1 s each, which fits; that others are before them shows only when it is their turn.
    calls = [
        partial(door, tenant=str(number), deadline=deadline if number % 2 else 1e9) for number in range(10)
    ]
    results = await together(calls)
    late = [result for result in results if isinstance(result, (DeadlineExceededError, RateLimitedError))]
    assert len(late) + len(provider.attempts) == 10
    assert provider.times == list(range(len(provider.attempts)))
    assert len(late) >= 3


async def test_one_task_sleeps_until_a_token_is_there_and_nobody_polls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    provider = Answers()
    limit = RateLimit(requests_per_minute=60, window=1, max_wait=100)
    looks = 0
    advance = limit._waiters.queue.advance

    def counted(now: float) -> object:
        nonlocal looks
        looks += 1
        return advance(now)

    monkeypatch.setattr(type(limit._waiters.queue), "advance", lambda _self, now: counted(now))
    await together([Door(limit, provider=provider)] * 21)
    assert len(provider.attempts) == 21
    assert looks <= 2 * 20 + 2  # when one comes, and when one is granted


async def test_what_a_call_gives_back_serves_a_waiter_at_once() -> None:
    provider = Answers(duration=3.0)
    limit = RateLimit(key=None, tokens_per_minute=60, estimate=by_body, max_wait=100)
    door = Door(limit, Bulkhead(max_concurrent=1, max_wait=1, key="model"), provider=provider)
    calls = [partial(door, body=b"30"), partial(door, body=b"30"), partial(door, body=b"30", model="other")]
    refused = [result for result in await together(calls) if isinstance(result, BulkheadFullError)]
    # The second never got past the bulkhead, and gave its 30 back after 1 s; the third had them then.
    assert len(refused) == 1
    assert provider.times == [0, 1]


async def test_waits_are_part_of_what_a_call_says_it_waited() -> None:
    door = Door(RateLimit(requests_per_minute=60, window=1), provider=Answers())
    await together([door] * 3)
    assert [round(call.wait_time, 6) for call in door.calls] == [0, 1, 2]


@settings(max_examples=25)
@given(seed=st.integers(0, 2**32), backend=st.sampled_from(["asyncio", "trio"]))
def test_under_random_cancellation_the_limit_holds_and_is_used(seed: int, backend: str) -> None:
    rng = random.Random(seed)
    limit = RateLimit(key=None, tokens_per_minute=600, window=3, estimate=by_body, max_wait=1e6)
    provider = Answers(duration=0.3, marks_sent=True)
    door = Door(limit, provider=provider)

    async def one(tenant: str, patience: float) -> None:
        with anyio.move_on_after(patience):
            await door(tenant=tenant, body=str(rng.choice([1, 5, 20])).encode())

    async def main() -> float:
        async with anyio.create_task_group() as group:
            for _ in range(150):
                group.start_soon(one, rng.choice("abc"), rng.choice([1e9, 1e9, rng.uniform(0, 40)]))
                await anyio.sleep(rng.uniform(0, 0.3))
        assert at_rest(limit)
        return anyio.current_time()

    run_virtual(main, backend=backend)  # type: ignore[arg-type]
    grants = [(at, int(attempt.request.body or 0)) for at, attempt in provider.attempts]
    for first, (begin, _) in enumerate(grants):
        total = 0
        for end, tokens in grants[first:]:
            total += tokens
            assert total <= 30 + 10 * (end - begin) + 1e-3
    used = sum(tokens for _, tokens in grants)
    busy = grants[-1][0] - grants[0][0]
    if busy > 60:  # it was saturated
        assert used >= 0.98 * 10 * busy


async def test_a_refusal_counts_those_who_wait() -> None:
    limit = RateLimit(requests_per_minute=60, window=1, max_wait=2)
    results = await together([Door(limit, provider=Answers())] * 5)
    assert ["2 calls wait" in str(error) for error in refusals(results)] == [True, True]


async def test_max_queued_counts_a_tenant_over_all_models() -> None:
    limits = [
        Limit(key="model", requests_per_minute=60, window=1),
        Limit(key=None, requests_per_minute=600, window=1),
    ]
    limit = RateLimit(limits=limits, max_queued=10, max_wait=1_000)
    provider = Answers()
    door = Door(limit, provider=provider)
    noisy = [partial(door, tenant="noisy", model=f"m{number % 10}") for number in range(300)]
    quiet = [partial(door, tenant="quiet", model="q") for _ in range(3)]
    results = await together([*noisy, *quiet])
    assert len(refusals(results[:300])) == 300 - 10 - 10
    assert not refusals(results[300:])
