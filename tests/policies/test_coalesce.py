"""Calls that ask the same at the same time: who makes the attempt, who waits, and what each of them gets."""

from __future__ import annotations

import gc
import json
import math
from collections.abc import AsyncIterator, Callable
from typing import Any

import anyio
import httpx2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient_llm import (
    Backoff,
    Bulkhead,
    Call,
    ConfigurationError,
    Deadline,
    Pipeline,
    Reply,
    Retry,
    Stream,
    Usage,
    ambient,
)
from resilient_llm.errors import CircuitOpenError
from resilient_llm.policies.coalesce import Coalesce
from resilient_llm.policies.idempotency import Idempotency
from resilient_llm.testing import run_virtual
from tests.policies.caching import (
    ASK,
    STREAM,
    STREAMED,
    WHOLE,
    Setting,
    answer,
    code,
    problem,
    served,
    slow_stream,
)
from tests.signals import Recording
from tests.streams.scripted import OVERLOADED, ROLE, Body, says, send, streamed
from tests.support import cancel_at_every_await
from tests.telemetry.observed import telemetry_of

pytestmark = pytest.mark.anyio

QUICK = Backoff(initial=0.1, maximum=0.1)


async def test_calls_at_the_same_time_make_one_attempt() -> None:
    setting = Setting(Coalesce(), lambda: answer(headers={"x-request-id": "r1", "set-cookie": "a=b"}))
    answers = await setting.together(5)
    assert setting.sent == 1
    assert sorted(str(served(response)) for response, _ in answers) == ["None"] + ["coalesced"] * 4
    assert len({body for _, body in answers}) == 1
    for response, body in answers:
        if served(response):
            assert response.headers["x-request-id"] == "r1"
            assert response.headers["age"] == "0"
            assert int(response.headers["content-length"]) == len(body)
            assert "set-cookie" not in response.headers
    setting.check_nothing_is_left()

    await setting.ask()  # nothing is kept
    assert setting.sent == 2


async def test_what_differs_is_asked_for_apart() -> None:
    setting = Setting(Coalesce())
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(setting.ask, ASK)
        tasks.start_soon(setting.ask, STREAMED)
        tasks.start_soon(setting.ask, {**ASK, "seed": 1})
        tasks.start_soon(setting.ask, {**ASK, "temperature": 1})
        tasks.start_soon(setting.ask, {**ASK, "temperature": 1})
    assert setting.sent == 5


@pytest.mark.parametrize(("share", "sent"), [(False, 3), (True, 1)])
async def test_tenants_and_credentials_are_kept_apart_unless_shared(share: bool, sent: int) -> None:
    setting = Setting(Coalesce(share=share))

    async def ask(tenant: str, key: str) -> None:
        with ambient(tenant=tenant):
            await setting.ask(headers={"authorization": key})

    async with anyio.create_task_group() as tasks:
        for tenant, key in [("a", "1"), ("a", "1"), ("b", "1"), ("a", "2")]:
            tasks.start_soon(ask, tenant, key)
    assert setting.sent == sent


@pytest.mark.parametrize("wish", ["no-store", "no-cache", "max-age=0, No-Cache"])
async def test_a_caller_can_ask_for_an_answer_of_its_own(wish: str) -> None:
    setting = Setting(Coalesce())
    await setting.together(2, headers={"cache-control": wish})
    assert setting.sent == 2


async def test_when_says_which_calls_may(caplog: pytest.LogCaptureFixture) -> None:
    def breaks(call: Call) -> bool:
        raise RuntimeError("mine")

    for when, sent in ((lambda call: call.model == "m", 1), (lambda _call: False, 2), (breaks, 2)):
        setting = Setting(Coalesce(when=when))
        await setting.together(2, {**ASK, "temperature": 1})
        assert setting.sent == sent
    assert "failed; the call goes on by itself" in caplog.text


