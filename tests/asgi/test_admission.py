"""Requests through policies: who waits, what the app finds, and when what was held is free again."""

from __future__ import annotations

import asyncio
import gc
import math
import weakref
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from starlette.background import BackgroundTask
from starlette.requests import Request as StarletteRequest
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from resilient_llm import Bulkhead, Call, ConfigurationError, Deadline, Outcome, Reply, Retry, Verdict
from resilient_llm.asgi import ResilienceMiddleware
from resilient_llm.call import CallNext
from resilient_llm.context import Ambient, ambient, current
from resilient_llm.errors import AttemptError, CircuitOpenError
from resilient_llm.ordering import Placement
from resilient_llm.outcome import SUCCESS
from resilient_llm.streams import BufferedStream
from tests.asgi.doubles import Spy, app_that_takes, guard, of
from tests.asgi.server import TENANT, Connection, read_body, respond
from tests.support import cancel_at_every_await

pytestmark = pytest.mark.anyio


async def test_one_tenant_waits_and_another_does_not() -> None:
    bulkhead = Bulkhead(max_concurrent=1)
    app = guard(app_that_takes(1), bulkhead)
    connections = [of("noisy") for _ in range(3)] + [of("quiet")]
    async with anyio.create_task_group() as tasks:
        for connection in connections:
            tasks.start_soon(connection.run, app)
            await anyio.lowlevel.checkpoint()
    assert [connection.ended for connection in connections] == [1, 2, 3, 1]
    assert {connection.status for connection in connections} == {200}
    assert bulkhead.in_use() == 0


async def test_a_full_queue_is_a_429_at_once() -> None:
    app = guard(app_that_takes(5), Bulkhead(max_concurrent=1, max_queued=0))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(of("acme").run, app)
        await anyio.sleep(0.1)
        second = await of("acme").run(app)
        assert second.ended == 0
        assert second.status == 429
        assert second.asked == []
        tasks.cancel_scope.cancel()


async def test_a_call_says_what_is_asked_for_whom() -> None:
    spy = Spy()
    connection = of("acme", method="POST", path="/v1/chat")
    await connection.run(guard(app_that_takes(0), spy, name="door"))
    [call] = spy.calls
    assert (call.tenant, call.inbound, call.target.name, call.number) == ("acme", True, "door", 0)
    assert (call.request.method, call.request.url) == ("POST", "/v1/chat")
    assert call.request.header(b"x-tenant-id") == b"acme"
    assert call.deadline == math.inf
    [reply] = spy.replies
    assert reply.status == 200
    assert [chunk async for chunk in reply.stream] == []


async def test_the_app_finds_tenant_deadline_and_priority() -> None:
    found: list[Ambient] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        found.append(current.get())
        await respond(send)

    spy = Spy()
    before = current.get()
    with ambient(priority=3):
        await of("acme").run(guard(app, Deadline(30), spy))
    [here] = found
    assert (here.tenant, here.priority, here.owner) == ("acme", 3, spy.calls[0])
    assert here.deadline == pytest.approx(spy.calls[0].started + 30)
    assert current.get() is before


async def test_an_inherited_deadline_holds_inside() -> None:
    found: list[float] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        found.append(current.get().effective_deadline() - anyio.current_time())
        await respond(send)

    with ambient(timeout=3):
        await of("acme").run(guard(app, Deadline(30)))
    assert found == [pytest.approx(3)]


async def test_the_app_runs_in_the_servers_task_and_context() -> None:
    tasks_seen: list[anyio.TaskInfo] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        tasks_seen.append(anyio.get_current_task())
        await respond(send)

    before = current.get()
    await of("acme").run(guard(app, Deadline(5), Bulkhead(max_concurrent=1)))
    assert tasks_seen == [anyio.get_current_task()]
    assert current.get() is before


async def test_a_policy_may_ask_for_what_a_request_does_not_say() -> None:
    spy = Spy()
    await of("acme").run(guard(app_that_takes(0), spy, Bulkhead(max_concurrent=1, key="model")))
    assert (spy.calls[0].model, spy.calls[0].profile.provider) == (None, "asgi")


