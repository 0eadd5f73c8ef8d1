"""The overhead benchmark still builds and runs every case it measures."""

from __future__ import annotations

from typing import Any

import httpx
import httpx2
import pytest

import resilient_llm.httpx
import resilient_llm.httpx2
from benchmarks._answering import ANSWER, server
from benchmarks.overhead import in_process, over_a_client, peers

pytestmark = [pytest.mark.anyio, pytest.mark.realtime]


async def test_every_case_runs() -> None:
    cases = in_process() | await peers()
    assert {"bare", "stack", "hyx_stack", "tenacity_stack"} <= cases.keys()
    for case in cases.values():
        assert await case() == 1
    with server() as url:
        over_clients = over_a_client(httpx, resilient_llm.httpx, "httpx", url)
        over_clients |= over_a_client(httpx2, resilient_llm.httpx2, "httpx2", url)
        assert len(over_clients) == 8
        for name, case in over_clients.items():
            response: Any = await case()
            assert (response.status_code, response.content) == (200, ANSWER), name
        for client in {case.func.__self__ for case in over_clients.values()}:  # type: ignore[attr-defined]
            await client.aclose()
