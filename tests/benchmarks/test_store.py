"""The benchmark of stores still builds and runs every case it measures."""

from __future__ import annotations

from contextlib import AsyncExitStack

import pytest

from benchmarks._valkey import Valkey
from benchmarks.store import PEERS, cases, is_installed, load

pytestmark = [pytest.mark.anyio, pytest.mark.realtime]


async def test_every_case_runs() -> None:
    with Valkey() as server:
        async with AsyncExitStack() as stack:
            made = await cases(server.url, stack)
            peers = {name for name in PEERS if is_installed(name)}
            assert made.keys() == {"decisions", "policy", "bare_evalsha", "batched_evalsha"} | peers
            for decide in made.values():
                figures = await load(decide, 4, 0.02)
                assert figures.per_s > 0
