"""What operators change while it runs: targets set aside, weights, canaries; and what a reload leaves of it."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from resilient_llm.sidecar import ConfigError, Sidecar, parse
from resilient_llm.sidecar.admin import Admin
from resilient_llm.sidecar.desk import OneProcess
from resilient_llm.sidecar.ui.snapshot import snapshot
from resilient_llm.testing import FakeProvider, Fault
from tests.asgi.server import Connection
from tests.sidecar.support import ASK, MemoryEngine, ask

pytestmark = pytest.mark.anyio

HERE = (b"host", b"localhost")
TWO = """
[targets.one]
preset = "openai"
passthrough = true
[targets.two]
url = "http://two.example/v1"
[models.chat]
targets = ["one/gpt-4o", "two/llama"]
[routing]
balancer = "weighted_random"
[retry]
enabled = false
"""
CANARY = """
[targets.main]
url = "http://provider.example/v1"
[models]
chat.targets = "main/gpt-4o"
next.targets = "main/gpt-5"
[canary.rollout]
model = "chat"
candidate = "next"
steps = [0.25, 1.0]
key = "tenant"
min_calls = 3
step_duration = 1
slo = { error_ratio = 0.2, p99_first_token = 30 }
"""
CHAT = {**ASK, "model": "chat"}


def sidecar_of(toml: str, provider: FakeProvider | None = None) -> Sidecar:
    return Sidecar(parse(toml), MemoryEngine(provider or FakeProvider()))


async def post(sidecar: Sidecar, path: str, body: object = None) -> Connection:
    sent = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    connection = Connection(sent, method="POST", path=path, headers=[HERE])
    return await connection.run(Admin(OneProcess(sidecar, None)))


async def health(sidecar: Sidecar) -> dict[str, Any]:
    connection = await Connection(b"", method="GET", path="/admin/health", headers=[HERE]).run(
        Admin(OneProcess(sidecar, None))
    )
    found: dict[str, Any] = connection.json
    return found


async def answered_by(sidecar: Sidecar, times: int) -> list[str]:
    replies = [await ask(sidecar, CHAT) for _ in range(times)]
    assert {reply.status for reply in replies} == {200}
    return [reply.headers[b"x-resilient-llm-target"].decode() for reply in replies]


async def test_a_preset_that_nobody_has_asked_yet_is_isolated() -> None:
    sidecar = sidecar_of(TWO)
    done = await post(sidecar, "/admin/circuits/one/isolate")
    assert (done.status, done.json) == (200, {"isolate": ["one/gpt-4o", "one"]})
    assert set(await answered_by(sidecar, 20)) == {"two/llama"}
    assert (await ask(sidecar, ASK, path="/one/v1/files", method="GET")).status == 503
    shown = {one["name"]: one for one in (await health(sidecar))["targets"]}
    assert (shown["one/gpt-4o"]["circuit"], shown["one/gpt-4o"]["by_hand"]) == ("isolated", ["isolated"])
    assert (await post(sidecar, "/admin/circuits/one/close")).json == {"close": ["one/gpt-4o", "one"]}
    assert set(await answered_by(sidecar, 40)) == {"one/gpt-4o", "two/llama"}
    assert (await ask(sidecar, ASK, path="/one/v1/files", method="GET")).status != 503


async def test_a_target_that_is_asked_by_its_name_is_in_the_report_as_that_too() -> None:
    provider = FakeProvider()
    sidecar = sidecar_of(TWO, provider)
    assert (await ask(sidecar, CHAT)).status == 200
    assert [(await ask(sidecar, ASK, path="/one/v1/chat/completions")).status for _ in range(3)] == [200] * 3
    seen = await health(sidecar)
    assert [(one["name"], one["model"]) for one in seen["targets"]] == [
        ("one/gpt-4o", "chat"),
        ("two/llama", "chat"),
        ("one", "*"),
    ]
    assert (seen["attempts"], seen["targets"][-1]["attempts"]) == (4, 3)
    await post(sidecar, "/admin/circuits/one/isolate")
    shown = (await health(sidecar))["targets"][-1]
    assert (shown["circuit"], shown["by_hand"], shown["healthy"]) == ("isolated", ["isolated"], False)
    rows = {row["name"]: row for row in snapshot(sidecar, started=0)["targets"]}
    assert (rows["one"]["attempts"], rows["one"]["circuit"]) == (3, "isolated")


async def test_calls_by_name_and_by_model_are_one_row_for_people() -> None:
    sidecar = sidecar_of('[targets.up]\nurl = "http://up.example/v1"\npassthrough = true\n')
    assert (await ask(sidecar)).status == 200
    assert (await ask(sidecar, ASK, path="/up/v1/chat/completions")).status == 200
    [row] = snapshot(sidecar, started=0)["targets"]
    limits = {one["model"]: one["limit"] for one in (await health(sidecar))["targets"]}
    assert (row["models"], row["attempts"], row["limit"]) == (["any", "*"], 2, limits["any"])
    assert limits["any"] is not None


async def test_one_model_of_a_target_is_isolated_by_the_name_that_health_has_for_it() -> None:
    sidecar = sidecar_of(
        TWO.replace('"two/llama"]', '"two/llama"]\n[models.other]\ntargets = "one/gpt-4o-mini"')
    )
    assert (await post(sidecar, "/admin/circuits/one/gpt-4o/isolate")).json == {"isolate": ["one/gpt-4o"]}
    assert set(await answered_by(sidecar, 10)) == {"two/llama"}
    assert (await ask(sidecar, {**ASK, "model": "other"})).status == 200
    for name in ("three", "one/gpt-5", "two/"):
        assert (await post(sidecar, f"/admin/circuits/{name}/isolate")).status == 404


async def test_what_is_isolated_stays_so_over_a_reload_also_of_its_own_table() -> None:
    sidecar = sidecar_of(TWO)
    await post(sidecar, "/admin/circuits/one/isolate")
    await sidecar.reload(parse(TWO + "[server]\ndeadline = 5\n"))
    assert set(await answered_by(sidecar, 10)) == {"two/llama"}
    await sidecar.reload(parse(TWO.replace("passthrough = true", "passthrough = true\nweight = 2")))
    assert set(await answered_by(sidecar, 10)) == {"two/llama"}


async def test_a_weight_is_effective_at_once_and_until_the_next_reload() -> None:
    sidecar = sidecar_of(TWO)
    assert (await post(sidecar, "/admin/targets/one/weight", {"weight": 1e-9})).json == {
        "weight": ["one/gpt-4o", "one"]
    }
    assert set(await answered_by(sidecar, 20)) == {"two/llama"}
    shown = {one["name"]: (one["weight"], one["by_hand"]) for one in (await health(sidecar))["targets"]}
    assert shown == {"one/gpt-4o": (1e-9, ["weight"]), "two/llama": (1.0, []), "one": (1e-9, ["weight"])}
    await sidecar.reload(parse(TWO))
    assert set(await answered_by(sidecar, 40)) == {"one/gpt-4o", "two/llama"}
    assert [one["by_hand"] for one in (await health(sidecar))["targets"]] == [[], [], []]


@pytest.mark.parametrize(
    ("body", "status", "why"),
    [
        (b"", 400, "no JSON object"),
        (b"[" * 60_000, 400, "no JSON object"),
        ([2], 400, "no JSON object"),
        ({}, 422, "expected is a weight"),
        ({"weight": 2, "wieght": 2}, 422, "expected is a weight"),
        ({"weight": 0}, 422, "weight=0: allowed are numbers"),
        ({"weight": "2"}, 422, "weight='2': allowed are numbers"),
        (b'{"weight": NaN}', 422, "weight=nan: allowed are numbers"),
        (b"x" * 70_000, 413, "more than 65536 bytes"),
    ],
)
async def test_a_weight_that_is_none_changes_nothing(body: object, status: int, why: str) -> None:
    sidecar = sidecar_of(TWO)
    refused = await post(sidecar, "/admin/targets/one/weight", body)
    assert (refused.status, why in refused.body.decode()) == (status, True)
    assert [one["by_hand"] for one in (await health(sidecar))["targets"]] == [[], [], []]
    assert (await post(sidecar, "/admin/targets/three/weight", {"weight": 1})).status == 404
    unasked = Connection(b"", method="GET", path="/admin/targets/one/weight", headers=[HERE])
    assert (await unasked.run(Admin(OneProcess(sidecar, None)))).headers[b"allow"] == b"POST"


# Canaries


async def test_a_canary_in_the_file_goes_from_step_to_step_and_is_rolled_back() -> None:
    provider = FakeProvider()
    alone = "[retry]\nenabled = false\n[targets.main.circuit]\nenabled = false\n"
    sidecar = sidecar_of(CANARY.replace('"tenant"', '["tenant", "model"]') + alone, provider)
    await post(sidecar, "/admin/canary/rollout", {"step": 1})
    assert (await ask(sidecar, CHAT)).status == 200
    assert [request.model for request in provider.requests] == ["gpt-5"]
    provider.script("gpt-5", lambda _request: Fault(status=500))
    assert {(await ask(sidecar, CHAT)).status for _ in range(3)} == {500}
    assert {(await ask(sidecar, CHAT)).status for _ in range(5)} == {200}
    standing = (await health(sidecar))["canaries"]["rollout"]
    assert (standing["state"], standing["share"], standing["restarts_in"]) == ("rolled_back", 0.0, 3600.0)
    assert provider.requests[-1].model == "gpt-4o"


async def test_a_canary_is_changed_by_hand(caplog: pytest.LogCaptureFixture) -> None:
    sidecar = sidecar_of(CANARY)
    standing = (await health(sidecar))["canaries"]["rollout"]
    assert (standing["state"], standing["share"], standing["step"], standing["steps"]) == (
        "running",
        0.25,
        0,
        [0.25, 1.0],
    )
    with caplog.at_level(logging.INFO, logger="resilient_llm"):
        for body, state, share, step in (
            ({"step": 1}, "running", 1.0, 1),
            ({"share": 0.1}, "held", 0.1, None),
            ({"do": "resume"}, "running", 0.25, 0),
            ({"do": "hold"}, "held", 0.25, None),
            ({"do": "roll_back"}, "rolled_back", 0.0, None),
            ({"do": "promote"}, "promoted", 1.0, None),
        ):
            done = await post(sidecar, "/admin/canary/rollout", body)
            assert (done.status, done.json["state"], done.json["share"], done.json["step"]) == (
                200,
                state,
                share,
                step,
            )
    said = [record.getMessage() for record in caplog.records]
    assert all(line.startswith("canary='rollout' model='chat'") for line in said)
    assert len(said) == 7  # a step is set, then gone on from
    assert (await post(sidecar, "/admin/canary/other", {"do": "hold"})).status == 404


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"hold", 400),
        ({"do": "explode"}, 422),
        ({"share": 2}, 422),
        ({"share": "1"}, 422),
        ({"step": 2}, 422),
        ({"step": -1}, 422),
        ({"step": True}, 422),
        ({"step": 0.5}, 422),
        ({"step": 1, "share": 1}, 422),
        ({}, 422),
    ],
)
async def test_what_is_no_change_of_a_canary_changes_nothing(body: object, status: int) -> None:
    sidecar = sidecar_of(CANARY)
    assert (await post(sidecar, "/admin/canary/rollout", body)).status == status
    assert (await health(sidecar))["canaries"]["rollout"]["state"] == "running"


async def test_a_canary_goes_on_over_a_reload_unless_it_or_its_models_changed() -> None:
    sidecar = sidecar_of(CANARY)
    await post(sidecar, "/admin/canary/rollout", {"share": 0.5})
    await sidecar.reload(parse(CANARY + "[server]\ndeadline = 5\n"))
    assert (await health(sidecar))["canaries"]["rollout"]["share"] == 0.5
    await sidecar.reload(parse(CANARY.replace("gpt-5", "gpt-6")))
    assert (await health(sidecar))["canaries"]["rollout"]["share"] == 0.25
    await sidecar.reload(parse(CANARY.partition("[canary")[0]))
    assert "canaries" not in await health(sidecar)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (
            ('model = "chat"', 'model = "chta"'),
            'canary.rollout.model = "chta": allowed are chat, next; did you mean',
        ),
        (('"next"\nsteps', '"chat"\nsteps'), 'canary.rollout.candidate = "chat": allowed are next'),
        (("min_calls = 3", "min_calls = 0"), "canary.rollout.min_calls = 0: allowed are numbers from 1"),
        (("[0.25, 1.0]", "[1.0, 0.25]"), "canary.rollout.steps = "),
        (
            ("[0.25, 1.0]", "[0.25, 2.0]"),
            "canary.rollout.steps[1] = 2.0: allowed are numbers up to 1",
        ),
        (('key = "tenant"', 'key = "user"'), "canary.rollout.key"),
        (("error_ratio = 0.2", "eror_ratio = 0.2"), "slo.eror_ratio: unknown key"),
        (("error_ratio = 0.2", "confidence = 0.1"), "canary.rollout.slo.confidence = 0.1"),
        (
            ("[canary.rollout]", '[canary.first]\nmodel = "chat"\ncandidate = "next"\n[canary.rollout]'),
            'canary.rollout.model = "chat": has the canary first already',
        ),
    ],
)
def test_a_canary_that_cannot_be_is_refused_by_its_key(change: tuple[str, str], why: str) -> None:
    with pytest.raises(ConfigError) as refused:
        sidecar_of(CANARY.replace(*change))
    assert why in str(refused.value)
