"""Calls of which each is worth a look for one reason, and no other: what a policy of tail sampling is to keep.

Times leave room for a machine that is slow: what is late is late by seconds.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Final

import anyio
import httpx
import httpx2
from opentelemetry.instrumentation.asgi import OpenTelemetryMiddleware
from opentelemetry.trace import TracerProvider
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from integrations.jaeger.call import ask, client_of
from resilient_llm import Bulkhead, CircuitBreaker, Hedge, Retry, Router, Target, Telemetry
from resilient_llm.asgi import ResilienceMiddleware
from resilient_llm.testing import FakeProvider, Fault

__all__ = ["CALLS", "all_of_them"]


@asynccontextmanager
async def client(
    traces: TracerProvider, provider: FakeProvider, *policies: Any
) -> AsyncIterator[httpx2.AsyncClient]:
    async with client_of(provider, traces, *policies) as made:
        yield made


async def dull(traces: TracerProvider) -> None:
    async with client(traces, FakeProvider(), Retry()) as made:
        assert (await ask(made, "dull")).status_code == 200


async def failed(traces: TracerProvider) -> None:
    provider = FakeProvider()
    provider.script(None, [Fault(status=400)])
    async with client(traces, provider) as made:
        assert (await ask(made, "failed")).status_code == 400


async def retried(traces: TracerProvider) -> None:
    provider = FakeProvider()
    provider.script(None, [Fault(delay_headers=1.0)])
    targets = Router([Target(name="one"), Target(name="other")])
    async with client(traces, provider, Hedge(delay=0.05, budget_ratio=1.0), targets) as made:
        assert (await ask(made, "retried")).status_code == 200


async def fallback(traces: TracerProvider) -> None:
    breaker = CircuitBreaker()
    router = Router(
        {
            "fallback": Target(name="gone", model="gone", policies=[breaker]),
            "next": Target(name="there", model="there"),
        },
        fallbacks={"fallback": ["next"]},
    )
    breaker.isolate("gone")
    async with client(traces, FakeProvider(), Retry(), router) as made:
        assert (await ask(made, "fallback")).status_code == 200


async def refused(traces: TracerProvider) -> None:
    async def slowly(_request: Request) -> PlainTextResponse:
        await anyio.sleep(1.0)
        return PlainTextResponse("done")

    app = Starlette(routes=[Route("/refused", slowly)])
    limited = ResilienceMiddleware(
        app,
        tenant="x-tenant",
        policies=[Bulkhead(max_concurrent=1, max_queued=0)],
        telemetry=Telemetry(tracer_provider=traces),
    )
    traced = OpenTelemetryMiddleware(limited, tracer_provider=traces, exclude_spans=["send", "receive"])
    statuses = []

    async def get() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(traced), base_url="http://app") as made:
            statuses.append((await made.get("/refused", headers={"x-tenant": "acme"})).status_code)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(get)
        tasks.start_soon(get)
    assert sorted(statuses) == [200, 429]


async def late(traces: TracerProvider) -> None:
    provider = FakeProvider()
    provider.script(None, [Fault(delay_first_token=2.0)])
    await read(traces, provider, "late")


async def waited(traces: TracerProvider) -> None:
    provider = FakeProvider()
    provider.script(None, [Fault(delay_headers=2.0)])
    async with (
        client(traces, provider, Bulkhead(max_concurrent=1)) as made,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(ask, made, "dull")
        await anyio.sleep(0.05)
        await ask(made, "waited")


async def slow(traces: TracerProvider) -> None:
    provider = FakeProvider()
    provider.script(None, [Fault(token_delay=0.5)])
    await read(traces, provider, "slow")


async def read(traces: TracerProvider, provider: FakeProvider, model: str) -> None:
    question = {"model": model, "messages": [{"role": "user", "content": "?"}], "stream": True}
    async with (
        client(traces, provider, Retry()) as made,
        made.stream("POST", "/chat/completions", json=question) as response,
    ):
        assert (await response.aread()).endswith(b"[DONE]\n\n")


CALLS: Final[dict[str, Callable[[TracerProvider], Coroutine[Any, Any, None]]]] = {
    call.__name__: call for call in (failed, retried, fallback, refused, late, waited, slow)
}


async def all_of_them(traces: TracerProvider) -> None:
    async with anyio.create_task_group() as tasks:
        for call in (*CALLS.values(), dull, dull, dull):
            tasks.start_soon(call, traces)
