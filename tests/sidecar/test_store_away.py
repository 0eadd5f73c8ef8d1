"""A store that cannot be asked, where calls are refused for it: clients hear that, and operators hear why."""

from __future__ import annotations

import json
import socket

import httpx
import pytest

pytest.importorskip("redis", reason="the extra redis is not installed")

from resilient_llm import StoreUnavailableError
from resilient_llm.stores.guard import OnStoreError, StoreGuard
from tests.sidecar.support import ASK, logged, over_sockets

pytestmark = [pytest.mark.anyio, pytest.mark.realtime]


async def test_clients_are_not_told_where_the_store_is(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and not listened at
        port = taken.getsockname()[1]
        monkeypatch.setenv("STORE_URL", f"redis://127.0.0.1:{port}/0")
        toml = """
        quota = {requests_per_minute = 4}
        [targets.main]
        url = "http://127.0.0.1:1/v1"
        [store]
        redis_env = "STORE_URL"
        on_error = "closed"
        """
        with logged() as log:
            async with over_sockets(toml) as (url, _), httpx.AsyncClient(timeout=60) as client:
                replies = [await client.post(f"{url}/v1/chat/completions", json=ASK) for _ in range(8)]
    for reply in replies:
        assert reply.status_code == 503
        assert reply.json()["error"]["code"] == "store_unavailable"
        assert "cannot be checked at the moment" in reply.json()["error"]["message"]
        for told in (str(port), "127.0.0.1", "redis", "Error"):
            assert told not in reply.text
    warnings = [json.loads(line)["message"] for line in log.lines if "warning" in line]
    assert [text.partition(":")[0] for text in warnings] == [
        "redis did not answer",
        "redis is not asked for now",
    ]
    assert all(str(port) in text for text in warnings)


@pytest.mark.parametrize(("on_error", "told"), [("closed", 2), ("local", 0), ("open", 0)])
def test_a_failure_is_told_only_where_calls_are_refused_for_it(on_error: OnStoreError, told: int) -> None:
    now = [0.0]
    guard = StoreGuard("far", on_error, clock=lambda: now[0])
    with logged() as log:
        for now[0] in (0.0, 1.0, 4.9, 5.0):
            guard.failed(guard.admit(), "no connection")
    assert len(log.lines) == told


def test_the_library_says_all_of_it() -> None:
    error = StoreGuard("far", "closed").error("no connection to 10.0.0.1")
    assert str(error) == "far: no connection to 10.0.0.1"
    assert "10.0.0.1" not in error.told
    assert isinstance(error, StoreUnavailableError)
