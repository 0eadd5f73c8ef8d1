"""A store that is made, and used, before a fork: what children do with it is printed. No test itself."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import traceback
from collections.abc import Callable, Coroutine
from typing import Any

from resilient_llm import Budget, Bulkhead, Pipeline, RateLimit, ambient
from resilient_llm.stores import RedisStore
from tests.stores.inside import runner_of, told

CHILDREN = 6
MOST = 2
MANY = 600
"""More than go in the first batches."""


def fork(work: Callable[[int], None]) -> str:
    """Run `work` in children, each with a pipe, and give what they wrote to it; one that fails ends the program."""
    read, write = os.pipe()
    children: list[int] = []
    for _ in range(CHILDREN):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                work(write)
                status = 0
            except BaseException:  # noqa: BLE001 - a child must not go on as the parent would
                traceback.print_exc()
            finally:
                os._exit(status)
        children.append(child)
    os.close(write)
    with os.fdopen(read) as pipe:
        said = pipe.read()
    if any(os.waitpid(child, 0)[1] for child in children):
        sys.exit("a child failed")
    return said


def leases(url: str, *, used: bool) -> dict[str, Any]:
    """Take slots in children, and count how many are held at once."""
    store = RedisStore(url, on_store_error="closed", timeout=5)
    pipeline = Pipeline(
        [
            RateLimit(requests_per_minute=6000, store=store),
            Budget(tokens_per_day=10_000, ledger=store.ledger, estimate=lambda _: 1),
            Bulkhead(max_concurrent=MOST, max_wait=60, store=store, name="slots"),
        ]
    )

    async def call(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        with ambient(tenant="acme"):
            await pipeline.run(work)

    async def nothing() -> None: ...

    async def use() -> None:
        await call(nothing)
        await told(store)  # the slot is free when children ask for it

    if used:
        asyncio.run(use())  # and not closed
    before = store.id

    def work(write: int) -> None:
        async def hold() -> None:
            os.write(write, b"+")
            await asyncio.sleep(0.3)
            os.write(write, b"-")

        async def main() -> None:
            await call(hold)
            await store.aclose()
            os.write(write, f"<{store.id}>".encode())

        asyncio.run(main())

    said = fork(work)
    held = most = 0
    for each in said:
        held += (each == "+") - (each == "-")
        most = max(most, held)
    ids = {part.partition(">")[0] for part in said.split("<")[1:]}
    if used:
        asyncio.run(use())  # the parent's connections are as they were
    return {"most": most, "served": said.count("+"), "ids": len(ids | {before})}


def kept(url: str) -> dict[str, Any]:
    """Fork while there is something that the server is yet to be told: the parent tells it, once."""
    store = RedisStore(url, on_store_error="local", timeout=5)
    loop = asyncio.new_event_loop()

    async def tell() -> None:
        for _ in range(MANY):
            store.runner.send_command("INCR", "told")

    async def later() -> None:
        await store.aclose()

    async def child() -> None:
        await store.runner.command("GET", "told")
        await store.aclose()

    loop.run_until_complete(tell())  # stopped before they could be sent

    def work(_write: int) -> None:
        asyncio.run(child())

    fork(work)
    loop.run_until_complete(later())
    loop.close()
    sender = runner_of(store).sender
    return {"kept": len(sender.told), "lost": store.guard.lost}


if __name__ == "__main__":
    what, url = sys.argv[1:]
    result = {
        "new": lambda: leases(url, used=False),
        "used": lambda: leases(url, used=True),
        "kept": lambda: kept(url),
    }[what]()
    print(json.dumps(result))  # noqa: T201
