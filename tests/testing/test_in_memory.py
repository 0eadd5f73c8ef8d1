"""The in-memory transports, each test for httpx and httpx2 alike."""

from __future__ import annotations

import contextvars
import logging
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from types import ModuleType
from typing import Any

import anyio
import anyio.lowlevel
import httpx
import httpx2
import pytest
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import resilient_llm.testing.httpx
import resilient_llm.testing.httpx2

pytestmark = pytest.mark.anyio

START: Message = {"type": "http.response.start", "status": 200, "headers": [(b"x-a", b"1")]}


def body(data: bytes = b"", *, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}


@pytest.fixture(params=[httpx, httpx2], ids=["httpx", "httpx2"])
def library(request: pytest.FixtureRequest) -> Any:
    """Return httpx or httpx2: the tests use what they have in common."""
    return request.param


def transport(library: ModuleType, app: ASGIApp, **options: Any) -> Any:
    module = resilient_llm.testing.httpx if library is httpx else resilient_llm.testing.httpx2
    return module.ASGIStreamTransport(app, **options)


def client(library: Any, app: ASGIApp, *, timeout: Any = None, **options: Any) -> Any:
    return library.AsyncClient(
        transport=transport(library, app, **options), base_url="http://fake", timeout=timeout
    )


async def read_request(receive: Receive) -> list[Message]:
    messages: list[Message] = []
    while not messages or messages[-1].get("more_body"):
        messages.append(await receive())
    return messages


class Recorder:
    """An app that streams `chunks`, one every `delay` seconds, and writes down what happens to it."""

    def __init__(self, chunks: int = 3, delay: float = 1.0, *, heed_disconnect: bool = True) -> None:
        self.chunks = chunks
        self.delay = delay
        self.heed_disconnect = heed_disconnect
        self.sent: list[float] = []
        self.complete = False
        self.disconnected_at: float | None = None
        self.cancelled_at: float | None = None
        self.ended = anyio.Event()
        self.scope: Scope = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        try:
            await read_request(receive)
            async with anyio.create_task_group() as group:
                group.start_soon(self.watch, receive, group.cancel_scope)
                await self.respond(send)
                group.cancel_scope.cancel()
        except anyio.get_cancelled_exc_class():
            self.cancelled_at = anyio.current_time()
            raise
        finally:
            self.ended.set()

    async def watch(self, receive: Receive, cancel_scope: anyio.CancelScope) -> None:
        assert (await receive())["type"] == "http.disconnect"
        if self.complete:  # as behind a server, it also comes when all has been sent
            return
        self.disconnected_at = anyio.current_time()
        if self.heed_disconnect:
            cancel_scope.cancel()

    async def respond(self, send: Send) -> None:
        await send(START)
        for number in range(self.chunks):
            await anyio.sleep(self.delay)
            await send(body(b"%d" % number))
            self.sent.append(anyio.current_time())
        self.complete = True
        await send(body(more=False))


async def test_the_body_arrives_while_the_app_is_still_sending_it(library: Any) -> None:
    app = Recorder()
    async with client(library, app) as http, http.stream("GET", "/") as response:
        assert response.status_code == 200
        assert response.headers["x-a"] == "1"
        assert anyio.current_time() == 0
        arrived = [(chunk, anyio.current_time()) async for chunk in response.aiter_raw()]
    assert arrived == [(b"0", 1.0), (b"1", 2.0), (b"2", 3.0)]
    assert app.disconnected_at is None


async def test_the_app_sees_the_request_as_from_a_server(library: Any) -> None:
    app = Recorder(chunks=0)
    async with client(library, app, client=("10.0.0.1", 1234), root_path="/root") as http:
        await http.post("/v1/caf%C3%A9?q=1&q=2", headers={"X-Tenant": "a"}, content=b"hello")
    headers = dict(app.scope.pop("headers"))
    assert headers[b"x-tenant"] == b"a"
    assert headers[b"host"] == b"fake"
    app.scope.pop("extensions")
    assert app.scope == {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": "/v1/café",
        "raw_path": b"/v1/caf%C3%A9",
        "query_string": b"q=1&q=2",
        "root_path": "/root",
        "client": ("10.0.0.1", 1234),
        "server": ("fake", None),
    }


async def test_send_waits_until_the_client_takes_what_it_was_sent(library: Any) -> None:
    app = Recorder(chunks=3, delay=0)
    async with client(library, app, max_buffer=0) as http, http.stream("GET", "/") as response:
        async for _ in response.aiter_raw():
            await anyio.sleep(10)
    assert app.sent == [0, 10, 20]


