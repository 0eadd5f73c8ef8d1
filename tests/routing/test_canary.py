"""A canary among other policies: who goes where, what counts, what is told, and control by hand."""

from __future__ import annotations

import contextlib
import logging
import random
import threading
from dataclasses import replace

import anyio
import anyio.lowlevel
import httpx
import pytest

from resilient_llm import (
    AttemptError,
    Backoff,
    CircuitBreaker,
    ConfigurationError,
    Deadline,
    DeadlineExceededError,
    EventLoopError,
    Policy,
    RejectedError,
    Reply,
    Retry,
    Router,
    Target,
    ambient,
)
from resilient_llm.call import Call, CallNext
from resilient_llm.core.canary import RolloutState
from resilient_llm.core.slo import SLO
from resilient_llm.httpx import ResilientTransport
from resilient_llm.outcome import CANCELLED, SUCCESS, Outcome, Scope, Usage, Verdict
from resilient_llm.pricing import Price
from resilient_llm.routing.canary import Canary
from resilient_llm.routing.canary_change import CanaryChange
from resilient_llm.testing import FakeModel, FakeProvider, Latency
from tests.signals import Recording
from tests.support import BAD_REQUEST, FAILURE, THROTTLED, Door, Nothing, cancel_at_every_await
from tests.telemetry.observed import telemetry_of

pytestmark = pytest.mark.anyio

DEAD_KEY = Outcome(verdict=Verdict.FATAL, scope=Scope.CREDENTIAL, error_type="invalid_api_key", status=401)
TOO_LONG = Outcome(verdict=Verdict.FATAL, error_type="context_length_exceeded", status=400)
SILENT = Outcome(verdict=Verdict.FAILURE, error_type="first_content_timeout", retryable=True, ambiguous=True)

OLD = Target(name="old", price=Price(input=1, output=1))
NEW = Target(name="new", price=Price(input=1, output=1))
TARGETS = {"chat": OLD, "chat-next": NEW}


class Models:
    """Answer for both models; the new one as told."""

    def __init__(self, new: Outcome = SUCCESS, *, old: Outcome = SUCCESS, seconds: float = 0.0) -> None:
        self.outcomes = {"new": new, "old": old}
        self.usage = {"new": 100, "old": 100}
        self.seconds = seconds
        self.asked: list[tuple[str, str | None]] = []
        self.calls: list[Call] = []

    async def __call__(self, attempt: Call) -> Reply:
        attempt.mark_sent()
        name = attempt.target.name
        self.asked.append((name, attempt.tenant))
        self.calls.append(attempt)
        if name == "new" and self.seconds:
            await anyio.sleep(self.seconds)
        outcome = replace(self.outcomes[name], usage=Usage(input_tokens=self.usage[name], output_tokens=0))
        if not outcome.ok:
            raise AttemptError(outcome)
        attempt.finish(outcome)
        return Reply(200, [], Nothing(), complete=True)

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.asked]


def canary(**options: object) -> Canary:
    given: dict[str, object] = {
        "model": "chat",
        "candidate": "chat-next",
        "min_calls": 10,
        "step_duration": 60.0,
    }
    return Canary(**(given | options))  # type: ignore[arg-type]


def door(
    models: Models, *policies: Policy, fallbacks: dict[str, str] | None = None, **options: object
) -> Door:
    router = Router(TARGETS, fallbacks=fallbacks or {}, random=random.Random(1))
    return Door(*policies, router, provider=models, **options)  # type: ignore[arg-type]


async def passes_on(call: Call, call_next: CallNext) -> Reply:
    return await call_next(call)


async def ask(door: Door, times: int, *, every: float = 1.0, model: str = "chat") -> None:
    for number in range(times):
        with contextlib.suppress(AttemptError, RejectedError):
            await door(model=model, tenant=f"tenant {number}")
        await anyio.sleep(every)


# Who goes where


