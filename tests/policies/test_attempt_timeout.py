"""The three clocks of a stream: what they wait for, what resets them, and what it means when they run out."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import anyio
import httpx2
import pytest

from resilient_llm import (
    AttemptTimeout,
    Backoff,
    Bulkhead,
    Call,
    CircuitBreaker,
    CircuitState,
    Clocks,
    ConfigurationError,
    Deadline,
    Pipeline,
    Retry,
    Scope,
    ambient,
)
from resilient_llm.outcome import Verdict
from tests.streams.scripted import (
    ASK,
    DONE,
    PING,
    ROLE,
    Spy,
    Upstream,
    chunks,
    data,
    read,
    resilient,
    says,
    send,
    streamed,
)

pytestmark = pytest.mark.anyio

ONCE = Retry(max_attempts=1)
THINKS = data({"choices": [{"index": 0, "delta": {"reasoning_content": "hm"}}]})
CALLS = data({"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, "function": {"name": "f"}}]}}]})
FILTER = data({"choices": [], "prompt_filter_results": [{"prompt_index": 0}]})
END = [says("end", "stop"), DONE]


async def play(*steps: Any, clocks: AttemptTimeout, delay: float = 0.0) -> tuple[str | None, float]:
    """Play a stream; give how its attempt ended, and when."""
    spy = Spy()
    upstream = Upstream(lambda: streamed(*steps), delay=delay)
    began = anyio.current_time()
    await read(await send(resilient(upstream, ONCE, clocks, spy)))
    took = anyio.current_time() - began
    assert upstream.all_closed or spy.ended[0].ok
    return spy.ended[0].error_type, round(took, 6)


@pytest.mark.parametrize("nothing", [PING, ROLE, FILTER, data({"type": "ping"}, "ping"), data(": keepalive")])
async def test_what_is_no_content_resets_no_clock(nothing: bytes) -> None:
    clocks = AttemptTimeout(first_content=5, content_gap=3)
    assert await play(*[1.0, nothing] * 10, *END, clocks=clocks) == ("first_content_timeout", 5)
    assert await play(1.0, says("one"), *[1.0, nothing] * 10, *END, clocks=clocks) == (
        "content_gap_timeout",
        4,
    )


@pytest.mark.parametrize("content", [says("one"), THINKS, CALLS, data({"choices": [{"text": "one"}]})])
async def test_whatever_the_model_makes_is_content(content: bytes) -> None:
    clocks = AttemptTimeout(first_content=5, content_gap=3)
    assert await play(*[2.5, content] * 10, *END, clocks=clocks) == (None, 25)


async def test_each_clock_ends_what_it_is_for() -> None:
    clocks = AttemptTimeout(headers=2, first_content=4, content_gap=1)
    assert await play(*END, clocks=clocks, delay=3) == ("headers_timeout", 2)
    assert await play(math.inf, clocks=clocks, delay=1) == ("first_content_timeout", 4)
    assert await play(says("one"), math.inf, clocks=clocks, delay=1) == ("content_gap_timeout", 2)
    assert await play(*END, clocks=AttemptTimeout(first_content=4), delay=5) == ("first_content_timeout", 4)
    assert await play(3.0, says("one"), 30.0, *END, clocks=AttemptTimeout(headers=2)) == (None, 33)


async def test_a_gap_is_what_somebody_waits_for() -> None:
    """A caller who takes his time is not the model's fault, and several waits without content are one gap."""
    upstream = Upstream(lambda: streamed(says("one"), says("two"), 2.0, PING, 2.0, PING, 2.0, *END))
    spy = Spy()
    response = await send(resilient(upstream, ONCE, AttemptTimeout(content_gap=5), spy))
    stream = aiter(response.stream)  # type: ignore[arg-type]
    assert await anext(stream) == says("one")
    await anyio.sleep(60)
    assert await anext(stream) == says("two")
    assert await anext(stream) == PING
    await anyio.sleep(60)
    assert await anext(stream) == PING
    began = anyio.current_time()
    assert b"content_gap_timeout" in await anext(stream)
    assert anyio.current_time() - began == pytest.approx(1)
    assert spy.ended[0].error_type == "content_gap_timeout"


