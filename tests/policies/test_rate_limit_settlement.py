"""What a finished call keeps of what it reserved, by how it ended; the table in docs/rate-limit.md."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

import anyio
import httpx
import pytest

from resilient_llm import (
    AttemptError,
    Bulkhead,
    BulkheadFullError,
    Call,
    CallNext,
    CircuitBreaker,
    CircuitOpenError,
    Outcome,
    RateLimit,
    Reply,
    Retry,
    Scope,
    Usage,
    Verdict,
)
from resilient_llm.httpx import ResilientTransport
from resilient_llm.outcome import CANCELLED
from resilient_llm.testing import FakeModel, FakeProvider
from tests.policies.rate_limiting import Answer, Answers, by_body, together
from tests.support import BAD_REQUEST, FAILURE, THROTTLED, Door

pytestmark = pytest.mark.anyio

AMBIGUOUS = replace(FAILURE, ambiguous=True)
NOT_CONNECTED = Outcome(verdict=Verdict.FAILURE, error_type="connect_error", retryable=True)
LOST = Outcome(verdict=Verdict.FAILURE, error_type="read_error", retryable=True, ambiguous=True)
OUT_OF_FILES = Outcome(verdict=Verdict.NEUTRAL, scope=Scope.LOCAL, error_type="too_many_open_files")
NO_CONNECTION_FREE = Outcome(verdict=Verdict.NEUTRAL, scope=Scope.LOCAL, error_type="pool_timeout")


def limited(**options: object) -> RateLimit:
    """Limit so slowly that what a call leaves behind shows."""
    return RateLimit(
        requests_per_minute=1e-3,
        tokens_per_minute=1e-3,
        window=6e7,  # 1,000 of each
        estimate=by_body,
        **options,  # type: ignore[arg-type]
    )


def left(limit: RateLimit, door: Door) -> tuple[int, int]:
    requests, tokens = limit.levels(door.calls[-1])
    return round(requests.remaining), round(tokens.remaining)


@pytest.mark.parametrize(
    ("answer", "requests", "tokens"),
    [
        pytest.param(Answer(tokens=150), 1, 150, id="less was used"),
        pytest.param(Answer(tokens=700), 1, 700, id="more was used"),
        pytest.param(Answer(tokens=0), 1, 0, id="nothing was used"),
        pytest.param(Answer(), 1, 400, id="usage unknown"),
        pytest.param(Answer(outcome=THROTTLED), 1, 0, id="throttled"),
        pytest.param(Answer(outcome=BAD_REQUEST), 1, 0, id="refused by the provider"),
        pytest.param(Answer(outcome=FAILURE), 1, 0, id="failed, nothing done"),
        pytest.param(Answer(outcome=AMBIGUOUS), 1, 400, id="failed, perhaps done"),
        pytest.param(Answer(outcome=AMBIGUOUS, tokens=90), 1, 90, id="failed, and said what it used"),
        pytest.param(Answer(outcome=LOST), 1, 400, id="connection lost"),
        pytest.param(Answer(outcome=NOT_CONNECTED), 0, 0, id="never connected"),
        pytest.param(Answer(outcome=NO_CONNECTION_FREE), 0, 0, id="no connection free"),
        pytest.param(Answer(outcome=OUT_OF_FILES), 0, 0, id="no descriptor free"),
    ],
)
@pytest.mark.parametrize("marks_sent", [True, False], ids=["door says when it sends", "door does not say"])
async def test_what_an_attempt_keeps(answer: Answer, requests: int, tokens: int, marks_sent: bool) -> None:
    limit = limited()
    door = Door(limit, provider=Answers(answer, marks_sent=marks_sent))
    try:
        await door(body=b"400")
    except AttemptError:
        assert not answer.outcome.ok
    assert left(limit, door) == (1_000 - requests, 1_000 - tokens)
    assert limit._quotas._all[0]._quotas[None].outstanding == 0


PROMPT = json.dumps({"prompt": "x" * 400, "max_tokens": 300}).encode()  # 100 tokens, and 300 for the answer


@pytest.mark.parametrize(
    ("usage", "tokens"),
    [
        pytest.param(Usage(input_tokens=110, output_tokens=20), 130, id="both are known"),
        pytest.param(Usage(output_tokens=20), 400, id="the prompt is not"),
        pytest.param(Usage(output_tokens=20, estimated=True), 400, id="a stream without usage"),
        pytest.param(Usage(output_tokens=500, estimated=True), 600, id="the same, longer than was allowed"),
        pytest.param(Usage(input_tokens=110, output_tokens=2, estimated=True), 400, id="given up early"),
        pytest.param(Usage(input_tokens=110, output_tokens=350, estimated=True), 460, id="given up late"),
        pytest.param(Usage(input_tokens=110), 400, id="the answer is not"),
        pytest.param(Usage(input_tokens=700), 700, id="the prompt alone is more"),
        pytest.param(Usage(cached_tokens=50), 400, id="neither is"),
        pytest.param(Usage(input_tokens=-10, output_tokens=20), 400, id="negative"),
        pytest.param(Usage(input_tokens=10**400, output_tokens=0), 400, id="no float holds it"),
        pytest.param(Usage(input_tokens=10**30, output_tokens=0), 400, id="absurd"),
        pytest.param(Usage(input_tokens=float("nan"), output_tokens=0), 400, id="not a number"),  # type: ignore[arg-type]
        pytest.param(Usage(input_tokens="10", output_tokens=0), 400, id="a string"),  # type: ignore[arg-type]
    ],
)
async def test_what_usage_leaves_unknown_is_not_zero(usage: Usage, tokens: int) -> None:
    limit = RateLimit(tokens_per_minute=1e-3, window=6e7)
    door = Door(limit, provider=Answers(Answer(usage=usage)))
    await door(body=PROMPT)
    assert limit.levels(door.calls[0])[0].remaining == pytest.approx(1_000 - tokens)
    assert limit._quotas._all[0]._quotas[None].outstanding == 0


async def test_an_operation_without_output_settles_by_what_it_read() -> None:
    limit = RateLimit(key="model", tokens_per_minute=10_000, learn=False)
    transport = ResilientTransport(FakeProvider().transport(), policies=[limit])
    async with httpx.AsyncClient(transport=transport, base_url="http://provider/v1") as client:
        response = await client.post("/embeddings", json={"model": "m", "input": "word " * 100})
    used = response.json()["usage"]["prompt_tokens"]
    (remaining,) = [remaining for _, _, remaining in limit._quotas.lowest(anyio.current_time())]
    assert used
    assert remaining == pytest.approx(10_000 - used, abs=0.5)


@pytest.mark.parametrize("usage_is_asked_for", [True, False])
async def test_a_stream_without_usage_counts_its_prompt(usage_is_asked_for: bool) -> None:
    provider = FakeProvider(FakeModel(reply="word " * 20))
    limit = RateLimit(key="model", tokens_per_minute=10_000, max_wait=0, learn=False)
    body: dict[str, object] = {
        "model": "m",
        "stream": True,
        "max_tokens": 40,
        "messages": [{"role": "user", "content": "word " * 800}],
    }
    if usage_is_asked_for:
        body["stream_options"] = {"include_usage": True}
    transport = ResilientTransport(provider.transport(), policies=[limit])
    async with httpx.AsyncClient(transport=transport, base_url="http://provider/v1") as client:
        statuses = [(await client.post("/chat/completions", json=body)).status_code for _ in range(20)]
    # Each reads 1,000 tokens, and some more for how it is written.
    assert statuses.count(200) == 9


async def test_more_than_was_estimated_may_leave_a_debt_that_is_bounded() -> None:
    limit = RateLimit(tokens_per_minute=60, estimate=by_body, max_wait=1_000)
    provider = Answers(Answer(tokens=100), Answer(tokens=1_000_000))
    door = Door(limit, provider=provider)
    await door(body=b"50")
    assert limit.levels(door.calls[0])[0].remaining == -40
    await door(body=b"20")
    assert provider.times == [0, 60]
    assert limit.levels(door.calls[0])[0].remaining == -60


async def test_a_call_cancelled_while_it_was_answered_keeps_its_charge() -> None:
    for marks_sent in (True, False):
        limit = limited()
        door = Door(limit, provider=Answers(duration=10, marks_sent=marks_sent))
        with anyio.move_on_after(1):
            await door(body=b"400")
        assert left(limit, door) == (999, 600)


async def test_a_call_refused_below_gives_everything_back() -> None:
    limit = limited()
    door = Door(limit, CircuitBreaker(consecutive_failures=1), provider=Answers(Answer(outcome=AMBIGUOUS)))
    with pytest.raises(AttemptError):
        await door(body=b"400")
    assert left(limit, door) == (999, 600)
    with pytest.raises(CircuitOpenError):
        await door(body=b"400")
    assert left(limit, door) == (999, 600)


async def test_a_call_refused_below_a_retry_after_it_was_sent_keeps_its_charge() -> None:
    limit = limited()
    retry, breaker = Retry(), CircuitBreaker(consecutive_failures=1)
    door = Door(limit, retry, breaker, provider=Answers(Answer(outcome=AMBIGUOUS), marks_sent=True))
    with pytest.raises(AttemptError):
        await door(body=b"400")
    assert left(limit, door) == (999, 600)


async def test_a_call_cancelled_in_a_queue_of_calls_below_gives_everything_back() -> None:
    limit = limited()
    door = Door(limit, Bulkhead(max_concurrent=1, key="model"), provider=Answers(duration=10))

    async def impatient() -> None:
        with anyio.move_on_after(1):
            await door(body=b"400")

    await together([partial(door, body=b"100"), impatient])
    assert left(limit, door) == (999, 900)


@pytest.mark.parametrize(
    ("says", "kept"), [(False, (0, 0)), (None, (1, 300))], ids=["door says", "does not say"]
)
async def test_a_call_cancelled_in_a_queue_of_attempts_below_gives_back_what_surely_was_not_sent(
    says: bool | None, kept: tuple[int, int]
) -> None:
    async def begin(call: Call, call_next: CallNext) -> Reply:
        call.sent = says
        return await call_next(call)

    limit = limited()
    provider = Answers(duration=10, marks_sent=says is not None)
    door = Door(begin, limit, Retry(), Bulkhead(max_concurrent=1, key="model"), provider=provider)

    async def impatient() -> None:
        with anyio.move_on_after(1):
            await door(body=b"300")

    await together([partial(door, body=b"100"), impatient])
    assert left(limit, door) == (999 - kept[0], 900 - kept[1])


async def test_the_last_of_several_attempts_does_not_speak_for_those_before() -> None:
    limit = limited()
    provider = Answers(Answer(outcome=AMBIGUOUS), Answer(outcome=NOT_CONNECTED), Answer(outcome=THROTTLED))
    door = Door(limit, Retry(max_attempts=3), provider=provider)
    with pytest.raises(AttemptError):
        await door(body=b"400")
    assert left(limit, door) == (999, 600)


async def test_a_refusal_by_a_full_bulkhead_frees_what_it_held_for_the_next() -> None:
    limit = RateLimit(requests_per_minute=60, window=2, key=None, max_wait=0)
    provider = Answers(duration=5)
    door = Door(limit, Bulkhead(max_concurrent=1, max_queued=0, key="model"), provider=provider)
    calls = [partial(door, model=model) for model in ("x", "x", "x", "y")]
    results = await together(calls)
    assert [isinstance(result, BulkheadFullError) for result in results] == [False, True, True, False]


async def test_an_inbound_request_that_ran_keeps_its_charge_however_it_ended() -> None:
    for outcome in (CANCELLED, Outcome(verdict=Verdict.FAILURE, error_type="no_response")):
        limit = RateLimit(requests_per_minute=1e-3, window=6e7)
        door = Door(limit, provider=Answers())
        await door()
        call = door.calls[0]
        call.inbound, call.outcome = True, None
        reservation = limit._reserve(call, anyio.current_time())
        reservation.take(anyio.current_time())
        before = limit.levels(call)[0].remaining
        limit._finish(call, reservation, outcome)
        assert limit.levels(call)[0].remaining == pytest.approx(before)