async def test_a_follower_that_leaves_is_noticed_by_nobody() -> None:
    setting = Setting(Coalesce(), slow_stream)
    got: list[bytes] = []

    async def ask(limit: float) -> None:
        with anyio.move_on_after(limit):
            got.append((await setting.ask(STREAMED))[1])

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask, 100.0)
        await anyio.sleep(0.1)
        for limit in (0.5, 1.5, 100.0):
            tasks.start_soon(ask, limit)
    assert got == [WHOLE, WHOLE]
    assert setting.sent == 1
    setting.check_nothing_is_left()


@pytest.mark.parametrize("leaves", [0.5, 2.5], ids=["before its reply", "in its stream"])
async def test_a_leader_that_leaves_hands_over_to_one_of_those_who_wait(leaves: float) -> None:
    setting = Setting(Coalesce(), slow_stream)
    ends: list[tuple[float, bytes]] = []

    async def lead() -> None:
        with anyio.move_on_after(leaves):
            await setting.ask(STREAMED)

    async def follow() -> None:
        body = (await setting.ask(STREAMED))[1]
        ends.append((anyio.current_time() - began, body))

    began = anyio.current_time()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lead)
        await anyio.sleep(0.1)
        for _ in range(3):
            tasks.start_soon(follow)
    assert setting.sent == 2  # the second made by one of the three
    assert [body for _, body in ends] == [WHOLE] * 3
    assert [at for at, _ in ends] == [pytest.approx(leaves + 1 + 4)] * 3
    setting.check_nothing_is_left()


async def test_a_deadline_of_the_leaders_is_its_own() -> None:
    setting = Setting(Coalesce(), delay=3.0, outer=(Deadline(100),))
    statuses: list[int] = []

    async def ask(limit: float) -> None:
        with ambient(timeout=limit):
            statuses.append((await setting.ask())[0].status_code)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask, 1.0)
        await anyio.sleep(0.1)
        tasks.start_soon(ask, 50.0)
        tasks.start_soon(ask, 2.0)
    assert sorted(statuses) == [200, 504, 504]
    assert setting.sent in (2, 3)  # either of the two may be the next to lead
    setting.check_nothing_is_left()


async def test_nobody_waits_longer_than_told() -> None:
    setting = Setting(Coalesce(max_wait=2.0), answer, delay=5.0)
    began = anyio.current_time()
    ends: list[float] = []

    async def ask() -> None:
        await setting.ask()
        ends.append(anyio.current_time() - began)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        await anyio.sleep(1)
        tasks.start_soon(ask)
    assert ends == [pytest.approx(5), pytest.approx(8)]  # 1 + 2 + 5
    assert setting.sent == 2


async def test_nobody_waits_longer_than_told_for_several_one_after_another() -> None:
    setting = Setting(Coalesce(max_wait=2.0), answer, delay=5.0)
    began = anyio.current_time()
    ends: list[float] = []

    async def lead() -> None:
        with anyio.move_on_after(1.0):
            await setting.ask()

    async def ask() -> None:
        await setting.ask()
        ends.append(anyio.current_time() - began)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lead)
        await anyio.sleep(0.5)
        tasks.start_soon(ask)
        tasks.start_soon(ask)
    assert ends == [
        pytest.approx(6),
        pytest.approx(7.5),
    ]  # one leads from 1 on, the other has waited from 0.5 to 2.5


async def test_a_leader_that_does_not_read_on_holds_nobody_for_good() -> None:
    setting = Setting(Coalesce(max_wait=10.0), lambda: streamed(*STREAM))
    leader = await send(setting.transport, STREAMED)
    began = anyio.current_time()
    _, body = await setting.ask(STREAMED)
    assert body == WHOLE
    assert anyio.current_time() - began == pytest.approx(11)
    await leader.aclose()
    setting.check_nothing_is_left()