async def test_a_share_of_the_calls_goes_to_the_candidate() -> None:
    models = Models()
    asking = door(models, canary(steps=(0.25,)))
    await ask(asking, 400, every=0.0)
    assert 70 <= models.names.count("new") <= 130
    for call, name in zip(asking.calls, models.names, strict=True):
        assert (call.logical_model, call.purpose) == (
            ("chat-next", "canary") if name == "new" else (None, None)
        )


async def test_a_tenant_stays_with_it_or_without_it() -> None:
    models = Models()
    one = canary(steps=(0.3,), step_duration=1e6)
    asking = door(models, one)
    for _ in range(3):
        await ask(asking, 50, every=0.0)
    sides: dict[str | None, set[str]] = {}
    for name, tenant in models.asked:
        sides.setdefault(tenant, set()).add(name)
    assert {len(names) for names in sides.values()} == {1}
    assert {min(names) for names in sides.values()} == {"old", "new"}


async def test_whoever_is_in_stays_in_when_the_share_grows() -> None:
    models = Models()
    one = canary(steps=(0.1,))
    asking = door(models, one)
    inside: set[str | None] = set()
    for share in (0.1, 0.4, 0.8, 1.0):
        one.set_share(share)
        models.asked.clear()
        await ask(asking, 100, every=0.0)
        now_inside = {tenant for name, tenant in models.asked if name == "new"}
        assert inside <= now_inside
        inside = now_inside
    assert len(inside) == 100


async def test_calls_without_a_key_are_drawn_one_by_one() -> None:
    models = Models()
    asking = door(models, canary(steps=(0.5,), random=random.Random(3)))
    for _ in range(100):
        await asking(model="chat")
    assert 35 <= models.names.count("new") <= 65


async def test_calls_for_other_models_pass_untouched() -> None:
    models = Models()
    one = canary(steps=(1.0,))
    await ask(door(models, one), 5, model="chat-next")
    assert models.names == ["new"] * 5  # asked for by name
    assert one.status().seen.calls == 0


async def test_a_retry_stays_with_the_candidate() -> None:
    models = Models(FAILURE)
    retry = Retry(max_attempts=3, backoff=Backoff(initial=1.0, jitter="none"))
    with pytest.raises(AttemptError):
        await door(models, canary(steps=(1.0,)), retry)(model="chat", tenant="a")
    assert models.names == ["new"] * 3


async def test_two_canaries_stand_side_by_side() -> None:
    models = Models()
    first = canary(steps=(0.5,))
    second = canary(model="other", steps=(1.0,), name="second")
    targets = {**TARGETS, "other": Target(name="third")}
    asking = Door(first, second, Router(targets), provider=models)
    await asking(model="other", tenant="a")
    assert models.names == ["new"]


# What counts


@pytest.mark.parametrize(
    ("outcome", "calls", "errors", "client_errors"),
    [
        pytest.param(SUCCESS, 1, 0, 0, id="success"),
        pytest.param(FAILURE, 1, 1, 0, id="server error"),
        pytest.param(THROTTLED, 1, 1, 0, id="throttled"),
        pytest.param(DEAD_KEY, 1, 1, 0, id="a dead key"),
        pytest.param(SILENT, 1, 1, 0, id="silence"),
        pytest.param(BAD_REQUEST, 0, 0, 1, id="refused as wrong"),
        pytest.param(TOO_LONG, 0, 0, 1, id="too long"),
        pytest.param(CANCELLED, 0, 0, 0, id="cancelled"),
        pytest.param(
            Outcome(verdict=Verdict.NEUTRAL, scope=Scope.LOCAL, error_type="pool_timeout"),
            0,
            0,
            0,
            id="neutral",
        ),
        pytest.param(
            Outcome(verdict=Verdict.FATAL, scope=Scope.LOCAL, error_type="KeyError"), 0, 0, 0, id="a bug here"
        ),
    ],
)
async def test_what_the_end_of_a_call_counts_as(
    outcome: Outcome, calls: int, errors: int, client_errors: int
) -> None:
    one = canary(steps=(1.0,))
    await ask(door(Models(outcome), one), 1)
    seen = one.status().seen
    assert (seen.calls, seen.errors, seen.client_errors) == (calls, errors, client_errors)


