"""A limit for each key, and a bound on how many there are."""

from __future__ import annotations

import gc
import tracemalloc
from functools import partial
from typing import Any

import anyio
import pytest

from resilient_llm import Call, Limit, RateLimit, RateLimitedError
from tests.policies.rate_limiting import Answers, together
from tests.support import Door

pytestmark = pytest.mark.anyio


async def test_tenants_beyond_the_bound_share_one_limit_while_all_are_in_use() -> None:
    provider = Answers()
    limit = RateLimit(requests_per_minute=60, window=1, max_wait=0, max_keys=2)
    results = await together([partial(Door(limit, provider=provider), tenant=tenant) for tenant in "abcd"])
    assert provider.tenants == "abc"
    assert isinstance(results[3], RateLimitedError)


async def test_idle_tenants_make_room() -> None:
    provider = Answers()
    limit = RateLimit(requests_per_minute=60, window=1, max_wait=0, max_keys=2)
    door = Door(limit, provider=provider)
    for tenant in "abcdef":
        await door(tenant=tenant)
        await anyio.sleep(1)
    assert provider.tenants == "abcdef"
    assert len(limit._quotas) <= 2


async def test_a_tenant_with_a_call_in_flight_is_not_forgotten() -> None:
    provider = Answers(duration=100)
    limit = RateLimit(tokens_per_minute=600, estimate=lambda _call: 10, max_keys=1)
    door = Door(limit, provider=provider)
    async with anyio.create_task_group() as group:
        group.start_soon(partial(door, tenant="a"))
        await anyio.sleep(50)
        quota = limit._quotas._all[0]._quotas["a"]
        await together([partial(door, tenant="b")])
        assert limit._quotas._all[0]._quotas["a"] is quota


async def test_a_tenant_that_waits_for_what_it_shares_is_not_forgotten() -> None:
    provider = Answers()
    limit = RateLimit(
        limits=[
            Limit(key="tenant", requests_per_minute=1.2, window=60),
            Limit(key=None, requests_per_minute=600, window=1),
        ],
        max_wait=1_000,
    )
    door = Door(limit, provider=provider)
    await together([door] * 2)
    async with anyio.create_task_group() as group:
        for number in range(300):
            group.start_soon(partial(door, tenant=f"other {number}"))
        await anyio.sleep(0.01)
        group.start_soon(partial(door, tenant="a"))
        await anyio.sleep(20)
        assert limit._quotas._all[0]._quotas["a"].outstanding == 1
        group.start_soon(partial(door, tenant="a"))
    times = [at for at, attempt in provider.attempts if attempt.tenant == "a"]
    assert times[1] - times[0] == pytest.approx(40)  # 1.2 were there, and 0.02 come each second


async def test_what_a_tenant_owes_is_not_forgotten() -> None:
    limit = RateLimit(requests_per_minute=60, window=100, max_keys=1_000)
    door = Door(limit, provider=Answers())
    for _ in range(50):
        await door(tenant="a")
    for number in range(300):
        await door(tenant=f"other {number}")
    (level,) = limit.levels(door.calls[0])
    assert level.remaining == pytest.approx(50)


@pytest.mark.parametrize(
    ("key", "same", "different"),
    [
        ("tenant", {"tenant": "a", "model": "other"}, {"tenant": "other"}),
        ("model", {"tenant": "other"}, {"model": "other"}),
        ("target", {"tenant": "other"}, {"target": "other"}),
        (("tenant", "model"), {"tenant": "a", "target": "other"}, {"tenant": "a", "model": "other"}),
        (None, {"tenant": "other", "model": "other", "target": "other"}, None),
    ],
)
async def test_what_a_key_tells_apart(
    key: str | None, same: dict[str, Any], different: dict[str, Any] | None
) -> None:
    door = Door(RateLimit(key=key, requests_per_minute=1, max_wait=0), provider=Answers())  # type: ignore[arg-type]
    await door(tenant="a")
    with pytest.raises(RateLimitedError):
        await door(**same)
    if different is not None:
        await door(**different)


async def test_a_key_may_be_any_function_of_the_call() -> None:
    def user(call: Call) -> bytes | None:
        return call.request.body

    door = Door(RateLimit(key=user, requests_per_minute=1, max_wait=0), provider=Answers())
    await door(body=b"u1")
    await door(body=b"u2")
    with pytest.raises(RateLimitedError) as refused:
        await door(body=b"u1")
    assert refused.value.limit == "requests of user"


async def test_users_of_one_tenant_do_not_hold_up_each_other() -> None:
    provider = Answers()
    limit = RateLimit(
        limits=[
            Limit(key=lambda call: call.request.body, requests_per_minute=6, window=10, scope="user"),
            Limit(key=("tenant", "model"), requests_per_minute=600),
            Limit(key=None, requests_per_minute=6_000),
        ]
    )
    door = Door(limit, provider=provider)
    await together([partial(door, tenant="a", body=body) for body in (b"u1", b"u1", b"u2", b"u3")])
    assert provider.times == [0, 0, 0, 10]


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_an_idle_tenant_takes_less_than_a_kilobyte() -> None:
    number = 100_000
    limit = RateLimit(requests_per_minute=60, tokens_per_minute=6_000, burst=5, max_keys=2 * number)
    door = Door(limit, provider=Answers())
    await door()
    call, quotas = door.calls[0], limit._quotas._all[0]
    gc.collect()
    gc.disable()  # nothing here is garbage
    tracemalloc.start()
    try:
        for index in range(number):
            call.tenant = f"tenant-{index:08d}"
            quotas.of(call, 0.0).buckets[0].take(1.0, 0.5)
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        gc.enable()
    assert len(quotas) == number + 1
    assert size / number < 1_024
