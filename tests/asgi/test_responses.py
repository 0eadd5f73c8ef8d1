"""What a client sees of a refusal and of a deadline, before and after the response has begun."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator
from typing import Any

import anyio
import pytest
from starlette.responses import StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from resilient_llm import (
    Bulkhead,
    BulkheadFullError,
    CircuitOpenError,
    Deadline,
    DeadlineExceededError,
    RejectedError,
)
from resilient_llm.asgi import ResilienceMiddleware
from resilient_llm.asgi.responses import error_event, error_response
from resilient_llm.call import Call, CallNext
from resilient_llm.core.sse import SSEParser
from resilient_llm.errors import UnknownTenantError
from resilient_llm.message import Reply
from resilient_llm.ordering import Placement
from resilient_llm.outcome import DEADLINE_EXCEEDED
from tests.asgi.doubles import Spy
from tests.asgi.server import TENANT, Connection, Headers, respond

pytestmark = pytest.mark.anyio

SECRET = "sk-CANARY-123"


class Refuse:
    placement = Placement.ADMISSION

    def __init__(self, error: Exception) -> None:
        self.error = error

    async def __call__(self, call: Call, call_next: CallNext) -> Reply:
        raise self.error


async def never(scope: Scope, receive: Receive, send: Send) -> None:
    raise AssertionError("the app must not run")


async def refused(error: Exception, *, method: str = "GET", path: str = "/", **options: Any) -> Connection:
    app = ResilienceMiddleware(never, tenant="x-tenant-id", policies=[Refuse(error)], **options)
    return await Connection(method=method, path=path).run(app)


@pytest.mark.parametrize("chosen", ["xml", [], None, ZeroDivisionError()])
async def test_a_format_that_cannot_be_had_is_problem_json(
    chosen: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def error_format(_scope: Scope) -> Any:
        if isinstance(chosen, Exception):
            raise chosen
        return chosen

    connection = await refused(BulkheadFullError("full", name="tenants"), error_format=error_format)
    assert connection.status == 429
    assert connection.headers[b"content-type"] == b"application/problem+json"
    assert "the answer is in the format 'problem'" in caplog.text


async def test_a_refusal_is_problem_json() -> None:
    connection = await refused(BulkheadFullError(f"no room for {SECRET}", retry_after=2.5, name="tenants"))
    assert connection.status == 429
    assert connection.headers == {
        b"content-type": b"application/problem+json",
        b"content-length": str(len(connection.body)).encode(),
        b"retry-after": b"3",
        b"x-should-retry": b"false",
    }
    assert connection.json == {
        "title": "Too Many Requests",
        "status": 429,
        "detail": "Too many of your requests are running or waiting. Try again later.",
        "code": "bulkhead_full",
    }


async def test_or_as_openai_says_it() -> None:
    connection = await refused(BulkheadFullError(f"no room for {SECRET}"), error_format="openai")
    assert connection.headers[b"content-type"] == b"application/json"
    error = connection.json["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["code"], error["param"]) == ("bulkhead_full", None)
    assert SECRET not in json.dumps(connection.json)


async def test_or_as_anthropic_says_it() -> None:
    connection = await refused(CircuitOpenError("open"), error_format="anthropic")
    assert connection.status == 503
    assert connection.json["type"] == "error"
    assert isinstance(connection.json["error"]["message"], str)


async def test_the_format_can_depend_on_the_request() -> None:
    def choose(scope: Scope) -> Any:
        return "openai" if scope["path"].startswith("/v1/") else "problem"

    error = CircuitOpenError("open")
    assert "error" in (await refused(error, path="/v1/chat", error_format=choose)).json
    assert "title" in (await refused(error, path="/other", error_format=choose)).json


@pytest.mark.parametrize(
    ("retry_after", "header"),
    [(0.0, b"1"), (0.4, b"1"), (1.0, b"1"), (1.001, b"2"), (59.2, b"60"), (None, None), (math.inf, None)],
)
async def test_retry_after_is_whole_seconds_rounded_up(
    retry_after: float | None, header: bytes | None
) -> None:
    connection = await refused(CircuitOpenError("open", retry_after=retry_after))
    assert connection.headers.get(b"retry-after") == header


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (BulkheadFullError("full"), 429),
        (CircuitOpenError("open"), 503),
        (RejectedError("no"), 503),
        (UnknownTenantError("who?"), 401),
        (DeadlineExceededError("late"), 504),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("error_format", ["problem", "openai", "anthropic"])
async def test_the_status_says_whose_limit_it_was(error: Exception, status: int, error_format: Any) -> None:
    connection = await refused(error, error_format=error_format)
    assert connection.status == status
    assert connection.headers[b"x-should-retry"] == b"false"
    assert (b"www-authenticate" in connection.headers) is (status == 401)


async def test_head_gets_the_headers_only() -> None:
    get, head = (
        await refused(CircuitOpenError("open")),
        await refused(CircuitOpenError("open"), method="HEAD"),
    )
    assert head.body == b""
    assert head.headers == get.headers


async def test_a_refusal_nobody_waits_for_is_sent_to_nobody() -> None:
    class Slow(Refuse):
        async def __call__(self, call: Call, call_next: CallNext) -> Reply:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(2)
            raise self.error

    app = ResilienceMiddleware(never, tenant="x-tenant-id", policies=[Slow(CircuitOpenError("open"))])
    connection = Connection()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(connection.disconnect_at, 1)
        await connection.run(app)
    assert (connection.error, connection.sent, connection.dropped) == (None, [], [])


async def test_a_client_that_leaves_under_a_refusal_is_no_error() -> None:
    connection = Connection(spec_version="2.4")

    class Leaves(Refuse):
        async def __call__(self, call: Call, call_next: CallNext) -> Reply:
            connection.gone = True  # seen by nobody yet
            raise self.error

    app = ResilienceMiddleware(never, tenant="x-tenant-id", policies=[Leaves(CircuitOpenError("open"))])
    await connection.run(app)
    assert (connection.error, connection.sent) == (None, [])


async def test_a_deadline_before_the_answer_is_a_504() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await anyio.sleep(60)

    spy = Spy()
    bulkhead = Bulkhead(max_concurrent=1)
    middleware = ResilienceMiddleware(app, tenant="x-tenant-id", policies=[Deadline(5), spy, bulkhead])
    connection = await Connection().run(middleware)
    assert (connection.status, connection.ended, connection.error) == (504, 5, None)
    assert connection.json["code"] == "deadline_exceeded"
    assert [outcome for _, outcome in spy.outcomes] == [DEADLINE_EXCEEDED]
    assert bulkhead.in_use() == 0


async def test_a_deadline_in_the_queue_is_a_504() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await anyio.sleep(60)
        await respond(send)

    bulkhead = Bulkhead(max_concurrent=1, max_wait=600)
    patient = ResilienceMiddleware(app, tenant="x-tenant-id", policies=[bulkhead])
    middleware = ResilienceMiddleware(app, tenant="x-tenant-id", policies=[Deadline(5), bulkhead])
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(Connection().run, patient)
        await anyio.sleep(1)
        connection = await Connection().run(middleware)
    assert (connection.status, connection.ended) == (504, 5)


async def test_the_caller_can_shorten_the_deadline() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await anyio.sleep(60)

    middleware = ResilienceMiddleware(app, tenant="x-tenant-id", policies=[Deadline(5)])
    connection = await Connection(headers=[TENANT, (b"X-Request-Timeout", b"1.5")]).run(middleware)
    assert (connection.status, connection.ended) == (504, 1.5)


def streaming(*chunks: bytes, headers: dict[str, str] | None = None, media_type: str) -> ASGIApp:
    """Answer with the chunks, then stall."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        content = [(b"content-type", media_type.encode())]
        content += [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
        await send({"type": "http.response.start", "status": 200, "headers": content})
        for chunk in chunks:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await anyio.sleep(60)

    return app


async def run_late(app: ASGIApp, *, connection: Connection | None = None, **options: Any) -> Connection:
    middleware = ResilienceMiddleware(app, tenant="x-tenant-id", policies=[Deadline(5)], **options)
    return await (connection or Connection()).run(middleware)


@pytest.mark.parametrize("error_format", ["problem", "openai", "anthropic"])
@pytest.mark.parametrize(
    "chunks",
    [
        [],
        [b"data: one\n\n"],
        [b"data: one\r\n\r\n"],
        [b"data: one\n", b"\n"],
        [b"data: one\n"],
        [b"data: o"],
        [b""],
        pytest.param([memoryview(b"data: one\n\n")], id="memoryview"),
    ],
    ids=repr,
)
async def test_an_event_stream_out_of_time_ends_with_one_error_event(
    chunks: list[bytes], error_format: Any
) -> None:
    connection = await run_late(
        streaming(*chunks, media_type="text/event-stream; charset=utf-8"), error_format=error_format
    )
    assert (connection.error, connection.complete, connection.ended) == (None, True, 5)
    parser = SSEParser()
    events = [*parser.feed(connection.body), *parser.close()]
    assert all(event.complete for event in events)
    last = events[-1]
    assert last.event == ("message" if error_format == "openai" else "error")
    assert "deadline_exceeded" in last.data
    whole = b"".join(chunks).endswith((b"\n\n", b"\n\r\n"))
    assert [event.data for event in events[:-1]] == (["one"] if whole else [])  # and half of one is none
    assert b"[DONE]" not in connection.body
    assert b"\n\n\n" not in connection.body


@pytest.mark.parametrize("deadline", [5, None])
@pytest.mark.parametrize("ending", [b"\n", b"\r\n", b"\r"])
async def test_an_event_stream_in_time_is_the_same_whatever_its_parts_are(
    ending: bytes, deadline: float | None
) -> None:
    body = b"data: one\n: c\n\nid: 1\ndata: \xc3\xa4\n\n\ndata: half".replace(b"\n", ending)
    for size in (1, 2, 7, 100):
        parts = [body[at : at + size] for at in range(0, len(body), size)]

        async def app(scope: Scope, receive: Receive, send: Send, parts: list[bytes] = parts) -> None:
            await StreamingResponse(aiter_of(parts), media_type="text/event-stream")(scope, receive, send)

        policies = [] if deadline is None else [Deadline(deadline)]
        middleware = ResilienceMiddleware(app, tenant="x-tenant-id", policies=policies)
        connection = await Connection().run(middleware)
        assert (connection.error, connection.body, connection.complete) == (None, body, True)


async def test_an_event_that_never_ends_is_not_kept_back_for_ever() -> None:
    large = b"data: " + b"x" * 70_000
    connection = await run_late(streaming(large, media_type="text/event-stream"))
    parser = SSEParser()
    events = [*parser.feed(connection.body), *parser.close()]
    assert [len(event.data) for event in events[:-1]] == [70_000]
    assert "deadline_exceeded" in events[-1].data


async def aiter_of(parts: list[bytes]) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


@pytest.mark.parametrize(
    ("media_type", "headers"),
    [
        ("application/json", {}),
        ("text/event-stream", {"content-encoding": "gzip"}),
        ("text/event-stream", {"content-length": "1000"}),
    ],
)
async def test_any_other_body_out_of_time_is_cut_with_an_exception(
    media_type: str, headers: dict[str, str]
) -> None:
    connection = await run_late(streaming(b"half", media_type=media_type, headers=headers))
    assert isinstance(connection.error, DeadlineExceededError)
    assert (connection.complete, connection.body) == (False, b"half")


async def test_a_client_that_takes_nothing_is_not_waited_for() -> None:
    connection = Connection()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [(b"content-type", b"text/event-stream")],
            }
        )
        connection.stalled = True
        await send({"type": "http.response.body", "body": b"data: x\n\n", "more_body": True})

    await run_late(app, connection=connection)
    assert isinstance(connection.error, DeadlineExceededError)
    assert connection.ended == 6