async def test_an_answer_by_a_fallback_model_is_the_candidates_error() -> None:
    one = canary(steps=(1.0,))
    models = Models(DEAD_KEY)
    retry = Retry(max_attempts=3, backoff=Backoff(initial=1.0, jitter="none"))
    await door(models, one, retry, fallbacks={"chat-next": "chat"})(model="chat", tenant="a")
    assert models.names[-1] == "old"
    assert (one.status().seen.calls, one.status().seen.errors) == (1, 1)


async def test_a_candidate_that_cannot_be_asked_is_its_error() -> None:
    # Once its circuit is open nothing fails any more; a rollout that waited for failures would wait for ever.
    one = canary(steps=(1.0,), min_calls=50)
    breaker = CircuitBreaker(consecutive_failures=1, break_duration=1_000, max_break_duration=1_000)
    models = Models(FAILURE)
    router = Router({"chat": OLD, "chat-next": Target(name="new", policies=[breaker])}, max_wait=0)
    await ask(Door(one, router, provider=models), 3)
    assert models.names == ["new"]
    assert one.status().state is RolloutState.ROLLED_BACK


@pytest.mark.parametrize("options", [{"candidate": "chat-nxet"}, {"model": "caht"}])
async def test_models_that_the_router_does_not_know_are_found_when_the_pipeline_is_made(
    options: dict[str, str],
) -> None:
    [(option, name)] = options.items()
    known = f"{option}='{name}': the Router has no targets for it; it has some for 'chat', 'chat-next'"
    with pytest.raises(ConfigurationError, match=known):
        door(Models(), canary(**options), Retry())
    for anything in (Router([OLD]), Router(TARGETS, default="chat")):
        Door(canary(**options), anything, provider=Models())


async def test_a_candidate_that_no_target_is_declared_for_is_rolled_back() -> None:
    one = canary(candidate="chat-nxet", steps=(0.5,))
    models = Models()
    await ask(door(models, one, passes_on), 20)  # names may be anything to a policy of the application's own
    assert one.status().state is RolloutState.ROLLED_BACK
    assert models.names.count("old") >= 14


async def test_a_deadline_that_passes_counts() -> None:
    one = canary(steps=(1.0,))
    models = Models(seconds=100.0)
    with pytest.raises(DeadlineExceededError):
        await door(models, Deadline(5), one)(model="chat", tenant="a")
    seen = one.status().seen
    assert (seen.calls, seen.errors, seen.p99_first_token) == (1, 1, float("inf"))


async def test_costs_are_those_the_router_adds_up() -> None:
    one = canary(steps=(1.0,), slo=SLO(cost=1.0))
    models = Models()
    await ask(door(models, one, Retry()), 3)
    assert one.status().seen.priced == 3
    assert one.status().seen.mean_cost == pytest.approx(100e-6)


async def test_a_candidate_that_costs_more_than_the_baseline_is_rolled_back() -> None:
    one = canary(steps=(0.5,), slo=SLO(cost_ratio=1.5))
    models = Models()
    models.usage = {"new": 300, "old": 100}
    await ask(door(models, one, Retry()), 60)
    assert one.status().state is RolloutState.ROLLED_BACK


async def test_time_to_first_token_is_that_of_the_stream_that_is_handed_on() -> None:
    provider = FakeProvider(FakeModel(latency=Latency(first_token=2.0, per_token=0.5)))
    one = canary(steps=(1.0,), slo=SLO(p99_first_token=5.0))
    transport = ResilientTransport(
        provider.transport(),
        policies=[one, Retry(), Router({"chat": OLD, "chat-next": Target(name="new")})],
    )
    async with httpx.AsyncClient(transport=transport, base_url="http://provider/v1", timeout=None) as client:
        with ambient(tenant="a"):
            body = {"model": "chat", "stream": True, "messages": [{"role": "user", "content": "hi"}]}
            async with client.stream("POST", "/chat/completions", json=body) as response:
                async for _ in response.aiter_bytes():
                    pass
    first_token = one.status().seen.p99_first_token
    assert first_token is not None
    assert 1.9 < first_token < 2.6


