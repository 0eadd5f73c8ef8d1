"""RateLimit over a store: several processes, here several stores with clients of their own, keep one limit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest

from resilient_llm import (
    ConfigurationError,
    CostExceedsCapacityError,
    Limit,
    RateLimit,
    RateLimitedError,
    Reply,
)
from resilient_llm.core.shared_rate import Change, RateCharge
from resilient_llm.outcome import Outcome, Usage, Verdict
from resilient_llm.stores import MemoryStore, RedisStore
from tests.policies.rate_limiting import by_body
from tests.support import A_HANG, Door, Nothing, Provider, stalls, until

pytestmark = [pytest.mark.anyio, pytest.mark.realtime]

Make = Callable[..., RedisStore]


def door(store: Any, provider: Any = None, **options: Any) -> Door:
    return Door(RateLimit(store=store, **options), provider=provider or Provider())


class Since:
    """The time that has really gone by, in which buckets refill."""

    def __init__(self) -> None:
        self.began = anyio.current_time()

    def refilled(self, level: float, rate: float) -> Any:
        """Give what may be left of a level by now, when so many come back in a second."""
        return pytest.approx(level, abs=rate * (anyio.current_time() - self.began) + 1e-3)


async def level(store: RedisStore, key: str, capacity: float, rate: float) -> float:
    """Look where a tenant's bucket stands in the store: less than what was taken, if places are held."""
    look = RateCharge(f"tenant:{key}", capacity, rate, 0.0, own=True)
    return (await store.rates.take("rate_limit:a", [look])).levels[0].level


async def test_two_processes_share_one_limit(server: Any, make_store: Make) -> None:
    since = Since()
    options = {"requests_per_minute": 0.1, "window": 3_600, "max_wait": 0}
    doors = [door(make_store(server), **options) for _ in range(2)]
    for turn in range(6):
        await doors[turn % 2](tenant="a")
    for each in doors:
        with pytest.raises(RateLimitedError) as refused:
            await each(tenant="a")
        assert refused.value.limit == "requests of tenant"
        assert refused.value.remaining == since.refilled(0, 1 / 600)
        assert refused.value.retry_after == since.refilled(600, 1)
        await each(tenant="b")


async def test_a_refusal_names_the_limit_and_what_remains_of_each(server: Any, make_store: Make) -> None:
    limits = [
        Limit(key="tenant", requests_per_minute=10, tokens_per_minute=1_000, burst=5),
        Limit(key=None, requests_per_minute=100, tokens_per_minute=10_000),
    ]
    first, second = (
        door(make_store(server), limits=limits, max_wait=0, estimate=lambda _call: 500.0) for _ in range(2)
    )
    since = Since()
    await first(tenant="a")
    await second(tenant="a")
    with pytest.raises(RateLimitedError) as refused:
        await first(tenant="a")
    error = refused.value
    assert error.limit == "tokens of tenant"
    assert error.retry_after == since.refilled(30, 1)
    remaining = {level.name: level.remaining for level in error.levels}
    assert remaining["tokens of tenant"] == since.refilled(0, 1_000 / 60)
    assert remaining["requests of tenant"] == since.refilled(8, 10 / 60)
    assert remaining["requests of account"] == since.refilled(98, 100 / 60)
    assert remaining["tokens of account"] == since.refilled(9_000, 10_000 / 60)
    await second(tenant="b")


async def test_waiting_calls_of_several_processes_take_turns(server: Any, make_store: Make) -> None:
    # 20 a second: 10 at once, then 2 processes with 10 waiting calls each.
    limit = {"burst": None, "requests_per_minute": 1_200, "window": 0.5, "max_wait": 5}
    stores = [make_store(server) for _ in range(2)]
    doors = [door(store, **limit) for store in stores]
    began = anyio.current_time()
    finished: list[tuple[float, int]] = []

    async def one(index: int) -> None:
        await doors[index](tenant="a")
        finished.append((anyio.current_time() - began, index))

    async with stalls(lambda: stores[0].runner.command("TIME")) as lost, anyio.create_task_group() as group:
        for _ in range(15):
            for index in range(2):
                group.start_soon(one, index)
    times = [at for at, _ in finished]
    assert len(finished) == 30
    for later, at in enumerate(times):
        granted = later + 1
        assert granted <= 10 + 20 * (at + 0.005) + 1e-6
    # Whoever sleeps too long after a turn costs the last one more than the machine does.
    assert times[-1] - times[0] <= 1.0 + 0.25 + lost.total
    # While both wait, neither is passed over more than a few times in a row, or as often as one was asleep.
    late = [index for _, index in finished[10:]]
    both = next(at for at in range(len(late)) if len(set(late[at:])) == 1)
    longest = max(
        len(run) for run in "".join(map(str, late[:both])).replace("01", "0 1").replace("10", "1 0").split()
    )
    assert longest <= 4 + 20 * lost.longest


