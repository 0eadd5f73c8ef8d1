"""Without policies the middleware makes no difference but for the tenant.

Every behaviour is carried out by the bare app and by the wrapped one, and everything a server sees is
compared: what is sent and when, when `receive` is called and what it gives, how the app ends.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any

import anyio
import pytest
from fastapi import FastAPI, Request
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from resilient_llm import Bulkhead, Deadline, Policy
from resilient_llm.asgi import ResilienceMiddleware
from resilient_llm.context import current
from tests.asgi.server import Connection, read_body, respond

pytestmark = pytest.mark.anyio

Log = list[Any]
MakeApp = Callable[[Log], ASGIApp]

seen: ContextVar[str] = ContextVar("seen", default="nothing")


def echo(log: Log) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await respond(send, body=await read_body(receive))

    return app


def answers_before_it_reads(log: Log) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await respond(send, 413)
        log.append(await receive())

    return app


def reads_slowly(log: Log) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        more = True
        while more:
            await anyio.sleep(1)
            message = await receive()
            more = message.get("more_body", False)
        await respond(send)

    return app


class Events:
    """A body of five events, one a second; no generator, since starlette leaves those unclosed under 2.4."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self.n = 0

    def __aiter__(self) -> Events:
        return self

    async def __anext__(self) -> str:
        if self.n == 5:
            raise StopAsyncIteration
        self.n += 1
        self.log.append(("event", self.n))
        try:
            await anyio.sleep(1)
        except anyio.get_cancelled_exc_class():
            self.log.append(("cancelled in", self.n))
            raise
        return f"data: {self.n}\n\n"


def streams(log: Log) -> ASGIApp:
    async def background() -> None:
        log.append("background")

    async def endpoint(_request: Request) -> StreamingResponse:
        later = BackgroundTask(background)
        return StreamingResponse(Events(log), media_type="text/event-stream", background=later)

    return Starlette(routes=[Route("/", endpoint)])


def works_in_the_background(log: Log) -> ASGIApp:
    async def later() -> None:
        await anyio.sleep(3)
        log.append("background")

    async def endpoint(_request: Request) -> JSONResponse:
        return JSONResponse({"queued": True}, status_code=202, background=BackgroundTask(later))

    return Starlette(routes=[Route("/", endpoint, methods=["GET", "POST"])])


def polls(log: Log) -> ASGIApp:
    app = FastAPI()

    @app.api_route("/", methods=["GET", "POST"])
    async def endpoint(request: Request) -> dict[str, int]:
        count = 1
        while count < 50 and not await request.is_disconnected():
            await anyio.sleep(0.07)
            count += 1
        log.append(("stopped after", count))
        return {"polls": count}

    return app


def returns_quietly(log: Log) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    return app


def crashes(log: Log) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await anyio.sleep(0.1)
        raise LookupError("no such thing")

    return app


def crashes_half_way(log: Log) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})
        raise ExceptionGroup("several", [LookupError("one"), ValueError("two")])

    return app


def forgets_to_answer(log: Log) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await read_body(receive)

    return app


def breaks_the_protocol(log: Log) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await respond(send)
        await respond(send)

    return app


def sets_a_context_variable(log: Log) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.set("the app")
        await respond(send)

    async def outside(scope: Scope, receive: Receive, send: Send) -> None:
        await app(scope, receive, send)
        log.append(seen.get())

    return outside


def with_middleware_of_starlette(log: Log) -> ASGIApp:
    async def dispatch(request: Request, call_next: Callable[[Request], Awaitable[Any]]) -> Any:
        response = await call_next(request)
        response.headers["x-seen"] = "yes"
        return response

    return GZipMiddleware(BaseHTTPMiddleware(streams(log), dispatch))


# The app, the request, when the client leaves; and, lest both fail alike, the bare app's status and error.
HTTP: dict[str, tuple[MakeApp, dict[str, Any], float | None, int | None, str]] = {
    "get": (echo, {}, None, 200, "None"),
    "post": (echo, {"body": [b"one", b"two"], "method": "POST"}, None, 200, "None"),
    "head": (works_in_the_background, {"method": "HEAD"}, None, 202, "None"),
    "not found": (streams, {"path": "/elsewhere"}, None, 404, "None"),
    "upload with backpressure": (
        reads_slowly,
        {"body": [b"x" * 100_000] * 4, "method": "PUT"},
        None,
        200,
        "None",
    ),
    "client leaves while it sends": (
        echo,
        {"body": [b"one"], "unfinished": True},
        0.5,
        None,
        "ConnectionError",
    ),
    "early answer": (answers_before_it_reads, {"body": [b"one", b"two"]}, None, 413, "None"),
    "stream": (streams, {}, None, 200, "None"),
    "stream, client leaves, 2.3": (streams, {}, 2.5, 200, "None"),
    "stream, client leaves, 2.4": (streams, {"spec_version": "2.4"}, 2.5, 200, "ClientDisconnect"),
    "background task": (works_in_the_background, {}, None, 202, "None"),
    "background task, client leaves after the answer": (works_in_the_background, {}, 1.0, 202, "None"),
    "is_disconnected, client stays": (polls, {"body": [b"{}"], "method": "POST"}, None, 200, "None"),
    "is_disconnected, client leaves": (polls, {}, 0.2, None, "None"),
    "client leaves before the answer": (returns_quietly, {}, 0.2, None, "None"),
    "exception": (crashes, {}, None, None, "LookupError"),
    "exception, client has left": (crashes, {}, 0.05, None, "LookupError"),
    "exceptions half way": (crashes_half_way, {}, None, 200, "ExceptionGroup"),
    "no answer": (forgets_to_answer, {}, None, None, "None"),
    "two answers": (breaks_the_protocol, {}, None, 200, "RuntimeError"),
    "context variable": (sets_a_context_variable, {}, None, 200, "None"),
    "starlette's middleware": (with_middleware_of_starlette, {}, None, 200, "None"),
    "starlette's middleware, client leaves": (with_middleware_of_starlette, {}, 2.5, 200, "None"),
}


