"""Streams that are hedged: who is read on, by whom, what becomes of the other, and how that looks in a trace."""

from __future__ import annotations

import math
from typing import Any

import anyio
import httpx2
import pytest

from resilient_llm import Bulkhead, Deadline, Hedge, Policy, Retry, Stream
from resilient_llm.httpx2 import ResilientTransport
from tests.policies.hedging import Attempts, InTurn
from tests.signals import Recording
from tests.streams.scripted import (
    DONE,
    OVERLOADED,
    ROLE,
    Spy,
    Upstream,
    data,
    read,
    says,
    send,
    streamed,
    usage,
)
from tests.support import cancel_at_every_await
from tests.telemetry.observed import telemetry_of

pytestmark = pytest.mark.anyio


def slow() -> httpx2.Response:
    """Begin at once and say nothing for a minute."""
    return streamed(ROLE, 60.0, says("slow", "stop"), DONE)


def quick() -> httpx2.Response:
    """Say something after half a second, and the rest two seconds later."""
    return streamed(ROLE, 0.5, says("quick "), 2.0, says("words", "stop"), usage(7, 2), DONE)


class Setting:
    """An upstream behind a hedge after 2 seconds and two targets with one slot each."""

    def __init__(self, *replies: Any, outer: tuple[Policy, ...] = (Retry(),), **options: Any) -> None:
        self.upstream = Upstream(*replies)
        self.calls = Spy()
        self.attempts = Attempts()
        self.slots = Bulkhead(max_concurrent=1, key="target")
        hedge = Hedge(delay=2.0, budget_ratio=1.0)
        policies = [self.calls, *outer, hedge, InTurn(), self.slots, self.attempts]
        self.transport = ResilientTransport(self.upstream, policies=policies, **options)

    def check_nothing_is_left(self) -> None:
        assert all(body.ended or body.closed is not None for body in self.upstream.bodies)
        assert (self.attempts.held, self.slots.in_use()) == (0, 0)
        assert all(call.finished for call in [*self.calls.calls, *self.attempts.made])


@pytest.mark.parametrize("outer", [(Retry(),), ()], ids=["with a retry", "without"])
async def test_the_first_content_decides(outer: tuple[Policy, ...]) -> None:
    setting = Setting(slow, quick, outer=outer)
    response = await send(setting.transport)
    assert setting.upstream.sent[1] - setting.upstream.sent[0] == pytest.approx(2.0)
    assert anyio.current_time() - setting.upstream.sent[1] == pytest.approx(0.5)
    loser, winner = setting.upstream.bodies
    assert loser.closed is not None  # before its caller has read anything
    assert setting.attempts.ends == ["cancelled", "open"]
    assert setting.attempts.held == setting.slots.in_use() == 1

    body = await read(response)
    assert body == ROLE + says("quick ") + says("words", "stop") + usage(7, 2) + DONE
    assert winner.ended
    assert setting.attempts.ends == ["cancelled", "success"]
    setting.check_nothing_is_left()
    (call,), (ended,) = setting.calls.calls, setting.calls.ended
    assert ended.ok
    assert ended.usage is not None
    assert (ended.usage.input_tokens, ended.usage.output_tokens) == (7, 2)
    assert call.hedges == 1


async def test_the_winner_may_be_read_by_another_task_whenever_it_likes() -> None:
    setting = Setting(slow, quick)
    responses: list[httpx2.Response] = []

    async def ask() -> None:
        responses.append(await send(setting.transport))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
    await anyio.sleep(100)
    with anyio.CancelScope():
        assert (await read(responses[0])).endswith(DONE)
    setting.check_nothing_is_left()


async def test_a_winner_that_breaks_afterwards_is_the_call_s_end() -> None:
    setting = Setting(slow, lambda: streamed(ROLE, says("quick "), 1.0, httpx2.ReadError("reset")))
    assert b"error" in await read(await send(setting.transport))
    assert setting.calls.ended[0].verdict.value == "failure"
    setting.check_nothing_is_left()


async def test_a_winner_that_is_closed_early_is_closed() -> None:
    setting = Setting(slow, quick)
    response = await send(setting.transport)
    await response.aclose()
    assert setting.attempts.ends == ["cancelled", "cancelled"]
    setting.check_nothing_is_left()


async def test_two_that_have_content_at_once_are_one_to_the_caller() -> None:
    setting = Setting(
        lambda: streamed(ROLE, 3.0, says("first"), 1.0, says("!", "stop"), DONE),
        lambda: streamed(ROLE, 1.0, says("second"), 1.0, says("!", "stop"), DONE),
    )
    body = await read(await send(setting.transport))
    assert (says("first") in body) != (says("second") in body)
    assert sorted(setting.attempts.ends) == ["cancelled", "success"]
    setting.check_nothing_is_left()


async def test_a_stream_that_begins_with_an_error_loses() -> None:
    setting = Setting(slow, lambda: streamed(ROLE, 1.0, OVERLOADED), slow)
    response = await send(setting.transport)
    assert says("slow", "stop") in await read(response)
    assert setting.attempts.ends == ["success", "overloaded"]
    setting.check_nothing_is_left()


async def test_a_stream_that_has_begun_is_not_late_however_long_it_is_held_back() -> None:
    setting = Setting(
        lambda: streamed(ROLE, 1.0, says("slowly "), 30.0, says("but surely", "stop"), DONE),
        quick,
        outer=(Stream(resume="buffer"), Retry()),
    )
    assert says("slowly ") in await read(await send(setting.transport))
    assert len(setting.upstream.sent) == 1
    setting.check_nothing_is_left()


