"""Shutdown: running requests end before the app closes what they use."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message

from resilient_llm import Bulkhead
from resilient_llm.asgi import ResilienceMiddleware
from tests.asgi.server import Connection

pytestmark = pytest.mark.anyio


class Lifespan:
    """A server's side of a lifespan."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self.said: list[str] = []
        self._to_app, self._from_server = anyio.create_memory_object_stream[Message](10)
        self._to_server, self._from_app = anyio.create_memory_object_stream[Message](10)

    async def run(self) -> None:
        async with self._to_app, self._from_server, self._to_server, self._from_app:
            await self.app({"type": "lifespan", "state": {}}, self._from_server.receive, self._to_server.send)

    async def tell(self, kind: str) -> str:
        """Send a message and wait for the app's answer."""
        await self._to_app.send({"type": f"lifespan.{kind}"})
        self.said.append((await self._from_app.receive())["type"])
        return self.said[-1]


class App:
    """A Starlette app whose handler takes 10 s and needs what the lifespan opens."""

    def __init__(self, **options: Any) -> None:
        self.log: list[str] = []
        self.open = False

        @asynccontextmanager
        async def lifespan(_app: Starlette) -> AsyncIterator[None]:
            self.open = True
            yield
            self.open = False
            self.log.append("closed")

        async def endpoint(_request: Request) -> PlainTextResponse:
            await anyio.sleep(10)
            self.log.append(f"done, open={self.open}")
            return PlainTextResponse("ok")

        self.app = Starlette(routes=[Route("/", endpoint)], lifespan=lifespan)
        policies = [Bulkhead(max_concurrent=5)]
        self.app.add_middleware(ResilienceMiddleware, tenant="x-tenant-id", policies=policies, **options)


async def test_the_app_closes_after_its_last_request() -> None:
    app = App()
    server = Lifespan(app.app)
    connection = Connection()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(server.run)
        assert await server.tell("startup") == "lifespan.startup.complete"
        tasks.start_soon(connection.run, app.app)
        await anyio.sleep(1)
        assert await server.tell("shutdown") == "lifespan.shutdown.complete"
        assert app.log == ["done, open=True", "closed"]
        assert connection.ended == 10
    assert connection.status == 200


async def test_new_requests_are_refused_meanwhile() -> None:
    app = App()
    server = Lifespan(app.app)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(server.run)
        await server.tell("startup")
        tasks.start_soon(Connection().run, app.app)
        await anyio.sleep(1)
        tasks.start_soon(server.tell, "shutdown")
        await anyio.sleep(1)
        late = await Connection().run(app.app)
    assert (late.status, late.json["code"], late.headers[b"retry-after"]) == (503, "draining", b"1")
    assert late.ended == 0


async def test_it_waits_no_longer_than_told(caplog: pytest.LogCaptureFixture) -> None:
    app = App(drain_timeout=2)
    server = Lifespan(app.app)
    connection = Connection()
    with caplog.at_level(logging.WARNING, logger="resilient_llm"):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(server.run)
            await server.tell("startup")
            tasks.start_soon(connection.run, app.app)
            await anyio.sleep(1)
            await server.tell("shutdown")
            assert connection.now() == 3
    assert "1 requests still run 2 s after the shutdown began" in caplog.text
    assert app.log == ["closed", "done, open=False"]


async def test_with_nothing_running_it_waits_for_nothing() -> None:
    app = App()
    server = Lifespan(app.app)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(server.run)
        await server.tell("startup")
        started = anyio.current_time()
        await server.tell("shutdown")
        assert anyio.current_time() == started


async def test_an_app_that_starts_again_takes_requests_again() -> None:
    app = App()
    for _ in range(2):
        server = Lifespan(app.app)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(server.run)
            await server.tell("startup")
            assert (await Connection().run(app.app)).status == 200
            await server.tell("shutdown")
    assert server.said == ["lifespan.startup.complete", "lifespan.shutdown.complete"]


async def test_a_startup_that_fails_is_told_as_it_is() -> None:
    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        raise LookupError("no database")
        yield

    app = Starlette(lifespan=lifespan)
    app.add_middleware(ResilienceMiddleware, tenant="x-tenant-id", policies=[Bulkhead(max_concurrent=1)])
    said: list[str] = []

    async def receive() -> Message:
        return {"type": "lifespan.startup"}

    async def send(message: Message) -> None:
        said.append(message["type"])

    with pytest.raises(LookupError):
        await app({"type": "lifespan", "state": {}}, receive, send)
    assert said == ["lifespan.startup.failed"]
