"""What cannot go on in the child of a fork, and what the child is told: printed. No test itself."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable
from typing import Any

from redis.asyncio import Redis, RedisCluster

from resilient_llm import EventLoopError
from resilient_llm.core.shared_rate import RateCharge
from resilient_llm.stores import RedisStore

CHARGE = RateCharge("k", 100.0, 1e-6, 1.0, own=True)


async def take(store: RedisStore) -> str:
    try:
        decision = await store.rates.take("account", [CHARGE])
    except EventLoopError as error:
        return f"{type(error).__name__}: {error}"
    return f"{decision.levels[0].level:.0f}"


def in_a_child(work: Callable[[], str]) -> str:
    """Run `work` in a child, and give what it says."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        said = "failed"
        try:
            said = work()
        finally:
            os.write(write, said.encode())
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return said


def with_a_loop_of_its_own(client: Any, port: int, *, used: bool) -> list[str]:
    """Fork with a client that was passed in; the child has an event loop of its own."""
    loop = asyncio.new_event_loop()
    said: list[str] = []

    async def make() -> RedisStore:
        return RedisStore(client(port), on_store_error="closed", timeout=10)

    store = loop.run_until_complete(make())
    if used:
        said.append(loop.run_until_complete(take(store)))
    said.append(in_a_child(lambda: asyncio.run(take(store))))
    if used:  # nothing has happened to the parent
        said.append(loop.run_until_complete(take(store)))
    loop.run_until_complete(close(store))
    loop.close()
    return said


def with_the_loop(port: int) -> list[str]:
    """Fork with an event loop that the child goes on with."""
    loop = asyncio.new_event_loop()
    store = RedisStore(f"redis://127.0.0.1:{port}/0", on_store_error="closed", timeout=10)
    said = [loop.run_until_complete(take(store))]
    said.append(in_a_child(lambda: loop.run_until_complete(take(store))))
    said.append(loop.run_until_complete(take(store)))
    loop.run_until_complete(close(store))
    loop.close()
    return said


async def close(store: RedisStore) -> None:
    client: Any = store.runner.client
    await store.aclose()
    await client.aclose()


CASES: dict[str, Callable[[int], list[str]]] = {
    "client, unused": lambda port: with_a_loop_of_its_own(lambda port: Redis(port=port), port, used=False),
    "client, used": lambda port: with_a_loop_of_its_own(lambda port: Redis(port=port), port, used=True),
    "cluster, used": lambda port: with_a_loop_of_its_own(
        lambda port: RedisCluster(host="127.0.0.1", port=port), port, used=True
    ),
    "loop": with_the_loop,
}

if __name__ == "__main__":
    what, port = sys.argv[1:]
    print(json.dumps(CASES[what](int(port))))  # noqa: T201
