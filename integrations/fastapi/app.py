"""A FastAPI service whose tenants do not starve each other, and whose LLM calls survive a bad minute.

Run it with `uvicorn --factory integrations.fastapi.app:create_app`; OPENAI_API_KEY and OPENAI_BASE_URL are the SDK's.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx2
import openai
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel

from resilient_llm import Bulkhead, CircuitBreaker, Deadline, Retry
from resilient_llm.asgi import ResilienceMiddleware
from resilient_llm.httpx2 import ResilientTransport


class Question(BaseModel):
    """What a client asks."""

    message: str
    model: str = "gpt-4o-mini"


class Answer(BaseModel):
    """What it gets."""

    text: str


def create_app(inner: httpx2.AsyncBaseTransport | None = None) -> FastAPI:
    """Make the service; with `inner`, over another transport than the network."""
    transport = ResilientTransport(
        inner, policies=[Deadline(60), Retry(max_attempts=4), CircuitBreaker(key=("target", "model"))]
    )
    llm = openai.AsyncOpenAI(
        http_client=openai.DefaultAsyncHttpxClient(transport=transport),
        max_retries=0,  # one layer retries, and it is the transport
    )

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        async with llm:
            yield

    app = FastAPI(lifespan=lifespan)

    @app.post("/chat")
    async def chat(question: Question) -> Answer:
        """Answer in one piece."""
        completion = await llm.chat.completions.create(
            model=question.model, messages=[{"role": "user", "content": question.message}]
        )
        return Answer(text=completion.choices[0].message.content or "")

    @app.post("/chat/stream")
    async def stream(question: Question) -> StreamingResponse:
        """Answer token by token."""
        events = await llm.chat.completions.create(
            model=question.model, messages=[{"role": "user", "content": question.message}], stream=True
        )

        async def tokens() -> AsyncIterator[str]:
            async with events:
                async for event in events:
                    if event.choices and (token := event.choices[0].delta.content):
                        yield token

        return StreamingResponse(tokens(), media_type="text/plain")

    @app.exception_handler(openai.APIStatusError)
    async def unavailable(_request: Request, error: openai.APIStatusError) -> JSONResponse:
        """Tell our client what it can act on: when to come back, and nothing of the provider's."""
        after = error.response.headers.get("retry-after")
        headers = {"x-should-retry": "false"} | ({"retry-after": after} if after else {})
        ours = error.status_code if error.status_code in (429, 503, 504) else 502
        return JSONResponse({"detail": "The model gave no answer."}, ours, headers)

    # Added last, so that it stands outermost.
    app.add_middleware(
        ResilienceMiddleware,
        tenant="x-tenant",  # set by a gateway that has authenticated the caller
        policies=[Deadline(90), Bulkhead(max_concurrent=4, max_queued=16, max_wait=10)],
    )
    return app
