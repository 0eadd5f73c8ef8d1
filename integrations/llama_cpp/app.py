"""A FastAPI service that answers from a real model behind an OpenAI-compatible server.

The only lines that have to do with resilience are the two that add the middleware and the transport.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx2
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from openai import AsyncOpenAI

from resilient_llm import Backoff, Bulkhead, CircuitBreaker, Deadline, Retry
from resilient_llm.asgi import ResilienceMiddleware
from resilient_llm.httpx2 import ResilientTransport

SYSTEM = "You are a helpful assistant. Answer in one short sentence."


def make_app(base_url: str, inner: httpx2.AsyncBaseTransport | None = None) -> FastAPI:
    """Make the service; `base_url` is the model server's, with its `/v1`."""
    transport = ResilientTransport(
        inner,
        policies=[Deadline(60), Retry(max_attempts=4, backoff=Backoff(initial=0.2)), CircuitBreaker()],
    )
    client = AsyncOpenAI(
        base_url=base_url,
        api_key="none",
        http_client=httpx2.AsyncClient(transport=transport),
        max_retries=0,
    )
    app = FastAPI()
    app.add_middleware(
        ResilienceMiddleware, tenant="x-tenant", policies=[Deadline(90), Bulkhead(max_concurrent=2)]
    )

    @app.get("/ask")
    async def ask(question: str) -> dict[str, str | None]:
        """Answer in one piece."""
        completion = await client.chat.completions.create(
            model="smollm2",
            max_tokens=48,
            messages=[{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}],
        )
        return {"answer": completion.choices[0].message.content}

    @app.get("/stream")
    async def stream(question: str) -> StreamingResponse:
        """Answer token by token."""
        events = await client.chat.completions.create(
            model="smollm2",
            max_tokens=48,
            stream=True,
            messages=[{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}],
        )

        async def tokens() -> AsyncIterator[str]:
            async with events:
                async for event in events:
                    if event.choices and (token := event.choices[0].delta.content):
                        yield token

        return StreamingResponse(tokens(), media_type="text/plain")

    return app