async def test_the_app_may_run_ahead_by_the_size_of_the_buffer(library: Any) -> None:
    app = Recorder(chunks=5, delay=0)
    async with client(library, app, max_buffer=2) as http, http.stream("GET", "/") as response:
        async for _ in response.aiter_raw():
            await anyio.sleep(10)
    assert app.sent == [0, 0, 0, 10, 20]


async def test_closing_the_response_tells_the_app(library: Any) -> None:
    app = Recorder(chunks=100)
    async with client(library, app) as http:
        async with http.stream("GET", "/") as response, aclosing(aiter(response.stream)) as chunks:
            assert [await anext(chunks), await anext(chunks)] == [b"0", b"1"]
        await app.ended.wait()
        assert app.disconnected_at == 2
        assert app.sent == [1, 2]
        assert app.cancelled_at is None


async def test_an_app_that_ignores_a_disconnect_is_cancelled(library: Any) -> None:
    app = Recorder(chunks=100, heed_disconnect=False)
    async with client(library, app, disconnect_grace=5.5) as http:
        async with http.stream("GET", "/"):
            await anyio.sleep(2)
        await app.ended.wait()
    assert app.disconnected_at == 2
    assert app.sent == [1, 2, 3, 4, 5, 6, 7]  # what it sends after that goes nowhere, and does not fail
    assert app.cancelled_at == 7.5


async def test_a_send_that_waits_for_a_client_who_leaves_returns(library: Any) -> None:
    sent = anyio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(START)
        await send(body(b"x"))
        assert (await receive())["type"] == "http.disconnect"
        sent.set()

    async with client(library, app, max_buffer=0, disconnect_grace=60) as http:
        async with http.stream("GET", "/"):
            await anyio.sleep(2)
        await sent.wait()
    assert anyio.current_time() == 2


async def test_cancelling_the_call_while_it_waits_for_the_head_tells_the_app(library: Any) -> None:
    app = Recorder()
    gone: list[float] = []

    async def silent(scope: Scope, receive: Receive, send: Send) -> None:
        await read_request(receive)
        assert (await receive())["type"] == "http.disconnect"
        gone.append(anyio.current_time())
        app.ended.set()

    async with client(library, silent) as http:
        with anyio.move_on_after(3):
            await http.get("/")
        await app.ended.wait()
    assert gone == [3]


async def test_cancelling_the_reader_tells_the_app(library: Any) -> None:
    app = Recorder(chunks=100)
    async with client(library, app) as http:
        response = await http.send(http.build_request("GET", "/"), stream=True)
        with anyio.move_on_after(2.5):
            async for _ in response.aiter_raw():
                pass
        await app.ended.wait()
        assert app.disconnected_at == 2.5
        await response.aclose()


async def test_a_response_may_be_opened_read_and_closed_in_three_tasks(library: Any) -> None:
    app = Recorder(chunks=100)
    responses: list[Any] = []
    async with client(library, app) as http:

        async def open_it() -> None:
            with anyio.fail_after(1):
                responses.append(await http.send(http.build_request("GET", "/"), stream=True))

        async def read_it() -> None:
            async with aclosing(aiter(responses[0].stream)) as chunks:
                assert await anext(chunks) == b"0"

        async def close_it() -> None:
            await responses[0].aclose()

        for step in (open_it, read_it, close_it):
            async with anyio.create_task_group() as group:
                group.start_soon(step)
        await app.ended.wait()
    assert app.disconnected_at == 1


async def test_closing_the_transport_cancels_what_still_runs(library: Any) -> None:
    after_response = Recorder()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/background":
            await send(START)
            await send(body(b"done", more=False))
        try:
            await anyio.sleep_forever()
        finally:
            after_response.sent.append(anyio.current_time())

    under_test = transport(library, app)
    http = library.AsyncClient(transport=under_test, timeout=None)
    assert (await http.get("http://fake/background")).content == b"done"

    async def hang() -> None:
        with pytest.raises(library.RemoteProtocolError, match="without sending a response"):
            await http.get("http://fake/hang")

    async with anyio.create_task_group() as group:
        group.start_soon(hang)
        await anyio.sleep(1)
        assert after_response.sent == []
        await under_test.aclose()
        assert after_response.sent == [1, 1]
    await http.aclose()


