"""A refusal or a failure that an answer tells of itself reaches the caller as it is, status and all.

SDKs have a place for it there, and would lose it in an error: `prompt_feedback`, a response's `error`.
"""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest

from resilient_llm import Backoff, Retry, Stream
from resilient_llm.outcome import Scope, Verdict
from tests.streams.scripted import DONE, ROLE, Spy, Upstream, read, resilient, says, send, streamed

pytestmark = pytest.mark.anyio

TWICE = Retry(max_attempts=2, backoff=Backoff(initial=0.001, maximum=0.001, jitter="none"))
GEMINI = "https://generativelanguage.googleapis.com/v1beta"
BLOCKED = {"promptFeedback": {"blockReason": "PROHIBITED_CONTENT"}, "usageMetadata": {"promptTokenCount": 1}}
INTERACTION = {"object": "interaction", "id": "i", "status": "failed", "errors": [{"message": "no"}]}
RESPONSES = "https://api.openai.com/v1/responses"


def response(status: str, code: str | None = None, **fields: object) -> dict[str, Any]:
    error = None if code is None else {"code": code, "message": "boom"}
    return {"id": "r", "object": "response", "status": status, "error": error, "output": [], **fields}


DONE_WELL = response("completed", output=[{"type": "message", "content": []}])


def says_json(body: object) -> httpx2.Response:
    return httpx2.Response(200, headers={"content-type": "application/json"}, content=json.dumps(body))


@pytest.mark.parametrize(
    ("url", "answer", "attempts", "verdict", "scope"),
    [
        (f"{GEMINI}/models/g:generateContent", BLOCKED, 1, Verdict.FATAL, Scope.REQUEST),
        (f"{GEMINI}/interactions", INTERACTION, 2, Verdict.FAILURE, Scope.TARGET),
        (RESPONSES, response("failed", "server_error"), 2, Verdict.FAILURE, Scope.TARGET),
        (RESPONSES, response("failed"), 2, Verdict.FAILURE, Scope.TARGET),
        (RESPONSES, response("failed", "rate_limit_exceeded"), 2, Verdict.THROTTLED, Scope.TARGET),
        (RESPONSES, response("failed", "invalid_prompt"), 1, Verdict.FATAL, Scope.REQUEST),
    ],
    ids=["blocked", "interaction", "failed", "failed, no error", "throttled", "invalid"],
)
async def test_the_callers_own_object_reaches_it(
    url: str, answer: object, attempts: int, verdict: Verdict, scope: Scope
) -> None:
    spy, upstream = Spy(), Upstream(lambda: says_json(answer))
    reply = await send(resilient(upstream, TWICE, spy), {"model": "m", "input": "hi"}, url=url)
    assert reply.status_code == 200
    assert json.loads(await read(reply)) == answer
    assert len(upstream.requests) == attempts
    assert {(outcome.verdict, outcome.scope) for outcome in spy.ended} == {(verdict, scope)}


async def test_a_response_that_failed_is_made_again() -> None:
    upstream = Upstream(lambda: says_json(response("failed", "server_error")), lambda: says_json(DONE_WELL))
    reply = await send(resilient(upstream, TWICE), {"model": "m", "input": "hi"}, url=RESPONSES)
    assert json.loads(await read(reply)) == DONE_WELL


async def test_the_end_of_a_job_is_no_failure_of_who_hears_of_it() -> None:
    spy = Spy()
    failed = response("failed", "server_error", background=True)
    upstream = Upstream(lambda: says_json(failed))
    ask = {"model": "m", "input": "hi", "background": True}
    reply = await send(resilient(upstream, TWICE, spy), ask, url=RESPONSES)
    assert (reply.status_code, json.loads(await read(reply))) == (200, failed)
    assert [outcome.verdict for outcome in spy.ended] == [Verdict.SUCCESS]
    assert len(upstream.requests) == 1


async def test_an_error_in_place_of_an_answer_still_gets_the_status_it_means() -> None:
    upstream = Upstream(lambda: says_json({"error": {"message": "boom", "code": "server_error"}}))
    reply = await send(resilient(upstream, TWICE), {"model": "m", "input": "hi"}, url=RESPONSES)
    assert reply.status_code == 500


@pytest.mark.parametrize("asked", [True, 1, 1.0, "true", "True", "yes", "on", "1", "t", "Y"])
async def test_a_stream_is_asked_for_by_whatever_servers_take_for_yes(asked: object) -> None:
    upstream = Upstream(lambda: streamed(ROLE, says("hi", "stop"), DONE))
    reply = await send(resilient(upstream, TWICE), {"model": "m", "messages": [], "stream": asked})
    assert (reply.status_code, await read(reply)) == (200, ROLE + says("hi", "stop") + DONE)
    assert len(upstream.requests) == 1


@pytest.mark.parametrize("asked", [1, "true"])
async def test_a_server_that_does_not_take_it_for_yes_may_answer_in_one_piece(asked: object) -> None:
    answer = {"choices": [{"index": 0, "message": {"content": "hi"}, "finish_reason": "stop"}]}
    upstream = Upstream(lambda: says_json(answer))
    reply = await send(resilient(upstream, TWICE), {"model": "m", "messages": [], "stream": asked})
    assert (reply.status_code, json.loads(await read(reply))) == (200, answer)
    assert len(upstream.requests) == 1


@pytest.mark.parametrize("asked", [False, None, 0, 2, "false", "no", "", [], {}])
async def test_a_stream_that_nobody_asked_for_is_no_answer(asked: object) -> None:
    upstream = Upstream(lambda: streamed(ROLE, says("hi", "stop"), DONE))
    reply = await send(resilient(upstream, TWICE), {"model": "m", "messages": [], "stream": asked})
    assert reply.status_code == 502


@pytest.mark.parametrize("large", [b": " + b"x" * 9_000_000 + b"\n\n", says("x" * 9_000_000)])
async def test_what_is_as_large_as_a_picture_passes(large: bytes) -> None:
    whole = [ROLE, *(large[at : at + 65_536] for at in range(0, len(large), 65_536)), says("!", "stop"), DONE]
    upstream = Upstream(lambda: streamed(*whole))
    assert await read(await send(resilient(upstream, Stream(), TWICE))) == b"".join(whole)


@pytest.mark.parametrize("operation", ["transcriptions", "translations"])
async def test_silence_has_an_empty_transcript(operation: str) -> None:
    upstream = Upstream(lambda: httpx2.Response(200, headers={"content-type": "text/plain"}, content=b""))
    url = f"https://api.openai.com/v1/audio/{operation}"
    reply = await send(resilient(upstream, TWICE), {"model": "w"}, url=url)
    assert (reply.status_code, await read(reply)) == (200, b"")
    assert len(upstream.requests) == 1


async def test_an_answer_that_is_not_all_utf_8_reaches_the_caller_as_it_is() -> None:
    body = b'{"choices": [{"index": 0, "message": {"content": "h\xff"}, "finish_reason": "stop"}]}'
    headers = {"content-type": "application/json"}
    upstream = Upstream(lambda: httpx2.Response(200, headers=headers, content=body))
    reply = await send(resilient(upstream, TWICE), {"model": "m", "messages": []})
    assert (reply.status_code, await read(reply)) == (200, body)
    assert len(upstream.requests) == 1
