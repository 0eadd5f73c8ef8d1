"""A client that leaves: in the queue, before the answer, in the middle of it, and after."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import anyio
import pytest
from fastapi import FastAPI
from starlette.background import BackgroundTask
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from resilient_llm import Bulkhead, CircuitOpenError, Deadline
from resilient_llm.asgi import ResilienceMiddleware
from resilient_llm.outcome import CANCELLED, Verdict
from tests.asgi.doubles import Spy
from tests.asgi.server import TENANT, ClientGoneError, Connection, read_body, respond

pytestmark = pytest.mark.anyio


async def leave(connection: Connection, app: ASGIApp, *, after: float) -> Connection:
    """Serve a request of a client that leaves after a while."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(connection.disconnect_at, after)
        await connection.run(app)
        tasks.cancel_scope.cancel()
    return connection


class Guarded:
    """An app behind a bulkhead, and what is known of its calls."""

    def __init__(self, app: ASGIApp, **options: Any) -> None:
        self.bulkhead = Bulkhead(max_concurrent=1)
        self.spy = Spy()
        self.app = ResilienceMiddleware(
            app, tenant="x-tenant-id", policies=[Deadline(600), self.spy, self.bulkhead], **options
        )

    def assert_cancelled(self) -> None:
        assert self.bulkhead.in_use() == 0
        assert self.bulkhead.queued() == 0
        assert [outcome for _, outcome in self.spy.outcomes] == [CANCELLED]


class Handler:
    """A handler that takes 10 s, and remembers how far it came."""

    def __init__(self) -> None:
        self.log: list[str] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.log.append("began")
        try:
            await read_body(receive)
            await anyio.sleep(10)
        except anyio.get_cancelled_exc_class():
            self.log.append("cancelled")
            raise
        self.log.append("done")
        await respond(send)


async def test_where_it_cannot_be_said_a_disconnect_cancels(caplog: pytest.LogCaptureFixture) -> None:
    def fails(_scope: Scope) -> bool:
        raise KeyError("route")

    guarded = Guarded(Handler(), cancel_on_disconnect=fails)
    connection = Connection()
    await leave(connection, guarded.app, after=2)
    assert connection.ended == 2
    assert "cancel_on_disconnect=" in caplog.text


@pytest.mark.parametrize("cancel", [None, False])
@pytest.mark.parametrize("unfinished", [False, True])
async def test_in_the_queue_the_wait_ends_at_once(cancel: bool | None, unfinished: bool) -> None:
    handler = Handler()
    guarded = Guarded(handler, cancel_on_disconnect=cancel)
    first = Connection()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(first.run, guarded.app)
        await anyio.sleep(1)
        second = Connection(b"{}", method="POST", unfinished=unfinished)
        await leave(second, guarded.app, after=2)
        assert second.ended == 2
        assert (second.error, second.sent, second.dropped) == (None, [], [])
        assert guarded.bulkhead.queued() == 0
        assert [outcome for _, outcome in guarded.spy.outcomes] == [CANCELLED]
    assert first.status == 200
    assert handler.log == ["began", "done"]


async def test_in_the_queue_with_a_body_over_the_cap_it_is_noticed_when_the_app_reads_on() -> None:
    handler = Handler()
    guarded = Guarded(handler, max_buffered_body=100)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(Connection().run, guarded.app)
        await anyio.sleep(1)
        second = Connection(b"x" * 100, b"y" * 100, method="POST")
        await leave(second, guarded.app, after=2)
        assert len(second.asked) == 2
        assert second.ended == 9  # the body was left unread, so the disconnect was too
    assert handler.log.count("done") == 1


async def test_before_the_answer_the_handler_is_cancelled() -> None:
    handler = Handler()
    guarded = Guarded(handler)
    connection = await leave(Connection(b"{}", method="POST"), guarded.app, after=2)
    assert (connection.ended, connection.error, connection.sent) == (2, None, [])
    assert handler.log == ["began", "cancelled"]
    guarded.assert_cancelled()