async def test_an_upload_goes_at_the_pace_of_the_app(library: Any) -> None:
    sent: list[float] = []
    received: list[Message] = []

    async def chunks() -> AsyncIterator[bytes]:
        for number in range(3):
            sent.append(anyio.current_time())
            yield b"%d" % number

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        while not received or received[-1]["more_body"]:
            await anyio.sleep(10)
            received.append(await receive())
        await send(START)
        await send(body(more=False))

    async with client(library, app, max_buffer=0) as http:
        await http.post("/", content=chunks())
    assert sent == [0, 10, 20]
    assert b"".join(message["body"] for message in received) == b"012"


async def test_an_app_may_answer_without_reading_the_upload(library: Any) -> None:
    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b"x" * 1000

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({**START, "status": 413})
        await send(body(more=False))

    async with client(library, app) as http:
        assert (await http.post("/", content=endless())).status_code == 413


async def test_a_body_at_hand_comes_in_one_message(library: Any) -> None:
    received: list[Message] = []
    ended = anyio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        received.extend(await read_request(receive))
        await send(START)
        await send(body(more=False))
        received.append(await receive())
        ended.set()

    async with client(library, app) as http:
        await http.post("/", content=b"hello")
        await ended.wait()
    assert received == [
        {"type": "http.request", "body": b"hello", "more_body": False},
        {"type": "http.disconnect"},
    ]


async def test_the_head_has_no_body_on_head(library: Any) -> None:
    async with client(library, Recorder()) as http:
        assert (await http.head("/")).content == b""


@pytest.mark.parametrize(
    ("timeouts", "options", "error", "after"),
    [
        ({"connect": 2}, {"connect_delay": 3}, "ConnectTimeout", 2),
        ({"read": 2}, {}, "ReadTimeout", 2),
        ({"write": 2}, {"max_buffer": 0}, "WriteTimeout", 2),
        ({"read": 2}, {"connect_delay": 3}, "ReadTimeout", 5),
    ],
)
async def test_timeouts_before_the_head(
    library: Any, timeouts: dict[str, float], options: dict[str, Any], error: str, after: float
) -> None:
    gone = anyio.Event()

    async def silent(scope: Scope, receive: Receive, send: Send) -> None:
        await anyio.sleep(4)
        await read_request(receive)
        while (await receive())["type"] != "http.disconnect":
            pass
        gone.set()

    async with client(library, silent, timeout=library.Timeout(None, **timeouts), **options) as http:
        with pytest.raises(getattr(library, error)):
            await http.post("/", content=b"x")
        assert anyio.current_time() == after
        if error != "ConnectTimeout":
            with anyio.move_on_after(10):
                await gone.wait()


async def test_the_read_timeout_is_for_each_read(library: Any) -> None:
    async with client(library, Recorder(chunks=3, delay=1.5), timeout=library.Timeout(2)) as http:
        assert (await http.get("/")).content == b"012"
    app = Recorder(chunks=3, delay=2.5)
    async with client(library, app, timeout=library.Timeout(2)) as http:
        async with http.stream("GET", "/") as response:
            with pytest.raises(library.ReadTimeout):
                await response.aread()
        assert anyio.current_time() == 4.5 + 2
        await app.ended.wait()
        assert app.disconnected_at == 6.5


class OopsError(Exception):
    pass


def failing(*before: Message) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        for message in before:
            await send(message)
        raise OopsError

    return app


