"""The overhead benchmark still builds and runs every case it measures."""

from __future__ import annotations

import httpx
import httpx2
import pytest

import resilient_llm.httpx
import resilient_llm.httpx2
from benchmarks.overhead import in_process, over_a_client, peers

pytestmark = [pytest.mark.anyio, pytest.mark.realtime]


async def test_every_case_runs() -> None:
    cases = in_process() | await peers()
    assert {"bare", "stack", "hyx_stack", "tenacity_stack"} <= cases.keys()
    for case in cases.values():
        assert await case() == 1
    over_clients = over_a_client(httpx, resilient_llm.httpx, "httpx")
    over_clients |= over_a_client(httpx2, resilient_llm.httpx2, "httpx2")
    for case in over_clients.values():
        assert getattr(await case(), "status_code") == 200  # noqa: B009 - of either library