async def test_a_slot_is_held_to_the_end_of_the_stream_and_free_before_background_tasks() -> None:
    bulkhead = Bulkhead(max_concurrent=1)
    spy = Spy()
    used: list[int] = []

    async def chunks() -> Any:
        for _ in range(3):
            used.append(bulkhead.in_use())
            yield b"x"
            await anyio.sleep(1)

    async def background() -> None:
        used.append(bulkhead.in_use())
        await anyio.sleep(10)
        used.append(-1)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        response = StreamingResponse(chunks(), background=BackgroundTask(background))
        await response(scope, receive, send)

    started = anyio.current_time()
    connection = await of("acme").run(guard(app, bulkhead, spy))
    assert used == [1, 1, 1, 0, -1]
    assert spy.outcomes[0][0] - started == pytest.approx(3)
    assert connection.ended == 13


async def test_background_tasks_have_no_deadline() -> None:
    done: list[float] = []

    async def background() -> None:
        done.append(current.get().effective_deadline())
        await anyio.sleep(60)
        done.append(anyio.current_time())

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        response = PlainTextResponse("ok", background=BackgroundTask(background))
        await response(scope, receive, send)

    connection = await of("acme").run(guard(app, Deadline(5)))
    assert connection.error is None
    assert done[0] == math.inf
    assert len(done) == 2


@pytest.mark.parametrize(
    ("status", "verdict"),
    [
        (200, Verdict.SUCCESS),
        (404, Verdict.SUCCESS),
        (429, Verdict.NEUTRAL),
        (500, Verdict.FAILURE),
        (503, Verdict.FAILURE),
    ],
)
async def test_the_status_says_how_a_call_ended(status: int, verdict: Verdict) -> None:
    spy = Spy()
    await of("acme").run(guard(app_that_takes(0, status), spy))
    [(_, outcome)] = spy.outcomes
    assert (outcome.verdict, outcome.status) == (verdict, status)


async def test_an_exception_is_a_failure_and_leaves_as_itself() -> None:
    error = LookupError("no such thing")

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise error

    spy = Spy()
    connection = await of("acme").run(guard(app, spy))
    assert connection.error is error
    assert error.__context__ is None
    assert connection.sent == []
    [(_, outcome)] = spy.outcomes
    assert (outcome.verdict, outcome.error_type) == (Verdict.FAILURE, "LookupError")


async def test_an_exception_group_of_the_app_leaves_as_itself() -> None:
    group = ExceptionGroup("two", [LookupError("one"), ValueError("two")])

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise group

    assert (await of("acme").run(guard(app, Spy()))).error is group


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)], ids=repr)
async def test_what_ends_the_process_leaves_as_itself(error: BaseException) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise error

    bulkhead = Bulkhead(max_concurrent=1)
    connection = of("acme")
    with pytest.raises(type(error)) as raised:
        await connection.run(guard(app, bulkhead))
    assert raised.value is error
    assert bulkhead.in_use() == 0


async def test_an_exception_is_gone_when_the_server_has_dropped_it() -> None:
    class Body:
        pass

    kept: list[weakref.ref[Body]] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        body = Body()
        kept.append(weakref.ref(body))
        await anyio.sleep(1)
        raise LookupError

    middleware = guard(app, Deadline(5), Bulkhead(max_concurrent=1))
    gc.disable()
    try:
        connection = await of("acme").run(middleware)
        assert isinstance(connection.error, LookupError)
        assert kept[0]() is not None
        connection.error = None
        assert kept[0]() is None
    finally:
        gc.enable()


async def test_an_app_that_does_not_answer_is_the_servers_to_deal_with() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        pass

    spy = Spy()
    connection = await of("acme").run(guard(app, spy))
    assert (connection.error, connection.sent) == (None, [])
    assert spy.outcomes[0][1].error_type == "no_response"


async def test_a_refusal_that_the_app_raises_becomes_its_response() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise CircuitOpenError("the provider is down", retry_after=4.2)

    connection = await of("acme").run(guard(app, Spy()))
    assert (connection.status, connection.headers[b"retry-after"]) == (503, b"5")


async def test_a_failed_attempt_that_the_app_raises_leaves_as_itself() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise AttemptError(Outcome(verdict=Verdict.FAILURE, error_type="502"))

    assert isinstance((await of("acme").run(guard(app, Spy()))).error, AttemptError)


async def test_a_policy_may_answer_in_the_apps_stead() -> None:
    class Closed:
        placement = Placement.ADMISSION

        async def __call__(self, call: Call, call_next: CallNext) -> Reply:
            return Reply(203, [(b"x-by", b"policy")], BufferedStream([b"sorry, ", b"closed"]))

    spy = Spy()
    connection = await of("acme").run(guard(app_that_takes(1), spy, Closed()))
    assert (connection.status, connection.headers[b"x-by"], connection.body) == (
        203,
        b"policy",
        b"sorry, closed",
    )
    assert spy.outcomes[0][1].ok


