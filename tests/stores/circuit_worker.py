"""One process of several that share a circuit: does what each line of its input says, and prints what came of it.

No test itself: `test_circuits_processes.py` starts it.
"""

from __future__ import annotations

import asyncio
import json
import math
import sys
import time
from contextlib import suppress
from typing import Any

import anyio

from resilient_llm import AttemptError, CircuitBreaker, CircuitOpenError
from resilient_llm.outcome import SUCCESS
from resilient_llm.stores import RedisStore
from tests.support import FAILURE, Door, Provider, Step, until


class Worker:
    def __init__(self, url: str, options: dict[str, Any]) -> None:
        self.store = RedisStore(url, timeout=5.0)
        self.breaker = CircuitBreaker(store=self.store, **options)
        self.provider = Provider()
        self.door = Door(self.breaker, provider=self.provider)
        self.ended = anyio.Event()
        self.calls: list[asyncio.Task[None]] = []

    async def call(self, step: str, duration: float = 0.0) -> dict[str, Any]:
        """Make a call that ends so: succeeds, fails, or hangs; tell whether it was let through."""
        steps: dict[str, Step] = {"ok": SUCCESS, "fail": FAILURE, "hang": math.inf}
        self.provider.script = [[duration, steps[step]]]
        try:
            await self.door()
        except CircuitOpenError:
            return {"through": False}
        except AttemptError:
            pass
        return {"through": True}

    async def burst(self, count: int, step: str) -> dict[str, Any]:
        """Make so many calls at the same time; tell how many were let through, which go on until `finish`."""
        before, refused = len(self.provider.attempts), 0
        self.ended = anyio.Event()
        self.provider.script = [[self.ended, {"ok": SUCCESS, "fail": FAILURE}[step]] for _ in range(count)]

        async def call() -> None:
            nonlocal refused
            try:
                with suppress(AttemptError):
                    await self.door()
            except CircuitOpenError:
                refused += 1

        self.calls = [asyncio.create_task(call()) for _ in range(count)]
        await until(lambda: len(self.provider.attempts) - before + refused == count)
        return {"through": count - refused}

    async def finish(self) -> dict[str, Any]:
        """Let the calls of a burst end."""
        self.ended.set()
        await asyncio.gather(*self.calls)
        return {}

    async def until(self, state: str) -> dict[str, Any]:
        """Wait until the circuit is in this state, and tell when it was, by the clock all processes have."""
        await until(lambda: self.breaker.state("api.example") == state)
        return {"at": time.monotonic()}

    async def isolate(self) -> dict[str, Any]:
        self.breaker.isolate("api.example")
        return {}

    async def close(self) -> dict[str, Any]:
        self.breaker.close("api.example")
        return {}


async def main() -> None:
    worker = Worker(sys.argv[1], json.loads(sys.argv[2]))
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    print(json.dumps({"ready": True}), flush=True)  # noqa: T201
    async with worker.store:
        while line := await reader.readline():
            name, *arguments = json.loads(line)
            print(json.dumps(await getattr(worker, name)(*arguments)), flush=True)  # noqa: T201


if __name__ == "__main__":
    asyncio.run(main())