async def test_a_loser_that_does_not_close_holds_its_caller_for_a_second_at_most() -> None:
    setting = Setting(lambda: streamed(ROLE, math.inf, closing=math.inf), quick)
    began = anyio.current_time()
    response = await send(setting.transport)
    assert anyio.current_time() - began == pytest.approx(2.5 + 1.0)
    await read(response)
    assert (setting.attempts.held, setting.slots.in_use()) == (0, 0)


@pytest.mark.parametrize("read_it", [True, False], ids=["read", "closed"])
@pytest.mark.parametrize(
    "replies",
    [
        (slow, quick),
        (lambda: streamed(ROLE, 2.5, says("first", "stop"), DONE), slow),
        (
            lambda: streamed(ROLE, 3.0, says("a", "stop"), DONE),
            lambda: streamed(ROLE, 1.0, says("b", "stop"), DONE),
        ),
        (lambda: streamed(ROLE, 2.5, OVERLOADED), quick),
        (slow, lambda: streamed(ROLE, 0.5, says("quick", "stop"), DONE, closing=0.1)),
        (lambda: streamed(ROLE, 60.0, closing=0.5), quick),
    ],
    ids=["second wins", "first wins", "both", "first fails", "slow to close", "loser slow to close"],
)
async def test_a_caller_that_leaves_at_any_await_leaves_nothing(replies: Any, read_it: bool) -> None:
    setting = Setting()

    async def scenario() -> None:
        setting.upstream.replies = [*replies, slow]
        response = await send(setting.transport)
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        try:
            if read_it:
                await read(response)
        finally:
            with anyio.CancelScope(shield=True):
                await response.stream.aclose()

    async def check() -> None:
        setting.check_nothing_is_left()
        await anyio.sleep(5)

    assert await cancel_at_every_await(scenario, check) >= 2


async def test_a_deadline_that_passes_while_the_loser_is_closed_is_the_call_s_end() -> None:
    setting = Setting(lambda: streamed(ROLE, 60.0, closing=0.5), quick, outer=(Deadline(2.75), Retry()))
    response = await send(setting.transport)
    assert response.status_code == 504
    assert setting.calls.ended[0].error_type == "deadline_exceeded"
    setting.check_nothing_is_left()


@pytest.mark.parametrize("after", [1.0, 2.0, 2.25, 2.5, 2.75, 3.0, 3.25])
@pytest.mark.parametrize("second", [0.5, 1.0, 60.0])
async def test_nor_at_any_time(after: float, second: float) -> None:
    setting = Setting(
        lambda: streamed(ROLE, 3.0, says("a"), 0.5, says("b", "stop"), DONE, closing=0.3),
        lambda: streamed(ROLE, second, says("a"), 0.5, says("b", "stop"), DONE, closing=0.3),
    )
    began = anyio.current_time()
    with anyio.move_on_after(after):
        response = await send(setting.transport)
        try:
            await read(response)
        finally:
            with anyio.CancelScope(shield=True):
                await response.aclose()
    assert anyio.current_time() - began <= after + 0.7
    setting.check_nothing_is_left()


# In a trace


async def test_both_attempts_are_below_the_call_and_the_loser_is_no_error() -> None:
    recording = Recording()
    setting = Setting(slow, quick, telemetry=telemetry_of(recording))
    await read(await send(setting.transport))
    spans = recording.spans
    call = spans.one("chat")
    first, second = sorted(spans.children(call), key=lambda span: span.start)
    assert first.start < second.start < first.end < second.end <= call.end
    assert [span.attributes["resilient_llm.attempt.reason"] for span in (first, second)] == [
        "initial",
        "hedge",
    ]
    assert [span.attributes["resilient_llm.attempt.outcome"] for span in (first, second)] == [
        "cancelled",
        "success",
    ]
    assert [span.attributes["resilient_llm.attempt.target"] for span in (first, second)] == ["one", "two"]
    assert "ERROR" not in str(first.status)
    assert call.attributes["resilient_llm.hedges"] == 1
    assert call.attributes["resilient_llm.attempts"] == 2
    assert call.attributes["resilient_llm.outcome"] == "success"
    spans.assert_accounted(call)
    assert recording.open == 0


async def test_what_a_reply_says_of_itself_is_the_winner_s() -> None:
    recording = Recording()

    def named(name: str) -> bytes:
        return data(
            {"id": name, "choices": [{"index": 0, "delta": {"content": "hi"}, "finish_reason": "stop"}]}
        )

    setting = Setting(
        lambda: streamed(3.0, named("first"), 1.0, DONE),
        lambda: streamed(1.0, named("second"), 1.0, DONE),
        telemetry=telemetry_of(recording),
    )
    body = await read(await send(setting.transport))
    said = "first" if named("first") in body else "second"
    assert recording.spans.one("chat").attributes["gen_ai.response.id"] == said
    assert recording.open == 0


async def test_a_dry_budget_is_an_event_of_the_call() -> None:
    recording = Recording()
    setting = Setting(
        slow, outer=(Retry(budget_ratio=0, budget_min_per_second=0),), telemetry=telemetry_of(recording)
    )
    await read(await send(setting.transport))
    assert len(setting.upstream.sent) == 1
    call = recording.spans.one("chat")
    (event,) = [event for event in call.events if event.name == "resilient_llm.hedge_suppressed"]
    assert event.attributes["resilient_llm.reason"] == "retry_budget"