@pytest.mark.parametrize(
    "cancel", [False, lambda scope: scope["path"] != "/save"], ids=["for all", "by path"]
)
async def test_cancelling_can_be_turned_off(cancel: Any) -> None:
    handler = Handler()
    guarded = Guarded(handler, cancel_on_disconnect=cancel)
    connection = await leave(Connection(b"{}", method="POST", path="/save"), guarded.app, after=2)
    assert (connection.ended, connection.error) == (10, None)
    assert handler.log == ["began", "done"]
    guarded.assert_cancelled()


async def test_cancelling_by_path_leaves_other_paths() -> None:
    handler = Handler()
    guarded = Guarded(handler, cancel_on_disconnect=lambda scope: scope["path"] != "/save")
    assert (await leave(Connection(path="/chat"), guarded.app, after=2)).ended == 2


async def test_cancelling_can_be_had_without_policies() -> None:
    handler = Handler()
    app = ResilienceMiddleware(handler, tenant="x-tenant-id", cancel_on_disconnect=True)
    assert (await leave(Connection(), app, after=2)).ended == 2
    assert handler.log == ["began", "cancelled"]


async def test_a_body_that_is_here_reaches_a_handler_that_goes_on() -> None:
    bodies: list[bytes] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await anyio.sleep(5)
        bodies.append(await read_body(receive))
        bodies.append((await receive())["type"].encode())
        await respond(send)

    guarded = Guarded(app, cancel_on_disconnect=False)
    await leave(Connection(b"one", b"two", method="POST"), guarded.app, after=2)
    assert bodies == [b"onetwo", b"http.disconnect"]


async def test_an_exception_of_a_cancelled_handler_still_leaves() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await anyio.sleep(10)
        finally:
            raise LookupError("the clean-up failed")

    guarded = Guarded(app)
    connection = await leave(Connection(), guarded.app, after=2)
    assert isinstance(connection.error, LookupError)
    guarded.assert_cancelled()


@pytest.mark.parametrize("spec_version", ["2.3", "2.4"])
async def test_in_a_stream_the_generator_is_closed(spec_version: str) -> None:
    log: list[str] = []

    class Events(AsyncIterator[bytes]):
        n = 0

        async def __anext__(self) -> bytes:
            self.n += 1
            try:
                await anyio.sleep(1)
            except anyio.get_cancelled_exc_class():
                log.append(f"cancelled in {self.n}")
                raise
            return b"data: x\n\n"

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await StreamingResponse(Events(), media_type="text/event-stream")(scope, receive, send)

    guarded = Guarded(app)
    connection = await leave(Connection(spec_version=spec_version), guarded.app, after=3.5)
    if spec_version == "2.3":  # the app listens
        assert (connection.ended, connection.error, log) == (3.5, None, ["cancelled in 4"])
    else:  # the app learns from the next send
        assert (connection.ended, log) == (4, [])
        assert isinstance(connection.error, ClientDisconnect)
    guarded.assert_cancelled()


async def test_what_the_servers_send_raises_is_passed_on_unchanged() -> None:
    caught: list[BaseException] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        try:
            while True:
                await send({"type": "http.response.body", "body": b"x", "more_body": True})
                await anyio.sleep(1)
        except OSError as error:
            caught.append(error)
            raise

    guarded = Guarded(app)
    connection = await leave(Connection(spec_version="2.4"), guarded.app, after=2.5)
    assert [type(error) for error in caught] == [ClientGoneError]
    assert connection.error is caught[0]
    guarded.assert_cancelled()


@pytest.mark.parametrize(("spec_version", "ended"), [("2.3", 10), ("2.4", 3)])
async def test_send_raises_by_itself_where_a_server_of_2_4_forgets_to(
    spec_version: str, ended: float
) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(10):
            await send({"type": "http.response.body", "body": b"x", "more_body": True})
            await anyio.sleep(1)
        await send({"type": "http.response.body", "body": b""})

    guarded = Guarded(app)
    connection = Connection(spec_version=spec_version)
    connection.send_raises = False
    await leave(connection, guarded.app, after=2.5)
    assert connection.ended == ended
    assert isinstance(connection.error, OSError if spec_version == "2.4" else type(None))
    guarded.assert_cancelled()


