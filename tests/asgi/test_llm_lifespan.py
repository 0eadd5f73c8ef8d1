"""`LLMMiddleware` over a lifespan: its transport is closed once, however that ends, and not before."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from resilient_llm.asgi import LLMMiddleware
from resilient_llm.testing import run_virtual

pytestmark = pytest.mark.anyio

LIFESPAN = {"type": "lifespan", "asgi": {"version": "3.0"}, "state": {}}
STARTUP, SHUTDOWN = {"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}


class Transport(httpx.AsyncBaseTransport):
    """Take `closing` seconds to close, and count how often that came to its end."""

    def __init__(self, closing: float = 0.0, error: Exception | None = None) -> None:
        self.closing = closing
        self.error = error
        self.closed = 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json={})

    async def aclose(self) -> None:
        await anyio.sleep(self.closing)
        if self.error is not None:
            raise self.error
        self.closed += 1


def starlette_app(*, fails_at: str = "", takes: float = 0.0) -> Starlette:
    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        await anyio.sleep(takes)
        if fails_at == "startup":
            raise LookupError("no database")
        try:
            yield
        finally:
            await anyio.sleep(takes)
            if fails_at == "shutdown":
                raise LookupError("no database")

    async def ask(request: Request) -> JSONResponse:
        await request.state.llm.get("http://provider.example")
        return JSONResponse(None)

    return Starlette(routes=[Route("/", ask)], lifespan=lifespan)


async def silent_at_the_end(scope: Scope, receive: Receive, send: Send) -> None:
    """Leave without a last message."""
    await receive()
    await send({"type": "lifespan.startup.complete"})
    await receive()


async def broken_at_the_end(scope: Scope, receive: Receive, send: Send) -> None:
    await silent_at_the_end(scope, receive, send)
    raise LookupError("no database")


async def broken_while_it_lasts(scope: Scope, receive: Receive, send: Send) -> None:
    await receive()
    await send({"type": "lifespan.startup.complete"})
    raise LookupError("no database")


async def no_listener(scope: Scope, receive: Receive, send: Send) -> None:
    """Listen to nothing after the startup, as the specification does not have it; requests are served on."""
    await receive()
    await send({"type": "lifespan.startup.complete"})


async def no_lifespan(scope: Scope, receive: Receive, send: Send) -> None:
    """Know no lifespan, which an app says by raising."""
    if scope["type"] == "lifespan":
        raise NotImplementedError
    await scope["state"]["llm"].get("http://provider.example")


async def no_lifespan_and_silent(scope: Scope, receive: Receive, send: Send) -> None:
    await receive()


class Server:
    """Run a lifespan as a server does: startup, shutdown at once, each message taking `takes` seconds."""

    def __init__(self, app: ASGIApp, *, takes: float = 0.0) -> None:
        self.app = app
        self.takes = takes
        self.said: list[str] = []
        self._messages = [STARTUP, SHUTDOWN]

    async def run(self) -> None:
        await self.app(dict(LIFESPAN), self._receive, self._send)

    async def _receive(self) -> Message:
        await anyio.sleep(self.takes)
        if not self._messages:
            await anyio.sleep_forever()
        return self._messages.pop(0)

    async def _send(self, message: Message) -> None:
        await anyio.sleep(self.takes)
        self.said.append(message["type"].removeprefix("lifespan."))


@pytest.mark.parametrize(
    ("app", "said"),
    [
        pytest.param(starlette_app(), ["startup.complete", "shutdown.complete"], id="as it should"),
        pytest.param(starlette_app(fails_at="startup"), ["startup.failed"], id="no startup"),
        pytest.param(
            starlette_app(fails_at="shutdown"), ["startup.complete", "shutdown.failed"], id="no shutdown"
        ),
        pytest.param(silent_at_the_end, ["startup.complete"], id="no last word"),
        pytest.param(broken_at_the_end, ["startup.complete"], id="an exception at the shutdown"),
        pytest.param(broken_while_it_lasts, ["startup.complete"], id="an exception before it"),
    ],
)
async def test_it_is_closed_once_however_the_lifespan_ends(app: ASGIApp, said: list[str]) -> None:
    transport = Transport()
    server = Server(LLMMiddleware(app, transport=transport))
    with suppress(LookupError):
        await server.run()
    assert (server.said, transport.closed) == (said, 1)


@pytest.mark.parametrize("app", [no_lifespan, no_lifespan_and_silent, no_listener])
async def test_an_app_that_is_served_without_a_lifespan_keeps_it_open(app: ASGIApp) -> None:
    transport = Transport()
    with suppress(NotImplementedError):
        await Server(LLMMiddleware(app, transport=transport)).run()
    assert transport.closed == 0


async def test_each_lifespan_closes_it_and_the_next_one_has_another_client() -> None:
    transport, seen = Transport(), []

    async def remember(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await silent_at_the_end(scope, receive, send)
            return
        seen.append(scope["state"]["llm"])
        assert (await seen[-1].get("http://provider.example")).status_code == 200

    app = LLMMiddleware(remember, transport=transport)
    for count in (1, 2):
        await app({"type": "http"}, _nothing, _nowhere)
        await Server(app).run()
        assert transport.closed == count
    assert seen[0] is not seen[1]


async def _nothing() -> Message:
    return {"type": "http.disconnect"}


async def _nowhere(_message: Message) -> None:
    """Take a message."""


async def test_one_that_does_not_close_holds_up_no_shutdown(caplog: pytest.LogCaptureFixture) -> None:
    server = Server(LLMMiddleware(starlette_app(), transport=Transport(closing=math.inf), name="llm"))
    began = anyio.current_time()
    await server.run()
    assert server.said == ["startup.complete", "shutdown.complete"]
    assert anyio.current_time() - began == pytest.approx(5)
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [
        "the transport of 'llm' was not closed within 5 s"
    ]


async def test_one_that_fails_to_close_is_no_failure_of_the_app(caplog: pytest.LogCaptureFixture) -> None:
    transport = Transport(error=OSError("no route"))
    server = Server(LLMMiddleware(starlette_app(), transport=transport, name="llm"))
    await server.run()
    assert server.said == ["startup.complete", "shutdown.complete"]
    assert [record.getMessage() for record in caplog.records] == [
        "the transport of 'llm' could not be closed"
    ]


APPS: list[Callable[[], ASGIApp]] = [
    lambda: starlette_app(takes=1),
    lambda: starlette_app(fails_at="startup", takes=1),
    lambda: starlette_app(fails_at="shutdown", takes=1),
    lambda: silent_at_the_end,
    lambda: broken_at_the_end,
]


async def _by_scope(run: Callable[[], Awaitable[None]], at: float) -> None:
    with anyio.move_on_after(at):
        await run()


async def _by_task(run: Callable[[], Any], at: float) -> None:
    task = asyncio.ensure_future(run())
    asyncio.get_running_loop().call_later(at, task.cancel)
    await asyncio.wait([task])
    if not task.cancelled() and (error := task.exception()):
        raise error


@pytest.mark.parametrize(
    ("backend", "cancelled"), [("asyncio", _by_scope), ("trio", _by_scope), ("asyncio", _by_task)]
)
@pytest.mark.parametrize("make", range(len(APPS)))
def test_a_server_that_cancels_it_at_any_await_leaves_nothing_open(
    make: int, backend: Any, cancelled: Callable[..., Awaitable[None]]
) -> None:
    async def cancel_at(at: float) -> tuple[int, int]:
        transport = Transport(closing=1)
        server = Server(LLMMiddleware(APPS[make](), transport=transport), takes=1)
        with suppress(LookupError):
            await cancelled(server.run, at)
        return transport.closed, len(server.said)

    ends = [run_virtual(cancel_at, step + 0.5, backend=backend) for step in range(12)]
    assert [closed for closed, _ in ends] == [1] * len(ends)
    assert len({said for _, said in ends}) > 1, "cancelled at one await only"