async def test_a_leader_that_is_dropped_lets_the_others_go_on() -> None:
    setting = Setting(Coalesce(max_wait=1e6), lambda: streamed(*STREAM))
    leader: Any = await send(setting.transport, STREAMED)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(setting.ask, STREAMED)
        await anyio.sleep(1)
        del leader
        setting.calls.calls.clear()
        gc.collect()
    assert setting.sent == 2
    assert len(setting.policy._replies) == 0


async def test_a_stream_is_given_whole_to_who_waits() -> None:
    setting = Setting(Coalesce(), slow_stream)
    answers = await setting.together(3, STREAMED)
    assert [body for _, body in answers] == [WHOLE] * 3
    assert all(r.headers["content-type"] == "text/event-stream" for r, _ in answers)
    assert setting.sent == 1
    setting.check_nothing_is_left()


@pytest.mark.parametrize("last", [OVERLOADED, httpx2.ReadError("cut")], ids=["an error", "a cut"])
async def test_a_stream_that_breaks_is_not_given_to_others(last: Any) -> None:
    setting = Setting(Coalesce(), lambda: streamed(ROLE, says("Hel"), 1.0, last), lambda: streamed(*STREAM))
    bodies = [body for _, body in await setting.together(3, STREAMED)]
    assert sorted(bodies, key=len)[1:] == [WHOLE] * 2
    assert b'"error"' in min(bodies, key=len)
    assert setting.sent == 2
    setting.check_nothing_is_left()


async def test_a_stream_that_has_broken_holds_nobody_although_nobody_closes_it() -> None:
    setting = Setting(
        Coalesce(max_wait=1e6), lambda: streamed(ROLE, says("Hel"), OVERLOADED), lambda: streamed(*STREAM)
    )
    leader = await send(setting.transport, STREAMED)
    assert isinstance(leader.stream, httpx2.AsyncByteStream)
    began, stream, seen = anyio.current_time(), leader.stream.__aiter__(), b""
    while b'"error"' not in seen:
        seen += await stream.__anext__()
    assert (await setting.ask(STREAMED))[1] == WHOLE
    assert anyio.current_time() - began == pytest.approx(1.0)  # of its own attempt
    await leader.stream.aclose()
    setting.check_nothing_is_left()


async def test_a_stream_that_its_caller_has_had_enough_of_is_not_whole() -> None:
    """After the reason to finish the call is a success, and the rest of the stream is missing."""
    setting = Setting(Coalesce(), lambda: streamed(*STREAM[:3], 1.0, *STREAM[3:]))
    follower: list[bytes] = []

    async def follow() -> None:
        follower.append((await setting.ask(STREAMED))[1])

    leader = await send(setting.transport, STREAMED)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(follow)
        assert isinstance(leader.stream, httpx2.AsyncByteStream)
        stream = leader.stream.__aiter__()
        seen = b""
        while b'"stop"' not in seen:
            seen += await stream.__anext__()
        await leader.stream.aclose()
        assert setting.calls.ended[0].ok
    assert follower == [WHOLE]
    assert setting.sent == 2


async def test_a_failure_is_that_of_all() -> None:
    setting = Setting(Coalesce(), lambda: problem(400, "bad_thing"))
    answers = await setting.together(4)
    assert setting.sent == 1
    assert [(r.status_code, code(body)) for r, body in answers] == [(400, "bad_thing")] * 4
    assert [outcome.status for outcome in setting.calls.ended] == [400] * 4
    assert [r.headers.get("x-should-retry") for r, _ in answers] == [None] * 4
    setting.check_nothing_is_left()


async def test_a_failure_after_retries_is_that_of_all_and_says_not_to_retry() -> None:
    setting = Setting(
        Coalesce(),
        lambda: problem(503, headers={"retry-after": "7"}),
        inner=(Retry(max_attempts=2, max_retry_after=5.0, backoff=QUICK),),
    )
    answers = await setting.together(3)
    assert setting.sent == 1
    for response, _ in answers:
        assert response.status_code == 503
        assert response.headers["x-should-retry"] == "false"
        assert response.headers["retry-after"] == "7"
    others = [outcome for outcome in setting.calls.ended if outcome.usage is not None]
    assert [outcome.usage for outcome in others] == [Usage(input_tokens=0, output_tokens=0)] * 2
    assert {(outcome.status, outcome.retryable, outcome.ambiguous) for outcome in others} == {
        (503, True, False)
    }
    assert [call.exhausted for call in setting.calls.calls] == [True] * 3
    setting.check_nothing_is_left()


