"""The service under test, as an application would write it: FastAPI, the OpenAI SDK, and this library.

Both doors are in here and nothing of the demo's bookkeeping.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random

import httpx2
import openai
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from resilient_llm import Backoff, Bulkhead, CircuitBreaker, Deadline, Retry, Telemetry
from resilient_llm.asgi import ResilienceMiddleware
from resilient_llm.demo.scenario import MODEL
from resilient_llm.httpx2 import ResilientTransport

_PASSED_ON = ("retry-after", "x-should-retry")


class Question(BaseModel):
    """What a tenant asks."""

    message: str
    model: str = MODEL


class Answer(BaseModel):
    """What the model says."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """The app, the client it calls the provider with, and the policies that the demo looks at."""

    app: FastAPI
    client: openai.AsyncOpenAI
    breaker: CircuitBreaker


def create_service(
    provider_url: str, *, break_duration: float, rng: Random, inbound: Telemetry, outbound: Telemetry
) -> Service:
    """Make the service: one list of policies at each door. `rng` draws the jitter of its backoffs."""
    breaker = CircuitBreaker(
        key="model",
        consecutive_failures=5,
        break_duration=break_duration,
        max_break_duration=1.5 * break_duration,
    )
    transport = ResilientTransport(
        policies=[
            Deadline(10.0),
            Retry(max_attempts=6, backoff=Backoff(initial=0.1, maximum=1.0), random=rng),
            breaker,
        ],
        telemetry=outbound,
    )
    client = openai.AsyncOpenAI(
        base_url=f"{provider_url}/v1",
        api_key="the-fake-provider-takes-any",
        http_client=httpx2.AsyncClient(transport=transport),
        max_retries=0,  # one layer retries, and it is the transport
    )

    app = FastAPI(title="resilient-llm demo", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(
        ResilienceMiddleware,
        tenant="x-tenant",  # believed as it is: the demo listens on loopback only
        policies=[Deadline(12.0), Bulkhead(max_concurrent=6, max_queued=12, max_wait=2.0)],
        telemetry=inbound,
    )

    @app.post("/chat")
    async def chat(question: Question) -> Answer:
        completion = await client.chat.completions.create(
            model=question.model, messages=[{"role": "user", "content": question.message}]
        )
        return Answer(text=completion.choices[0].message.content or "")

    @app.exception_handler(openai.APIStatusError)
    async def pass_on(_request: Request, error: openai.APIStatusError) -> JSONResponse:
        headers: Mapping[str, str] = error.response.headers
        passed_on = {name: headers[name] for name in _PASSED_ON if name in headers}
        problem = {"status": error.status_code, "detail": error.message, "code": error.code}
        return JSONResponse(problem, error.status_code, headers=passed_on)

    return Service(app=app, client=client, breaker=breaker)