async def test_a_client_that_leaves_ends_what_a_policy_answers() -> None:
    class Endless:
        placement = Placement.ADMISSION
        closed = False

        async def __call__(self, call: Call, call_next: CallNext) -> Reply:
            return Reply(200, [], self)

        async def __aiter__(self) -> Any:
            while True:
                yield b"."
                await anyio.sleep(1)

        async def aclose(self) -> None:
            self.closed = True

    endless = Endless()
    connection = of("acme")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(connection.disconnect_at, 2.5)
        await connection.run(guard(app_that_takes(1), endless))
    assert connection.ended == 2.5
    assert endless.closed


async def test_a_request_cannot_be_replayed() -> None:
    class Twice:
        placement = Placement.ADMISSION

        async def __call__(self, call: Call, call_next: CallNext) -> Reply:
            await call_next(call)
            return await call_next(call)

    connection = await of("acme").run(guard(app_that_takes(0), Twice()))
    assert isinstance(connection.error, RuntimeError)
    assert "cannot be replayed" in str(connection.error)
    with pytest.raises(ConfigurationError, match="replays calls"):
        guard(app_that_takes(0), Retry())


async def test_what_must_be_awaited_at_the_end_is_awaited_before_background_tasks() -> None:
    order: list[str] = []

    class Lease:
        placement = Placement.ADMISSION

        async def __call__(self, call: Call, call_next: CallNext) -> Reply:
            call.on_finish(lambda _outcome: self.give_back())
            return await call_next(call)

        async def give_back(self) -> None:
            await anyio.sleep(0.1)
            order.append("given back")

    async def background() -> None:
        order.append("background")

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await PlainTextResponse("ok", background=BackgroundTask(background))(scope, receive, send)

    await of("acme").run(guard(app, Lease()))
    assert order == ["given back", "background"]

    async def crash(scope: Scope, receive: Receive, send: Send) -> None:
        raise LookupError

    with anyio.CancelScope() as scope:
        scope.cancel()
        await of("acme").run(guard(crash, Lease()))
    assert order[2:] == ["given back"]


async def test_other_messages_of_the_response_pass() -> None:
    sent: list[Message] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.early_hint", "links": []})
        await send({"type": "http.response.start", "status": 200, "headers": [], "trailers": True})
        await send({"type": "http.response.body", "body": b"x"})
        await send({"type": "http.response.trailers", "headers": [(b"x-sum", b"1")]})

    async def send(message: Message) -> None:
        sent.append(message)

    spy = Spy()
    connection = of("acme")
    await guard(app, spy)(connection.scope, connection.receive, send)
    assert [message["type"].rpartition(".")[2] for message in sent] == [
        "early_hint",
        "start",
        "body",
        "trailers",
    ]
    assert [outcome for _, outcome in spy.outcomes] == [Outcome(verdict=Verdict.SUCCESS, status=200)]
    assert SUCCESS.ok


@pytest.mark.parametrize("kind", ["pathsend", "zerocopysend"])
async def test_a_file_sent_by_the_server_ends_the_call(kind: str) -> None:
    spy = Spy()
    open_calls: list[int] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        open_calls.append(len(spy.outcomes))
        await send({"type": f"http.response.{kind}"})
        open_calls.append(len(spy.outcomes))

    async def send(message: Message) -> None:
        pass

    connection = of("acme")
    await guard(app, spy)(connection.scope, connection.receive, send)
    assert open_calls == [0, 1]


async def test_a_long_body_is_read_no_further_ahead_than_told() -> None:
    chunk = b"x" * 1000

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await anyio.sleep(1)
        assert len(connection.asked) == 3  # 2 are there, the third is over the cap
        assert (await receive())["body"] == chunk
        await anyio.sleep(1)
        assert len(connection.asked) == 4
        body = await read_body(receive)
        await respond(send, body=str(len(body)).encode())

    connection = Connection(*[chunk] * 10, headers=[TENANT], method="POST")
    await connection.run(guard(app, Spy(), max_buffered_body=2500))
    assert connection.error is None
    assert connection.body == b"9000"


async def test_an_upload_arrives_whole() -> None:
    chunks = [bytes([n]) * 50_000 for n in range(20)]

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        body = await StarletteRequest(scope, receive).body()
        await respond(send, body=body)

    connection = Connection(*chunks, headers=[TENANT], method="POST")
    await connection.run(guard(app, Bulkhead(max_concurrent=1), max_buffered_body=1))
    assert connection.body == b"".join(chunks)