async def test_a_failure_without_a_reply() -> None:
    setting = Setting(
        Coalesce(), httpx2.ConnectError("down"), inner=(Retry(max_attempts=2, backoff=QUICK),), delay=0.1
    )
    answers = await setting.together(3)
    assert setting.sent == 2
    assert [r.status_code for r, _ in answers] == [502] * 3
    setting.check_nothing_is_left()


async def test_without_retries_each_has_its_own_exception() -> None:
    setting = Setting(Coalesce(), httpx2.ConnectError("down"))
    raised = 0

    async def ask() -> None:
        nonlocal raised
        with pytest.raises(httpx2.ConnectError):
            await setting.ask()
        raised += 1

    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(ask)
    assert (raised, setting.sent) == (3, 3)
    setting.check_nothing_is_left()


async def test_a_failure_of_one_tenant_is_not_told_to_another() -> None:
    setting = Setting(Coalesce(share=True), lambda: problem(401, "invalid_api_key"), answer)
    answers = await setting.together(3)
    assert sorted(r.status_code for r, _ in answers) == [200, 200, 401]
    assert setting.sent == 3


async def test_a_refusal_is_that_of_all() -> None:
    class Refuse:
        refused = 0

        async def __call__(self, call: Call, call_next: Any) -> Any:
            self.refused += 1
            await anyio.sleep(1)
            raise CircuitOpenError("open", retry_after=3.0, name="mine")

    refuse = Refuse()
    setting = Setting(Coalesce(), inner=(refuse,), on_rejection="raise")
    errors: list[CircuitOpenError] = []

    async def ask() -> None:
        with pytest.raises(CircuitOpenError, match="open") as raised:
            await setting.ask()
        errors.append(raised.value)

    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(ask)
    assert (refuse.refused, setting.sent) == (1, 0)
    assert len({id(error) for error in errors}) == 3
    assert {(error.retry_after, error.name, error.status) for error in errors} == {(3.0, "mine", 503)}
    setting.check_nothing_is_left()


async def test_a_bug_is_each_callers_own() -> None:
    class Broken:
        async def __call__(self, call: Call, call_next: Any) -> Any:
            await anyio.sleep(1)
            raise RuntimeError("bug")

    setting = Setting(Coalesce(), inner=(Broken(),))
    bugs = 0

    async def ask() -> None:
        nonlocal bugs
        with pytest.raises(RuntimeError, match="bug"):
            await setting.ask()
        bugs += 1

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        tasks.start_soon(ask)
    assert bugs == 2
    setting.check_nothing_is_left()


@pytest.mark.parametrize("body", [ASK, STREAMED], ids=["whole", "streamed"])
async def test_what_is_too_large_is_each_callers_own_and_nobody_waits_in_line(body: Any) -> None:
    replies = (lambda: streamed(*STREAM, headers=None)) if body is STREAMED else answer
    setting = Setting(Coalesce(max_body=100), replies)
    began = anyio.current_time()
    answers = await setting.together(5, body)
    assert setting.sent == 5
    assert anyio.current_time() - began == pytest.approx(2)  # the first, then all others at once
    assert len({body for _, body in answers}) == 1
    setting.check_nothing_is_left()


async def test_a_redirect_is_no_answer() -> None:
    setting = Setting(Coalesce(), lambda: httpx2.Response(302, headers={"location": "/"}))
    answers = await setting.together(3)
    assert ([r.status_code for r, _ in answers], setting.sent) == ([302] * 3, 3)
    setting.check_nothing_is_left()