async def test_a_client_that_leaves_before_its_error_event_is_no_error() -> None:
    connection = Connection(spec_version="2.4")

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await streaming(b"data: x\n\n", media_type="text/event-stream")(scope, receive, gone_in_the_end(send))

    def gone_in_the_end(send: Send) -> Send:
        async def watched(message: Message) -> None:
            await send(message)
            connection.gone = bool(message.get("body"))  # seen by nobody yet

        return watched

    await run_late(app, connection=connection)
    assert (connection.error, connection.body) == (None, b"data: x\n\n")


async def test_a_stream_that_is_done_is_not_touched_by_its_deadline() -> None:
    async def chunks() -> Any:
        for n in range(3):
            yield f"data: {n}\n\n"
            await anyio.sleep(1)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await StreamingResponse(chunks(), media_type="text/event-stream")(scope, receive, send)
        await anyio.sleep(60)

    connection = await run_late(app)
    assert (connection.error, connection.body.count(b"data:"), connection.ended) == (None, 3, 63)


async def test_a_refusal_after_the_start_leaves_as_itself() -> None:
    error = CircuitOpenError("open")

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [(b"content-type", b"text/event-stream")],
            }
        )
        raise error

    assert (await run_late(app)).error is error


@pytest.mark.parametrize("error_format", ["problem", "openai", "anthropic"])
def test_no_text_of_an_exception_gets_out(error_format: Any) -> None:
    class OwnError(RejectedError):
        reason = "own"

        @property
        def status(self) -> int:
            return 418

    headers: Headers = [(b"authorization", SECRET.encode())]
    scope: Scope = {"type": "http", "method": "GET", "path": f"/{SECRET}", "headers": headers}
    error = OwnError(SECRET, name=SECRET)
    for message in error_response(error, scope, error_format):
        assert SECRET not in repr(message)
    assert SECRET.encode() not in error_event(error, error_format)
