"""RateLimit over a store: several processes, here several stores with clients of their own, keep one limit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import pytest

from resilient_llm import (
    ConfigurationError,
    CostExceedsCapacityError,
    Limit,
    RateLimit,
    RateLimitedError,
)
from resilient_llm.core.shared_rate import Change, RateCharge
from resilient_llm.outcome import Outcome, Usage, Verdict
from resilient_llm.stores import MemoryStore, RedisStore
from tests.support import Door, Provider

pytestmark = [pytest.mark.anyio, pytest.mark.realtime]

Make = Callable[..., RedisStore]


def door(store: Any, provider: Any = None, **options: Any) -> Door:
    return Door(RateLimit(store=store, **options), provider=provider or Provider())


async def test_two_processes_share_one_limit(server: Any, make_store: Make) -> None:
    doors = [door(make_store(server), requests_per_minute=6, max_wait=0) for _ in range(2)]
    for turn in range(6):
        await doors[turn % 2](tenant="a")
    for each in doors:
        with pytest.raises(RateLimitedError) as refused:
            await each(tenant="a")
        assert refused.value.limit == "requests of tenant"
        assert refused.value.remaining == pytest.approx(0, abs=0.2)
        assert refused.value.retry_after == pytest.approx(10, abs=2)
        await each(tenant="b")


async def test_a_refusal_names_the_limit_and_what_remains_of_each(server: Any, make_store: Make) -> None:
    limits = [
        Limit(key="tenant", requests_per_minute=10, tokens_per_minute=1_000, burst=5),
        Limit(key=None, requests_per_minute=100, tokens_per_minute=10_000),
    ]
    first, second = (
        door(make_store(server), limits=limits, max_wait=0, estimate=lambda _call: 400.0) for _ in range(2)
    )
    await first(tenant="a")
    await second(tenant="a")
    with pytest.raises(RateLimitedError) as refused:
        await first(tenant="a")
    error = refused.value
    assert error.limit == "tokens of tenant"
    assert error.retry_after == pytest.approx(12, abs=0.5)
    remaining = {level.name: level.remaining for level in error.levels}
    assert remaining["tokens of tenant"] == pytest.approx(200, abs=10)
    assert remaining["requests of tenant"] == pytest.approx(8, abs=0.2)
    assert remaining["requests of account"] == pytest.approx(98, abs=1)
    assert remaining["tokens of account"] == pytest.approx(9_200, abs=100)
    await second(tenant="b")


async def test_waiting_calls_of_several_processes_take_turns(server: Any, make_store: Make) -> None:
    # 20 a second: 10 at once, then 2 processes with 10 waiting calls each.
    limit = {"burst": None, "requests_per_minute": 1_200, "window": 0.5, "max_wait": 5}
    doors = [door(make_store(server), **limit) for _ in range(2)]
    began = anyio.current_time()
    finished: list[tuple[float, int]] = []

    async def one(index: int) -> None:
        await doors[index](tenant="a")
        finished.append((anyio.current_time() - began, index))

    async with anyio.create_task_group() as group:
        for _ in range(15):
            for index in range(2):
                group.start_soon(one, index)
    times = [at for at, _ in finished]
    assert len(finished) == 30
    for later, at in enumerate(times):
        granted = later + 1
        assert granted <= 10 + 20 * (at + 0.005) + 1e-6
    assert times[-1] == pytest.approx(1.0, abs=0.25)
    # While both wait, neither is passed over more than a few times in a row.
    late = [index for _, index in finished[10:]]
    both = next(at for at in range(len(late)) if len(set(late[at:])) == 1)
    longest = max(
        len(run) for run in "".join(map(str, late[:both])).replace("01", "0 1").replace("10", "1 0").split()
    )
    assert longest <= 4


async def test_a_cancelled_wait_gives_its_place_up(server: Any, make_store: Make) -> None:
    look = RateCharge("tenant:requests:a", 1.0, 1.0, 0.0, own=True)
    first, second = (door(make_store(server), requests_per_minute=60, window=1, max_wait=9) for _ in range(2))
    await first(tenant="a")
    with anyio.move_on_after(0.3):
        await first(tenant="a")
    await anyio.sleep(0.05)
    (level,) = (await make_store(server).rates.take("rate_limit:a", [look])).levels
    assert level.level > 0, "a place is still held"
    began = anyio.current_time()
    await second(tenant="a")
    assert anyio.current_time() - began == pytest.approx(0.7, abs=0.2)


async def test_usage_settles_the_estimate_for_everybody(server: Any, make_store: Make) -> None:
    outcome = Outcome(verdict=Verdict.SUCCESS, usage=Usage(input_tokens=50, output_tokens=50))

    async def provider(call: Any) -> Any:
        call.finish(outcome)
        return await Provider()(call)

    options: dict[str, Any] = {"tokens_per_minute": 1_000, "max_wait": 0, "estimate": lambda _call: 900.0}
    first, second = (door(make_store(server), provider, **options) for _ in range(2))
    await first(tenant="a")
    await anyio.sleep(0.1)
    await second(tenant="a")
    await anyio.sleep(0.1)
    with pytest.raises(RateLimitedError) as refused:
        await first(tenant="a")
    assert refused.value.remaining == pytest.approx(800, abs=15)


async def test_what_was_never_sent_is_given_back(server: Any, make_store: Make) -> None:
    store = make_store(server)
    refusing = door(
        store, Provider(*[RefusedFurtherInError() for _ in range(4)]), requests_per_minute=2, max_wait=0
    )
    for _ in range(4):
        with pytest.raises(RefusedFurtherInError):
            await refusing(tenant="a")
        await anyio.sleep(0.03)


class RefusedFurtherInError(CostExceedsCapacityError):
    """A refusal further in."""

    def __init__(self) -> None:
        Exception.__init__(self, "refused further in")
        self.retry_after = None
        self.name = "inner"


async def test_more_than_a_bucket_holds_is_refused_without_asking(server: Any, make_store: Make) -> None:
    store = make_store(server)
    too_large = door(store, tokens_per_minute=100, estimate=lambda _call: 200.0)
    with pytest.raises(CostExceedsCapacityError, match="needs 200 tokens of tenant"):
        await too_large(tenant="a")
    with server.admin as admin:
        assert admin.keys() == []


async def test_a_call_that_is_refused_by_what_is_known_asks_nobody(server: Any, make_store: Make) -> None:
    store = make_store(server)
    limited = door(store, requests_per_minute=1, max_wait=0)
    await limited(tenant="a")
    with pytest.raises(RateLimitedError):
        await limited(tenant="a")
    with server.admin as admin:
        before = admin.info("commandstats").get("cmdstat_evalsha", {}).get("calls", 0)
        for _ in range(50):
            with pytest.raises(RateLimitedError):
                await limited(tenant="a")
        assert admin.info("commandstats").get("cmdstat_evalsha", {}).get("calls", 0) == before


async def test_one_name_means_one_set_of_limits(server: Any, make_store: Make) -> None:
    store = make_store(server)
    RateLimit(store=store, requests_per_minute=1)
    RateLimit(store=store, requests_per_minute=1)
    with pytest.raises(ConfigurationError, match="give each a name= of its own"):
        RateLimit(store=store, requests_per_minute=2)
    RateLimit(store=store, requests_per_minute=2, name="other")


async def test_dry_run_counts_and_refuses_nothing(server: Any, make_store: Make) -> None:
    store = make_store(server)
    trial = door(store, requests_per_minute=2, max_wait=0, dry_run=True)
    for _ in range(5):
        await trial(tenant="a")


async def test_the_memory_store_decides_alike() -> None:
    store = MemoryStore()
    doors = [door(store, requests_per_minute=4, max_wait=0) for _ in range(2)]
    for turn in range(4):
        await doors[turn % 2](tenant="a")
    for each in doors:
        with pytest.raises(RateLimitedError):
            await each(tenant="a")


async def test_what_one_process_learns_of_the_provider_all_know(server: Any, make_store: Make) -> None:
    headers = [(b"x-ratelimit-limit-requests", b"100"), (b"x-ratelimit-remaining-requests", b"3")]

    async def provider(call: Any) -> Any:
        reply = await Provider()(call)
        reply.headers.extend(headers)
        return reply

    options: dict[str, Any] = {"requests_per_minute": 100, "key": "target", "max_wait": 0}
    first, second = (door(make_store(server), provider, **options) for _ in range(2))
    await first(tenant="a")
    await anyio.sleep(0.1)
    headers.clear()
    for _ in range(3):
        await second(tenant="a")
    with pytest.raises(RateLimitedError) as refused:
        await second(tenant="a")
    assert refused.value.limit == "requests of target"


async def test_a_noisy_tenant_that_waits_does_not_delay_another(server: Any, make_store: Make) -> None:
    limits = [
        Limit(key="tenant", requests_per_minute=60, window=5),
        Limit(key=None, requests_per_minute=6_000),
    ]
    first, second = (door(make_store(server), limits=limits, max_wait=20) for _ in range(2))
    async with anyio.create_task_group() as group:
        for _ in range(12):
            group.start_soon(lambda: first(tenant="noisy"))
        await anyio.sleep(0.2)
        for each in (first, second):
            began = anyio.current_time()
            await each(tenant="quiet")
            assert anyio.current_time() - began < 0.2
        group.cancel_scope.cancel()


async def test_more_keys_than_are_kept_here_are_still_told_apart_there(server: Any, make_store: Make) -> None:
    limited = door(make_store(server), requests_per_minute=1, max_wait=0, max_keys=2)
    for turn in range(10):
        await limited(tenant=f"tenant {turn}")
    for turn in range(10):
        with pytest.raises(RateLimitedError):
            await limited(tenant=f"tenant {turn}")


async def test_cancelled_at_any_moment_nothing_stays_taken_or_held(server: Any, make_store: Make) -> None:
    limited = door(make_store(server), requests_per_minute=600, window=1, max_wait=9)
    began = anyio.current_time()
    granted = 0
    for turn in range(60):
        with anyio.move_on_after(turn % 20 * 5e-4):
            await limited(tenant="a")
            granted += 1
    await anyio.sleep(0.1)
    allowed = 10 + 10 * (anyio.current_time() - began)
    assert granted <= allowed
    began = anyio.current_time()
    for _ in range(12):
        await limited(tenant="a")
    assert anyio.current_time() - began < 1.6, "what nobody used is not there"


async def test_a_refusal_is_not_decided_by_old_news(server: Any, make_store: Make) -> None:
    here, there = make_store(server), make_store(server)
    limited = door(here, requests_per_minute=1, max_wait=0)
    charge = RateCharge("tenant:requests:a", 1.0, 1 / 60, 1.0, own=True)
    await there.rates.take("rate_limit:a", [charge])
    with pytest.raises(RateLimitedError):
        await limited(tenant="a")
    there.rates.settle("rate_limit:a", [Change(charge.key, charge.capacity, charge.rate, 1.0)])
    await anyio.sleep(0.1)
    with pytest.raises(RateLimitedError):
        await limited(tenant="a")
    await anyio.sleep(1.0)
    await limited(tenant="a")