async def test_a_body_that_cannot_be_read_again_is_each_callers_own() -> None:
    class Once(httpx2.AsyncByteStream):
        def __init__(self) -> None:
            self.read = False

        async def __aiter__(self) -> AsyncIterator[bytes]:
            if self.read:
                raise httpx2.StreamConsumed
            self.read = True
            yield answer().content

        async def aclose(self) -> None:
            pass

    class Own:
        async def __call__(self, call: Call, call_next: Any) -> Reply:
            reply: Reply = await call_next(call)
            reply.stream = once = Once()
            assert [chunk async for chunk in once]
            return reply

    setting = Setting(Coalesce(), inner=(Own(),))
    answers = await setting.together(2)
    assert ([r.status_code for r, _ in answers], setting.sent) == ([200, 200], 2)
    setting.check_nothing_is_left()


async def test_an_error_that_is_cut_off_is_told_by_its_status() -> None:
    setting = Setting(Coalesce(), lambda: httpx2.Response(500, stream=Body(b"{", httpx2.ReadError("cut"))))
    answers = await setting.together(3)
    assert ([r.status_code for r, _ in answers], setting.sent) == ([500] * 3, 1)


async def test_an_upload_is_not_compared() -> None:
    async def upload() -> AsyncIterator[bytes]:
        yield json.dumps(ASK).encode()

    setting = Setting(Coalesce(when=lambda _call: True))
    async with httpx2.AsyncClient(transport=setting.transport) as client, anyio.create_task_group() as tasks:
        for _ in range(2):
            tasks.start_soon(lambda: client.post("http://h.example/v1/chat/completions", content=upload()))
    assert setting.sent == 2


async def test_a_stream_that_can_be_gone_on_with_is_each_callers_own() -> None:
    """The door joins its halves, further out than any policy sees."""
    cut: list[Any] = [ROLE, says("Hello "), httpx2.ReadError("cut")]
    setting = Setting(
        Coalesce(),
        lambda: streamed(*cut),
        lambda: streamed(*STREAM),
        inner=(Stream(resume="continue", prefill={"m"}), Retry(backoff=QUICK)),
    )
    _, body = await setting.ask(STREAMED)
    assert b"Hello" in body
    assert b"[DONE]" in body
    assert b"error" not in body
    assert setting.sent == 2
    setting.check_nothing_is_left()


async def test_what_is_outside_waits_and_pays_for_itself() -> None:
    slots = Bulkhead(max_concurrent=10)
    setting = Setting(Coalesce(), slow_stream, outer=(slots,))
    await setting.together(4, STREAMED)
    assert slots.in_use() == 0
    assert [outcome.ok for outcome in setting.calls.ended] == [True] * 4
    used = [outcome.usage.total_tokens for outcome in setting.calls.ended if outcome.usage is not None]
    assert sorted(map(str, used)) == ["0", "0", "0", "5"]
    assert [call.cost for call in setting.calls.calls] == [0.0] * 4


@pytest.mark.parametrize("leads", [True, False], ids=["the leader", "a follower"])
@pytest.mark.parametrize("body", [ASK, STREAMED], ids=["whole", "streamed"])
async def test_cancelled_at_every_await(body: Any, leads: bool) -> None:
    """The other one has its reply, and nothing is left."""
    setting = Setting(Coalesce(), slow_stream if body is STREAMED else answer)
    bodies: list[bytes] = []

    async def other() -> None:
        with anyio.CancelScope(shield=True):
            if leads:
                await anyio.sleep(0.01)
            bodies.append((await setting.ask(body))[1])

    async def scenario() -> None:
        bodies.clear()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(other)
            if not leads:
                await anyio.sleep(0.01)
            await setting.ask(body)

    async def check() -> None:
        (got,) = bodies
        assert got == WHOLE if body is STREAMED else b"Hello" in got
        setting.check_nothing_is_left()

    assert await cancel_at_every_await(scenario, check) >= 2


