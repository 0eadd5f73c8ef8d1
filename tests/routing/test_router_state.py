"""What a router keeps of its targets, the names that it answers for, and what it tells those it refuses."""

from __future__ import annotations

import json
import math
import random

import anyio
import pytest

from resilient_llm import (
    AttemptError,
    Call,
    CallNext,
    CircuitBreaker,
    ConfigurationError,
    ContextWindowError,
    NoTargetError,
    Reply,
    Request,
    Retry,
)
from resilient_llm.core.target_load import TargetLoad
from resilient_llm.outcome import Outcome, Usage, Verdict
from resilient_llm.pricing import Price
from tests.routing.upstreams import FIXED, OVERLOADED, SILENT, Upstreams, door, router, target, throttled
from tests.support import FAILURE, Door, Nothing

pytestmark = pytest.mark.anyio


async def test_one_target_of_two_models_has_one_state() -> None:
    upstreams = Upstreams(a=[throttled(30.0)])
    shared = target("a")
    routing = router({"m": shared, "n": [shared, target("b")]})
    one = door(upstreams, routing, retry=Retry(max_attempts=1))
    with pytest.raises(AttemptError):
        await one(model="m")
    await one(model="n")
    assert upstreams.names == ["a", "b"]
    health = routing.health()
    assert [(one.name, one.model, one.healthy) for one in health.targets] == [
        ("a", "m", False),
        ("a", "n", False),
        ("b", "n", True),
    ]
    assert health.attempts == 2


@pytest.mark.parametrize("hint", [1e9, math.inf])
async def test_a_hint_that_is_absurd_cools_down_for_a_quarter_of_an_hour_and_then_one_call_tries(
    hint: float,
) -> None:
    upstreams = Upstreams(a=[throttled(hint)])
    routing = router([target("a"), target("b")])
    one = door(upstreams, routing)
    await one()
    health = routing.health()
    assert health.targets[0].cooling_down == pytest.approx(900.0)
    json.loads(health.to_json(), parse_constant=pytest.fail)
    await anyio.sleep(900.0)
    upstreams.scripts["a"] = [5.0]
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(one)
        await anyio.sleep(1)
        await one()
    await one()
    assert upstreams.names == ["a", "b", "a", "b", "a"]


async def test_the_longest_retry_after_is_compared_without_its_jitter() -> None:
    for seed in range(5):
        upstreams = Upstreams(a=[throttled(120.0)])
        await door(upstreams, router([target("a")]), retry=Retry(backoff=FIXED, random=random.Random(seed)))()
        assert 120.0 <= upstreams.asked[-1][1] <= 132.0


async def test_a_star_stands_for_all_models_that_are_not_declared() -> None:
    upstreams = Upstreams()
    routing = router(
        {"m": target("a", context_window=10_000), "*": target("b", context_window=20_000)},
        fallbacks={"*": ["m"]},
    )
    one = door(upstreams, routing)
    await one(model="m")
    await one(model="x")
    assert upstreams.names == ["a", "b"]
    assert [routing.context_window(model) for model in ("m", "x", None)] == [10_000, 20_000, 20_000]
    upstreams.scripts["b"] = [FAILURE] * 3
    await one(model="y")
    assert upstreams.names[2:] == ["b", "b", "b", "a"]


def test_the_context_window_is_that_of_the_default() -> None:
    routing = router({"m": target("a", context_window=10_000), "n": target("b")}, default="m")
    assert [routing.context_window(model) for model in ("m", "n", "x")] == [10_000, None, 10_000]
    assert router({"m": target("a", context_window=1)}).context_window("x") is None


def test_health_can_be_asked_for_before_the_first_call_and_outside_a_loop() -> None:
    (told,) = router([target("a")]).health().targets
    assert (told.healthy, told.attempts, told.cooling_down) == (True, 0, 0.0)


async def test_a_target_that_cools_down_is_brought_back_by_hand_and_its_circuit_closed() -> None:
    upstreams = Upstreams(a=[FAILURE, throttled(600.0)])
    routing = router([target("a")])
    one = Door(Retry(max_attempts=1), routing, CircuitBreaker(consecutive_failures=1), provider=upstreams)
    for _ in range(2):
        with pytest.raises(AttemptError):
            await one()
        assert not routing.health().targets[0].healthy
        routing.restore("a")
        assert routing.health().targets[0].healthy
    await one()
    with pytest.raises(ConfigurationError, match="no target is called so"):
        routing.restore("b")


