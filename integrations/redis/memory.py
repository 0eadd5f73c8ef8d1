"""What each thing that policies keep takes of a server's memory: makes ten thousand of each, and divides.

    python -m integrations.redis.memory redis://localhost:6379/15 [10000]

As `MEMORY USAGE` says: keys, values and the table they stand in. The database is emptied before and after. The last
line is a JSON object, in bytes.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from contextlib import suppress

import anyio
from redis import Redis

from resilient_llm import (
    AttemptError,
    Budget,
    Bulkhead,
    CircuitBreaker,
    Limit,
    Pipeline,
    Policy,
    Price,
    RateLimit,
    ambient,
)
from resilient_llm.outcome import Outcome, Verdict
from resilient_llm.stores import RedisStore

KINDS: dict[str, Callable[[RedisStore, int], Policy]] = {
    "a rate limit of requests": lambda store, count: RateLimit(
        requests_per_minute=60, max_keys=count, store=store
    ),
    "one of requests, tokens and bursts": lambda store, count: RateLimit(
        limits=[Limit(key="tenant", requests_per_minute=60, tokens_per_minute=60_000, burst=5)],
        estimate=lambda _call: 100,
        max_keys=count,
        store=store,
    ),
    "a bulkhead with one slot in use": lambda store, count: Bulkhead(
        max_concurrent=2, max_keys=count, store=store
    ),
    "a circuit that has opened": lambda store, count: CircuitBreaker(
        key="tenant", consecutive_failures=1, max_keys=count, store=store
    ),
    "a budget of a day and a month": lambda store, count: Budget(
        usd_per_day=10,
        usd_per_month=100,
        price=Price(input=1, output=1),
        estimate=lambda _call: 100,
        max_keys=count,
        ledger=store.ledger,
    ),
}


async def one_call_each(policy: Policy, count: int, look: Callable[[], None]) -> None:
    """Make a call of each of so many tenants, all at once; looks when all are under way, and when all have failed."""
    inside, all_are = 0, anyio.Event()

    async def work() -> Outcome:
        nonlocal inside
        inside += 1
        if inside == count:
            look()
            all_are.set()
        await all_are.wait()
        return Outcome(verdict=Verdict.FAILURE, error_type="503", status=503)

    pipeline = Pipeline([policy], classify_result=lambda outcome: outcome)  # type: ignore[arg-type, return-value]

    async def call(number: int) -> None:
        with ambient(tenant=f"tenant-{number:05}"), suppress(AttemptError):
            await pipeline.run(work)

    async with anyio.create_task_group() as tasks:
        for number in range(count):
            tasks.start_soon(call, number)


async def measure(url: str, count: int) -> dict[str, float]:
    """Give the bytes that each kind takes at most, keys and all."""
    figures: dict[str, float] = {}
    with Redis.from_url(url) as admin:

        def used() -> int:
            with admin.pipeline(transaction=False) as sizes:
                for key in admin.scan_iter(count=1_000):
                    sizes.memory_usage(key, samples=0)
                return sum(size or 0 for size in sizes.execute())

        for name, kind in KINDS.items():
            admin.flushdb()
            seen: list[int] = []
            async with RedisStore(url, timeout=30.0, on_store_error="closed") as store:
                await one_call_each(kind(store, count), count, lambda seen=seen: seen.append(used()))  # type: ignore[misc]  # typed by use
                await anyio.sleep(0.2)  # what nobody waits for
                seen.append(used())
            figures[name] = max(seen) / count
        admin.flushdb()
    return figures


if __name__ == "__main__":
    result = asyncio.run(measure(sys.argv[1], int(sys.argv[2]) if sys.argv[2:] else 10_000))
    for title, size in result.items():
        print(f"{title:36} {size:6.0f} bytes")  # noqa: T201 - a program
    print(json.dumps(result))  # noqa: T201