async def test_a_cancelled_wait_gives_its_place_up(server: Any, make_store: Make) -> None:
    limit: dict[str, Any] = {"requests_per_minute": 0.6, "window": 100}  # one, and the next in 100 seconds
    waits, other = make_store(server), make_store(server)
    first, second = door(waits, max_wait=300, **limit), door(other, max_wait=0, **limit)
    since = Since()
    await second(tenant="a")  # of which the first does not know: it asks, and keeps a place

    async def places() -> float:
        return round(-await level(other, "requests:a", 1.0, 0.01))

    async with anyio.create_task_group() as group:
        group.start_soon(lambda: first(tenant="a"))
        await until(lambda: _is(places, 1))
        group.cancel_scope.cancel()
    await until(lambda: _is(places, 0))
    with pytest.raises(RateLimitedError) as refused:
        await second(tenant="a")
    assert refused.value.retry_after == since.refilled(100, 1), "it would wait for nobody"


async def _is(look: Callable[[], Awaitable[float]], expected: float) -> bool:
    return await look() == expected


async def test_usage_settles_the_estimate_for_everybody(server: Any, make_store: Make) -> None:
    outcome = Outcome(verdict=Verdict.SUCCESS, usage=Usage(input_tokens=50, output_tokens=50))

    async def provider(call: Any) -> Any:
        call.finish(outcome)
        return await Provider()(call)

    rate = 1 / 6
    options: dict[str, Any] = {"tokens_per_minute": 10, "window": 6_000, "max_wait": 0}
    options["estimate"] = lambda _call: 900.0
    stores = [make_store(server) for _ in range(2)]
    first, second = (door(store, provider, **options) for store in stores)
    since = Since()

    async def is_left(expected: float) -> bool:
        return bool(await level(stores[1], "tokens:a", 1_000.0, rate) == since.refilled(expected, rate))

    await first(tenant="a")
    await until(lambda: is_left(900))
    await second(tenant="a")
    await until(lambda: is_left(800))
    with pytest.raises(RateLimitedError) as refused:
        await first(tenant="a")
    assert refused.value.remaining == since.refilled(800, rate)


async def test_what_was_never_sent_is_given_back(server: Any, make_store: Make) -> None:
    store = make_store(server)
    refusing = door(
        store, Provider(*[RefusedFurtherInError() for _ in range(4)]), requests_per_minute=2, max_wait=0
    )
    for _ in range(4):
        with pytest.raises(RefusedFurtherInError):
            await refusing(tenant="a")
        await until(lambda: _is(lambda: level(store, "requests:a", 2.0, 2 / 60), 2.0))


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
    limited = door(store, requests_per_minute=0.1, window=600, max_wait=0)
    await limited(tenant="a")
    began = anyio.current_time()
    with pytest.raises(RateLimitedError):
        await limited(tenant="a")
    before = server.scripts_run()
    for _ in range(50):
        with pytest.raises(RateLimitedError):
            await limited(tenant="a")
    took = anyio.current_time() - began
    # What is known is good for a second.
    assert server.scripts_run() - before <= took


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

    options: dict[str, Any] = {"requests_per_minute": 1, "window": 6_000, "key": "target", "max_wait": 0}
    stores = [make_store(server) for _ in range(2)]
    first, second = (door(store, provider, **options) for store in stores)
    await first(tenant="a")
    look = RateCharge("target:requests:api.example", 100.0, 1 / 60, 0.0)

    async def is_known() -> bool:
        return (await stores[1].rates.take("rate_limit:api.example", [look])).levels[0].level < 4

    await until(is_known)
    headers.clear()
    for _ in range(3):
        await second(tenant="a")
    with pytest.raises(RateLimitedError) as refused:
        await second(tenant="a")
    assert refused.value.limit == "requests of target"


