"""Another configuration in the place of the one that runs: no request is lost, what did not change keeps its state."""

from __future__ import annotations

import gc
import json
import re
import sys
import weakref
from pathlib import Path

import anyio
import pytest

from resilient_llm.core.circuit_state import CircuitState
from resilient_llm.errors import ConfigurationError
from resilient_llm.sidecar import ConfigError, Sidecar, parse
from resilient_llm.sidecar.admin import Admin
from resilient_llm.sidecar.build import Setup
from resilient_llm.sidecar.desk import OneProcess
from resilient_llm.sidecar.reload import Reloader
from resilient_llm.sidecar.server import _reload
from resilient_llm.testing import FakeProvider, Fault
from tests.asgi.server import Connection
from tests.sidecar.support import ASK, MemoryEngine, ask, logged, memory

pytestmark = pytest.mark.anyio

ONE = '[targets.one]\nurl = "http://one.example/v1"\n'
HERE = ((b"host", b"localhost"),)
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


async def test_a_defect_changes_nothing_and_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_given: object, **_more: object) -> Setup:
        raise LookupError("secret")

    file = tmp_path / "gateway.toml"
    file.write_text(TWO)
    sidecar = memory(FakeProvider(), ONE)
    reload = Reloader(sidecar, file)
    with monkeypatch.context() as patch, logged() as log:
        patch.setattr("resilient_llm.sidecar.app.build", broken)
        await _reload(reload)  # as SIGHUP does
        answered = await Connection(b"", method="POST", path="/admin/reload", headers=HERE).run(
            Admin(OneProcess(sidecar, reload))
        )
    assert answered.status == 500
    assert answered.json == {"reloaded": False, "error": reload.last.error}
    assert len(log.lines) == 2  # one each
    assert reload.last.error == "it met a defect, LookupError; the log says where"
    said = [line for line in log.lines if "the configuration was not reloaded: it met a defect" in line]
    assert len(said) == 2
    assert all("LookupError" in line and "secret" not in line for line in said)
    assert (await ask(sidecar)).headers[b"x-resilient-llm-target"] == b"one"
    done = await reload()
    assert (done.error, done.count) == (None, 1)


async def test_what_the_library_refuses_is_told_in_its_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_given: object) -> Setup:
        raise ConfigurationError("these do not go together")

    file = tmp_path / "gateway.toml"
    file.write_text(TWO)
    reload = Reloader(memory(FakeProvider(), ONE), file)
    monkeypatch.setattr("resilient_llm.sidecar.build.admission", refused)
    with pytest.raises(ConfigError):
        await reload()
    assert reload.last.error == f"{file}: these do not go together"


async def test_a_store_that_is_not_installed_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STORE", "redis://localhost")
    monkeypatch.setitem(sys.modules, "redis.asyncio", None)
    monkeypatch.delitem(sys.modules, "resilient_llm.stores.redis", raising=False)
    file = tmp_path / "gateway.toml"
    file.write_text(TWO + '[store]\nredis_env = "STORE"\n')
    sidecar = memory(FakeProvider(), ONE)
    reload = Reloader(sidecar, file)
    why = f"{file}:3: store: needs redis-py: pip install 'resilient-llm[redis]'"
    with pytest.raises(ConfigError, match=re.escape(why)):
        await reload()
    assert reload.last.error == why
    assert (await ask(sidecar)).headers[b"x-resilient-llm-target"] == b"one"


async def test_closing_closes_the_connections() -> None:
    engine = MemoryEngine(FakeProvider())
    sidecar = Sidecar(parse(ONE), engine)
    await sidecar.aclose()
    assert engine.closed


BALANCED = """
[targets.one]
url = "http://one.example/v1"
[targets.two]
url = "http://two.example/v1"
[models.m]
targets = ["one", "two/other"]
[routing]
balancer = "peak_ewma"
[retry]
enabled = false
"""


