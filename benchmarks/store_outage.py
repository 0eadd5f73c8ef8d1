"""What calls meet while the store of their rate limit is killed, or frozen, under load: how long they wait for it.

Forty callers make calls of one limit that is far from reached. After half a second the server ends, or stops answering;
a second later it is back. Everything that a call waits before it runs, or is refused, is added latency. In each mode
(`on_store_error`) calls go on as promised: of this process's share, without a limit, or refused at once.

    python benchmarks/store_outage.py [--full]

The last line is a JSON object: by mode and kind of outage the p99 of added latency in milliseconds while the store was
gone, the longest, and the seconds after its return until it was asked again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import anyio
import anyio.to_thread

from benchmarks._valkey import Valkey
from resilient_llm import Pipeline, RateLimit, StoreUnavailableError, ambient
from resilient_llm.stores import RedisStore
from resilient_llm.stores.guard import OnStoreError

CALLERS = 40
BEFORE = 0.5
GONE = 1.0
PATIENCE = 10.0
MODES: tuple[OnStoreError, ...] = ("local", "open", "closed")
OUTAGES = ("killed", "frozen")


@dataclass
class Figures:
    """What became of calls, by when they were made: before the outage, during it, after."""

    healthy: list[float] = field(default_factory=list)
    gone: list[float] = field(default_factory=list)
    back: list[float] = field(default_factory=list)
    refused: list[float] = field(default_factory=list)
    """When calls were refused, in seconds since the outage began."""
    recovery: float = math.inf
    """Seconds from the server's return until it was asked again as a matter of course."""
    changes: int = 0
    unguarded: int = 0
    lost: int = 0


async def measure(outage: str, mode: OnStoreError, server: Valkey) -> Figures:
    """Let a server that runs go and come back under load."""
    figures = Figures()
    async with RedisStore(server.url, prefix=f"{outage}-{mode}:", on_store_error=mode) as store:
        pipeline = Pipeline([RateLimit(requests_per_minute=60_000_000, store=store)])
        samples, done = figures.healthy, False
        since = math.inf

        async def calls() -> None:
            while not done:
                into, began = samples, time.perf_counter()

                async def run() -> None:
                    into.append(time.perf_counter() - began)  # noqa: B023 - it runs before the next is made

                try:
                    with ambient(tenant="acme"):
                        await pipeline.run(run)
                except StoreUnavailableError:
                    into.append(time.perf_counter() - began)
                    figures.refused.append(time.perf_counter() - since)
                await anyio.sleep(0.005)

        async with anyio.create_task_group() as tasks:
            for _ in range(CALLERS):
                tasks.start_soon(calls)
            await anyio.sleep(BEFORE)
            samples, since = figures.gone, time.perf_counter()
            (server.kill if outage == "killed" else server.freeze)()
            await anyio.sleep(GONE)
            if outage == "killed":
                await anyio.to_thread.run_sync(server.start)
            else:
                server.thaw()
            returned = time.perf_counter()
            while not store.guard.closed and time.perf_counter() - returned < PATIENCE:  # noqa: ASYNC110 - no event
                await anyio.sleep(0.002)
            figures.recovery = time.perf_counter() - returned
            samples = figures.back
            await anyio.sleep(BEFORE)
            done = True
        figures.changes = store.guard.transitions
        figures.unguarded = store.guard.unguarded
    figures.lost = store.guard.lost
    return figures


def p99(values: Sequence[float]) -> float:
    """Give the 99th percentile."""
    return sorted(values)[math.ceil(0.99 * len(values)) - 1]


def main(rounds: int) -> None:
    """Measure, print a table, and the figures as JSON in the last line."""
    result: dict[str, float] = {}
    print(
        f"{'':16} {'p99 before':>11} {'p99 gone':>9} {'longest':>9} {'p99 after':>10} {'asked again after':>18}"
    )
    for outage in OUTAGES:
        for mode in MODES:
            runs = []
            for _ in range(rounds):
                with Valkey() as server:
                    runs.append(asyncio.run(measure(outage, mode, server)))
            figures = sorted(runs, key=lambda run: p99(run.gone))[len(runs) // 2]
            print(
                f"{outage + ', ' + mode:16} {p99(figures.healthy) * 1e3:8.2f} ms {p99(figures.gone) * 1e3:6.1f} ms "
                f"{max(figures.gone) * 1e3:6.1f} ms {p99(figures.back) * 1e3:7.2f} ms {figures.recovery:16.2f} s"
                f"   {len(figures.gone):,} calls, {len(figures.refused):,} refused, {figures.lost} lost"
            )
            key = f"{outage}_{mode}"
            result[f"{key}_p99_ms"] = p99(figures.gone) * 1e3
            result[f"{key}_max_ms"] = max(figures.gone) * 1e3
            result[f"{key}_asked_again_s"] = figures.recovery
    print(json.dumps({name: round(value, 3) for name, value in result.items()}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--full", action="store_true", help="medians of five outages each")
    main(5 if parser.parse_args().full else 1)
