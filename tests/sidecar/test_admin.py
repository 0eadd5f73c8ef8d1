"""What operators see and do, and who they have to be."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import anyio
import pytest
from prometheus_client import generate_latest

from resilient_llm.message import Headers
from resilient_llm.sidecar import Config, ConfigError, Sidecar, parse
from resilient_llm.sidecar.admin import Admin, admin_token
from resilient_llm.sidecar.app import Sidecar as App
from resilient_llm.sidecar.desk import OneProcess
from resilient_llm.sidecar.observability import observe
from resilient_llm.sidecar.reload import Reloader
from resilient_llm.testing import FakeProvider, Fault
from tests.asgi.server import Connection
from tests.sidecar.support import ASK, KEY, MemoryEngine, ask

pytestmark = pytest.mark.anyio

TOML = """
[tenants.acme]
key_env = "KEY_OF_ACME"
[targets.main]
url = "http://provider.example/v1"
api_key_env = "PROVIDER_KEY"
headers = {x-org = "private"}
[retry]
enabled = false
"""
TOKEN = "token-of-operators-0123"
HERE = (b"host", b"127.0.0.1:8081")
MINE: Headers = [(b"x-api-key", KEY.encode())]


@pytest.fixture(autouse=True)
def _keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY_OF_ACME", KEY)
    monkeypatch.setenv("PROVIDER_KEY", "sk-provider-key")


def sidecar_of(provider: FakeProvider, toml: str = TOML) -> App:
    return Sidecar(parse(toml), MemoryEngine(provider))


async def get(admin: Admin, path: str, headers: Headers | None = None, method: str = "GET") -> Connection:
    connection = Connection(b"", method=method, path=path, headers=[HERE] if headers is None else headers)
    return await connection.run(admin)


async def test_probes() -> None:
    sidecar = sidecar_of(FakeProvider())
    admin = Admin(OneProcess(sidecar, None), token=TOKEN)
    for path in ("/healthz", "/readyz"):
        assert (await get(admin, path, [])).status == 200
        assert (await ask(sidecar, b"", path=path, method="GET")).status == 200
    sidecar.draining = True
    assert (await get(admin, "/healthz", [])).status == 200
    assert (await get(admin, "/readyz", [])).status == 503
    assert (await ask(sidecar, b"", path="/readyz", method="GET")).status == 503


async def test_the_token_is_needed() -> None:
    admin = Admin(OneProcess(sidecar_of(FakeProvider()), None), token=TOKEN)
    for headers in ([], [(b"authorization", b"Bearer no")], [(b"x-api-key", KEY.encode())]):
        for path in ("/metrics", "/admin/health", "/admin/config", "/nothing"):
            answered = await get(admin, path, headers)
            assert (answered.status, answered.headers[b"www-authenticate"]) == (401, b"Bearer")
        assert (await get(admin, "/admin/circuits/main/isolate", headers, "POST")).status == 401
    shown: Headers = [(b"authorization", f"Bearer {TOKEN}".encode())]
    assert (await get(admin, "/admin/health", shown)).status == 200


async def test_without_a_token_only_programs_on_this_machine_are_answered() -> None:
    admin = Admin(OneProcess(sidecar_of(FakeProvider()), None))
    assert (await get(admin, "/admin/health")).status == 200
    assert (await get(admin, "/admin/health", [(b"host", b"[::1]:8081")])).status == 200
    for headers in ([(b"host", b"evil.example")], [HERE, (b"origin", b"http://evil.example")], []):
        assert (await get(admin, "/admin/config", headers)).status == 403
        assert (await get(admin, "/admin/reload", headers, "POST")).status == 403


def test_a_token_must_be_there_and_long() -> None:
    assert admin_token(None, {}) is None
    assert admin_token("T", {"T": f"{TOKEN}\n"}) == TOKEN
    for environ, why in (({}, "is not set"), ({"T": "short"}, "less than 16")):
        with pytest.raises(ConfigError, match=why):
            admin_token("T", environ)


async def test_health_says_how_targets_are_doing() -> None:
    provider = FakeProvider()
    sidecar = sidecar_of(provider)
    await ask(sidecar, headers=MINE)
    health = (await get(Admin(OneProcess(sidecar, None)), "/admin/health")).json
    (target,) = health["targets"]
    assert (target["name"], target["attempts"], target["circuit"], target["healthy"]) == (
        "main",
        1,
        "closed",
        True,
    )
    assert health["bulkheads"] == {"bulkhead": {"in_use": 0, "queued": 0}}


async def test_what_began_before_a_reload_is_seen_while_it_runs() -> None:
    provider = FakeProvider()
    provider.script(None, lambda _request: Fault(token_delay=1.0))
    sidecar = sidecar_of(provider)
    admin = Admin(OneProcess(sidecar, None))
    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(lambda: ask(sidecar, {**ASK, "stream": True}, headers=MINE))
        await anyio.sleep(1.5)
        for toml in (TOML, TOML + "[bulkhead]\nmax_concurrent = 7\n"):
            await sidecar.reload(parse(toml))
            health = (await get(admin, "/admin/health")).json
            assert (health["running"], sidecar.running) == (3, 3)
            assert health["bulkheads"] == {"bulkhead": {"in_use": 3, "queued": 0}}
    health = (await get(admin, "/admin/health")).json
    assert (health["running"], health["bulkheads"]["bulkhead"]["in_use"]) == (0, 0)


async def test_a_circuit_is_isolated_and_closed_by_hand() -> None:
    provider = FakeProvider()
    sidecar = sidecar_of(provider)
    admin = Admin(OneProcess(sidecar, None))
    assert (await get(admin, "/admin/circuits/main/isolate", method="POST")).json == {"isolate": ["main"]}
    assert (await ask(sidecar, headers=MINE)).status == 503
    assert (await get(admin, "/admin/health")).json["targets"][0]["circuit"] == "isolated"
    assert (await get(admin, "/admin/circuits/main/close", method="POST")).json == {"close": ["main"]}
    assert (await ask(sidecar, headers=MINE)).status == 200
    assert (await get(admin, "/admin/circuits/other/isolate", method="POST")).status == 404
    assert (await get(admin, "/admin/circuits/main/explode", method="POST")).status == 404
    assert (await get(admin, "/admin/circuits/main/isolate")).status == 405


async def test_the_configuration_is_shown_without_secrets() -> None:
    provider = FakeProvider()
    provider.script(None, [Fault(status=401)])
    sidecar = sidecar_of(provider)
    await ask(sidecar, headers=MINE)
    admin = Admin(OneProcess(sidecar, None))
    shown = await get(admin, "/admin/config")
    assert shown.json["config"]["targets"]["main"]["api_key_env"] == ["PROVIDER_KEY"]
    everything = shown.body + (await get(admin, "/admin/health")).body
    for secret in (b"sk-provider-key", KEY.encode(), b"private"):
        assert secret not in everything


async def test_it_is_reloaded_by_a_call(tmp_path: Path) -> None:
    file = tmp_path / "gateway.toml"
    sidecar = sidecar_of(FakeProvider())
    admin = Admin(OneProcess(sidecar, Reloader(sidecar, file)))
    file.write_text(TOML + "[server]\ndeadline = 5\n")
    assert (await get(admin, "/admin/reload", method="POST")).json == {"reloaded": True, "after_restart": []}
    assert sidecar.setup.config.server.deadline == 5
    file.write_text(TOML + "[server]\ndeadline = 0\n")
    refused = await get(admin, "/admin/reload", method="POST")
    assert refused.status == 422
    assert ":11: server.deadline = 0: allowed are numbers above 0" in refused.json["error"]
    assert (await get(admin, "/admin/health")).json["reload"]["error"] == refused.json["error"]
    assert (await get(admin, "/admin/reload")).headers[b"allow"] == b"POST"


async def test_metrics_are_read_where_calls_run_and_written_down_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    where: dict[str, int] = {}

    class Owner:
        def observe(self) -> list[tuple[float, dict[str, str]]]:
            where["read"] = threading.get_ident()
            return [(7.0, {})]

    def write(*given: Any, **options: Any) -> bytes:
        where["written"] = threading.get_ident()
        text: bytes = generate_latest(*given, **options)
        return text

    monkeypatch.setattr("prometheus_client.generate_latest", write)
    seen = observe(parse(TOML))
    assert seen.telemetry is not None
    assert seen.metrics is not None
    owner = Owner()
    seen.telemetry.observe("own.gauge", owner.observe, "1", "One of this test")
    for _ in range(2):
        text, _kind = await seen.metrics()
        assert b"own_gauge 7.0\n" in text
    seen.shutdown()
    assert where["read"] == threading.get_ident() != where["written"]


async def test_metrics_are_prometheus() -> None:
    config: Config = parse(TOML)
    seen = observe(config)
    sidecar = Sidecar(config, MemoryEngine(FakeProvider()), telemetry=seen.telemetry)
    admin = Admin(OneProcess(sidecar, None, metrics=seen.metrics))
    await ask(sidecar, headers=MINE)
    answered = await get(admin, "/metrics")
    seen.shutdown()
    assert answered.headers[b"content-type"].startswith(b"text/plain")
    text = answered.body.decode()
    assert 'resilient_llm_attempt_target="main"' in text
    assert "resilient_llm_attempt_duration_seconds_count{" in text
    assert "gen_ai_client_operation_duration_seconds_count{" in text
    assert 'resilient_llm_tenant="acme"' in text
    assert KEY not in text
    assert "sk-provider-key" not in text
    assert (await get(Admin(OneProcess(sidecar, None)), "/metrics")).status == 404