async def test_a_noisy_tenant_that_waits_does_not_delay_another(server: Any, make_store: Make) -> None:
    limits = [
        Limit(key="tenant", requests_per_minute=0.6, window=500),
        Limit(key=None, requests_per_minute=6_000),
    ]
    limit = RateLimit(store=make_store(server), limits=limits, max_wait=2_000)
    first = Door(limit, provider=Provider())
    second = door(make_store(server), limits=limits, max_wait=2_000)
    async with anyio.create_task_group() as group:
        for _ in range(12):
            group.start_soon(lambda: first(tenant="noisy"))
        await until(lambda: limit.queued() >= 6)
        # Behind noisy's it would be minutes.
        with anyio.fail_after(A_HANG):
            for each in (first, second):
                await each(tenant="quiet")
        group.cancel_scope.cancel()


async def test_shares_are_by_tokens_where_calls_use_less_than_was_estimated(
    server: Any, make_store: Make
) -> None:
    taken: Counter[str] = Counter()

    async def provider(call: Any) -> Reply:
        tokens = int(by_body(call))
        taken[call.tenant] += tokens
        await anyio.sleep(0.02)
        usage = Usage(input_tokens=tokens // 2, output_tokens=0)
        call.finish(Outcome(verdict=Verdict.SUCCESS, usage=usage))
        return Reply(200, [], Nothing(), complete=True)

    limits = [
        Limit(key=None, tokens_per_minute=600_000, window=0.2),
        Limit(key="model", requests_per_minute=600_000),
    ]
    limited = door(make_store(server), provider, limits=limits, estimate=by_body, max_wait=1_000)

    async def again_and_again(tenant: str, model: str, tokens: int) -> None:
        while True:
            await limited(tenant=tenant, model=model, body=b"%d" % tokens)

    async with anyio.create_task_group() as group:
        for model in "xy":
            for _ in range(4):
                group.start_soon(again_and_again, "large", model, 500)
            for _ in range(20):
                group.start_soon(again_and_again, "small", model, 40)
        await until(lambda: taken["large"] > 5_000)  # the bucket was full at first, for whoever came
        taken.clear()
        await until(lambda: taken["large"] > 40_000)
        group.cancel_scope.cancel()
    assert 0.94 < taken["small"] / taken["large"] < 1.06


async def test_more_keys_than_are_kept_here_are_still_told_apart_there(server: Any, make_store: Make) -> None:
    limited = door(make_store(server), requests_per_minute=1, max_wait=0, max_keys=2)
    for turn in range(10):
        await limited(tenant=f"tenant {turn}")
    for turn in range(10):
        with pytest.raises(RateLimitedError):
            await limited(tenant=f"tenant {turn}")


async def test_cancelled_at_any_moment_nothing_stays_taken_or_held(server: Any, make_store: Make) -> None:
    store, upstream = make_store(server), Provider()
    limited = door(store, upstream, requests_per_minute=0.6, window=2_000, max_wait=9_000)
    since = Since()
    # Until there is nothing left, and then of those who wait their turn.
    for turn in range(80):
        with anyio.move_on_after(turn % 20 * 5e-4):
            await limited(tenant="a")
    while len(upstream.attempts) < 20:
        with anyio.fail_after(A_HANG):  # what seems to be missing would come back in 100 s
            await limited(tenant="a")
    for turn in range(20):
        with anyio.move_on_after(turn * 5e-4):
            await limited(tenant="a")
    assert len(upstream.attempts) == 20
    await until(lambda: _is(lambda: level(store, "requests:a", 20.0, 0.01), since.refilled(0, 0.01)))


async def test_a_refusal_is_not_decided_by_old_news(server: Any, make_store: Make) -> None:
    here, there = make_store(server), make_store(server)
    limited = door(here, requests_per_minute=0.1, window=600, max_wait=0)
    charge = RateCharge("tenant:requests:a", 1.0, 1 / 600, 1.0, own=True)
    await there.rates.take("rate_limit:a", [charge])
    with pytest.raises(RateLimitedError):
        await limited(tenant="a")
    there.rates.settle("rate_limit:a", [Change(charge.key, charge.capacity, charge.rate, 1.0)])

    async def is_let_through() -> bool:
        try:
            await limited(tenant="a")
        except RateLimitedError:
            return False
        return True

    await until(is_let_through)  # by what was heard first it would take ten minutes
