"""What cannot be carried over a fork: an event loop, and the connections of a client that was passed in."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from redis.asyncio import RedisCluster

from resilient_llm import EventLoopError
from resilient_llm.core.shared_rate import RateCharge
from resilient_llm.stores import RedisStore
from tests.stores.conftest import Server

pytestmark = pytest.mark.realtime

ROOT = Path(__file__).parents[2]
TOLD = "EventLoopError: redis{where} was carried over a fork with its event loop or with a client that was passed in"

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")


def said(what: str, port: int) -> list[str]:
    """Run `fork_errors_worker.py`, since a test's own process has threads and loops that a fork would break."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.stores.fork_errors_worker", what, str(port)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    words: list[str] = json.loads(done.stdout)
    return words


@needs_fork
def test_a_client_that_the_parent_has_not_used_is_the_child_s(server: Server) -> None:
    assert said("client, unused", server.port) == ["99"]


@needs_fork
@pytest.mark.parametrize("what", ["client, used", "loop"])
def test_the_child_is_told_and_the_parent_goes_on(server: Server, what: str) -> None:
    before, child, after = said(what, server.port)
    assert child.startswith(TOLD.format(where=""))
    assert (before, after) == ("99", "98")


@needs_fork
def test_so_it_is_with_a_cluster(cluster_of: Callable[[str], list[Server]]) -> None:
    nodes = cluster_of("valkey9")
    for node in nodes:
        with node.admin as admin:
            admin.flushall()
    before, child, after = said("cluster, used", nodes[0].port)
    assert child.startswith("EventLoopError: redis at 127.0.0.1:")
    assert "was carried over a fork" in child
    assert (before, after) == ("99", "98")


@pytest.mark.parametrize("kind", ["server", "cluster"])
def test_two_loops_at_a_time_are_one_too_many(
    server: Server, cluster_of: Callable[[str], list[Server]], kind: str
) -> None:
    charge = RateCharge("k", 100.0, 1e-6, 1.0, own=True)
    told: list[str] = []

    def elsewhere(store: RedisStore) -> None:
        async def use() -> None:
            try:
                await store.rates.take("account", [charge])
            except EventLoopError as error:
                told.append(str(error))

        asyncio.run(use())

    async def main() -> None:
        client = None
        if kind == "cluster":
            client = RedisCluster(host="127.0.0.1", port=cluster_of("valkey9")[0].port)
        store = RedisStore(client or server.url, timeout=10.0, on_store_error="closed")
        await store.rates.take("account", [charge])
        thread = threading.Thread(target=elsewhere, args=(store,))
        thread.start()
        await asyncio.to_thread(thread.join)
        await store.rates.take("account", [charge])  # and here it goes on
        await store.aclose()
        if client is not None:
            await client.aclose()

    asyncio.run(main())
    assert len(told) == 1
    assert "in use by another event loop" in told[0]
