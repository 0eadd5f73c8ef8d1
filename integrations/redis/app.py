"""A FastAPI service whose workers, on any number of machines, keep one set of limits, slots, circuits and budgets.

Run it with `STORE_URL=redis://localhost:6379/0 uvicorn --factory integrations.redis.app:create_app --workers 4`;
OPENAI_API_KEY and OPENAI_BASE_URL are the SDK's.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx2
import openai
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from integrations.redis.store import close, store_of
from resilient_llm import Bulkhead, CircuitBreaker, Deadline, Limit, RateLimit, Retry
from resilient_llm.asgi import ResilienceMiddleware
from resilient_llm.httpx2 import ResilientTransport


class Question(BaseModel):
    """What a client asks."""

    message: str
    model: str = "gpt-4o-mini"


def create_app(
    inner: httpx2.AsyncBaseTransport | None = None, url: str | None = None, *, store_timeout: float = 0.05
) -> FastAPI:
    """Make the service; with `inner`, over another transport than the network."""
    store = store_of(url or os.environ["STORE_URL"], timeout=store_timeout, on_store_error="local")
    transport = ResilientTransport(
        inner,
        policies=[
            Deadline(60),
            RateLimit(  # each tenant's own: requests, tokens and bursts, decided on at once
                name="tenants", requests_per_minute=60, tokens_per_minute=50_000, burst=5, store=store
            ),
            Retry(max_attempts=4),
            RateLimit(  # what the provider allows, whoever asks
                name="provider",
                limits=[
                    Limit(key="model", requests_per_minute=500, tokens_per_minute=300_000),
                    Limit(key=None, requests_per_minute=10_000),
                ],
                store=store,
            ),
            CircuitBreaker(key=("target", "model"), store=store),  # one worker finds out, all know
        ],
    )
    llm = openai.AsyncOpenAI(http_client=openai.DefaultAsyncHttpxClient(transport=transport), max_retries=0)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        async with llm:
            yield
        await close(store)  # after the last call, so that what it used is told

    app = FastAPI(lifespan=lifespan)

    @app.get("/ready")
    async def ready() -> dict[str, object]:
        """Say that this worker can serve: without the store too, as `on_store_error` says."""
        return {"store": "asked" if store.guard.closed else "given up on", "workers": store.processes}

    @app.post("/chat")
    async def chat(question: Question) -> dict[str, str]:
        """Answer in one piece."""
        completion = await llm.chat.completions.create(
            model=question.model, messages=[{"role": "user", "content": question.message}]
        )
        return {"text": completion.choices[0].message.content or ""}

    @app.exception_handler(openai.APIStatusError)
    async def unavailable(_request: Request, error: openai.APIStatusError) -> JSONResponse:
        """Tell our client what it can act on: when to come back, and nothing of the provider's."""
        after = error.response.headers.get("retry-after")
        headers = {"x-should-retry": "false"} | ({"retry-after": after} if after else {})
        ours = error.status_code if error.status_code in (429, 503, 504) else 502
        return JSONResponse({"detail": "The model gave no answer."}, ours, headers)

    app.add_middleware(
        ResilienceMiddleware,
        tenant="x-tenant",  # set by a gateway that has authenticated the caller
        default_tenant="health checks",
        policies=[Deadline(90), Bulkhead(max_concurrent=4, max_queued=16, max_wait=10, store=store)],
    )
    return app
