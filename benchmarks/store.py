"""Decisions a second about one shared limit, against other libraries and against a script that does nothing.

Everything runs against one server, a Valkey on the same machine, in one run and in turns (A B C A B C ...), from one
process with so many callers at once; figures are medians of the rounds, and only their ratios hold. Each decision is
one that lets a call pass, asynchronous, atomic on the server, and about one bucket that is never empty.

What each guarantees (all of them: several processes never grant more than one of them would):

- ours: a token bucket on the server's clock in microseconds, exact in any interval, with the wait for those who are
  refused; several limits at once would be as many keys of the same script. "decisions" are the store's, as those of the
  others are; "policy" is all of `RateLimit` around a function: a call with its telemetry, the waiting room, settlement.
- limits, `SlidingWindowCounterRateLimiter`: a script on two counters. Its window is weighted, not exact: at a boundary
  more or fewer than the limit pass. Its exact strategy (moving window) keeps a list entry per call, and each client's
  own clock.
- pyrate-limiter, `RedisBucket`: a script on a sorted set with a member per call, by the client's clock in
  milliseconds. Exact, if clocks agree.
- throttled-py, token bucket: a script on a hash, by the server's clock in whole seconds.
- bare: `EVALSHA` of `return 1` with the same client, by as many callers; and the same through our batches.

    python benchmarks/store.py [--full]

The last line is a JSON object: decisions a second, what one takes, and the CPU time it costs this process, at 64
callers; `*_alone_*` at one, when nothing can be batched.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any, NamedTuple

import anyio
import redis.asyncio

from benchmarks._running import run
from benchmarks._valkey import Valkey
from resilient_llm import Pipeline, RateLimit
from resilient_llm.core.shared_rate import RateCharge, Verdict
from resilient_llm.stores import RedisStore
from resilient_llm.stores._redis_scripts import Script

Decide = Callable[[], Awaitable[object]]

CALLERS = 64
FAR = 6_000_000_000
PEERS = {"limits": "limits", "pyrate": "pyrate_limiter", "throttled": "throttled"}


async def cases(url: str, stack: AsyncExitStack) -> dict[str, Decide]:
    """Give what is measured, by name: each makes one decision, and fails if that is a refusal."""
    store = await stack.enter_async_context(RedisStore(url, timeout=5.0, on_store_error="closed"))
    pipeline = Pipeline([RateLimit(requests_per_minute=FAR, store=store)])

    async def nothing() -> None: ...

    async def policy() -> None:
        await pipeline.run(nothing)

    charges = [RateCharge("bench", FAR, FAR / 60, 1.0)]

    async def take() -> None:
        decision = await store.rates.take("bench", charges)
        assert decision.verdict is Verdict.TAKEN

    client: Any = redis.asyncio.Redis.from_url(url, max_connections=CALLERS)
    stack.push_async_callback(client.aclose)
    no_op = Script("no_op", b"return 1")
    await client.script_load("return 1")

    async def bare() -> None:
        assert await client.execute_command("EVALSHA", no_op.sha, 0) == 1

    async def batched() -> None:
        assert await store.runner.run(no_op, ()) == 1

    made: dict[str, Decide] = {"decisions": take, "policy": policy}
    made |= {name: await PEER_CASES[name](url, stack) for name in PEERS if is_installed(name)}
    return made | {"bare_evalsha": bare, "batched_evalsha": batched}


def is_installed(name: str) -> bool:
    """Tell whether a peer is there to be measured."""
    return importlib.util.find_spec(PEERS[name]) is not None


async def limits(url: str, stack: AsyncExitStack) -> Decide:
    """Make a decision by `limits`."""
    import limits as peer  # noqa: PLC0415 - they are not ours to require
    import limits.aio  # noqa: PLC0415

    storage: Any = peer.aio.storage.RedisStorage(f"async+{url}", implementation="redispy")
    stack.push_async_callback(storage.bridge.get_connection().aclose)
    limiter = peer.aio.strategies.SlidingWindowCounterRateLimiter(storage)
    item = peer.RateLimitItemPerMinute(FAR)

    async def decide() -> None:
        assert await limiter.hit(item, "acme")

    return decide


async def pyrate(url: str, stack: AsyncExitStack) -> Decide:
    """Make a decision by `pyrate-limiter`."""
    from pyrate_limiter import Limiter, Rate, RedisBucket, SingleBucketFactory  # noqa: PLC0415

    client = redis.asyncio.Redis.from_url(url, max_connections=CALLERS)
    stack.push_async_callback(client.aclose)
    bucket = await RedisBucket.init([Rate(FAR, 60_000)], client, "pyrate")
    limiter = Limiter(SingleBucketFactory(bucket, schedule_leak=False))

    async def decide() -> None:
        assert await limiter.try_acquire_async("acme", blocking=False)

    return decide


async def throttled(url: str, stack: AsyncExitStack) -> Decide:
    """Make a decision by `throttled-py`."""
    from throttled.asyncio import RateLimiterType, Throttled, rate_limiter, store  # noqa: PLC0415

    quota = rate_limiter.per_min(FAR, burst=FAR)
    shared: Any = store.RedisStore(server=url)
    stack.push_async_callback(shared._backend.get_client().aclose)
    limiter = Throttled(using=RateLimiterType.TOKEN_BUCKET.value, quota=quota, store=shared)

    async def decide() -> None:
        assert not (await limiter.limit("acme")).limited

    return decide


PEER_CASES: dict[str, Callable[[str, AsyncExitStack], Awaitable[Decide]]] = {
    "limits": limits,
    "pyrate": pyrate,
    "throttled": throttled,
}


class Load(NamedTuple):
    """What came of making decisions for a while: how many a second, what each took, and of this process's time."""

    per_s: float
    took: list[float]
    cpu: float


