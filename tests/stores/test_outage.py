"""The store dies under load, or a process does that others wait behind: calls go on, and limits are kept again.

STORE_TESTS=all tries every mode with every outage.
"""

from __future__ import annotations

import itertools
import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from benchmarks._valkey import Valkey
from benchmarks.store_outage import MODES, OUTAGES, measure, p99
from resilient_llm import Pipeline, RateLimit, ambient
from resilient_llm.stores.guard import OnStoreError
from tests.stores.cluster import wait_for
from tests.stores.conftest import Server
from tests.stores.processes import CAPACITY, RATE, Setting, Workers, most_missing, order

PROCESSES = 4
FEW: list[tuple[str, OnStoreError]] = [("killed", "local"), ("killed", "open"), ("frozen", "closed")]
CASES = list(itertools.product(OUTAGES, MODES)) if os.environ.get("STORE_TESTS") == "all" else FEW


@pytest.fixture
def workers() -> Iterator[Workers]:
    made = Workers(PROCESSES)
    yield made
    made.close()


@pytest.mark.parametrize(("outage", "mode"), CASES)
def test_calls_go_on_as_promised(outage: str, mode: OnStoreError) -> None:
    with Valkey() as server:
        figures = anyio.run(measure, outage, mode, server)
    # What it comes to is the benchmark's to say. Nobody waited the second it took, nor for a connection.
    assert len(figures.gone) > 500
    assert p99(figures.gone) < 0.25
    assert figures.recovery < 9
    assert figures.changes >= 2
    assert figures.unguarded > 100
    if mode == "closed":
        assert len(figures.refused) > 100
    else:
        assert figures.refused == []


def test_limits_hold_again_once_the_store_is_back(workers: Workers, tmp_path: Path) -> None:
    server = Server("valkey9", tmp_path)
    server.start()
    setting = Setting(server.url, cluster=False, read=lambda: server.admin)
    told = order(setting, "refused", on_store_error="local", timeout=0.25, seconds=6.0)
    try:
        workers.tell(told)
        time.sleep(3.0)  # so that each has heard, twice, how many there are
        server.kill()
        killed = time.monotonic()
        time.sleep(1.0)
        server.start()
        back = time.monotonic()
        tallies = workers.hear()
        notes = setting.notes(told["prefix"])
    finally:
        server.close()
    assert [each["unavailable"] for each in tallies] == [0] * PROCESSES
    grants = sorted(at for each in tallies for at in each["grants"])

    def granted(since: float, until: float) -> int:
        return sum(since <= at < until for at in grants)

    # Without the store the shares of all come to the whole limit, and no process goes without.
    alone = granted(killed, back)
    assert 0.7 * RATE * (back - killed) <= alone <= CAPACITY + RATE * (back - killed)
    assert all(any(killed + 0.3 < at < back for at in each["grants"]) for each in tallies)
    # The server begins anew, hears what was granted without it, and gives nothing beyond the limit from then on.
    assert most_missing(notes, RATE, CAPACITY) < CAPACITY + 0.5
    last = grants[-1]
    assert 0.9 * RATE <= granted(last - 1, last) <= CAPACITY + RATE


def test_a_process_that_dies_in_line_holds_up_nobody_for_long(own_server: Server) -> None:
    setting = Setting(own_server.url, cluster=False, read=lambda: own_server.admin)
    limit = {"requests_per_minute": 240, "window": 0.25, "max_wait": 30}
    told = order(setting, "waiting", callers=1, seconds=60.0, limit=limit)
    workers = Workers(3)  # one alone knows its turn, and keeps no place
    try:
        workers.tell(told)
        wait_for(lambda: bool(held(own_server, told["prefix"])), "a place in line")
    finally:
        workers.close()  # by SIGKILL
    assert held(own_server, told["prefix"])
    waits = anyio.run(calls_in_a_row, own_server, told)
    # Its place is forgotten a second after its turn, and one call every quarter of a second goes through again.

    assert max(waits[:3]) < 2.5
    assert sum(waits[8:]) < 0.25 * 4 + 0.25
    assert most_missing(setting.notes(told["prefix"]), 4.0, 1.0) < 1.5


async def calls_in_a_row(server: Server, told: dict[str, Any]) -> list[float]:
    from resilient_llm.stores import RedisStore  # noqa: PLC0415

    waits: list[float] = []
    async with RedisStore(server.url, prefix=told["prefix"], timeout=2.0, on_store_error="closed") as store:
        pipeline = Pipeline([RateLimit(store=store, **told["limit"])])

        async def work() -> None: ...

        with ambient(tenant="acme"):
            for _ in range(12):
                began = time.monotonic()
                await pipeline.run(work)
                waits.append(time.monotonic() - began)
    return waits


def held(server: Server, prefix: str) -> float:
    """Say how much of a bucket is held for those in line."""
    with server.admin as admin:
        found = [admin.get(key) for key in admin.keys(f"{prefix}*rate*") if not key.endswith(b":notes")]
    if not found or not found[0]:
        return 0.0
    _, _, lately, _, _, older, _ = struct.unpack("<7d", found[0])
    return float(lately + older)
