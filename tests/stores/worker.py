"""One process of many that draw on the same limits: does what each line of its input says, and prints what came of it.

Every grant and every change is noted by the scripts themselves, on the server, in the same instant: those of the
library run inside a function whose reply is written to a list before it is given on. No test itself.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
from redis.asyncio.cluster import RedisCluster
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from resilient_llm import Pipeline, RateLimit, RateLimitedError, StoreUnavailableError, ambient
from resilient_llm.outcome import Outcome, Usage, Verdict
from resilient_llm.stores import RedisStore
from resilient_llm.stores._redis_scripts import Script
from tests.support import Stalls, stalls

_BEFORE = b"local function decide()\n"
_AFTER = {
    "rate_take": b"""
end
local reply = decide()
local time = redis.call('TIME')
local verdict = struct.unpack('<d', reply)
if verdict == 1 then
  local note = struct.pack('<dd', tonumber(time[1]) + tonumber(time[2]) / 1000000, 1)
  local at = #ARGV[1] - 48 * #KEYS + 1
  for i = 1, #KEYS do
    local capacity, rate, amount, mine, turn, own
    capacity, rate, amount, mine, turn, own, at = struct.unpack('<dddddd', ARGV[1], at)
    note = note .. struct.pack('<d', amount)
  end
  redis.call('RPUSH', KEYS[1] .. ':notes', note)
end
return reply
""",
    "rate_settle": b"""
end
local reply = decide()
local time = redis.call('TIME')
local note = struct.pack('<dd', tonumber(time[1]) + tonumber(time[2]) / 1000000, 2)
local at = 1
for i = 1, #KEYS do
  local capacity, rate, back, freed, turn
  capacity, rate, back, freed, turn, at = struct.unpack('<ddddd', ARGV[1], at)
  note = note .. struct.pack('<d', back)
