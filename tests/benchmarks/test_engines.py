"""The comparison of the engines runs, and each reads every answer whole."""

from __future__ import annotations

import pytest

from benchmarks._answering import SIZES, server
from benchmarks.engines import measure

pytestmark = [pytest.mark.anyio, pytest.mark.realtime]


async def test_every_engine_answers() -> None:
    with server() as url:
        figures = await measure(url, 1, 0.05)
    assert figures.keys() == SIZES.keys()
    for rates in figures.values():
        assert rates.keys() == {"http1", "aiohttp", "httpx2", "httpx"}
        assert min(rates.values()) > 0