async def test_an_apps_exception_is_a_500_as_from_a_server(
    library: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with client(library, failing()) as http:
        response = await http.get("/")
    assert (response.status_code, response.text) == (500, "Internal Server Error")
    assert caplog.records[0].exc_info is not None
    assert isinstance(caplog.records[0].exc_info[1], OopsError)


@pytest.mark.parametrize("app_errors", ["respond", "disconnect"])
async def test_an_exception_after_the_start_closes_the_connection(library: Any, app_errors: str) -> None:
    async with client(library, failing(START, body(b"x")), app_errors=app_errors) as http:
        response = await http.send(http.build_request("GET", "/"), stream=True)
        with pytest.raises(library.RemoteProtocolError, match="incomplete chunked read"):
            await response.aread()


async def test_an_exception_before_the_start_may_close_the_connection(library: Any) -> None:
    async with client(library, failing(), app_errors="disconnect") as http:
        with pytest.raises(library.RemoteProtocolError, match="without sending a response"):
            await http.get("/")


@pytest.mark.parametrize("before", [[], [START, body(b"x")]], ids=["before the start", "after it"])
async def test_an_apps_exception_may_be_raised_to_the_client(library: Any, before: list[Message]) -> None:
    async with client(library, failing(*before), app_errors="raise") as http:
        with pytest.raises(OopsError):
            await http.get("/")


async def test_an_exception_after_the_end_is_logged(library: Any, caplog: pytest.LogCaptureFixture) -> None:
    app = failing(START, body(more=False))
    async with client(library, app) as http:
        assert (await http.get("/")).status_code == 200
        await anyio.sleep(1)
    assert [record.levelno for record in caplog.records if record.name == "resilient_llm.testing"] == [
        logging.ERROR
    ]


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([], "returned without completing"),
        ([body()], "expected ASGI message 'http.response.start'"),
        ([START, START], "expected ASGI message 'http.response.body'"),
        ([START], "returned without completing"),
        ([START, body(more=False), body()], "after the response was completed"),
    ],
)
async def test_an_app_that_breaks_the_protocol_is_told(
    library: Any, messages: list[Message], complaint: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        for message in messages:
            await send(message)

    async with client(library, app) as http:
        with anyio.move_on_after(1):
            with suppress(library.RemoteProtocolError):
                await http.get("/")
        await anyio.sleep(1)
    (record,) = [record for record in caplog.records if record.name == "resilient_llm.testing"]
    assert record.exc_info is not None
    assert complaint in str(record.exc_info[1])


@pytest.mark.parametrize("how", ["reset", "close"])
@pytest.mark.parametrize("before", [[], [START, body(b"x")]], ids=["before the start", "after it"])
async def test_an_app_may_break_the_connection(library: Any, how: str, before: list[Message]) -> None:
    later: list[Message] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert "resilient_llm.connection" in scope["extensions"]
        for message in (*before, {"type": "resilient_llm.connection", "how": how}):
            await send(message)
        later.extend(await read_request(receive))

    async with client(library, app) as http:
        error = library.ReadError if how == "reset" else library.RemoteProtocolError
        with pytest.raises(error):
            await http.get("/")
        await anyio.sleep(1)
    assert later == [{"type": "http.disconnect"}]


async def test_the_apps_context_is_not_the_callers(library: Any) -> None:
    variable = contextvars.ContextVar("variable", default="nobody's")
    seen: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(variable.get())
        await send(START)
        await send(body(more=False))

    variable.set("the caller's")
    async with client(library, app) as http:
        await http.get("/")
    assert seen == ["nobody's"]


async def test_two_hundred_calls_at_once(library: Any) -> None:
    app = Recorder(chunks=5)
    done: list[bytes] = []
    async with client(library, app) as http, anyio.create_task_group() as group:

        async def call() -> None:
            done.append((await http.get("/")).content)

        for _ in range(200):
            group.start_soon(call)
    assert done == [b"01234"] * 200
    assert anyio.current_time() == 5


async def test_a_synchronous_body_is_refused(library: Any) -> None:
    request = library.Request("POST", "http://fake/", content=iter([b"x"]))
    with pytest.raises(TypeError, match="async request body"):
        await transport(library, Recorder()).handle_async_request(request)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_buffer": -1}, "max_buffer must be >= 0 bytes, got -1"),
        ({"disconnect_grace": -1}, "disconnect_grace must be >= 0 seconds, got -1"),
        ({"connect_delay": float("nan")}, "connect_delay must be >= 0 seconds, got nan"),
        ({"app_errors": "ignore"}, r"app_errors must be one of .*, got 'ignore'"),
    ],
)
async def test_options_are_validated(library: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        transport(library, Recorder(), **options)


async def test_cancellation_at_every_await_leaves_nothing_running(library: Any) -> None:
    """Cancel the call after any number of scheduler steps; the transport closes, with all apps ended."""

    async def attempt(steps: int) -> bool:
        app = Recorder(chunks=3, delay=0)
        under_test = transport(library, app, max_buffer=0)
        finished = False
        async with (
            library.AsyncClient(transport=under_test, timeout=5) as http,
            anyio.create_task_group() as group,
        ):

            async def call() -> None:
                nonlocal finished
                await http.post("http://fake/", content=b"x")
                finished = True

            group.start_soon(call)
            for _ in range(steps):
                await anyio.lowlevel.checkpoint()
            group.cancel_scope.cancel()
        assert not under_test._exchanges
        return finished

    steps = 0
    while not await attempt(steps):
        steps += 1
    assert steps > 5


async def test_starlette_can_ask_whether_the_client_is_gone(library: Any) -> None:
    answers: list[bool] = []
    asked = anyio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        await request.body()
        answers.append(await request.is_disconnected())
        await anyio.sleep(3)
        answers.append(await request.is_disconnected())
        asked.set()

    async with client(library, app, disconnect_grace=10) as http:
        with anyio.move_on_after(2):
            await http.post("/", content=b"x")
        await asked.wait()
    assert answers == [False, True]
