"""Field cases ASGI-*, and what others ask of the ASGI door: LIM-11, RA-16, OBS-*, CAN-*."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any

import anyio
import pytest
from fastapi import FastAPI, WebSocket
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind
from starlette.applications import Starlette
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route, WebSocketRoute
from starlette.testclient import TestClient
from starlette.types import ASGIApp, Receive, Scope, Send

from resilient_llm import Bulkhead, CircuitOpenError, Deadline
from resilient_llm.asgi import ClientAddress, ResilienceMiddleware, TenantHeader
from resilient_llm.context import current
from resilient_llm.outcome import CANCELLED
from resilient_llm.telemetry import Telemetry
from resilient_llm.testing import run_virtual
from tests.asgi.doubles import Spy, app_that_takes, guard, of
from tests.asgi.server import TENANT, Connection, respond

pytestmark = pytest.mark.anyio

GZIP = (b"accept-encoding", b"gzip")
BODY = b'{"messages": [{"role": "user", "content": "CANARY-123"}]}'


async def serve(app: ASGIApp, connection: Connection, *, leaves: float) -> Connection:
    """Serve a request of a client that leaves after a while."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(connection.disconnect_at, leaves)
        await connection.run(app)
        tasks.cancel_scope.cancel()
    return connection


async def pass_on(request: Request, call_next: Any) -> Any:
    return await call_next(request)


@pytest.mark.parametrize("policies", [False, True])
async def test_asgi_01_a_disconnect_is_seen_with_our_middleware_in_the_stack(policies: bool) -> None:
    seen: list[float] = []

    async def endpoint(request: Request) -> PlainTextResponse:
        while not await request.is_disconnected():  # noqa: ASYNC110 - as users do
            await anyio.sleep(0.07)
        seen.append(connection.now())
        return PlainTextResponse("")

    app: ASGIApp = Starlette(routes=[Route("/", endpoint)])
    for _ in range(3):
        bulkheads = [Bulkhead(max_concurrent=1)] if policies else []
        app = guard(app, *bulkheads, cancel_on_disconnect=False)
    connection = Connection()
    await serve(app, connection, leaves=0.2)
    assert connection.error is None
    assert seen == [0.21]


@pytest.mark.parametrize("policies", [False, True])
async def test_asgi_03_context_variables_of_the_app_are_seen_outside(policies: bool) -> None:
    variable: ContextVar[str] = ContextVar("variable", default="unset")

    async def endpoint(_request: Request) -> PlainTextResponse:
        variable.set("by the endpoint")
        return PlainTextResponse("ok")

    app = Starlette(routes=[Route("/", endpoint)])
    await of("acme").run(guard(app, *([Deadline(5), Bulkhead(max_concurrent=1)] if policies else [])))
    assert variable.get() == "by the endpoint"


