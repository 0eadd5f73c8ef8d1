"""Several workers with one store: limits count for all, and what a killed one held comes back."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

pytest.importorskip("redis", reason="the extra redis is not installed")

from resilient_llm.testing import FakeProvider, Fault, serve_in_thread
from tests.sidecar.process import PORTS, started, until
from tests.sidecar.support import ASK
from tests.stores.conftest import Server

pytestmark = pytest.mark.realtime

CHAT = "/v1/chat/completions"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[str]:
    server = Server("valkey9", tmp_path)
    server.start()
    yield server.url
    server.close()


def test_a_slot_of_a_killed_worker_comes_back_within_its_lease(store: str, tmp_path: Path) -> None:
    provider = FakeProvider()
    provider.script(None, [Fault(stall_after_tokens=2)])
    file = tmp_path / "gateway.toml"
    with serve_in_thread(provider) as upstream:
        file.write_text(
            f'{PORTS}[targets.one]\nurl = "{upstream}/v1"\n'
            "[bulkhead]\nmax_concurrent = 1\nmax_wait = 60\n"
            '[store]\nredis_env = "STORE_URL"\ntimeout = 10.0\nlease = 3.0\n'
        )
        with started(file, "--workers", "2", STORE_URL=store) as (process, url, admin):
            assert not [line for line in process.lines if line["message"].startswith("each worker")]
            took: list[int] = []

            def stall() -> None:
                try:
                    with httpx.stream(
                        "POST", f"{url}{CHAT}", json={**ASK, "stream": True}, timeout=60
                    ) as stream:
                        took.extend(1 for _ in stream.iter_raw())
                except httpx.TransportError:
                    took.append(0)

            holding = threading.Thread(target=stall)
            holding.start()
            until(lambda: bool(took))
            workers = httpx.get(f"{admin}/admin/health", timeout=60).json()["workers"]
            [holder] = [one["pid"] for one in workers if one["running"]]
            os.kill(holder, signal.SIGKILL)
            holding.join(60)
            assert took[-1] == 0
            assert httpx.post(f"{url}{CHAT}", json=ASK, timeout=60).status_code == 200
            assert httpx.post(f"{admin}/admin/reload", timeout=60).status_code == 200
            process.signal(signal.SIGTERM)
            assert process.end() == (0, "")
