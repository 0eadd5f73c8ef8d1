"""Requests that are refused before they are calls are counted, by what they are told, and nothing else is."""

from __future__ import annotations

import re

import pytest

from resilient_llm.sidecar import Sidecar, parse
from resilient_llm.sidecar.observability import observe
from resilient_llm.testing import FakeProvider, Fault
from tests.sidecar.support import ASK, BEARER, KEY, MemoryEngine, ask, exchange, over_sockets
from tests.signals import Recording
from tests.telemetry.observed import telemetry_of

TOML = """
[tenants.acme]
key_env = "KEY_OF_ACME"
models = ["gpt-4o"]
quota = { requests_per_minute = 1, max_wait = 0 }
[targets.one]
url = "http://one.example/v1"
[models.gpt-4o]
targets = "one"
[retry]
enabled = false
"""


@pytest.mark.anyio
async def test_what_became_no_call_is_counted_by_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY_OF_ACME", KEY)
    config = parse(TOML)
    seen = observe(config)
    provider = FakeProvider()
    provider.script(None, [Fault(status=401)])
    try:
        sidecar = Sidecar(config, MemoryEngine(provider), telemetry=seen.telemetry)
        statuses = [
            (await ask(sidecar, headers=[BEARER])).status,  # which the provider refused
            (await ask(sidecar, headers=[BEARER])).status,  # which its quota did
            (await ask(sidecar)).status,
            (await ask(sidecar, headers=[(b"x-api-key", b"guessed-0123456789")])).status,
            (await ask(sidecar, {**ASK, "model": "another"}, headers=[BEARER])).status,
            (await ask(sidecar, b"{", headers=[BEARER])).status,
        ]
        assert statuses == [502, 429, 401, 401, 404, 400]
        assert seen.metrics is not None
        text = (await seen.metrics())[0].decode()
    finally:
        seen.shutdown()
    counted = dict(
        re.findall(
            r'^resilient_llm_request_refusals_total\{error_type="(\w+)"\} ([\d.]+)', text, re.MULTILINE
        )
    )
    assert counted == {"invalid_api_key": "2.0", "model_not_found": "1.0", "invalid_request_error": "1.0"}
    assert len(re.findall(r"^gen_ai_client_operation_duration_seconds_count", text, re.MULTILINE)) == 2


@pytest.mark.realtime
@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_so_is_one_whose_body_breaks_http() -> None:
    recording = Recording()
    toml = '[targets.main]\nurl = "http://127.0.0.1:9/v1"\n'
    async with over_sockets(toml, telemetry=telemetry_of(recording)) as (url, _):
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
        answer = await exchange(url, head + b"no length\r\n")
        assert answer.startswith(b"HTTP/1.1 400 ")
    assert recording.points.one("resilient_llm.request.refusals").attributes == {
        "error.type": "malformed_request"
    }
