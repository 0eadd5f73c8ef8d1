"""What of a reloaded file waits for a restart is, until then, as it was, and what is let in is judged by that."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from resilient_llm.sidecar import Config, ConfigError, Sidecar, parse
from resilient_llm.sidecar.crew_desk import CrewDesk
from resilient_llm.sidecar.observability import observe
from resilient_llm.sidecar.options import Section
from resilient_llm.sidecar.orders import Orders
from resilient_llm.sidecar.reload import Reloader, after_restart, in_force
from resilient_llm.testing import FakeProvider, serve_in_thread
from tests.sidecar.process import PORTS, started, until
from tests.sidecar.support import ASK, BEARER, KEY, MemoryEngine, ask

TARGET = '[targets.one]\nurl = "http://one.example/v1"\n'
TENANTS = '[tenants.acme]\nkey_env = "KEY_OF_ACME"\n'
EVERYWHERE = '[server]\nhost = "0.0.0.0"\n'
TOKEN = "token-of-operators-0123"


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY_OF_ACME", KEY)
    monkeypatch.setenv("TOKEN", TOKEN)


def reloader(file: Path, toml: str) -> tuple[Sidecar, Reloader]:
    file.write_text(toml)
    sidecar = Sidecar(parse(toml), MemoryEngine(FakeProvider()))
    return sidecar, Reloader(sidecar, file)


REFUSED = {
    "who has tenants, and then none": (TARGET + TENANTS + EVERYWHERE, TARGET, "server.host"),
    "who has tenants, and then none, and says loopback": (
        TARGET + TENANTS + EVERYWHERE,
        TARGET + '[server]\nhost = "127.0.0.1"\n',
        "server.host",
    ),
    "who is open, and then is not": (TARGET + EVERYWHERE + "open = true\n", TARGET, "server.host"),
    "who gives a tenant the operators' token": (
        TARGET + TENANTS + '[admin]\ntoken_env = "TOKEN"\n',
        TARGET + TENANTS.replace('"KEY_OF_ACME"', '["KEY_OF_ACME", "TOKEN"]'),
        "admin.token_env",
    ),
}


@pytest.mark.anyio
@pytest.mark.parametrize(("before", "after", "what"), REFUSED.values(), ids=REFUSED)
async def test_what_only_a_restart_would_make_safe_is_refused(
    before: str, after: str, what: str, tmp_path: Path
) -> None:
    file = tmp_path / "gateway.toml"
    sidecar, reload = reloader(file, before)
    setup = sidecar.setup
    file.write_text(after)
    parse(after)  # which is right by itself
    with pytest.raises(ConfigError, match=rf"gateway\.toml.*{what}.*: holds until a restart: ") as refused:
        await reload()
    assert reload.last.error == str(refused.value)
    assert (sidecar.setup, reload.last.count) == (setup, 0)
    without_a_key = await ask(sidecar)
    assert without_a_key.status == (200 if "open" in before else 401)
    assert TOKEN not in str(refused.value)


@pytest.mark.anyio
@pytest.mark.parametrize(("before", "after", "what"), REFUSED.values(), ids=REFUSED)
async def test_and_by_several_workers_too(before: str, after: str, what: str, tmp_path: Path) -> None:
    file = tmp_path / "gateway.toml"
    file.write_text(before)
    crew: Any = None  # who is not asked
    orders = Orders(file)
    desk = CrewDesk(crew, orders)
    file.write_text(after)
    status, _, body = await desk.answer("POST", "/admin/reload", b"")
    assert status == 422
    assert what in body.decode()
    assert "holds until a restart" in body.decode()
    assert orders.config == parse(before)


@pytest.mark.anyio
async def test_what_is_safe_where_it_listens_is_taken(tmp_path: Path) -> None:
    file = tmp_path / "gateway.toml"
    sidecar, reload = reloader(file, TARGET + TENANTS + EVERYWHERE)
    file.write_text(TARGET + TENANTS)
    assert (await reload()).after_restart == ["server.host"]
    assert sidecar.setup.config.server.host == "0.0.0.0"
    assert (await ask(sidecar)).status == 401
    file.write_text(TARGET + "[server]\nopen = true\n")  # so it is meant
    assert (await reload()).after_restart == ["server.host"]
    assert (await ask(sidecar)).status == 200
    # What the next start would refuse is refused now, although where it listens now it would do.
    _, reload = reloader(file, TARGET)
    file.write_text(TARGET + EVERYWHERE)
    with pytest.raises(ConfigError, match="without tenants anybody who reaches it") as refused:
        await reload()
    assert "until a restart" not in str(refused.value)


TLS = '{ certificate = "a", key = "b" }'
OTHERS = {
    "host": '"::1"',
    "port": "1",
    "tls": TLS,
    "workers": "2",
    "open": "true",
    "cors_origins": '["https://app.example"]',
    "rate_limit_headers": "false",
    "access_log": "false",
    "enabled": "false",
    "token_env": '"TOKEN"',
    "prometheus": "false",
    "otlp_endpoint": '"http://collector:4318"',
    "sample_ratio": "1.0",
    "service_name": '"another"',
    "semconv": '"inference"',
    "record_tenant": "false",
    "tenants_in_metrics": "false",
}
KEYS = [
    (table, key)
    for table in ("server", "admin", "telemetry")
    for key in type(getattr(parse(TARGET), table)).model_fields
]


@pytest.mark.parametrize(("table", "key"), KEYS, ids=".".join)
def test_a_key_takes_effect_or_is_told_to_wait_for_a_restart(table: str, key: str) -> None:
    before = parse(TARGET + TENANTS)
    after = parse(f"{TARGET}{TENANTS}[{table}]\n{key} = {OTHERS.get(key, '2048')}\n")
    running, waiting = in_force(before, after), after_restart(before, after)

    def value(config: Config) -> object:
        options: Section = getattr(config, table)
        return getattr(options, key)

    assert value(after) != value(before)
    assert waiting in ([], [table], [f"{table}.{key}"])
    assert value(running) == value(before if waiting else after)


def test_certificates_that_take_effect_are_those_of_the_file() -> None:
    before = parse(f"{TARGET}{TENANTS}[server]\ntls = {TLS}\n")
    after = parse(f"{TARGET}{TENANTS}[server]\ntls = {TLS}\n".replace('"a"', '"another"'))
    assert in_force(before, after).server.tls == after.server.tls != before.server.tls


def labels(metrics: str, name: str) -> set[str]:
    return set(
        re.findall(
            rf'^gen_ai_client_operation_duration_seconds_count{{.*?{name}="([^"]+)"', metrics, re.MULTILINE
        )
    )


@pytest.mark.anyio
async def test_tenants_and_models_that_come_with_a_reload_are_labels(tmp_path: Path) -> None:
    file = tmp_path / "gateway.toml"
    others = (
        TENANTS.replace("acme", "other-one").replace("KEY_OF_ACME", "TOKEN") + "[models]\na.targets = 'one'\n"
    )
    file.write_text(TARGET + others)
    config = parse(TARGET + others)
    seen = observe(config)
    assert seen.metrics is not None
    try:
        sidecar = Sidecar(config, MemoryEngine(FakeProvider()), telemetry=seen.telemetry)
        reload = Reloader(sidecar, file, seen=seen)
        file.write_text(
            TARGET + others + "b.targets = 'one'\n" + TENANTS + "[telemetry]\ntenants_in_metrics = false\n"
        )
        assert (await reload()).after_restart == ["telemetry"]
        assert (await ask(sidecar, {**ASK, "model": "b"}, headers=[BEARER])).status == 200
        shown = (await seen.metrics())[0].decode()
        assert labels(shown, "resilient_llm_tenant") == {"acme"}
        assert labels(shown, "gen_ai_request_model") == {"b"}
        file.write_text(TARGET + others)  # of whom nothing is asked any more, what was measured stays
        await reload()
        assert (await ask(sidecar, headers=[BEARER])).status == 401
        assert labels((await seen.metrics())[0].decode(), "resilient_llm_tenant") == {"acme"}
    finally:
        seen.shutdown()


@pytest.mark.realtime
@pytest.mark.skipif(sys.platform != "linux", reason="several workers share a port on Linux only")
def test_a_worker_that_begins_later_is_as_those_that_stayed(tmp_path: Path) -> None:
    file = tmp_path / "gateway.toml"
    bearer = {"authorization": f"Bearer {KEY}"}
    with serve_in_thread(FakeProvider()) as upstream:
        target = f'[targets.one]\nurl = "{upstream}/v1"\n'
        operators = TENANTS.replace("acme", "first").replace("KEY_OF_ACME", "TOKEN")
        before = PORTS.replace("[admin]", "max_head = 2048\n[admin]")
        file.write_text(before + target + operators)
        environ = {"KEY_OF_ACME": KEY, "TOKEN": TOKEN}
        with started(file, "--workers", "2", **environ) as (process, url, admin):
            file.write_text(PORTS + target + operators + TENANTS)
            done = httpx.post(f"{admin}/admin/reload", timeout=60).json()
            assert done == {"reloaded": True, "after_restart": ["server.max_head"]}
            os.kill(
                httpx.get(f"{admin}/admin/health", timeout=60).json()["workers"][0]["pid"], signal.SIGKILL
            )
            process.wait_for("a worker is back")

            def answered_by_both() -> bool:
                assert (
                    httpx.post(f"{url}/v1/chat/completions", json=ASK, headers=bearer, timeout=60).status_code
                    == 200
                )
                long = {**bearer, "x-long": "x" * 4096}
                assert httpx.get(f"{url}/v1/models", headers=long, timeout=60).status_code == 431
                shown = httpx.get(f"{admin}/metrics", timeout=60).text
                assert labels(shown, "resilient_llm_tenant") == {"acme"}
                return labels(shown, "worker") == {"1", "2"}

            until(answered_by_both)
