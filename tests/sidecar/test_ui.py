"""What the page is told: calls step by step, tenants, targets; bounded, and nothing of what was said."""

from __future__ import annotations

import json
from typing import Any

import anyio
import pytest

from resilient_llm import Telemetry
from resilient_llm.sidecar import Sidecar, parse
from resilient_llm.sidecar.desk import OneProcess
from resilient_llm.sidecar.ui import SNAPSHOT, Live, Recent, Snapshot, merge, snapshot
from resilient_llm.sidecar.ui.live import TooManyViewersError
from resilient_llm.sidecar.ui.view import SHOWN, Query, view
from resilient_llm.testing import FakeModel, FakeProvider, Fault, Latency
from tests.sidecar.support import ANSWER, KEY, MemoryEngine, ask

pytestmark = pytest.mark.anyio

MINE = [(b"x-api-key", KEY.encode())]
TOML = """
[tenants.acme]
key_env = "KEY_OF_ACME"
[targets.one]
url = "http://one.example/v1"
price = {input = 1, output = 1000}
concurrency = {initial = 7}
circuit = {consecutive_failures = 2, break_duration = 30}
[targets.other]
url = "http://other.example/v1"
[routing]
balancer = "priority"
[retry]
backoff = {initial = 1, maximum = 1, jitter = "none"}
[stream]
"""


@pytest.fixture(autouse=True)
def _keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY_OF_ACME", KEY)


def watched(provider: FakeProvider, toml: str = TOML, **options: Any) -> tuple[Sidecar, Recent]:
    recent = Recent(**options)
    return Sidecar(parse(toml), MemoryEngine(provider), telemetry=Telemetry(listener=recent)), recent


def kinds(call: Any) -> list[str]:
    return [step["kind"] for step in call["steps"]]


async def test_a_call_is_told_step_by_step() -> None:
    provider = FakeProvider(FakeModel(latency=Latency(headers=0.5)))
    provider.script(None, [Fault(status=503, delay_headers=2.0), Fault(status=503)])
    sidecar, recent = watched(provider)
    recent.calls()  # somebody looks
    assert (await ask(sidecar, headers=MINE)).status == 200
    (call,) = recent.calls()
    assert kinds(call) == ["route", "attempt", "route", "attempt", "backoff", "route", "attempt"]
    first, second, third = [step for step in call["steps"] if step["kind"] == "attempt"]
    assert first["facts"]["outcome"] == second["facts"]["outcome"] == "retryable"
    assert (first["facts"]["status"], first["facts"]["number"], third["facts"]["number"]) == (503, 1, 3)
    assert third["facts"]["outcome"] == "success"
    assert (first["at"], first["took"]) == pytest.approx((0.0, 2500.0))
    backoff = call["steps"][4]
    assert backoff["facts"]["source"] == "exponential"
    assert backoff["took"] == pytest.approx(1000.0)
    route = call["steps"][2]["facts"]
    assert (route["selected"], route["from"]) == (second["facts"]["target"], first["facts"]["target"])
    assert (call["tenant"], call["model"], call["outcome"], call["status"]) == ("acme", "gpt-4o", "ok", 200)
    assert (call["attempts"], call["retries"], call["notable"]) == (3, 2, True)
    assert call["took"] == pytest.approx(4500.0)
    assert (call["target"], call["output_tokens"]) == (third["facts"]["target"], len(ANSWER.split()))


async def test_first_decisions_are_worked_out_only_while_somebody_looks() -> None:
    sidecar, recent = watched(FakeProvider())
    await ask(sidecar, headers=MINE)
    assert kinds(recent.calls()[0]) == ["attempt"]
    await ask(sidecar, headers=MINE)
    assert kinds(recent.calls()[0]) == ["route", "attempt"]
    await anyio.sleep(60)
    await ask(sidecar, headers=MINE)
    assert kinds(recent.calls()[0]) == ["attempt"]


