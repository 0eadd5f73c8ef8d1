"""A FastAPI service whose workers share slots and quotas of tenants; for `test_uvicorn_workers.py`. No test itself.

It counts by itself how many requests of a tenant all workers work on at once.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
from fastapi import FastAPI, Request
from redis.asyncio import Redis
from starlette.types import ASGIApp, Receive, Scope, Send

from resilient_llm import Bulkhead, RateLimit
from resilient_llm.asgi import ResilienceMiddleware
from resilient_llm.stores import RedisStore

FREE = "/free"
"""Where the same work is done and nothing is limited: what that takes the machine takes."""
WORK = 0.05
SLOTS = 4
QUOTA = 120
WINDOW = 30


def create_app() -> ASGIApp:
    url = os.environ["STORE_URL"]
    store = RedisStore(url, timeout=10.0, on_store_error="closed")
    counts = Redis.from_url(url)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        async with store, counts:
            yield

    app = FastAPI(lifespan=lifespan)

    @app.get("/")
    async def work(request: Request) -> dict[str, int]:
        tenant = request.headers["x-tenant"]
        running = await counts.incr(f"running:{tenant}")
        try:
            await anyio.sleep(WORK)
        finally:
            with anyio.CancelScope(shield=True):
                await counts.decr(f"running:{tenant}")
        return {"running": running, "worker": os.getpid()}

    @app.get(FREE)
    async def free() -> dict[str, int]:
        await anyio.sleep(WORK)
        return {}

    limited = ResilienceMiddleware(
        app,
        tenant="x-tenant",
        policies=[
            RateLimit(requests_per_minute=QUOTA * 60 / WINDOW, window=WINDOW, max_wait=0, store=store),
            Bulkhead(max_concurrent=SLOTS, max_queued=20, max_wait=60, store=store),
        ],
    )

    async def choose(scope: Scope, receive: Receive, send: Send) -> None:
        await (app if scope.get("path") == FREE else limited)(scope, receive, send)

    return choose
