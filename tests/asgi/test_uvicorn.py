"""The middleware under a real server over real sockets, with both of uvicorn's HTTP parsers."""

from __future__ import annotations

import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import anyio
import httpx
import pytest
import uvicorn
from anyio.abc import SocketStream
from fastapi import BackgroundTasks, FastAPI, Request
from starlette.responses import StreamingResponse
from starlette.types import ASGIApp

from resilient_llm import Bulkhead, Deadline
from resilient_llm.asgi import ResilienceMiddleware
from tests.support import until

pytestmark = [pytest.mark.anyio, pytest.mark.realtime]


@pytest.fixture(params=["h11", "httptools"])
def http(request: pytest.FixtureRequest) -> str:
    parser: str = request.param
    return parser


class Server(uvicorn.Server):
    """A uvicorn that leaves the process's signals alone."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def serving(app: ASGIApp, http: Any) -> AsyncIterator[tuple[str, Server]]:
    """Serve an app on a free port and give its address."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        config = uvicorn.Config(
            app, http=http, log_level="critical", lifespan="on", timeout_keep_alive=3600
        )  # or one is closed just as a client that was held up uses it
        server = Server(config)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(server.serve, [sock])
            while not server.started:  # noqa: ASYNC110 - uvicorn offers no more
                await anyio.sleep(0.01)
            yield f"http://127.0.0.1:{sock.getsockname()[1]}", server
            server.should_exit = True


class Service:
    """A FastAPI service as a user would write it, and what happened in it."""

    def __init__(self, **options: Any) -> None:
        self.log: list[str] = []
        self.bulkhead = Bulkhead(max_concurrent=1, max_queued=1)
        self.app = app = FastAPI()
        if options.pop("wrapped", True):
            policies = options.pop("policies", [Deadline(300), self.bulkhead])
            app.add_middleware(ResilienceMiddleware, tenant="x-tenant-id", policies=policies, **options)

        @app.post("/echo")
        async def echo(request: Request, tasks: BackgroundTasks) -> dict[str, int]:
            tasks.add_task(self.log.append, "background")
            return {"length": len(await request.body())}

        @app.post("/slow")
        async def slow() -> str:
            self.log.append("slow began")
            try:
                await anyio.sleep(600)
            finally:
                self.log.append("slow ended")
            return "slow"

        @app.get("/poll")
        async def poll(request: Request) -> str:
            self.log.append("polling")
            while not await request.is_disconnected():  # noqa: ASYNC110 - as users do
                await anyio.sleep(0.02)
            self.log.append("disconnect seen")
            return "polled"

        @app.get("/events")
        async def events() -> StreamingResponse:
            async def generate() -> AsyncIterator[bytes]:
                self.log.append("generator began")
                try:
                    for n in range(6_000):
                        yield f"data: {n}\n\n".encode()
                        await anyio.sleep(0.1)
                finally:
                    self.log.append("generator closed")

            return StreamingResponse(generate(), media_type="text/event-stream")


def client(address: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=address, headers={"x-tenant-id": "acme"}, timeout=60)


async def post(address: str, path: str, *, body: bytes = b"", expect: bool = False) -> SocketStream:
    """Send a request on a connection of its own."""
    host, port = address.removeprefix("http://").split(":")
    stream = await anyio.connect_tcp(host, int(port))
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\nx-tenant-id: acme\r\ncontent-length: {len(body)}\r\n"
    await stream.send(head.encode() + (b"expect: 100-continue\r\n\r\n" if expect else b"\r\n" + body))
    return stream