async def test_a_prompt_that_no_window_is_large_enough_for_is_a_400() -> None:
    body = b'{"messages": [{"role": "user", "content": "' + b"word " * 100 + b'"}]}'
    one = door(Upstreams(), router([target("a", context_window=10), target("b", context_window=20)]))
    with pytest.raises(ContextWindowError, match=r"a:context_window \(of 10 tokens\)") as raised:
        await one(body=body)
    assert raised.value.status == 400


async def test_what_no_target_can_do_is_a_400_that_names_it() -> None:
    body = b'{"messages": [], "tools": [{"type": "function"}], "stream": true}'
    targets = [target("a", capabilities={"streaming"}), target("b", dialect="anthropic")]
    with pytest.raises(NoTargetError) as raised:
        await door(Upstreams(), router(targets))(body=body)
    assert raised.value.status == 400
    assert raised.value.retry_after is None
    assert raised.value.rejected == ("a:capabilities", "b:dialect")
    assert "a:capabilities (without tools), b:dialect (anthropic, not openai)" in str(raised.value)


async def test_what_another_time_may_be_possible_is_no_400() -> None:
    upstreams = Upstreams(a=[throttled(600.0)])
    one = door(
        upstreams, router([target("a"), target("b", dialect="anthropic")]), retry=Retry(max_attempts=1)
    )
    with pytest.raises(AttemptError):
        await one()
    with pytest.raises(NoTargetError) as raised:
        await one()
    assert raised.value.status == 503


async def test_what_is_in_no_known_dialect_is_let_through_to_any() -> None:
    upstreams = Upstreams()

    class Files:
        async def __call__(self, call: Call, call_next: CallNext) -> Reply:
            call.request = Request("GET", "https://api.example/v1/files/f", [], b"")
            return await call_next(call)

    await Door(Files(), Retry(), router([target("a", dialect="anthropic")]), provider=upstreams)()
    assert upstreams.names == ["a"]


async def test_the_outermost_router_names_the_target() -> None:
    class Named(Upstreams):
        async def __call__(self, attempt: Call) -> Reply:
            reply = await super().__call__(attempt)
            reply.headers = [(b"X-Resilient-LLM-Target", b"inner")]
            return reply

    reply = await door(Named(), router([target("a")]))()
    assert reply.headers == [(b"x-resilient-llm-target", b"a")]


@pytest.mark.parametrize(
    ("usage", "cost"),
    [
        (None, 101 * 10.0),
        (Usage(output_tokens=7, estimated=True), 101 * 10.0 + 7 * 30.0),
        (Usage(input_tokens=50), 50 * 10.0),
        (Usage(input_tokens=50, output_tokens=7), 50 * 10.0 + 7 * 30.0),
    ],
)
async def test_what_an_answer_does_not_tell_of_its_tokens_is_estimated(
    usage: Usage | None, cost: float
) -> None:
    class Silent(Upstreams):
        async def __call__(self, attempt: Call) -> Reply:
            attempt.mark_sent()
            attempt.finish(Outcome(verdict=Verdict.SUCCESS, usage=usage))
            return Reply(200, [], Nothing(), complete=True)

    one = door(Silent(), router([target("a", price=Price(input=10.0, output=30.0))]))
    await one(body=b'{"prompt": "' + b"x" * 404 + b'"}')
    assert one.calls[0].cost == pytest.approx(cost / 1e6)


async def test_a_call_learns_from_a_failure_that_its_target_could_not_learn_from(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def finished(*_: object, **__: object) -> None:
        raise RuntimeError("out of order")

    monkeypatch.setattr(TargetLoad, "finished", finished)
    upstreams = Upstreams(a=[SILENT], b=[OVERLOADED])
    await door(upstreams, router([target("a"), target("b")]))()
    assert upstreams.names == ["a", "b", "b"]  # not "a" again, which gave no answer in its time
    assert "a callback of a finished call failed" in caplog.text
