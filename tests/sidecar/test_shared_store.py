"""Two sidecars with one store: a tenant's quota, a budget and a circuit count for both."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import anyio
import httpx
import pytest

pytest.importorskip("redis", reason="the extra redis is not installed")

from resilient_llm.testing import FakeProvider, Fault, serve
from tests.sidecar.support import ASK, KEY, over_sockets
from tests.stores.conftest import Server
from tests.support import A_HANG

pytestmark = [pytest.mark.anyio, pytest.mark.realtime]

HEADERS = {"authorization": f"Bearer {KEY}"}


@pytest.fixture
def toml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    server = Server("valkey9", tmp_path)
    server.start()
    monkeypatch.setenv("STORE_URL", server.url)
    monkeypatch.setenv("KEY_OF_ACME", KEY)
    yield """
    [tenants.acme]
    key_env = "KEY_OF_ACME"
    quota = {requests_per_minute = 4, max_wait = 0}
    [store]
    redis_env = "STORE_URL"
    timeout = 5.0
    [retry]
    enabled = false
    """
    server.close()


async def test_a_quota_counts_for_both(toml: str) -> None:
    provider = FakeProvider()
    async with serve(provider) as upstream:
        toml += f'[targets.main]\nurl = "{upstream}/v1"\n'
        async with (
            over_sockets(toml) as (one, _),
            over_sockets(toml) as (two, _),
            httpx.AsyncClient(timeout=60) as client,
        ):
            statuses = [
                (await client.post(f"{url}/v1/chat/completions", json=ASK, headers=HEADERS)).status_code
                for url in (one, two, one, two, one, two)
            ]
    assert statuses == [200, 200, 200, 200, 429, 429]


async def test_the_quota_of_a_target_counts_for_both(toml: str) -> None:
    provider = FakeProvider()
    async with serve(provider) as upstream:
        toml = toml.replace("= 4", "= 1000")
        toml += f'[targets.main]\nurl = "{upstream}/v1"\nquota = {{requests_per_minute = 4, max_wait = 0}}\n'
        async with (
            over_sockets(toml) as (one, _),
            over_sockets(toml) as (two, _),
            httpx.AsyncClient(timeout=60) as client,
        ):
            statuses = [
                (await client.post(f"{url}/v1/chat/completions", json=ASK, headers=HEADERS)).status_code
                for url in (one, two, one, two, one, two)
            ]
    assert statuses == [200, 200, 200, 200, 429, 429]


async def test_a_circuit_opens_for_both(toml: str) -> None:
    provider = FakeProvider()
    provider.script(None, lambda _request: Fault(status=503))
    async with serve(provider) as upstream:
        toml = toml.replace("= 4", "= 100") + f'[targets.main]\nurl = "{upstream}/v1"\n'
        async with (
            over_sockets(toml) as (one, _),
            over_sockets(toml) as (two, _),
            httpx.AsyncClient(timeout=60) as client,
        ):
            for _ in range(5):
                await client.post(f"{one}/v1/chat/completions", json=ASK, headers=HEADERS)
            sent = len(provider.requests)
            with anyio.fail_after(A_HANG):
                while True:
                    refused = await client.post(f"{two}/v1/chat/completions", json=ASK, headers=HEADERS)
                    if len(provider.requests) == sent and refused.status_code == 503:
                        break
                    sent = len(provider.requests)
    assert sent < 10, "five failures of its own would have opened it"
