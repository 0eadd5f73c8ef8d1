"""A full queue of a rate limit: who has fewer places than its share gets one of who has more, who is told at once."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial

import anyio
import anyio.lowlevel
import pytest

from resilient_llm import (
    Bulkhead,
    BulkheadFullError,
    ConcurrencyLimit,
    ConcurrencyLimitError,
    DeadlineExceededError,
    Limit,
    Policy,
    RateLimit,
    RateLimitedError,
    RejectedError,
)
from resilient_llm.stores import MemoryStore
from tests.policies.rate_limiting import Answers, refusals, together
from tests.support import Door

pytestmark = pytest.mark.anyio


def limit(**options: float) -> RateLimit:
    """One request a second, of all tenants together, and four places."""
    return RateLimit(
        limits=[Limit(key=None, requests_per_minute=60, window=1)],
        max_queued=4,
        max_queued_total=4,
        max_wait=1_000,
        **options,  # type: ignore[arg-type]
    )


async def test_the_displaced_one_is_told_at_once_when_to_come_back() -> None:
    provider, refused = Answers(), list[tuple[float, RateLimitedError]]()
    door = Door(limit(), provider=provider)

    async def noisy() -> None:
        try:
            await door(tenant="n")
        except RateLimitedError as error:
            refused.append((anyio.current_time(), error))

    async with anyio.create_task_group() as tasks:
        for _ in range(5):
            tasks.start_soon(noisy)
        await anyio.sleep(0.5)
        began = anyio.current_time()
        await together([partial(door, tenant="q")] * 2)
    assert [at for at, _ in refused] == [began, began]
    # Two of its own are before it, or three where it is told before the other one is.
    assert all(error.retry_after in (2.5, 3.5) for _, error in refused)
    assert sorted(provider.tenants) == sorted("nnnqq")
    assert len(provider.times) == 5
    assert provider.times == [0, 1, 2, 3, 4], "no place is lost, and none is given twice"


async def test_beyond_its_share_a_tenant_displaces_nobody() -> None:
    provider = Answers()
    door = Door(limit(), provider=provider)
    results = await together([partial(door, tenant="n")] * 5 + [partial(door, tenant="q")] * 4)
    assert provider.tenants.count("q") == 2, "half of the places"
    assert len(refusals(results)) == 4
    assert [isinstance(result, RateLimitedError) for result in results[:5]] == [
        False,
        False,
        False,
        True,
        True,
    ]


@pytest.mark.parametrize("who", ["the displaced one", "the newcomer"])
async def test_cancelled_in_the_same_instant_it_leaves_nothing_behind(who: str) -> None:
    policy, provider = limit(), Answers()
    door = Door(policy, provider=provider)
    scopes: list[anyio.CancelScope] = []

    async def one(tenant: str) -> None:
        with anyio.CancelScope() as scope, suppress(RateLimitedError):
            scopes.append(scope)
            await door(tenant=tenant)

    async def cancel() -> None:
        scopes[4 if who == "the displaced one" else -1].cancel()

    async with anyio.create_task_group() as tasks:
        for _ in range(5):
            tasks.start_soon(one, "n")
            await anyio.lowlevel.checkpoint()
        await anyio.sleep(0.5)
        tasks.start_soon(one, "q")
        tasks.start_soon(cancel)
        await anyio.sleep(0.1)
        assert policy.queued() in ((4,) if who == "the displaced one" else (3, 4))
        await door(tenant="q")
    assert policy.queued() == 0
    assert provider.times == [float(second) for second in range(len(provider.times))]


async def test_a_call_out_of_time_in_that_instant_is_told_so_or_refused_but_never_lost() -> None:
    door = Door(limit(), provider=Answers())

    async def last() -> object:
        try:
            return await door(tenant="n", deadline=anyio.current_time() + 4.5)
        except (RateLimitedError, DeadlineExceededError) as error:
            return error

    async with anyio.create_task_group() as tasks:
        for _ in range(4):
            tasks.start_soon(partial(door, tenant="n"))
        await anyio.lowlevel.checkpoint()
        outcome = list[object]()

        async def ask() -> None:
            outcome.append(await last())

        tasks.start_soon(ask)
        await anyio.sleep(0.5)
        await door(tenant="q")
    assert isinstance(outcome[0], RateLimitedError)


SLOTS: list[tuple[Policy, type[RejectedError]]] = [
    (Bulkhead(max_concurrent=1, shared=1, max_queued=4, max_queued_total=4), BulkheadFullError),
    (ConcurrencyLimit(initial=1, max=1, max_queued=4, max_queued_total=4), ConcurrencyLimitError),
]


@pytest.mark.parametrize(("policy", "error"), SLOTS, ids=["bulkhead", "concurrency limit"])
async def test_so_it_is_with_slots(policy: Bulkhead | ConcurrencyLimit, error: type[RejectedError]) -> None:
    provider, refused = Answers(duration=1.0), list[tuple[float, RejectedError]]()
    door = Door(policy, provider=provider)

    async def noisy() -> None:
        try:
            await door(tenant="n")
        except RejectedError as refusal:
            refused.append((anyio.current_time(), refusal))

    async with anyio.create_task_group() as tasks:
        for _ in range(5):
            tasks.start_soon(noisy)
        await anyio.sleep(0.5)
        began = anyio.current_time()
        results = await together([partial(door, tenant="q")] * 3)
    assert [at for at, _ in refused] == [began, began]
    for _, refusal in refused:
        assert isinstance(refusal, error)
        assert refusal.retry_after is not None
        assert refusal.retry_after >= 1
        assert "went to a tenant that had fewer" in str(refusal)
    assert [isinstance(result, error) for result in results] == [False, False, True], "half of the places"
    assert sorted(provider.tenants) == sorted("nnnqq")
    assert (policy.in_use(), policy.queued()) == (0, 0)


ONE_AND_A_PLACE: list[Callable[[], Policy]] = [
    lambda: Bulkhead(max_concurrent=1, max_queued=1, max_wait=1),
    lambda: Bulkhead(max_concurrent=1, max_queued=1, max_wait=1, store=MemoryStore()),
    lambda: ConcurrencyLimit(initial=1, max=1, max_queued=1, max_wait=1),
]


@pytest.mark.parametrize("make", ONE_AND_A_PLACE, ids=["bulkhead", "stored", "concurrency"])
async def test_who_has_run_out_of_time_takes_nobody_s_place(make: Callable[[], Policy]) -> None:
    """Which of two an event loop comes to first, that one's time is up or that another comes, is a matter of chance."""
    doors = [Door(make(), provider=Answers(duration=1.5)) for _ in range(12)]

    async def call(door: Door, second: int) -> None:
        await anyio.sleep(second)
        with suppress(RejectedError):
            await door()

    async with anyio.create_task_group() as group:
        for door in doors:
            for second in (
                0,
                0,
                1,
            ):  # one runs, one gives up after a second, and one waits for the other half
                group.start_soon(call, door, second)
    assert [door.calls[-1].wait_time for door in doors] == pytest.approx([0.5] * 12)