async def test_after_the_answer_it_means_nothing() -> None:
    done: list[str] = []

    async def background() -> None:
        await anyio.sleep(5)
        done.append("background")

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        response = JSONResponse({}, background=BackgroundTask(background))
        await response(scope, receive, send)
        done.append((await receive())["type"])

    guarded = Guarded(app)
    connection = await leave(Connection(), guarded.app, after=2)
    assert (connection.ended, done) == (5, ["background", "http.disconnect"])
    [(_, outcome)] = guarded.spy.outcomes
    assert outcome.ok


async def test_a_receive_that_waits_hears_of_the_end_of_the_response() -> None:
    heard: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await read_body(receive)

        async def listen() -> None:
            heard.append((await receive())["type"])

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(listen)
            tasks.start_soon(listen)
            await anyio.sleep(1)
            await respond(send)

    guarded = Guarded(app)
    connection = await Connection().run(guarded.app)
    assert (connection.ended, heard) == (1, ["http.disconnect"] * 2)


class Polling:
    """A FastAPI app that asks again and again whether its client is still there, for at most 10 s."""

    def __init__(self) -> None:
        self.seen: list[bool] = []
        self.app = app = FastAPI()

        @app.post("/")
        async def endpoint(request: Request, body: dict[str, int]) -> dict[str, int]:
            for _ in range(140):
                self.seen.append(await request.is_disconnected())
                if self.seen[-1]:
                    break
                await anyio.sleep(0.07)
            return body


def json_request() -> Connection:
    return Connection(b'{"n": 1}', method="POST", headers=[TENANT, (b"content-type", b"application/json")])


async def pass_on(request: Request, call_next: Any) -> Any:
    return await call_next(request)


@pytest.mark.parametrize("outside", [0, 1, 3])
async def test_is_disconnected_becomes_true(outside: int) -> None:
    polling = Polling()
    guarded = Guarded(polling.app, cancel_on_disconnect=False)
    stack: ASGIApp = guarded.app
    for _ in range(outside):
        stack = BaseHTTPMiddleware(stack, pass_on)
    connection = await leave(json_request(), stack, after=0.2)
    assert polling.seen == [False, False, False, True]
    assert connection.ended == pytest.approx(0.21)
    guarded.assert_cancelled()


@pytest.mark.parametrize("inside", [1, 3])
async def test_base_http_middleware_that_hides_a_disconnect_does_not_keep_the_handler(inside: int) -> None:
    polling = Polling()
    stack: ASGIApp = polling.app
    for _ in range(inside):
        stack = BaseHTTPMiddleware(stack, pass_on)
    bare = await leave(json_request(), stack, after=0.2)
    assert bare.ended == pytest.approx(9.8)  # starlette's defect, without us
    assert True not in polling.seen
    guarded = Guarded(stack)
    connection = await leave(json_request(), guarded.app, after=0.2)
    assert (connection.ended, connection.error) == (0.2, None)
    guarded.assert_cancelled()


async def test_is_disconnected_of_a_client_that_stays_is_false_and_costs_nothing_of_the_body() -> None:
    seen: list[object] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        seen.append(await request.body())
        seen.append(await request.is_disconnected())
        await anyio.sleep(1)
        seen.append(await request.is_disconnected())
        await respond(send)

    await Connection(b"one", b"two", method="POST").run(Guarded(app).app)
    assert seen == [b"onetwo", False, False]


async def test_a_ready_message_is_given_without_a_checkpoint() -> None:
    got: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await anyio.sleep(0.1)
        with anyio.CancelScope() as scope_:
            scope_.cancel()
            got.append((await receive())["type"])
        await anyio.sleep(2)
        with anyio.CancelScope() as scope_:
            scope_.cancel()
            got.append((await receive())["type"])

    guarded = Guarded(app, cancel_on_disconnect=False)
    await leave(Connection(), guarded.app, after=1)
    assert got == ["http.request", "http.disconnect"]


async def test_a_disconnect_heard_while_the_last_message_is_sent_is_the_end_of_the_response() -> None:
    """Under other middleware `send` may return long after the server has everything."""
    guarded = Guarded(lambda _scope, _receive, send: respond(send))
    connection = Connection()

    async def send(message: Message) -> None:
        await connection.send(message)
        await anyio.sleep(1)

    await guarded.app(connection.scope, connection.receive, send)
    [(_, outcome)] = guarded.spy.outcomes
    assert outcome.ok