async def test_of_a_reply_that_is_no_stream_it_is_the_time_to_its_end() -> None:
    one = canary(steps=(1.0,))
    await door(Models(seconds=3.0), one)(model="chat", tenant="a")
    assert one.status().seen.p99_first_token == pytest.approx(3.0, rel=0.05)


# How it goes on


async def test_it_steps_to_all_calls_and_is_promoted() -> None:
    changes: list[CanaryChange] = []
    models = Models()
    one = canary(steps=(0.05, 0.25, 0.5, 1.0), on_change=changes.append)
    await ask(door(models, one), 1_200)
    assert [(change.from_share, change.to_share, change.reason) for change in changes] == [
        (0.05, 0.25, "passed"),
        (0.25, 0.5, "passed"),
        (0.5, 1.0, "passed"),
        (1.0, 1.0, "passed"),
    ]
    assert changes[-1].to_state is RolloutState.PROMOTED
    assert models.names[-100:] == ["new"] * 100


async def test_a_bad_candidate_costs_few_calls_and_is_tried_again_after_a_while() -> None:
    changes: list[CanaryChange] = []
    models = Models(FAILURE)
    one = canary(steps=(0.5,), cool_off=200.0, on_change=changes.append)
    asking = door(models, one)
    await ask(asking, 150)
    assert models.names.count("new") == 3
    await ask(asking, 100)
    assert models.names.count("new") == 6
    assert [change.reason for change in changes] == ["error_ratio", "cool_off", "error_ratio"]


async def test_it_waits_for_a_human_where_told_so() -> None:
    models = Models(FAILURE)
    one = canary(steps=(0.5,), cool_off=10.0, restart=False)
    asking = door(models, one)
    await ask(asking, 100)
    assert models.names.count("new") == 3
    models.outcomes["new"] = SUCCESS
    one.resume()
    await ask(asking, 100)
    assert models.names.count("new") > 20


# What is told


async def test_each_change_is_an_event_a_log_line_and_a_call_of_the_hook(
    caplog: pytest.LogCaptureFixture,
) -> None:
    recording = Recording()
    changes: list[CanaryChange] = []
    one = canary(steps=(1.0,), on_change=changes.append)
    with caplog.at_level(logging.INFO, "resilient_llm"):
        await ask(door(Models(FAILURE), one, telemetry=telemetry_of(recording)), 3)
    assert len(changes) == 1
    [line] = [record for record in caplog.records if hasattr(record, "canary")]
    assert line.levelno == logging.WARNING
    assert line.getMessage() == (
        "canary='canary' model='chat' candidate='chat-next' state=rolled_back share=0 from=1 reason='error_ratio' "
        "calls=3 errors=3 client_errors=0 mean_cost=0.0001 baseline_calls=0 baseline_errors=0 baseline_client_errors=0"
    )
    assert line.canary["to_share"] == 0.0
    spans = recording.spans.named("chat")
    assert [span.event_names() for span in spans] == [
        ["resilient_llm.canary"],
        ["resilient_llm.canary"],
        ["resilient_llm.canary", "resilient_llm.canary.change"],
    ]
    assert spans[-1].events[-1].attributes == {
        "resilient_llm.canary.name": "canary",
        "resilient_llm.canary.model": "chat-next",
        "resilient_llm.canary.state": "rolled_back",
        "resilient_llm.canary.share": 0.0,
        "resilient_llm.canary.from": 1.0,
        "resilient_llm.canary.reason": "error_ratio",
    }


async def test_a_change_by_hand_is_an_event_of_the_next_call() -> None:
    recording = Recording()
    one = canary(steps=(0.5,))
    asking = door(Models(), one, telemetry=telemetry_of(recording))
    one.promote()
    await ask(asking, 1)
    assert recording.spans.one("chat").event_names() == [
        "resilient_llm.canary.change",
        "resilient_llm.canary",
    ]