async def test_what_is_refused_before_any_policy_is_told_too() -> None:
    sidecar, recent = watched(FakeProvider())
    assert (await ask(sidecar, headers=[(b"x-api-key", b"wrong")])).status == 401
    assert (await ask(sidecar, b"[]", headers=MINE)).status == 400
    second, first = recent.calls()
    assert (first["tenant"], first["status"], first["error"], first["steps"]) == (
        None,
        401,
        "invalid_api_key",
        [],
    )
    assert (second["tenant"], second["status"], second["notable"]) == ("acme", 400, True)
    assert (recent.tally(None).refused, recent.tally("acme").refused) == (1, 1)


async def test_tenants_are_counted() -> None:
    provider = FakeProvider(FakeModel(latency=Latency(headers=5.0)))
    sidecar, recent = watched(provider, TOML + "[bulkhead]\nmax_concurrent = 1\nmax_queued = 1\n")
    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(lambda: ask(sidecar, headers=MINE))
            await anyio.sleep(0.1)
        now = recent.tally("acme").row("acme")
        assert (now["in_flight"], now["queued"], now["refused"], now["requests"]) == (1, 1, 1, 1)
    after = recent.tally("acme").row("acme")
    assert (after["in_flight"], after["queued"], after["requests"], after["errors"]) == (0, 0, 3, 0)
    tokens = 2 * len(ANSWER.split())
    assert after["output_tokens"] == tokens
    assert after["cost_usd"] == pytest.approx(tokens * 1e-3, rel=0.01)


async def test_a_call_in_backoff_is_queued_and_one_that_leaves_is_nowhere() -> None:
    provider = FakeProvider()
    provider.script(None, [Fault(status=503), Fault(status=503), Fault(delay_headers=100)])
    sidecar, recent = watched(provider)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: ask(sidecar, headers=MINE))
        await anyio.sleep(0.5)
        assert recent.tally("acme").row("acme")["queued"] == 1
        await anyio.sleep(1.0)
        assert recent.tally("acme").row("acme")["in_flight"] == 1
        tasks.cancel_scope.cancel()
    row = recent.tally("acme").row("acme")
    assert (row["queued"], row["in_flight"], row["cancelled"]) == (0, 0, 1)


async def test_what_is_kept_is_bounded_and_trouble_outlives_what_went_well() -> None:
    provider = FakeProvider()
    provider.script(None, [Fault(status=400)])
    sidecar, recent = watched(provider, kept=3)
    for _ in range(10):
        await ask(sidecar, headers=MINE)
    calls = recent.calls()
    assert [call["outcome"] for call in calls] == ["ok", "ok", "ok", "error"]
    assert len({call["id"] for call in calls}) == 4
    assert recent.tally("acme").requests == 10
    assert recent.calls() == calls


async def test_the_steps_of_a_call_are_bounded() -> None:
    recent = Recent()
    story = recent()
    story._now = lambda: 1.0
    for number in range(100):
        story.event(None, f"event {number}", {"resilient_llm.reason": "why", "x": float("inf")})  # type: ignore[arg-type]
    assert (len(story.rows()), story.left_out) == (64, 36)
    assert story.rows()[0]["facts"] == {"name": "event 0", "about": {"reason": "why", "x": None}}


async def test_nothing_of_what_was_said_is_kept() -> None:
    sidecar, _ = watched(FakeProvider())
    body = {"model": "gpt-4o", "messages": [{"role": "user", "content": "my-secret-prompt"}], "user": "alice"}
    await ask(sidecar, body, headers=[*MINE, (b"cookie", b"c=my-cookie")])
    told = json.dumps(snapshot(sidecar, started=0.0))
    for secret in ("my-secret-prompt", "quick brown", "alice", KEY, "my-cookie"):
        assert secret not in told
    assert "gpt-4o" in told


async def test_a_snapshot_says_how_targets_are() -> None:
    provider = FakeProvider()
    provider.script(None, [Fault(status=500)] * 2)
    sidecar, _ = watched(provider, TOML.replace('"none"}', '"none"}\nenabled = false'))
    for _ in range(3):
        await ask(sidecar, headers=MINE)
    status, _, body = await OneProcess(sidecar, None).answer("GET", SNAPSHOT, b"")
    told: Snapshot = json.loads(body)
    one, other = sorted(told["targets"], key=lambda row: row["name"])
    assert status == 200
    assert (one["name"], one["circuit"], one["healthy"], one["limit"]) == ("one", "open", False, 7)
    assert (one["attempts"], one["failures"], one["weight"]) == (2, 2, 1.0)
    assert one["effective_weight"] < 0.5
    assert (other["circuit"], other["attempts"], other["failures"]) == ("closed", 1, 0)
    assert (told["workers"], told["open"], told["draining"], told["running"]) == (1, False, False, 0)