@pytest.mark.parametrize("cancel", [True, False])
async def test_asgi_04_a_client_that_left_before_the_answer_is_no_error(
    cancel: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    spy = Spy()
    connection = await serve(guard(app, spy, cancel_on_disconnect=cancel), of("acme"), leaves=1)
    assert (connection.error, connection.sent, connection.ended) == (None, [], 1)
    assert [outcome for _, outcome in spy.outcomes] == [CANCELLED]
    assert caplog.records == []

    async def broken(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        raise LookupError("a real one")

    connection = await serve(guard(broken, spy, cancel_on_disconnect=False), of("acme"), leaves=1)
    assert isinstance(connection.error, LookupError)


@pytest.mark.parametrize("spec_version", ["2.3", "2.4"])
@pytest.mark.parametrize("policies", [False, True])
async def test_asgi_07_a_stream_ends_within_one_send_of_the_disconnect(
    spec_version: str, policies: bool
) -> None:
    taken: list[float] = []

    class Events(AsyncIterator[bytes]):
        async def __anext__(self) -> bytes:
            taken.append(connection.now())
            await anyio.sleep(0.07)
            return b"data: x\n\n"

    async def endpoint(_request: Request) -> StreamingResponse:
        return StreamingResponse(Events(), media_type="text/event-stream")

    bulkhead = Bulkhead(max_concurrent=1)
    app = guard(Starlette(routes=[Route("/", endpoint)]), *([bulkhead] if policies else []))
    connection = of("acme", spec_version=spec_version)
    await serve(app, connection, leaves=0.2)
    assert taken == [0, 0.07, 0.14]
    assert connection.ended == pytest.approx(0.2 if spec_version == "2.3" else 0.21)
    assert bulkhead.in_use() == 0


async def test_asgi_08_with_gzip_outside_each_event_has_its_own_send() -> None:
    async def events() -> AsyncIterator[str]:
        for n in range(3):
            await anyio.sleep(2)
            yield f"data: {n}\n\n"

    async def endpoint(_request: Request) -> StreamingResponse:
        return StreamingResponse(events(), media_type="text/event-stream")

    app = guard(Starlette(routes=[Route("/", endpoint)]), Deadline(60), Bulkhead(max_concurrent=1))
    connection = await Connection(headers=[TENANT, GZIP]).run(GZipMiddleware(app))
    assert [(at, message.get("body")) for at, message in connection.sent] == [
        (0, None),
        (2, b"data: 0\n\n"),
        (4, b"data: 1\n\n"),
        (6, b"data: 2\n\n"),
        (6, b""),
    ]


@pytest.mark.parametrize("policies", [(), (Bulkhead(max_concurrent=1),)], ids=["no policies", "policies"])
def test_asgi_10_lifespan_and_websockets_pass(policies: Any) -> None:
    log: list[str] = []

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[dict[str, str]]:
        log.append("startup")
        yield {"pool": "open"}
        log.append("shutdown")

    async def echo(socket: WebSocket) -> None:
        await socket.accept()
        log.append(socket.state.pool)
        await socket.send_text(await socket.receive_text())
        await socket.close()

    app = Starlette(routes=[WebSocketRoute("/ws", echo)], lifespan=lifespan)
    app.add_middleware(ResilienceMiddleware, tenant="x-tenant-id", policies=policies)
    with TestClient(app) as client:
        with client.websocket_connect("/ws") as socket:
            socket.send_text("hello")
            assert socket.receive_text() == "hello"
        assert client.get("/nowhere", headers={"x-tenant-id": "acme"}).status_code == 404
        assert client.get("/nowhere").status_code == 401
    assert log == ["startup", "open", "shutdown"]


async def test_asgi_10_unknown_scopes_pass_untouched() -> None:
    given: list[Any] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        given.extend([scope, receive, send])

    scope = {"type": "something.new"}
    connection = Connection()
    receive, send = connection.receive, connection.send
    await guard(app, Bulkhead(max_concurrent=1))(scope, receive, send)
    assert [id(thing) for thing in given] == [id(scope), id(receive), id(send)]


async def tell_tenant(scope: Scope, receive: Receive, send: Send) -> None:
    await respond(send, body=str(current.get().tenant).encode())


async def test_lim_11_a_forged_header_opens_no_compartment() -> None:
    """The tenant comes from the key; whatever the client writes into other headers changes nothing."""
    keys = {"Bearer key-of-acme": "acme"}
    bulkhead = Bulkhead(max_concurrent=1, max_queued=0)

    def from_key(scope: Scope) -> str | None:
        return keys.get(dict(scope["headers"]).get(b"authorization", b"").decode())

    app = ResilienceMiddleware(app_that_takes(1), tenant=from_key, policies=[bulkhead])
    key = (b"authorization", b"Bearer key-of-acme")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(Connection(headers=[key]).run, app)
        await anyio.sleep(0.1)
        forged = await Connection(headers=[key, (b"x-tenant-id", b"fresh-bucket")]).run(app)
        assert forged.status == 429
        victim = await Connection(headers=[(b"x-tenant-id", b"acme")]).run(app)
        assert victim.status == 401


@pytest.mark.parametrize(("peer", "status"), [("10.0.0.1", 200), ("198.51.100.66", 401)])
async def test_lim_11_a_header_counts_from_a_trusted_peer_only(peer: str, status: int) -> None:
    source = TenantHeader("x-tenant-id", trusted_peers=["10.0.0.0/24"])
    connection = Connection(headers=[(b"x-tenant-id", b"victim")], client=(peer, 1))
    assert (await connection.run(ResilienceMiddleware(tell_tenant, tenant=source))).status == status


async def test_lim_11_the_address_is_the_rightmost_hop_that_is_not_ours() -> None:
    source = ClientAddress(trusted_peers=["10.0.0.0/24"])
    hops = [(b"x-forwarded-for", b"1.2.3.4, 198.51.100.66")]
    connection = Connection(headers=hops, client=("10.0.0.1", 1))
    assert (await connection.run(ResilienceMiddleware(tell_tenant, tenant=source))).body == b"198.51.100.66"


@pytest.mark.parametrize(("back_in", "header"), [(0.4, b"1"), (59.2, b"60")])
@pytest.mark.parametrize("error_format", ["problem", "openai", "anthropic"])
async def test_ra_16_our_own_503_says_when_to_come_back(
    back_in: float, header: bytes, error_format: Any
) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise CircuitOpenError("all targets cool down", retry_after=back_in)

    connection = await of("acme").run(guard(app, Spy(), error_format=error_format))
    assert (connection.status, connection.headers[b"retry-after"]) == (503, header)


async def test_ra_16_a_429_is_the_callers_own_limit_and_an_upstreams_529_stays_one() -> None:
    app = guard(app_that_takes(5), Bulkhead(max_concurrent=1, max_queued=0))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(of("acme").run, app)
        await anyio.sleep(0.1)
        own = await of("acme").run(app)
        tasks.cancel_scope.cancel()
    assert own.status == 429
    assert int(own.headers[b"retry-after"]) >= 1
    assert (await of("acme").run(guard(app_that_takes(0, status=529), Spy()))).status == 529


class Recorder:
    """An OpenTelemetry SDK that keeps what it is given, and a server's span around each request."""

    def __init__(self) -> None:
        self.spans = InMemorySpanExporter()
        self.tracer_provider = TracerProvider()
        self.tracer_provider.add_span_processor(SimpleSpanProcessor(self.spans))
        self.reader = InMemoryMetricReader()
        self.meter_provider = MeterProvider([self.reader])
        self.telemetry = Telemetry(tracer_provider=self.tracer_provider, meter_provider=self.meter_provider)

    def server(self, app: ASGIApp) -> ASGIApp:
        tracer = self.tracer_provider.get_tracer("server")

        async def traced(scope: Scope, receive: Receive, send: Send) -> None:
            with tracer.start_as_current_span(scope["method"], kind=SpanKind.SERVER):
                await app(scope, receive, send)

        return traced

    def series(self) -> set[tuple[str, str]]:
        data = self.reader.get_metrics_data()
        return {
            (metric.name, json.dumps(dict(point.attributes or {}), sort_keys=True))
            for resource in (data.resource_metrics if data else ())
            for scope in resource.scope_metrics
            for metric in scope.metrics
            for point in metric.data.data_points
        }


async def test_obs_waits_and_tenant_show_on_the_servers_span() -> None:
    recorder = Recorder()
    app = guard(app_that_takes(1), Bulkhead(max_concurrent=1), telemetry=recorder.telemetry)
    async with anyio.create_task_group() as tasks:
        for _ in range(2):
            tasks.start_soon(of("acme").run, recorder.server(app))
    spans = recorder.spans.get_finished_spans()
    servers = [span for span in spans if span.kind is SpanKind.SERVER]
    [wait] = [span for span in spans if span.name == "wait bulkhead"]
    assert wait.parent is not None
    assert wait.parent.span_id in {span.context.span_id for span in servers if span.context}
    assert {(span.attributes or {}).get("resilient_llm.tenant") for span in servers} == {"acme"}


async def test_obs_the_tenant_shows_without_policies_too() -> None:
    recorder = Recorder()
    app = ResilienceMiddleware(tell_tenant, tenant="x-tenant-id", telemetry=recorder.telemetry)
    await of("acme").run(recorder.server(app))
    [span] = recorder.spans.get_finished_spans()
    assert (span.attributes or {})["resilient_llm.tenant"] == "acme"


@pytest.mark.parametrize("leaves", [0.5, 1.5, 2.5])
async def test_obs_01_and_02_whoever_leaves_leaves_one_ended_span_and_no_log(
    leaves: float, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder()
    bulkhead = Bulkhead(max_concurrent=1)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await anyio.sleep(1)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x", "more_body": True})
        await anyio.sleep(1)
        await send({"type": "http.response.body", "body": b""})
        await anyio.sleep(1)

    guarded = guard(app, Deadline(60), bulkhead, telemetry=recorder.telemetry)
    with caplog.at_level(logging.DEBUG):
        await serve(recorder.server(guarded), of("acme"), leaves=leaves)
    assert [span.kind for span in recorder.spans.get_finished_spans()] == [SpanKind.SERVER]
    assert [
        record for record in caplog.records if record.name.startswith(("opentelemetry", "resilient_llm"))
    ] == []
    assert bulkhead.in_use() == 0


async def test_obs_04_a_thousand_chunks_make_no_span_of_ours() -> None:
    recorder = Recorder()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(1000):
            await send({"type": "http.response.body", "body": b"x", "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    await of("acme").run(recorder.server(guard(app, Deadline(5), telemetry=recorder.telemetry)))
    assert len(recorder.spans.get_finished_spans()) == 1


async def test_obs_05_random_tenants_and_paths_make_no_series() -> None:
    recorder = Recorder()
    bulkhead = Bulkhead(max_concurrent=1, max_queued=0, max_keys=10)
    app = guard(
        app_that_takes(0), bulkhead, telemetry=recorder.telemetry, known_tenants=lambda name: name != "no"
    )
    for n in range(20):
        await of(f"tenant-{n}", path=f"/scan/{n}").run(app)
        await of("no", path=f"/scan/{n}").run(app)
    before = recorder.series()
    for n in range(20, 200):
        await of(f"tenant-{n}", path=f"/scan/{n}").run(app)
        await of("no", path=f"/scan/{n}").run(app)
    assert recorder.series() == before
    assert "resilient_llm.rejections" in {name for name, _ in before}
    assert not any("tenant-" in labels or "/scan" in labels for _, labels in before)


async def test_obs_06_and_07_neither_prompts_nor_keys_show_anywhere(caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder()
    secrets = ("CANARY-123", "sk-FAKE", "key=AIza-FAKE")
    headers = [TENANT, (b"authorization", b"Bearer sk-FAKE")]

    async def crash(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        raise CircuitOpenError("refused CANARY-123 for sk-FAKE")

    shown: list[object] = []
    bulkhead = Bulkhead(max_concurrent=1, max_queued=0)
    policies = (Deadline(5), bulkhead)
    with caplog.at_level(logging.DEBUG, logger="resilient_llm"):
        for app in (app_that_takes(60), crash):
            door = guard(app, *policies, telemetry=recorder.telemetry)
            async with anyio.create_task_group() as tasks:
                for _ in range(2):
                    connection = Connection(BODY, method="POST", headers=headers)
                    connection.scope["query_string"] = b"key=AIza-FAKE"
                    shown.append(connection.sent)
                    tasks.start_soon(connection.run, recorder.server(door))
    shown += [span.to_json() for span in recorder.spans.get_finished_spans()]
    shown += [recorder.series(), caplog.text]
    assert len(shown) >= 8
    for secret in secrets:
        assert secret not in repr(shown)


async def test_can_01_a_cancel_in_the_turn_of_the_hand_over_leaves_the_slot_free() -> None:
    bulkhead = Bulkhead(max_concurrent=1)
    app = guard(app_that_takes(1), bulkhead)
    waiting = of("acme")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(of("acme").run, app)
        await anyio.sleep(0.5)
        tasks.start_soon(waiting.run, app)
        await anyio.sleep(0.5)  # the holder ends, and the client leaves, in this very turn
        waiting.disconnect()
    assert (bulkhead.in_use(), bulkhead.queued()) == (0, 0)
    assert (await of("acme").run(app)).status == 200


@pytest.mark.parametrize("spec_version", ["2.3", "2.4"])
async def test_can_09_an_aborted_stream_gives_its_slot_back(spec_version: str) -> None:
    class Forever(AsyncIterator[bytes]):
        async def __anext__(self) -> bytes:
            await anyio.sleep(1)
            return b"data: x\n\n"

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/stream":
            await StreamingResponse(Forever(), media_type="text/event-stream")(scope, receive, send)
        else:
            await respond(send)

    door = guard(app, Bulkhead(max_concurrent=1, max_queued=0))
    await serve(door, of("acme", path="/stream", spec_version=spec_version), leaves=2)
    assert (await of("acme").run(door)).status == 200


def test_can_13_one_middleware_serves_one_event_loop_after_another() -> None:
    app = FastAPI()

    @app.get("/")
    async def endpoint() -> str:
        await anyio.sleep(1)
        return "ok"

    app.add_middleware(
        ResilienceMiddleware, tenant="x-tenant-id", policies=[Deadline(5), Bulkhead(max_concurrent=1)]
    )

    async def two_requests(backend: str) -> list[int | None]:
        connections = [of("acme"), of("acme")]
        async with anyio.create_task_group() as tasks:
            for connection in connections:
                tasks.start_soon(connection.run, app)
        return [connection.status for connection in connections]

    assert run_virtual(two_requests, "asyncio") == [200, 200]
    assert run_virtual(two_requests, "trio", backend="trio") == [200, 200]
    assert run_virtual(two_requests, "asyncio") == [200, 200]


async def test_base_http_middleware_outside_ours_works_but_hides_context_variables() -> None:
    """What the documentation warns of: put ours outermost, by adding it last."""
    variable: ContextVar[str] = ContextVar("variable", default="unset")

    async def endpoint(_request: Request) -> PlainTextResponse:
        variable.set("by the endpoint")
        return PlainTextResponse("ok")

    bulkhead = Bulkhead(max_concurrent=1)
    inner = guard(Starlette(routes=[Route("/", endpoint)]), bulkhead)
    connection = await of("acme").run(BaseHTTPMiddleware(inner, pass_on))
    assert (connection.status, connection.body, bulkhead.in_use()) == (200, b"ok", 0)
    assert variable.get() == "unset"