async def test_the_wait_is_in_the_trace() -> None:
    recording = Recording()
    setting = Setting(Coalesce(), telemetry=telemetry_of(recording))
    await setting.together(2)
    spans = recording.spans
    wait = spans.one("wait coalesce")
    assert wait.attributes["resilient_llm.wait.outcome"] == "acquired"
    assert max(call.wait_time for call in setting.calls.calls) == pytest.approx(1.0)
    for span in spans.named("chat m"):
        spans.assert_accounted(span)


def test_options() -> None:
    for options, message in [
        ({"when": "always"}, "when='always': allowed are functions"),
        ({"share": 1}, "share=1: allowed are True and False"),
        ({"max_wait": -1.0}, "max_wait=-1.0"),
        ({"max_body": -1}, "max_body=-1"),
        ({"ignore_fields": "user"}, "ignore_fields='user': allowed are lists or sets"),
        ({"ignore_headers": [b"x"]}, "ignore_headers="),
        ({"name": ""}, "name=''"),
    ]:
        with pytest.raises(ConfigurationError, match=message):
            Coalesce(**options)  # type: ignore[arg-type]
    assert Coalesce(max_wait=math.inf, ignore_fields=()).max_wait == math.inf


def test_functions_have_no_requests() -> None:
    with pytest.raises(ConfigurationError, match="put it on the transport"):
        Pipeline([Coalesce()])


# Whoever comes and goes

COMERS = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.5, 1.0, 2.5, 4.5, 7.0]), st.sampled_from([0.25, 1.5, 3.0, 100.0, 100.0])
    ),
    min_size=1,
    max_size=8,
)
FATES = st.lists(
    st.sampled_from(["whole", "streamed", "broken", "400", "503", "too large", "no reply"]), max_size=6
)


def fate(name: str) -> Callable[[], httpx2.Response] | Exception:
    """Give a reply that is the same, or none, each time."""
    replies: dict[str, Callable[[], httpx2.Response] | Exception] = {
        "whole": slow_stream,
        "streamed": lambda: streamed(*STREAM),
        "broken": lambda: streamed(ROLE, says("Hel"), 1.0, httpx2.ReadError("cut")),
        "400": lambda: problem(400),
        "503": lambda: problem(503),
        "too large": lambda: streamed(*STREAM[:-1], b": " + b"x" * 5000 + b"\n\n", STREAM[-1]),
        "no reply": httpx2.ConnectError("down"),
    }
    return replies[name]


@settings(max_examples=60)
@given(comers=COMERS, fates=FATES, coalesces=st.booleans())
def test_whoever_comes_and_goes_has_an_answer_of_those_that_were_given(
    comers: list[tuple[float, float]], fates: list[str], coalesces: bool
) -> None:
    """No one waits for ever, no one has half of what another has, and nothing is left."""

    async def run() -> None:
        policy = Coalesce(max_body=4000) if coalesces else Idempotency(max_body=4000)
        retry = Retry(max_attempts=2, backoff=QUICK)
        setting = Setting(policy, *map(fate, fates), fate("streamed"), inner=(retry,))
        done: list[tuple[int, bytes, bool]] = []

        async def come(after: float, stays: float) -> None:
            await anyio.sleep(after)
            with anyio.move_on_after(stays):
                response, body = await setting.ask(STREAMED, headers={"idempotency-key": "k"})
                done.append((response.status_code, body, served(response) is not None))

        with anyio.fail_after(200):
            async with anyio.create_task_group() as tasks:
                for after, stays in comers:
                    tasks.start_soon(come, after, stays)
        assert len(done) >= sum(stays == 100.0 for _, stays in comers)
        for status, body, shared in done:
            if status == 200 and shared:
                assert body == WHOLE
            elif status == 200:
                assert body.endswith(STREAM[-1]) or b'"error"' in body
            else:
                assert status in (400, 502, 503)
        setting.check_nothing_is_left()

    for backend in ("asyncio", "trio"):
        run_virtual(run, backend=backend)