def a_snapshot(**changes: Any) -> Snapshot:
    told: dict[str, Any] = {
        "version": "1",
        "workers": 1,
        "at": 100.0,
        "started": 0.0,
        "draining": False,
        "open": False,
        "running": 1,
        "reload_error": None,
        "tenants": [a_tenant("acme")],
        "targets": [a_target("main")],
        "calls": [],
    }
    return {**told, **changes}  # type: ignore[typeddict-item]


def a_tenant(name: str | None, **changes: Any) -> Any:
    counts = (
        "in_flight",
        "queued",
        "requests",
        "refused",
        "errors",
        "cancelled",
        "input_tokens",
        "output_tokens",
    )
    return {"name": name, **dict.fromkeys(counts, 1), "cost_usd": 0.5, **changes}


def a_target(name: str, **changes: Any) -> Any:
    return {
        "name": name,
        "models": ["large"],
        "healthy": True,
        "circuit": "closed",
        "cooling_down": 0.0,
        "in_flight": 1,
        "limit": 5,
        "attempts": 9,
        "failures": 1,
        "success_ratio": 1.0,
        "first_token": 10.0,
        "p50": 10.0,
        "p95": 20.0,
        "weight": 1.0,
        "effective_weight": 1.0,
        **changes,
    }


def a_call(number: int, **changes: Any) -> Any:
    told = {"id": str(number), "ended": float(number), "notable": False, "request_id": f"request-{number}"}
    words = dict.fromkeys(("tenant", "model", "target", "error"), None)
    return {**told, **words, "outcome": "ok", "path": "/v1/chat/completions", **changes}


def test_snapshots_of_several_processes_are_added_up() -> None:
    one = a_snapshot(
        calls=[a_call(5), a_call(1)], targets=[a_target("main"), a_target("only here", limit=None)]
    )
    other = a_snapshot(
        calls=[a_call(4)],
        draining=True,
        started=-5.0,
        reload_error="why",
        tenants=[a_tenant("acme", requests=4), a_tenant(None)],
        targets=[a_target("main", circuit="open", healthy=False, attempts=29, p50=40.0, p95=90.0)],
    )
    both = merge([one, other])
    assert merge([one]) is one
    assert (both["workers"], both["started"], both["draining"], both["running"]) == (2, -5.0, True, 2)
    assert both["reload_error"] == "why"
    assert [call["id"] for call in both["calls"]] == ["5", "4", "1"]
    acme, nobody = both["tenants"]
    assert (acme["requests"], acme["in_flight"], acme["cost_usd"], nobody["name"]) == (5, 2, 1.0, None)
    main, only = both["targets"]
    assert (main["circuit"], main["healthy"], main["limit"], main["attempts"]) == ("open", False, 10, 38)
    assert main["p50"] == pytest.approx((10 * 10 + 30 * 40) / 40)
    assert main["p95"] == 90.0
    assert (only["name"], only["limit"], only["circuit"]) == ("only here", None, "closed")
    json.dumps(both, allow_nan=False)


def test_of_a_thousand_tenants_a_viewer_gets_those_that_matter_or_that_it_looks_for() -> None:
    tenants = [a_tenant(f"tenant {number:04}", in_flight=0, queued=0) for number in range(1000)]
    tenants[777]["queued"] = 9
    tenants[778]["cost_usd"] = 99.0
    told = a_snapshot(tenants=tenants)
    by_name = view(told, Query())
    names = [row["name"] for row in by_name["tenants"]]
    assert len(names) == SHOWN
    assert names == sorted(names, key=str)
    assert "tenant 0777" in names
    assert (by_name["tenants_all"], by_name["tenants_found"], by_name["totals"]["requests"]) == (
        1000,
        1000,
        1000,
    )
    assert view(told, Query.parse(b"tenants_by=queued"))["tenants"][0]["name"] == "tenant 0777"
    assert view(told, Query.parse(b"tenants_by=spend"))["tenants"][0]["name"] == "tenant 0778"
    found = view(told, Query.parse(b"tenant=TENANT+099"))
    assert [row["name"] for row in found["tenants"]] == [f"tenant 099{number}" for number in range(10)]
    assert (found["tenants_found"], found["totals"]["requests"]) == (10, 1000)


