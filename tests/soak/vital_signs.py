"""What a sidecar holds when nobody asks anything of it: memory, descriptors, threads, slots."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import httpx

from tests.soak.world import Gateway

_PATIENCE = 60.0
_MEMORY_RATIO = 1.10
_MEMORY_SLACK = 8.0
_DESCRIPTORS_SLACK = 4
"""A connection to the store, a file that is being read: what comes and goes."""

_THREADS_SLACK = 4
"""Those of an executor, which are made when they are needed, and stay."""


class Signs(NamedTuple):
    """What there is of it."""

    megabytes: float
    descriptors: int
    threads: int


def look(gateway: Gateway) -> Signs:
    """Read what the system knows of the process."""
    proc = Path(f"/proc/{gateway.process.pid}")
    status = dict(line.split(":", 1) for line in (proc / "status").read_text().splitlines())
    return Signs(
        int(status["VmRSS"].split()[0]) / 1024, len(list((proc / "fd").iterdir())), int(status["Threads"])
    )


async def at_rest(gateway: Gateway, most_descriptors: int | None) -> tuple[Signs, list[str]]:
    """Wait until nothing runs and idle connections are gone; say also what is held on to all the same."""
    end = time.monotonic() + _PATIENCE
    async with httpx.AsyncClient(headers={"connection": "close"}, timeout=60) as client:
        while True:
            health = (await client.get(f"{gateway.admin}/admin/health", timeout=30)).json()
            held = list(_held("", health))
            signs = look(gateway)
            idle = most_descriptors is None or signs.descriptors <= most_descriptors + _DESCRIPTORS_SLACK
            if (not held and idle) or time.monotonic() > end:
                return signs, held
            await anyio.sleep(0.5)


def grown(first: Signs, last: Signs) -> list[str]:
    """Say what is more than it was."""
    found = []
    if last.megabytes > first.megabytes * _MEMORY_RATIO + _MEMORY_SLACK:
        found.append(f"memory grew from {first.megabytes:.0f} to {last.megabytes:.0f} MB")
    if last.descriptors > first.descriptors + _DESCRIPTORS_SLACK:
        found.append(f"descriptors grew from {first.descriptors} to {last.descriptors}")
    if last.threads > first.threads + _THREADS_SLACK:
        found.append(f"threads grew from {first.threads} to {last.threads}")
    return found


def _held(where: str, part: Any) -> list[str]:
    """Find what is in use, wherever health tells of it."""
    if isinstance(part, list):
        return [one for number, item in enumerate(part) for one in _held(f"{where}[{number}]", item)]
    if not isinstance(part, dict):
        return []
    found = []
    for name, value in part.items():
        if name in ("running", "in_use", "queued", "in_flight") and not isinstance(value, bool):
            if value and (not isinstance(value, dict) or any(value.values())):
                found.append(f"{where}.{name} is {json.dumps(value)}")
        else:
            found += _held(f"{where}.{name}", value)
    return found