async def load(decide: Decide, callers: int, seconds: float) -> Load:
    """Let so many callers make one decision after another."""
    took: list[float] = []
    used = time.process_time()
    began = time.perf_counter()
    until = began + seconds

    async def again_and_again() -> None:
        now = time.perf_counter()
        while now < until:
            await decide()
            before, now = now, time.perf_counter()
            took.append(now - before)

    async with anyio.create_task_group() as tasks:
        for _ in range(callers):
            tasks.start_soon(again_and_again)
    per_s = len(took) / (time.perf_counter() - began)
    return Load(per_s, sorted(took), (time.process_time() - used) / len(took))


async def measure(url: str, rounds: int, seconds: float) -> dict[str, dict[str, float]]:
    """Measure every case in turns, at many callers and at one; gives medians of the rounds."""
    figures: dict[str, dict[str, list[float]]] = {}
    async with AsyncExitStack() as stack:
        made = await cases(url, stack)
        for decide in made.values():
            await load(decide, CALLERS, seconds / 4)  # connections, scripts
        for _ in range(rounds):
            for name, decide in made.items():
                many = await load(decide, CALLERS, seconds)
                alone = await load(decide, 1, seconds / 2)
                for figure, value in {
                    "per_s": many.per_s,
                    "p50_ms": many.took[len(many.took) // 2] * 1e3,
                    "p99_ms": many.took[len(many.took) * 99 // 100] * 1e3,
                    "cpu_us": many.cpu * 1e6,
                    "alone_per_s": alone.per_s,
                    "alone_p50_ms": alone.took[len(alone.took) // 2] * 1e3,
                    "alone_cpu_us": alone.cpu * 1e6,
                }.items():
                    figures.setdefault(name, {}).setdefault(figure, []).append(value)
    return {
        name: {figure: statistics.median(values) for figure, values in each.items()}
        for name, each in figures.items()
    }


async def main(rounds: int, seconds: float) -> None:
    """Measure, print a table, and the figures as JSON in the last line."""
    with Valkey() as server:
        figures = await measure(server.url, rounds, seconds)
    bare = figures["bare_evalsha"]
    print(f"{'':16}{f'{CALLERS} callers':>13}{'of bare':>9}{'p50':>10}{'p99':>10}{'CPU':>8}", end="")
    print(f"{'one alone':>13}{'of bare':>9}{'p50':>10}{'CPU':>8}")
    for name, each in figures.items():
        print(
            f"{name:16}{each['per_s']:11,.0f}/s{each['per_s'] / bare['per_s']:9.2f}{each['p50_ms']:7.2f} ms"
            f"{each['p99_ms']:7.2f} ms{each['cpu_us']:5.0f} us"
            f"{each['alone_per_s']:11,.0f}/s{each['alone_per_s'] / bare['alone_per_s']:9.2f}"
            f"{each['alone_p50_ms']:7.2f} ms{each['alone_cpu_us']:5.0f} us"
        )
    result: dict[str, Any] = {
        f"{name}_{figure}": round(value, 3)
        for name, each in figures.items()
        for figure, value in each.items()
    }
    print(json.dumps(result))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--full", action="store_true", help="longer, and more rounds")
    full = parser.parse_args().full
    run(main(9 if full else 3, 1.0 if full else 0.4))