async def test_a_clock_that_runs_out_is_a_failure_of_the_target() -> None:
    for delay, steps in ((10, END), (0, [math.inf]), (0, [says("one"), math.inf])):
        spy = Spy()
        upstream = Upstream(partial(streamed, *steps), delay=delay)
        clocks = AttemptTimeout(headers=1, first_content=2, content_gap=1)
        await read(await send(resilient(upstream, ONCE, clocks, spy)))
        outcome = spy.ended[0]
        assert (outcome.verdict, outcome.scope, outcome.retryable) == (Verdict.FAILURE, Scope.TARGET, True)
        assert outcome.ambiguous
        assert outcome.timed_out


async def test_the_total_deadline_is_not_the_targets_fault() -> None:
    for delay, steps in ((10, END), (0, [math.inf]), (0, [says("one"), math.inf])):
        spy = Spy()
        upstream = Upstream(partial(streamed, *steps), delay=delay)
        clocks = AttemptTimeout(for_call=lambda _: Clocks(headers=8, first_content=8, content_gap=8))
        response = await send(resilient(upstream, Deadline(3), ONCE, clocks, spy))
        assert b"deadline_exceeded" in await read(response)
        assert [outcome.verdict for outcome in spy.ended] == [Verdict.NEUTRAL]
        assert upstream.all_closed


async def test_a_call_or_a_tenant_may_have_clocks_of_its_own() -> None:
    def chosen(call: Call) -> Clocks | None:
        return {"patient": Clocks(first_content=10), "other": None}[call.tenant or "other"]

    clocks = AttemptTimeout(first_content=2, for_call=chosen)
    upstream = Upstream(lambda: streamed(5.0, *END))
    transport = resilient(upstream, ONCE, clocks)
    with ambient(tenant="patient"):
        assert (await send(transport)).status_code == 200
    with ambient(tenant="other"):
        assert (await send(transport)).status_code == 504


async def test_waits_inside_the_pipeline_are_no_latency() -> None:
    """Neither for the clocks, nor for a circuit that opens when first tokens are slow."""
    spy, breaker = Spy(), CircuitBreaker(slow_call_ratio=0.3, slow_call_duration=4, minimum_throughput=1)
    upstream = Upstream(lambda: streamed(1.0, says("one"), 5.0, *END))
    transport = resilient(
        upstream,
        ONCE,
        Bulkhead(max_concurrent=1, key="target"),
        breaker,
        AttemptTimeout(first_content=3),
        spy,
    )

    async def call() -> None:
        await read(await send(transport))

    async with anyio.create_task_group() as group:
        group.start_soon(call)
        group.start_soon(call)
    assert [outcome.ok for outcome in spy.ended] == [True, True]
    assert [call.first_content for call in spy.calls] == pytest.approx([1, 1])
    assert breaker.state("h.example") is CircuitState.CLOSED
    upstream.delay = 4
    with pytest.raises(httpx2.ReadTimeout):
        await send(resilient(upstream, AttemptTimeout(first_content=3)))
    await read(await send(resilient(upstream, ONCE, breaker)))
    assert breaker.state("h.example") is CircuitState.OPEN


async def test_a_silent_target_is_tried_again_when_there_is_no_other() -> None:
    backoff = Backoff(initial=1, maximum=1, jitter="none")
    upstream = Upstream(lambda: streamed(math.inf), lambda: streamed(*END))
    clocks = AttemptTimeout(first_content=2)
    assert (await read(await send(resilient(upstream, Retry(backoff=backoff), clocks)))).endswith(DONE)
    assert upstream.sent[1] - upstream.sent[0] == 3


async def test_around_a_function_the_nearest_clock_counts() -> None:
    pipeline = Pipeline([Retry(max_attempts=1), AttemptTimeout(whole_reply=2)])
    with pytest.raises(TimeoutError):
        await pipeline.run(anyio.sleep, 3)
    await pipeline.run(anyio.sleep, 1)


async def test_one_scope_for_all_that_is_read_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock costs a cancel scope for each wait of the caller's, not one for each read of the network."""
    event = says("one")
    upstream = Upstream(lambda: streamed(*[event[at : at + 1] for at in range(len(event))] * 10, *END))
    response = await send(resilient(upstream, Deadline(60), AttemptTimeout(content_gap=5), Spy()))
    entered = 0
    kind = type(anyio.CancelScope())
    enter = kind.__enter__

    def counted(scope: Any) -> Any:
        nonlocal entered
        entered += 1
        return enter(scope)

    monkeypatch.setattr(kind, "__enter__", counted)
    came = await chunks(response)
    assert len(came) == 12
    assert upstream.bodies[0].reads == 10 * len(event) + 3
    assert entered <= 13