async def observe(wrap: Callable[[ASGIApp], ASGIApp], behaviour: str) -> dict[str, Any]:
    """Serve one request and give everything a server sees of it."""
    make, options, leaves, _, _ = HTTP[behaviour]
    options = dict(options)
    log: Log = []
    seen.set("nothing")
    connection = Connection(*options.pop("body", ()), **options)
    async with anyio.create_task_group() as tasks:
        if leaves is not None:
            tasks.start_soon(connection.disconnect_at, leaves)
        await connection.run(wrap(make(log)))
    error = connection.error
    return {
        "status": connection.status,
        "sent": connection.sent,
        "received": connection.received,
        "asked": connection.asked,
        "ended": connection.ended,
        "error": type(error).__name__.replace("NoneType", "None"),
        "message": str(error),
        "errors in the group": list(map(repr, getattr(error, "exceptions", ()))),
        "log": log,
    }


def unwrapped(app: ASGIApp) -> ASGIApp:
    return app


def wrapped(app: ASGIApp) -> ASGIApp:
    return ResilienceMiddleware(app, tenant="x-tenant-id")


@pytest.mark.parametrize("behaviour", HTTP)
async def test_the_server_sees_the_same(behaviour: str) -> None:
    bare = await observe(unwrapped, behaviour)
    assert (bare["status"], bare["error"]) == HTTP[behaviour][3:]
    assert await observe(wrapped, behaviour) == bare


@pytest.mark.parametrize("behaviour", HTTP)
async def test_with_policies_that_have_room_the_client_sees_the_same(behaviour: str) -> None:
    """The body may be read ahead; what is sent, when, and how the app ends stays."""

    def guarded(app: ASGIApp) -> ASGIApp:
        policies: list[Policy] = [Deadline(60), Bulkhead(max_concurrent=1)]
        return ResilienceMiddleware(app, tenant="x-tenant-id", policies=policies, cancel_on_disconnect=False)

    bare, observed = await observe(unwrapped, behaviour), await observe(guarded, behaviour)
    for seen_by_the_server_only in ("asked", "received"):
        del bare[seen_by_the_server_only], observed[seen_by_the_server_only]
    assert observed == bare


async def test_an_app_sees_its_own_channels_and_scope() -> None:
    given: list[object] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        given.extend([scope, receive, send])

    connection = Connection()
    receive, send = connection.receive, connection.send
    await ResilienceMiddleware(app, tenant="x-tenant-id")(connection.scope, receive, send)
    assert given[0] is connection.scope
    assert given[1] is receive
    assert given[2] is send


async def test_only_the_tenant_is_known_inside() -> None:
    seen: list[object] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(current.get())

    before = current.get()
    await Connection().run(ResilienceMiddleware(app, tenant="x-tenant-id"))
    [inside] = seen
    assert inside == type(before)(tenant="acme")
    assert current.get() is before


async def test_one_app_serves_two_event_loops_at_once() -> None:
    app = wrapped(echo([]))

    async def elsewhere() -> int | None:
        return (await Connection().run(app)).status

    assert await elsewhere() == 200
    assert await anyio.to_thread.run_sync(anyio.run, elsewhere) == 200
    assert await elsewhere() == 200


@pytest.mark.parametrize("kind", ["lifespan", "websocket", "something.new"])
@pytest.mark.parametrize("policies", [0, 1])
async def test_other_scopes_pass_untouched(kind: str, policies: int) -> None:
    given: list[object] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        given.extend([scope, receive, send])
        raise KeyError(kind)

    async def receive() -> Message:
        raise AssertionError

    async def send(message: Message) -> None:
        raise AssertionError

    middleware = ResilienceMiddleware(
        app, tenant="x-tenant-id", policies=[Bulkhead(max_concurrent=1)] * policies
    )
    scope = {"type": kind}
    with pytest.raises(KeyError):
        await middleware(scope, receive, send)
    assert given[0] is scope
    assert given[2] is send
    if kind != "lifespan" or not policies:  # with policies a lifespan's messages are watched
        assert given[1] is receive