end
redis.call('RPUSH', KEYS[1] .. ':notes', note)
return reply
""",
}


def noting(load: Callable[..., Script]) -> Callable[..., Script]:
    """Make scripts note what they do."""

    def load_noting(*names: str) -> Script:
        script = load(*names)
        after = _AFTER.get(script.name)
        return script if after is None else Script(script.name, _BEFORE + script.source + after)

    return load_noting


@dataclass
class Tally:
    """What this process has seen."""

    granted: int = 0
    refused: int = 0
    cancelled: int = 0
    unavailable: int = 0
    used: float = 0.0
    grants: list[float] = field(default_factory=list)
    """When each was granted, on the monotonic clock, which all processes of a machine share."""
    errors: list[str] = field(default_factory=list)


class Worker:
    """Some callers, one store."""

    def __init__(self, order: dict[str, Any]) -> None:
        self.order = order
        self.random = random.Random(order["seed"])
        self.tally = Tally()
        self.store = RedisStore(
            self.server(),
            prefix=order["prefix"],
            timeout=order.get("timeout", 10.0),
            on_store_error=order.get("on_store_error", "closed"),
        )
        limit = RateLimit(store=self.store, estimate=lambda _call: self.estimate, **order["limit"])
        self.estimate = 0.0
        self.pipeline = Pipeline([limit], classify_result=lambda result: result)  # type: ignore[arg-type, return-value]

    def server(self) -> Any:
        url = self.order["url"]
        if not self.order.get("cluster"):
            return url
        return RedisCluster.from_url(url, retry=Retry(NoBackoff(), 0))

    async def __call__(self) -> dict[str, Any]:
        async with stalls(unless=0.05) as found:
            return await self.work(found)

    async def work(self, found: Stalls) -> dict[str, Any]:
        await self.start_together()
        began = time.monotonic()
        caller: Callable[[], Awaitable[None]] = getattr(self, self.order["caller"])

        async def again_and_again() -> None:
            while not self.is_over(began):
                try:
                    with ambient(tenant=self.order.get("tenant", "acme")):
                        await caller()
                except StoreUnavailableError as error:
                    self.tally.unavailable += 1
                    if len(self.tally.errors) < 3:
                        self.tally.errors.append(str(error))
                    await anyio.sleep(0.005)

        async with anyio.create_task_group() as tasks:
            for _ in range(self.order["callers"]):
                tasks.start_soon(again_and_again)
            if "peers" in self.order:
                tasks.start_soon(self.tell_when_all_are_counted)
        until = time.monotonic()
        guard, runner = self.store.guard, self.store.runner
        clock = time.time() - time.monotonic()  # the server's is this machine's
        client = runner.client
        await self.store.aclose()
        if self.order.get("cluster"):
            await client.aclose()
        return vars(self.tally) | {
            "wanted": (began + clock, until + clock),
            "stalled": found.total,
            "longest_stall": found.longest,
            "lost": guard.lost,
            "unguarded": guard.unguarded,
            "processes": self.store.processes,
        }

    def is_over(self, began: float) -> bool:
        """Tell whether it has worked for so many seconds, or as long as it was to."""
        if "stop" in self.order:
            return Path(self.order["stop"]).exists()
        return time.monotonic() - began > float(self.order["seconds"])

    async def tell_when_all_are_counted(self) -> None:
        """Leave a note on the server once the store has heard how many processes there are."""
        while self.store.processes < self.order["peers"]:  # noqa: ASYNC110 - it tells nobody
            await anyio.sleep(0.02)
        await self.store.runner.command("SADD", f"{self.order['prefix']}counted", self.order["seed"])

    async def start_together(self) -> None:
        """Be connected, and begin when the others do."""
        for _ in range(3):
            await self.server_time()
        await anyio.sleep(max(0.0, self.order["start"] - time.monotonic()))

    async def server_time(self) -> float:
        try:
            if self.order.get("cluster"):
                words: Any = (
                    "EVAL",
                    "local t = redis.call('TIME') return {t[1], t[2]}",
                    1,
                    self.order["home"],
                )
            else:
                words = ("TIME",)
            second, micro = await self.store.runner.command(*words)
        except StoreUnavailableError:
            return 0.0
        return int(second) + int(micro) / 1e6

    # Callers

    async def refused(self) -> None:
        """Take what is there, at once or not at all, and try again soon."""
        try:
            await self.pipeline.run(self.granted)
        except RateLimitedError:
            self.tally.refused += 1
            await anyio.sleep(0.004)

    async def waiting(self) -> None:
        """Wait in line."""
        try:
            await self.pipeline.run(self.granted)
        except RateLimitedError:
            self.tally.refused += 1

    async def granted(self) -> Outcome:
        self.tally.granted += 1
        self.tally.grants.append(time.monotonic())
        return Outcome(verdict=Verdict.SUCCESS)

    async def settling(self) -> None:
        """Reserve tokens, use more or fewer of them, or be cancelled at any moment."""
        patience = self.random.choice((0.0, 0.001, 0.003, 0.01, 0.05, 10.0, 10.0))
        estimate = self.estimate = float(self.random.randrange(10, 100))
        used = float(self.random.choice((0, estimate // 2, estimate, estimate + 20)))
        started: list[float] = []

        async def use() -> Outcome:
            started.append(estimate)
            self.tally.granted += 1
            await anyio.sleep(self.random.random() * 0.01)
            return Outcome(verdict=Verdict.SUCCESS, usage=Usage(input_tokens=int(used), output_tokens=0))

        finished = False
        try:
            with anyio.move_on_after(patience):
                await self.pipeline.run(use)
                finished = True
        except RateLimitedError:
            self.tally.refused += 1
            await anyio.sleep(0.004)
            return
        self.tally.cancelled += not finished
        if started:
            # Whoever was cancelled while the model worked may have used all of it.
            self.tally.used += used if finished else estimate


def main() -> None:
    Script.load = staticmethod(noting(Script.load))  # type: ignore[method-assign, assignment]
    print("ready", flush=True)  # noqa: T201
    for line in sys.stdin:
        # As a user would run it: on asyncio, whose loop ends with the order.
        print(json.dumps(asyncio.run(Worker(json.loads(line))())), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
