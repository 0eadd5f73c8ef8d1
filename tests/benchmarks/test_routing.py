"""The benchmark of routing still builds and runs every case it measures."""

from __future__ import annotations

import pytest

from benchmarks.routing import BALANCERS, SIZES, cases

pytestmark = pytest.mark.anyio


async def test_every_case_runs() -> None:
    picks = cases()
    assert len(picks) == len(SIZES) * (len(BALANCERS) + 2)
    for pick in picks.values():
        assert pick() is not None