def test_targets_and_calls_are_found_by_what_is_known_of_them() -> None:
    told = a_snapshot(
        targets=[
            a_target("a"),
            a_target("b", models=["small"], circuit="open", healthy=False),
            a_target("c", attempts=100),
        ],
        calls=[
            a_call(3, error="rate_limit_error", notable=True),
            a_call(2, model="gpt-4o"),
            a_call(1, tenant="Acme"),
        ],
    )
    assert [row["name"] for row in view(told, Query.parse(b"target=SMALL"))["targets"]] == ["b"]
    assert [row["name"] for row in view(told, Query.parse(b"targets_by=circuit"))["targets"]] == [
        "b",
        "a",
        "c",
    ]
    assert view(told, Query())["troubles"] == [{"name": "b", "circuit": "open", "cooling_down": 0.0}]
    for query, ids in (
        (b"call=gpt", ["2"]),
        (b"call=acme", ["1"]),
        (b"call=RATE_LIMIT", ["3"]),
        (b"call=request-2", ["2"]),
        (b"notable=1", ["3"]),
        (b"", ["3", "2", "1"]),
        (b"call=nothing", []),
    ):
        assert [row["id"] for row in view(told, Query.parse(query))["calls"]] == ids


@pytest.mark.parametrize(
    "query",
    [b"tenants_by=__class__&targets_by=%00", b"tenant=\xff%ff&" * 300, b"&=&" * 10, b"call=" + b"x" * 9000],
)
def test_queries_that_make_no_sense_find_something_or_nothing(query: bytes) -> None:
    parsed = Query.parse(query)
    assert parsed.tenants_by == parsed.targets_by == "name"
    assert len(parsed.call) <= 100
    json.dumps(view(a_snapshot(), parsed))


async def test_one_snapshot_a_second_serves_all_who_look() -> None:
    taken: list[float] = []

    async def take() -> Snapshot:
        taken.append(anyio.current_time())
        await anyio.sleep(0.01)
        return a_snapshot()

    live = Live(take)
    async with anyio.create_task_group() as tasks:
        for _ in range(8):
            tasks.start_soon(live.latest)
    assert (len(taken), live.number) == (1, 1)
    await anyio.sleep(100)
    assert len(taken) == 1  # nobody looked
    await live.latest()
    assert len(taken) == 2


async def test_only_so_many_look() -> None:
    async def take() -> Snapshot:
        return a_snapshot()

    live = Live(take, max_viewers=1)
    with live.viewing():
        assert live.is_full
        with pytest.raises(TooManyViewersError), live.viewing():
            pass
    assert not live.is_full


async def test_rates_and_shares_are_those_of_the_last_minute() -> None:
    requests, attempts = 100, [10, 30]

    async def take() -> Snapshot:
        return a_snapshot(
            tenants=[a_tenant("acme", requests=requests)],
            targets=[a_target("a", attempts=attempts[0]), a_target("b", attempts=attempts[1])],
        )

    live = Live(take)
    told = await live.latest()
    assert told["tenants"][0]["per_second"] == 1.0  # 100 in the 100 s since the start
    assert [target.get("share") for target in told["targets"]] == [0.25, 0.75]
    for _ in range(90):
        await anyio.sleep(1)
        requests += 5
        attempts[0] += 3
        attempts[1] += 1
        told = await live.latest()
    assert told["tenants"][0]["per_second"] == pytest.approx(5.0)
    assert [target.get("share") for target in told["targets"]] == [0.75, 0.25]
    requests, attempts = 0, [0, 0]  # another process
    await anyio.sleep(1)
    assert (await live.latest())["tenants"][0]["per_second"] == 0.0