async def test_a_hook_that_fails_breaks_no_call(caplog: pytest.LogCaptureFixture) -> None:
    def fail(_change: CanaryChange) -> None:
        raise RuntimeError("a bug in the hook")

    models = Models(FAILURE)
    one = canary(steps=(1.0,), on_change=fail)
    await ask(door(models, one), 5)
    assert models.names == ["new"] * 3 + ["old"] * 2
    assert "on_change" in caplog.text


async def test_the_share_is_a_gauge() -> None:
    recording = Recording()
    one = canary(steps=(0.25,))
    asking = door(Models(), one, telemetry=telemetry_of(recording))
    await ask(asking, 1)
    [point] = [point for point in recording.points if point.name == "resilient_llm.canary.share"]
    assert (point.value, point.attributes["resilient_llm.canary.name"]) == (0.25, "canary")


# By hand


async def test_set_share_promote_roll_back_and_resume() -> None:
    models = Models()
    one = canary(steps=(0.05, 0.5, 1.0))
    asking = door(models, one)
    one.set_share(1.0)
    await ask(asking, 100)
    assert models.names == ["new"] * 100
    assert one.status().state is RolloutState.HELD
    one.roll_back()
    await ask(asking, 10)
    assert models.names[100:] == ["old"] * 10
    one.promote()
    assert (one.status().state, one.status().share) == (RolloutState.PROMOTED, 1.0)
    one.resume()
    assert (one.status().step, one.status().waits_for) == (0, "step_duration")


@pytest.mark.realtime
async def test_by_hand_from_another_thread() -> None:
    one = canary(steps=(0.05,))
    models = Models()
    asking = door(models, one)
    await asking(model="chat", tenant="a")
    thread = threading.Thread(target=one.promote)
    thread.start()
    await anyio.to_thread.run_sync(thread.join)
    await anyio.lowlevel.checkpoint()
    await asking(model="chat", tenant="a")
    assert models.names == ["old", "new"]


def test_by_hand_outside_of_any_event_loop() -> None:
    with pytest.raises(EventLoopError):
        canary().promote()


@pytest.mark.parametrize("share", [-0.1, 1.1, "0.5", True, None, float("nan")])
async def test_a_share_out_of_range_is_refused(share: float) -> None:
    with pytest.raises(ConfigurationError, match="share="):
        canary().set_share(share)


# Options


@pytest.mark.parametrize(
    "wrong",
    [
        {"model": ""},
        {"candidate": None},
        {"candidate": "chat"},
        {"steps": (0.5, 0.2)},
        {"slo": 0.05},
        {"min_calls": 0},
        {"step_duration": 0.0},
        {"cool_off": -1},
        {"restart": "yes"},
        {"salt": ""},
        {"purpose": 5},
        {"on_change": "log"},
        {"key": "user"},
        {"name": ""},
    ],
)
def test_options_out_of_range_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        canary(**wrong)


def test_without_a_router_it_is_refused_when_built() -> None:
    with pytest.raises(ConfigurationError, match="no Router"):
        Door(canary(), Retry(), provider=Models())


async def test_nothing_is_counted_whenever_a_call_is_cancelled() -> None:
    one = canary(steps=(1.0,))
    models = Models(seconds=1.0)
    asking = door(models, one)

    async def scenario() -> None:
        await asking(model="chat", tenant="a")

    counted = 0

    async def check() -> None:
        nonlocal counted
        seen = one.status().seen
        counted = seen.calls
        assert seen.errors == seen.client_errors == 0

    assert await cancel_at_every_await(scenario, check) >= 1
    assert counted == 1  # the one that was not cancelled


async def test_many_at_once_of_one_tenant_all_go_the_same_way() -> None:
    models = Models(seconds=1.0)
    asking = door(models, canary(steps=(0.5,)))

    async def one_call() -> None:
        await asking(model="chat", tenant="the same")

    async with anyio.create_task_group() as group:
        for _ in range(20):
            group.start_soon(one_call)
    assert len(models.names) == 20
    assert len(set(models.names)) == 1
