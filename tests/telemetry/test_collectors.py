"""A collector that is away or does not answer costs a call nothing."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator

import anyio
import pytest

from resilient_llm import Retry
from resilient_llm.testing import FakeProvider
from tests.telemetry.exporting import Exporting
from tests.telemetry.observed import ask, client_of

pytestmark = [pytest.mark.anyio, pytest.mark.realtime]

AT_ONCE = 30.0
"""Seconds for a hundred calls that take a fraction of one; waiting for the collector they would take fifty."""


@pytest.fixture(params=["away", "silent"])
def collector(request: pytest.FixtureRequest) -> Iterator[str]:
    """The URL of a collector that is of no use."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        if request.param == "silent":
            bound.listen()
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"


async def test_calls_do_not_wait_for_a_collector(collector: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)  # what the exporter says about it
    exporting = Exporting(collector, export_interval=5.0, timeout=0.5)
    provider = FakeProvider()
    try:
        async with client_of(exporting.telemetry, provider, Retry()) as client:
            with anyio.fail_after(AT_ONCE):
                for _ in range(100):
                    await ask(client)
    finally:
        await anyio.to_thread.run_sync(exporting.shutdown)
    assert provider.total_requests == 100