async def test_what_was_learnt_of_targets_is_known_after_a_reload() -> None:
    provider = FakeProvider()
    provider.script("other", lambda _request: Fault(delay_headers=2.0))
    sidecar = memory(provider, BALANCED)
    asked = {**ASK, "model": "m"}
    for _ in range(5):
        async with anyio.create_task_group() as tasks:
            for _ in range(4):  # more than the quick one is for
                tasks.start_soon(ask, sidecar, asked)
    known = {one.name: (one.attempts, one.latency) for one in sidecar.setup.router.health().targets}
    assert min(attempts for attempts, _ in known.values()) > 0
    await sidecar.reload(parse(BALANCED + "[server]\ndeadline = 5\n"))
    after = {one.name: (one.attempts, one.latency) for one in sidecar.setup.router.health().targets}
    assert after == known
    answered = [(await ask(sidecar, asked)).headers[b"x-resilient-llm-target"] for _ in range(10)]
    assert answered == [b"one"] * 10  # it need not be found out again who is slow

    changed = BALANCED.replace('two.example/v1"', 'two.example/v1"\nweight = 2')
    await sidecar.reload(parse(changed))
    attempts = {one.name: one.attempts for one in sidecar.setup.router.health().targets}
    assert attempts == {"one": known["one"][0] + 10, "two/other": 0}


async def test_calls_that_are_under_way_count_after_a_reload_and_those_of_a_target_that_is_gone_end() -> None:
    provider = FakeProvider()
    provider.script(None, lambda _request: Fault(delay_headers=5.0))
    sidecar = memory(provider, ONE + TWO + "[routing]\nbalancer = 'priority'\n")
    answered: list[int | None] = []

    async def client() -> None:
        answered.append((await ask(sidecar)).status)

    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(client)
        await anyio.sleep(1)
        await sidecar.reload(parse(ONE + "[server]\ndeadline = 50\n"))
        (one,) = sidecar.setup.router.health().targets
        assert (one.name, one.in_flight) == ("one", 3)
        await sidecar.reload(parse(TWO))
        assert [target.in_flight for target in sidecar.setup.router.health().targets] == [0]
    assert answered == [200] * 3
    assert sidecar._retired == []


async def test_a_cool_down_lasts_over_a_reload_also_for_callers_that_name_the_target() -> None:
    provider = FakeProvider()
    provider.script(None, [Fault(status=429, headers={"retry-after": "60"})])
    sidecar = memory(provider, ONE + "passthrough = true\n[retry]\nenabled = false\n")
    assert (await ask(sidecar, path="/one/v1/chat/completions")).status == 429
    await sidecar.reload(
        parse(ONE + "passthrough = true\n[retry]\nenabled = false\n[server]\ndeadline = 5\n")
    )
    assert (await ask(sidecar, path="/one/v1/chat/completions")).status != 200
    assert len(provider.requests) == 1


async def test_a_reload_that_fails_takes_nothing_over() -> None:
    sidecar = memory(FakeProvider(), BALANCED)
    await ask(sidecar, {**ASK, "model": "m"})
    router = sidecar.setup.router
    router.set_weight("one", 7)
    with pytest.raises(ConfigError):
        await sidecar.reload(parse(BALANCED + '[tenants.a]\nkey_env = "NOT_THERE"\n'))
    assert sidecar.setup.router is router
    assert router.health().targets[0].weight == 7


async def test_what_was_replaced_is_forgotten() -> None:
    sidecar = memory(FakeProvider(), BALANCED)
    seen: list[weakref.ref[object]] = []
    for number in range(1, 6):
        await ask(sidecar, {**ASK, "model": "m"})
        seen.append(weakref.ref(sidecar.setup))
        seen.append(weakref.ref(sidecar.setup.router._fleet))
        await sidecar.reload(parse(BALANCED + f"[server]\ndeadline = {number}\n"))
    for _ in range(3):
        await ask(sidecar, {**ASK, "model": "m"})
    gc.collect()
    assert [one() for one in seen] == [None] * 10


async def test_limits_and_circuits_in_a_store_change_with_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORE", "redis://127.0.0.1:9")
    stored = '[store]\nredis_env = "STORE"\n'
    first = ONE + "quota = { requests_per_minute = 60 }\ncircuit = { consecutive_failures = 3 }\n" + stored
    second = first.replace("60", "120").replace("= 3 }", "= 9 }")
    sidecar = memory(FakeProvider(), first)
    circuit = sidecar.setup.circuits["one"]
    for toml in (second, first, second):
        await sidecar.reload(parse(toml))
        assert sidecar.setup.circuits["one"] is not circuit
        circuit = sidecar.setup.circuits["one"]
    await sidecar.aclose()