@pytest.mark.parametrize("bad", [0, -1, math.inf, math.nan, "5", True])
@pytest.mark.parametrize("name", ["headers", "first_content", "content_gap", "whole_reply"])
def test_limits_are_seconds(name: str, bad: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"{name}="):
        AttemptTimeout(**{name: bad})


def test_limits_that_contradict_each_other() -> None:
    with pytest.raises(ConfigurationError, match="limits nothing"):
        AttemptTimeout()
    with pytest.raises(ConfigurationError, match=r"headers=5.*first_content=3"):
        AttemptTimeout(headers=5, first_content=3)
    with pytest.raises(ConfigurationError, match=r"deadline \(total=10\) comes before.*10 s"):
        Pipeline([Deadline(10), AttemptTimeout(first_content=10)])
    with pytest.raises(ConfigurationError, match=r"deadline \(total=10\)"):
        Pipeline([Deadline(10), AttemptTimeout(whole_reply=30)])
    with pytest.raises(ConfigurationError, match=r"sampling_duration=30.*2 x the attempt's limit of 20 s"):
        Pipeline([CircuitBreaker(sampling_duration=30), AttemptTimeout(headers=20)])
    with pytest.raises(ConfigurationError, match=r"deadline \(total=10\)"):
        Pipeline([Deadline(10), AttemptTimeout(headers=5, content_gap=100)])
    Pipeline([Deadline(10), CircuitBreaker(sampling_duration=30), AttemptTimeout(headers=5, content_gap=9)])


@pytest.mark.parametrize("limit", [-1, 0, "a", None, True, math.nan])
@pytest.mark.parametrize("name", ["headers", "first_content", "content_gap", "whole_reply"])
def test_clocks_are_seconds(name: str, limit: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"{name}={limit!r}: allowed are seconds above 0"):
        Clocks(**{name: limit})
    assert getattr(Clocks(**{name: 3}), name) == 3


@pytest.mark.parametrize("options", [{"for_call": 5}, {"name": ""}, {"name": 3}])
def test_a_hook_can_be_called_and_a_name_is_one(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(ConfigurationError, match=f"{name}={options[name]!r}"):
        AttemptTimeout(headers=1, **options)


def broken(_call: Call) -> Any:
    raise KeyError("m")


@pytest.mark.parametrize("hook", [broken, lambda _: {"headers": 9}, lambda _: Clocks(headers=-1)])
async def test_a_hook_that_is_broken_breaks_no_call(hook: Any, caplog: pytest.LogCaptureFixture) -> None:
    clocks = AttemptTimeout(first_content=2, for_call=hook)
    upstream = Upstream(lambda: streamed(5.0, *END))
    began = anyio.current_time()
    assert (await send(resilient(upstream, ONCE, clocks))).status_code == 504
    assert anyio.current_time() - began == 2
    assert "for_call=" in caplog.text


def test_where_it_stands() -> None:
    with pytest.raises(ConfigurationError, match="circuit must stand before attempt_timeout"):
        Pipeline([AttemptTimeout(headers=5), CircuitBreaker()])
    assert "headers=5" in str(Pipeline([AttemptTimeout(headers=5)]).describe())


async def test_a_request_for_a_stream_that_says_so_nowhere() -> None:
    """Such a stream has the clocks of one, from when it is known to be one."""
    spy = Spy()
    upstream = Upstream(lambda: streamed(says("one"), math.inf), delay=4)
    clocks = AttemptTimeout(whole_reply=5, first_content=6, content_gap=2)
    asked = {key: value for key, value in ASK.items() if key != "stream"}
    began = anyio.current_time()
    url = "http://h.example/v1/something"  # where a model is known to be asked it would be no answer
    with pytest.raises(httpx2.ReadTimeout):
        await read(await send(resilient(upstream, ONCE, clocks, spy), asked, url=url))
    assert spy.ended[0].error_type == "content_gap_timeout"
    assert anyio.current_time() - began == pytest.approx(6)