async def test_a_disconnect_that_only_send_tells_of_is_one_too() -> None:
    async def receive() -> Message:
        await anyio.sleep_forever()
        raise AssertionError

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        connection.gone = True
        try:
            await send({"type": "http.response.body", "body": b"x", "more_body": True})
        finally:
            heard.append((await receive())["type"])

    heard: list[str] = []
    guarded = Guarded(app)
    connection = Connection(spec_version="2.4")
    with pytest.raises(ClientGoneError):
        await guarded.app(connection.scope, receive, connection.send)
    assert heard == ["http.disconnect"]
    guarded.assert_cancelled()


async def test_a_body_that_comes_after_the_answer_is_not_given() -> None:
    heard: list[str] = []

    async def receive() -> Message:
        await anyio.sleep(1)
        return {"type": "http.request", "body": b"late", "more_body": True}

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await respond(send, 413)
        await anyio.sleep(3)
        heard.append((await receive())["type"])

    guarded = Guarded(app)
    connection = Connection()
    await guarded.app(connection.scope, receive, connection.send)
    assert heard == ["http.disconnect"]


async def test_a_background_task_that_fails_after_the_client_left_is_not_hidden() -> None:
    error = CircuitOpenError("open")

    async def background() -> None:
        await anyio.sleep(5)
        raise error

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await JSONResponse({}, background=BackgroundTask(background))(scope, receive, send)

    guarded = Guarded(app)
    connection = await leave(Connection(), guarded.app, after=2)
    assert connection.error is error


async def test_base_http_middleware_outside_ours_takes_a_quiet_return_for_an_error() -> None:
    """What the documentation warns of; add ours last, so that it stands outermost."""
    guarded = Guarded(Handler())
    connection = await leave(Connection(), BaseHTTPMiddleware(guarded.app, pass_on), after=2)
    assert str(connection.error) == "No response returned."
    guarded.assert_cancelled()


async def test_under_base_http_middleware_an_answered_call_is_no_cancelled_one() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await respond(send)

    guarded = Guarded(app)
    connection = await Connection().run(BaseHTTPMiddleware(guarded.app, pass_on))
    assert connection.status == 200
    [(_, outcome)] = guarded.spy.outcomes
    assert outcome.ok


async def fails_to_clean_up(scope: Scope, receive: Receive, send: Send) -> None:
    """Have two tasks, one of which fails as soon as it is cancelled."""

    async def work() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            raise LookupError("no database")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(work)
        await anyio.sleep_forever()


async def test_what_fails_beside_the_cancelled_handler_leaves_without_its_cancellation() -> None:
    guarded = Guarded(fails_to_clean_up)
    connection = await leave(Connection(), guarded.app, after=1)
    assert isinstance(
        connection.error, ExceptionGroup
    )  # with the cancellation in it, it would end a server on trio
    assert [str(error) for error in connection.error.exceptions] == ["no database"]
    guarded.assert_cancelled()


async def test_a_server_that_cancels_the_request_gets_its_own_cancellation_back() -> None:
    guarded = Guarded(fails_to_clean_up)
    connection = Connection()
    with pytest.raises(ExceptionGroup) as raised, anyio.move_on_after(1) as scope:
        await guarded.app(connection.scope, connection.receive, connection.send)
    assert scope.cancel_called
    assert [str(error) for error in raised.value.exceptions] == ["no database"]
    assert (guarded.bulkhead.in_use(), len(guarded.spy.outcomes)) == (0, 1)


@pytest.mark.parametrize("spec_version", ["2.3", "2.4"])
async def test_a_client_that_leaves_while_the_last_of_it_is_sent_is_no_failure(spec_version: str) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        connection.stalled = True
        await send({"type": "http.response.body", "body": b"all of it"})

    guarded = Guarded(app)
    connection = Connection(spec_version=spec_version)
    await leave(connection, guarded.app, after=1)
    assert type(connection.error) is (ClientGoneError if spec_version == "2.4" else type(None))
    assert [outcome.verdict for _, outcome in guarded.spy.outcomes] == [
        Verdict.NEUTRAL if spec_version == "2.4" else Verdict.SUCCESS
    ]