async def test_what_the_servers_receive_raises_is_the_apps_to_see() -> None:
    error = ConnectionResetError("broken")

    async def receive() -> Message:
        raise error

    caught: list[BaseException] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await receive()
        except OSError as failure:
            caught.append(failure)
        await respond(send)

    connection = of("acme")
    await guard(app, Spy())(connection.scope, receive, connection.send)
    assert caught == [error]
    assert connection.status == 200


async def test_a_server_that_repeats_its_body_is_not_read_for_ever() -> None:
    asked = 0

    async def receive() -> Message:
        nonlocal asked
        asked += 1
        return {"type": "http.request", "body": b"x", "more_body": False}

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await anyio.sleep(1)
        await respond(send, body=(await receive())["body"])

    connection = of("acme")
    await guard(app, Spy())(connection.scope, receive, connection.send)
    assert connection.body == b"x"
    assert asked == 2


async def test_cancellation_at_every_await_leaves_nothing_held() -> None:
    bulkhead = Bulkhead(max_concurrent=1)
    spy = Spy()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        body = await read_body(receive)
        await anyio.sleep(1)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body, "more_body": True})
        await anyio.sleep(1)
        await send({"type": "http.response.body", "body": b""})
        await anyio.sleep(1)  # a background task

    middleware = guard(app, Deadline(60), spy, bulkhead)
    blocked = guard(app_that_takes(0.5), bulkhead)

    async def scenario() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(of("acme").run, blocked)
            await anyio.sleep(0.1)
            connection = Connection(b"one", b"two", headers=[TENANT], method="POST")
            await connection.run(middleware)  # waits in the queue first

    async def check() -> None:
        assert bulkhead.in_use() == 0
        assert bulkhead.queued() == 0
        assert all(call.finished for call in spy.calls)
        assert len(spy.outcomes) == len(spy.calls)
        assert middleware._drain._running == 0

    assert await cancel_at_every_await(scenario, check) >= 8


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_asyncios_own_cancellation_is_left_as_it_is() -> None:
    bulkhead = Bulkhead(max_concurrent=1)
    middleware = guard(app_that_takes(10), bulkhead)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await of("acme").run(middleware)
    task = asyncio.current_task()
    assert task is not None
    assert (task.cancelling(), bulkhead.in_use()) == (0, 0)

    async def awaits_what_was_cancelled(scope: Scope, receive: Receive, send: Send) -> None:
        future = asyncio.get_running_loop().create_future()
        future.cancel()
        await future

    with pytest.raises(asyncio.CancelledError):
        await of("acme").run(guard(awaits_what_was_cancelled, bulkhead))
    assert (task.cancelling(), bulkhead.in_use()) == (0, 0)


async def test_two_middlewares_nest() -> None:
    outer, inner = Bulkhead(max_concurrent=1), Bulkhead(max_concurrent=1)
    found: list[Ambient] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        found.append(current.get())
        await respond(send, body=await read_body(receive))

    stack = guard(guard(app, Deadline(30), inner), Deadline(10), outer)
    connection = Connection(b"one", b"two", headers=[TENANT])
    await connection.run(stack)
    assert connection.body == b"onetwo"
    assert found[0].deadline == pytest.approx(10)
    assert (outer.in_use(), inner.in_use()) == (0, 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_buffered_body": 0}, "max_buffered_body=0"),
        ({"drain_timeout": -1}, "drain_timeout=-1"),
        ({"error_format": "xml"}, "error_format='xml': allowed are 'problem', 'openai', 'anthropic'"),
        ({"known_tenants": "acme"}, "known_tenants='acme'"),
        ({"default_tenant": ""}, "default_tenant=''"),
        ({"tenant": 7}, "tenant=7"),
        ({"tenant": "no header"}, "tenant='no header'"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        ResilienceMiddleware(app_that_takes(0), **{"tenant": "x-tenant-id", **options})
    assert message in str(raised.value)


@pytest.mark.parametrize("asked", ["0.30000000000000004", ".3", "3e-1"])
async def test_a_caller_may_write_its_deadline_as_its_language_does(asked: str) -> None:
    connection = of("acme")
    connection.scope["headers"].append((b"x-request-timeout", asked.encode()))
    await connection.run(guard(app_that_takes(5), Deadline(8)))
    assert connection.status == 504
    assert connection.ended == pytest.approx(0.3)
