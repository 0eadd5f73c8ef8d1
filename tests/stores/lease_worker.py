"""One process of several that share a bulkhead: takes slots as fast as it gets them. No test itself.

What each grant and release did is noted by the scripts, on the server, in the same instant: the time, and how many of
the leases that have not ended are out.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sys
from collections.abc import Callable
from typing import Any

import anyio

from resilient_llm import Bulkhead, RejectedError
from resilient_llm.stores import RedisStore
from resilient_llm.stores._redis_scripts import Script
from tests.support import Door, Provider, stalls

_BEFORE = b"local function decide()\n"
_AFTER = b"""
end
local reply = decide()
if reply[1] == 0 then
  local time = redis.call('TIME')
  local clock = tonumber(time[1]) + tonumber(time[2]) / 1000000
  redis.call('RPUSH', KEYS[1] .. ':notes', cjson.encode({
    at = clock, lease = ARGV[1], out = redis.call('ZCOUNT', KEYS[1], string.format('%.6f', clock), '+inf')}))
end
return reply
"""


def noting(load: Callable[..., Script]) -> Callable[..., Script]:
    """Make the script that grants note what it grants."""

    def load_noting(*names: str) -> Script:
        script = load(*names)
        if script.name != "lease_acquire":
            return script
        return Script(script.name, _BEFORE + script.source + _AFTER)

    return load_noting


async def main(url: str, options: dict[str, Any]) -> None:
    store = RedisStore(url, timeout=10.0, on_store_error="closed", lease=options["lease"])
    bulkhead = Bulkhead(
        max_concurrent=options["most"],
        key=lambda _: "all",
        max_wait=60,
        max_queued=1000,
        store=store,
        name="slots",
    )
    upstream = Provider()
    door = Door(bulkhead, provider=upstream)
    rng = random.Random(options["seed"])
    served = 0

    async def caller() -> None:
        nonlocal served
        while True:
            upstream.duration = options["hold"] * rng.uniform(0.5, 1.5)
            with contextlib.suppress(RejectedError):
                if rng.random() < options.get("cancel", 0.0):
                    with anyio.move_on_after(rng.random() * 2 * options["hold"]):
                        await door()
                else:
                    await door()
                served += 1

    print("ready", flush=True)  # noqa: T201
    async with stalls() as found:
        with anyio.move_on_after(options["seconds"]):
            async with anyio.create_task_group() as tasks:
                for _ in range(options["callers"]):
                    tasks.start_soon(caller)
    await store.aclose()
    result = {
        "served": served,
        "lost": store.leases.lost,
        "process": store.id,
        "stalled": found.longest,
    }
    print(json.dumps(result), flush=True)  # noqa: T201


if __name__ == "__main__":
    Script.load = staticmethod(noting(Script.load))  # type: ignore[method-assign, assignment]
    asyncio.run(main(sys.argv[1], json.loads(sys.argv[2])))