@pytest.mark.parametrize(
    "options", [{"wrapped": False}, {"policies": []}, {}], ids=["bare", "no policies", "policies"]
)
async def test_requests_streams_and_background_tasks(http: str, options: dict[str, Any]) -> None:
    service = Service(**options)
    async with serving(service.app, http) as (address, _), client(address) as session:
        for size in (0, 10, 1_000_000):
            response = await session.post("/echo", content=b"x" * size)
            assert response.json() == {"length": size}
        await until(lambda: service.log == ["background"] * 3)
        came: list[str] = []
        async with session.stream("GET", "/events") as response:
            async for line in response.aiter_lines():
                if line:
                    came.append(line)
                if len(came) == 3:
                    break
            assert service.log[-1] == "generator began"  # they came while it went on, for ten minutes
        assert came == ["data: 0", "data: 1", "data: 2"]
        await until(lambda: "generator closed" in service.log)


async def test_a_client_that_leaves_the_queue(http: str) -> None:
    service = Service()
    async with serving(service.app, http) as (address, _):
        async with await post(address, "/slow"):
            await until(service.bulkhead.in_use)
            waiting = await post(address, "/slow", body=b"x" * 1000)
            await until(service.bulkhead.queued)
            await waiting.aclose()
            await until(lambda: not service.bulkhead.queued())
            assert service.log == ["slow began"]
        await until(lambda: not service.bulkhead.in_use())
        assert service.log == ["slow began", "slow ended"]


@pytest.mark.parametrize("path", ["/poll", "/events"])
async def test_a_client_that_leaves_a_handler(http: str, path: str) -> None:
    service = Service(cancel_on_disconnect=lambda scope: scope["path"] != "/poll")
    async with serving(service.app, http) as (address, _):
        async with client(address) as session, anyio.create_task_group() as tasks:
            tasks.start_soon(session.get, path)
            await until(lambda: service.log)
            tasks.cancel_scope.cancel()
        expected = {
            "/poll": ["polling", "disconnect seen"],
            "/events": ["generator began", "generator closed"],
        }
        await until(lambda: service.log == expected[path])
        await until(lambda: not service.bulkhead.in_use())


async def test_a_thread_that_outlives_its_client_keeps_its_slot(http: str) -> None:
    service = Service()
    go_on = threading.Event()

    @service.app.post("/thread")
    def thread() -> str:
        go_on.wait(60)
        return "done"

    async with serving(service.app, http) as (address, _):
        async with await post(address, "/thread"):
            await until(service.bulkhead.in_use)
        await anyio.sleep(0.1)
        assert service.bulkhead.in_use() == 1
        go_on.set()
        await until(lambda: not service.bulkhead.in_use())


async def test_a_refusal_of_an_upload_leaves_the_next_request_alone(http: str) -> None:
    service = Service()
    async with serving(service.app, http) as (address, _), client(address) as session:
        async with await post(address, "/slow"), await post(address, "/slow"):
            await until(service.bulkhead.queued)
            refused = await session.post("/echo", content=b"x" * 300_000)
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) >= 1
        await until(lambda: not service.bulkhead.in_use())
        assert (await session.post("/echo", content=b"xy")).json() == {"length": 2}


async def test_who_is_refused_at_once_is_not_asked_for_a_body(http: str) -> None:
    service = Service()
    async with (
        serving(service.app, http) as (address, _),
        await post(address, "/slow"),
        await post(address, "/slow"),
    ):
        await until(service.bulkhead.queued)
        async with await post(address, "/echo", body=b"x" * 1000, expect=True) as refused:
            assert (await refused.receive()).startswith(b"HTTP/1.1 429")


async def test_a_running_request_outlives_the_servers_shutdown(http: str) -> None:
    service = Service()
    app = service.app
    go_on = anyio.Event()

    @app.get("/short")
    async def short() -> str:
        await go_on.wait()
        return "done"

    responses: list[httpx.Response] = []
    async with serving(app, http) as (address, server), client(address) as session:

        async def get() -> None:
            responses.append(await session.get("/short"))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(get)
            await until(service.bulkhead.in_use)
            server.should_exit = True
            await anyio.sleep(0.3)
            go_on.set()
    assert [response.status_code for response in responses] == [200]
    assert service.bulkhead.in_use() == 0
