"""Four uvicorn workers, one bulkhead and one quota for each tenant: a noisy one waits behind itself on all of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import anyio
import httpx
import pytest

from benchmarks._children import Watch
from tests.stores.cluster import wait_for
from tests.stores.conftest import Server, free_port
from tests.stores.service import FREE, QUOTA, SLOTS, WINDOW, WORK
from tests.support import until

pytestmark = [pytest.mark.anyio, pytest.mark.realtime]

WORKERS = 4
NOISY = 40
ROOT = Path(__file__).parents[2]


@pytest.fixture
def service(tmp_path: Path) -> Iterator[str]:
    """Start the service on a store of its own."""
    store = Server("valkey9", tmp_path)
    store.start()
    url = f"http://127.0.0.1:{free_port()}"
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "uvicorn", "--factory", "tests.stores.service:create_app"),
            *("--port", url.rpartition(":")[2], "--workers", str(WORKERS), "--log-level", "warning"),
        ],
        cwd=ROOT,
        env=os.environ | {"STORE_URL": store.url},
        start_new_session=True,
    )
    watch = Watch(process, group=True)
    try:
        wait_for(lambda: is_up(url, process), "the service", within=110)
        yield url
    finally:
        watch.release()
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        store.close()


def is_up(url: str, process: subprocess.Popen[bytes]) -> bool:
    assert process.poll() is None
    try:
        with httpx.Client(base_url=url, headers={"x-tenant": "nobody"}, timeout=5) as client:
            return client.get("/").status_code == 200
    except httpx.TransportError:
        return False


async def test_a_noisy_tenant_waits_behind_itself_on_all_workers(service: str) -> None:
    statuses: Counter[int] = Counter()
    workers: Counter[int] = Counter()
    peak = 0

    async def ask(tenant: str, path: str = "/") -> tuple[int, float]:
        nonlocal peak
        began = time.perf_counter()
        status, answer = await get(service, tenant, path)
        if status == 200 and tenant == "noisy":
            peak = max(peak, answer["running"])
            workers[answer["worker"]] += 1
        return status, time.perf_counter() - began

    beside: list[tuple[int, float]] = []
    unlimited: list[tuple[int, float]] = []
    began = time.perf_counter()
    async with anyio.create_task_group() as tasks:

        async def noise() -> None:
            while True:
                status, _ = await ask("noisy")
                statuses[status] += 1
                await anyio.sleep(0.02 if status == 200 else 0.3)

        for _ in range(NOISY):
            tasks.start_soon(noise)
        await until(lambda: statuses[429] and len(workers) > 1, within=60)
        for _ in range(20):
            beside.append(await ask("quiet"))
            unlimited.append(await ask("quiet", FREE))
            await anyio.sleep(0.02)
        tasks.cancel_scope.cancel()
    took = time.perf_counter() - began

    assert [status for status, _ in beside + unlimited] == [200] * 40
    # However many workers there are, noisy has so many slots, and so many requests a minute.
    assert peak <= SLOTS
    assert statuses[200] <= QUOTA + took * QUOTA / WINDOW
    # Quiet never waits behind noisy: all that it takes longer is to ask for a slot.
    queue = NOISY / SLOTS * WORK
    assert middle(beside) < 2 * middle(unlimited) + queue / 2


async def get(url: str, tenant: str, path: str) -> tuple[int, dict[str, int]]:
    """Ask on a connection of its own, so that any worker may answer; a client would cost more than the service."""
    host, _, port = url.removeprefix("http://").partition(":")
    async with await anyio.connect_tcp(host, int(port)) as stream:
        await stream.send(
            f"GET {path} HTTP/1.1\r\nhost: app\r\nx-tenant: {tenant}\r\nconnection: close\r\n\r\n".encode()
        )
        response = b"".join([chunk async for chunk in stream])
    head, _, body = response.partition(b"\r\n\r\n")
    status = int(head.split()[1])
    return status, json.loads(body) if status == 200 else {}


def middle(answers: list[tuple[int, float]]) -> float:
    return median(seconds for _, seconds in answers)
