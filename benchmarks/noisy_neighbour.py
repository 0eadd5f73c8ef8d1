"""What a noisy tenant does to a quiet one: with one queue for all, with slots of one's own, and with a shared pool.

Noisy offers fifty times its share of ten slots and takes whatever it gets; quiet offers part of its own. All times
are virtual, random numbers seeded. A call takes a second on average, with half of that for its standard deviation.
Figures are p99s of quiet's calls, but for its first hundred: until then it earns the credit that a burst draws on.
"Intervals" are p99s of the time between two releases of slots in succession. "Always first" is a weight of a million:
no order of serving a full pool can do better by quiet.

The last line is a JSON object. Where the name says no more, its figures are of calls at random at half the share;
`*_vs_alone` is their total time by that of quiet alone in the same pool, `busy_ratio` how much of the slots was used,
`new_*` what the first hundred calls met.
"""

import argparse
import functools
import gc
import itertools
import json
import math
import random
import tracemalloc
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import anyio

from resilient_llm import Bulkhead, Pipeline, ambient
from resilient_llm.core.waiting_room import WaitingRoom
from resilient_llm.testing import run_virtual

SLOTS = 10
NOISY = 50 * SLOTS // 2
NEW = 100
LOADS = (0.2, 0.5, 0.8)
QUEUES: dict[str, Any] = {"max_queued": 20 * NOISY, "max_wait": 10_000.0}
ARRANGEMENTS: dict[str, dict[str, Any]] = {
    "one queue for all": {"max_concurrent": SLOTS, "key": lambda _: "all"},
    "half the slots each": {"max_concurrent": SLOTS // 2},
    "shared": {"max_concurrent": SLOTS, "shared": SLOTS},
    "shared, always first": {"max_concurrent": SLOTS, "shared": SLOTS, "weights": {"quiet": 1e6}},
}


class Call(NamedTuple):
    """A call that is over: whose it was, when it came, got its slot and ended."""

    tenant: str
    came: float
    began: float
    ended: float


class Traffic:
    """Calls through a bulkhead, and what became of them."""

    def __init__(self, bulkhead: Bulkhead, seed: int) -> None:
        self.pipeline = Pipeline([bulkhead])
        self.seed = seed
        self.randoms: dict[str, random.Random] = {}
        self.calls: list[Call] = []

    async def call(self, tenant: str) -> None:
        """Make one call."""
        came = anyio.current_time()

        async def work() -> None:
            began = anyio.current_time()
            await anyio.sleep(self.random(tenant).lognormvariate(-0.1116, 0.4724))
            self.calls.append(Call(tenant, came, began, anyio.current_time()))

        with ambient(tenant=tenant):
            await self.pipeline.run(work)

    def random(self, tenant: str) -> random.Random:
        """Give random numbers that are the same for a tenant whoever else is there."""
        return self.randoms.setdefault(tenant, random.Random(f"{self.seed} {tenant}"))

    @asynccontextmanager
    async def saturated_by(self, callers: dict[str, int]) -> AsyncIterator[None]:
        """Let so many callers of these tenants each make one call after another, meanwhile."""

        async def again_and_again(tenant: str) -> None:
            while True:
                await self.call(tenant)

        async with anyio.create_task_group() as group:
            for tenant, count in callers.items():
                for _ in range(count):
                    group.start_soon(again_and_again, tenant)
            await anyio.sleep(20)
            yield
            group.cancel_scope.cancel()

    async def offer(self, arrivals: str, rate: float, calls: int) -> None:
        """Make quiet's calls, so many a second."""
        when = random.Random(self.seed)
        async with anyio.create_task_group() as group:
            for _ in range(calls):
                between = when.expovariate(rate) if arrivals == "at random" else when.uniform(0.9, 1.1) / rate
                await anyio.sleep(between)
                group.start_soon(self.call, "quiet")


class Figures(NamedTuple):
    """What quiet's day was like."""

    wait: float
    total: float
    new_wait: float
    interval: float
    busy: float


def p99(values: Sequence[float]) -> float:
    return sorted(values)[math.ceil(0.99 * len(values)) - 1]


async def day(
    arrangement: dict[str, Any], noisy: dict[str, int], arrivals: str, rate: float, calls: int
) -> Figures:
    """Let quiet make its calls beside so many callers of others."""
    traffic = Traffic(Bulkhead(**QUEUES, **arrangement), seed=7)
    async with traffic.saturated_by(noisy):
        began = anyio.current_time()
        await traffic.offer(arrivals, rate, calls)
        ended = anyio.current_time()
    during = [call for call in traffic.calls if began < call.ended < ended]
    quiet = sorted((call for call in traffic.calls if call.tenant == "quiet"), key=lambda call: call.came)
    return Figures(
        wait=p99([call.began - call.came for call in quiet[NEW:]]),
        total=p99([call.ended - call.came for call in quiet[NEW:]]),
        new_wait=p99([call.began - call.came for call in quiet[:NEW]]),
        interval=p99([later.ended - call.ended for call, later in itertools.pairwise(during)]),
        busy=sum(call.ended - max(began, call.began) for call in during) / SLOTS / (ended - began),
    )


def run(arrangement: str, noisy: dict[str, int], arrivals: str, rate: float, calls: int) -> Figures:
    return run_virtual(day, ARRANGEMENTS[arrangement], noisy, arrivals, rate, calls)


async def shares(weights: dict[str, float], grants: int) -> dict[str, float]:
    """Give what part of the slots each of some tenants has that all want everything."""
    traffic = Traffic(Bulkhead(**QUEUES, **ARRANGEMENTS["shared"], weights=weights), seed=7)
    async with traffic.saturated_by(dict.fromkeys(weights, 3 * SLOTS)):
        before = len(traffic.calls)
        await anyio.sleep(grants / SLOTS)
        granted = Counter(call.tenant for call in traffic.calls[before:])
    return {tenant: granted[tenant] / granted.total() for tenant in weights}


def memory(seen: int) -> float:
    """Give the bytes left behind by each of so many tenants that have been served while others still wait."""
    room = WaitingRoom[str](2 * seen, credit=1)
    for _ in range(10):
        room.push("noisy", 0.0)
    tracemalloc.start()
    for number in range(seen):
        name = f"tenant-{number}"
        room.push(name, 0.0)
        while room.depth(name):
            room.head(0.0)
            room.pop()
        if room.depth("noisy") < 5:
            room.push("noisy", 0.0)
    gc.collect()
    left, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return left / seen


def sweep(calls: int) -> Iterator[tuple[str, float, Figures, dict[str, Figures]]]:
    """Give quiet's figures by how its calls come and what part of its share they are: alone, and beside noisy."""
    for arrivals, load in itertools.product(("evenly", "at random"), LOADS):
        rate = load * SLOTS / 2
        alone = run("shared", {}, arrivals, rate, calls)
        beside = {
            name: run(name, {"noisy": NOISY}, arrivals, rate, calls if "shared" in name else calls // 2)
            for name in ARRANGEMENTS
        }
        yield arrivals, load, alone, beside


def main(*, full: bool) -> None:
    calls = 4_000 if full else 800
    result: dict[str, float] = {}
    print(
        f"{'':18} {'':24}{'p99 wait':>9} {'in intervals':>13} {'p99 total':>10} {'x alone':>8} {'slots busy':>11}"
    )
    for arrivals, load, alone, beside in sweep(calls):
        print(
            f"\n{arrivals + f', {load:.0%}':18} {'alone':24}{alone.wait:7.2f} s {'':13} {alone.total:8.2f} s"
        )
        for name, figures in beside.items():
            intervals = f"{figures.wait / figures.interval:13.2f}" if figures.interval else ""
            print(
                f"{'':18} {name:24}{figures.wait:7.2f} s {intervals:13} {figures.total:8.2f} s "
                f"{figures.total / alone.total:8.2f} {figures.busy:11.0%}"
            )
        if (arrivals, load) == ("at random", 0.5):
            result["alone_total_s"] = alone.total
            for name, key in zip(beside, ("one_queue", "halves", "shared", "first"), strict=True):
                result[f"{key}_wait_s"] = beside[name].wait
                result[f"{key}_total_s"] = beside[name].total
                result[f"{key}_vs_alone"] = beside[name].total / alone.total
                result[f"{key}_busy_ratio"] = beside[name].busy
            result["shared_new_wait_s"] = beside["shared"].new_wait
            result["release_interval_s"] = beside["shared"].interval
        if (arrivals, load) == ("at random", 0.8):
            result["shared_wait_at_80_s"] = beside["shared"].wait
            result["first_wait_at_80_s"] = beside["shared, always first"].wait

    many = {f"noisy {number}": 50 for number in range(SLOTS)}
    print("\nTen noisy tenants, and quiet at part of an eleventh, at random")
    for load in LOADS:
        figures = run("shared", many, "at random", load * SLOTS / 11, calls // 2)
        print(f"{load:18.0%} {'shared':24}{figures.wait:7.2f} s {figures.wait / figures.interval:13.2f}")
    result["ten_noisy_wait_at_80_s"] = figures.wait
    result["ten_noisy_new_wait_at_80_s"] = figures.new_wait

    weights = {"one": 1.0, "two": 2.0, "four": 4.0}
    parts = run_virtual(functools.partial(shares, weights, 7_000))
    off = max(abs(parts[tenant] * 7 / weight - 1) for tenant, weight in weights.items())
    print(
        "\nShares at weights 1, 2, 4:",
        ", ".join(f"{part:.2%}" for part in parts.values()),
        f"(off by {off:.2%})",
    )
    result["weights_error_ratio"] = off

    seen = 1_000_000 if full else 100_000
    result["idle_tenant_bytes"] = memory(seen)
    print(f"Memory of a tenant seen and remembered, of {seen:,}: {result['idle_tenant_bytes']:.0f} bytes")
    print(json.dumps({key: round(value, 4) for key, value in result.items()}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--full", action="store_true", help="five times as many calls, a million tenants")
    main(full=parser.parse_args().full)
