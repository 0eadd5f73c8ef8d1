"""Another configuration in the place of the one that runs: no request is lost, what did not change keeps its state."""

from __future__ import annotations

import json
from pathlib import Path

import anyio
import pytest

from resilient_llm.core.circuit_state import CircuitState
from resilient_llm.sidecar import ConfigError, Sidecar, parse
from resilient_llm.sidecar.reload import Reloader
from resilient_llm.testing import FakeProvider, Fault
from tests.asgi.server import Connection
from tests.sidecar.support import ASK, MemoryEngine, ask, memory

pytestmark = pytest.mark.anyio

ONE = '[targets.one]\nurl = "http://one.example/v1"\n'
TWO = '[targets.two]\nurl = "http://two.example/v1"\n'


async def test_new_requests_go_by_the_new_configuration_and_old_ones_end_as_they_began() -> None:
    provider = FakeProvider()
    provider.script(None, [Fault(token_delay=1.0)])
    sidecar = memory(provider, ONE)
    connection = Connection(
        json.dumps({**ASK, "stream": True}).encode(), method="POST", path="/v1/chat/completions", headers=()
    )
    connection.scope["query_string"] = b""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(connection.run, sidecar)
        await anyio.sleep(2)
        before = sidecar.setup
        await sidecar.reload(parse(TWO))
        assert (await ask(sidecar)).headers[b"x-resilient-llm-target"] == b"two"
        assert before.running == 1
    assert connection.body.endswith(b"data: [DONE]\n\n")
    assert connection.headers[b"x-resilient-llm-target"] == b"one"
    assert before.running == 0
    assert sidecar._retired == []


async def test_reloading_under_load_loses_no_request() -> None:
    provider = FakeProvider()
    provider.script(None, lambda _request: Fault(delay_headers=0.05))
    sidecar = memory(provider, ONE)
    statuses: list[int | None] = []

    async def client() -> None:
        for _ in range(20):
            statuses.append((await ask(sidecar)).status)  # noqa: PERF401 - one after another

    async with anyio.create_task_group() as tasks:
        for _ in range(10):
            tasks.start_soon(client)
        for number in range(20):
            await anyio.sleep(0.04)
            await sidecar.reload(parse(TWO if number % 2 else ONE))
    assert statuses == [200] * 200
    assert len(provider.requests) == 200
    assert sidecar._retired == []
    assert sidecar.setup.running == 0


async def test_what_did_not_change_keeps_its_state() -> None:
    provider = FakeProvider()
    provider.script(None, lambda _request: Fault(status=503))
    sidecar = memory(provider, ONE + "[retry]\nenabled = false\n")
    for _ in range(5):
        await ask(sidecar)
    (name, breaker), *_ = sidecar.setup.circuits["one"]
    assert breaker.state(name) is CircuitState.OPEN
    bulkhead = sidecar.setup.parts.keep("bulkhead", None, object)
    sent = len(provider.requests)

    await sidecar.reload(parse(ONE + TWO + "[retry]\nenabled = false\n[models.m]\ntargets = 'one'\n"))
    assert sidecar.setup.circuits["one"][0][1] is breaker
    refused = await ask(sidecar, {**ASK, "model": "m"})
    assert (refused.status, len(provider.requests)) == (503, sent)

    await sidecar.reload(parse(ONE + "[targets.one.circuit]\nconsecutive_failures = 9\n"))
    assert sidecar.setup.circuits["one"][0][1] is not breaker
    assert bulkhead is not None


async def test_what_a_tenant_has_spent_stays_spent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY_OF_ACME", "key-of-acme-0123456789")
    toml = ONE + '[tenants.acme]\nkey_env = "KEY_OF_ACME"\nbudget = {tokens_per_day = 1_000}\n'
    sidecar = memory(FakeProvider(), toml)
    headers = [(b"x-api-key", b"key-of-acme-0123456789")]
    asked = {**ASK, "max_tokens": 700}
    while (await ask(sidecar, asked, headers=headers)).status == 200:
        pass
    await sidecar.reload(parse(toml + "[server]\ndeadline = 5\n"))
    assert (await ask(sidecar, asked, headers=headers)).status == 429
    await sidecar.reload(parse(toml.replace("1_000", "5_000")))
    assert (await ask(sidecar, asked, headers=headers)).status == 200


async def test_a_file_that_cannot_work_changes_nothing_and_says_why(tmp_path: Path) -> None:
    file = tmp_path / "gateway.toml"
    file.write_text(ONE)
    sidecar = Sidecar(parse(ONE), MemoryEngine(FakeProvider()))
    reload = Reloader(sidecar, file)
    setup = sidecar.setup
    for text, why in (
        (TWO + "wieght = 1\n", "gateway.toml:3: targets.two.wieght: unknown key"),
        (TWO + '[tenants.a]\nkey_env = "NOT_THERE"\n', "gateway.toml:4: tenants.a.key_env: the environment"),
        (TWO + 'api_key_env = "NOT_THERE"\n', "NOT_THERE is not set"),
        ("[", "not TOML"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError) as refused:
            await reload()
        assert why in str(refused.value)
        assert reload.last.error == str(refused.value)
        assert sidecar.setup is setup
        assert (await ask(sidecar)).headers[b"x-resilient-llm-target"] == b"one"
    file.unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        await reload()
    file.write_text(TWO + "[server]\nport = 1234\ndeadline = 5\n")
    done = await reload()
    assert (done.error, done.count, done.after_restart) == (None, 1, ["server.port"])
    assert (await ask(sidecar)).headers[b"x-resilient-llm-target"] == b"two"


async def test_closing_closes_the_connections() -> None:
    engine = MemoryEngine(FakeProvider())
    sidecar = Sidecar(parse(ONE), engine)
    await sidecar.aclose()
    assert engine.closed
