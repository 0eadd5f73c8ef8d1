"""A service that Prometheus scrapes: its LLM calls are measured by the library, /metrics is OpenTelemetry's.

Run it with `uvicorn --factory integrations.prometheus.app:create_app`; OPENAI_API_KEY and OPENAI_BASE_URL are the
SDK's.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx2
import openai
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.resources import Resource
from prometheus_client import CollectorRegistry, make_asgi_app
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Mount, Route

from resilient_llm import (
    Bulkhead,
    Canary,
    CircuitBreaker,
    Deadline,
    Retry,
    Router,
    Target,
    Telemetry,
    ambient,
)
from resilient_llm.httpx2 import ResilientTransport

TENANTS = ("acme", "umbrella")


def create_app(inner: httpx2.AsyncBaseTransport | None = None) -> Starlette:
    """Make the service; with `inner`, over another transport than the network."""
    registry = CollectorRegistry()
    reader = PrometheusMetricReader(registry=registry)
    # An application with one meter provider hands it to opentelemetry.metrics.set_meter_provider, and needs no
    # meter_provider= then.
    meters = MeterProvider([reader], Resource.create({"service.name": "chat"}))
    # A tenant becomes a label where it is named here; any other is "other".
    telemetry = Telemetry(meter_provider=meters, tenants=TENANTS)
    transport = ResilientTransport(
        inner,
        policies=[
            Deadline(60),
            Bulkhead(max_concurrent=8),
            Canary(model="chat", candidate="chat-next"),
            Retry(),
            Router(
                {"chat": Target(name="old", model="gpt-4o"), "chat-next": Target(name="new", model="gpt-5")}
            ),
            CircuitBreaker(),
        ],
        telemetry=telemetry,
    )
    llm = openai.AsyncOpenAI(
        http_client=openai.DefaultAsyncHttpxClient(transport=transport),
        max_retries=0,  # one layer retries, and it is the transport
    )

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        async with llm:
            yield
        meters.shutdown()

    async def chat(request: Request) -> JSONResponse:
        """Answer in one piece."""
        question: str = (await request.json())["message"]
        # Set by a gateway that has authenticated the caller.
        with ambient(tenant=request.headers.get("x-tenant")):
            completion = await llm.chat.completions.create(
                model="chat", messages=[{"role": "user", "content": question}]
            )
        return JSONResponse({"text": completion.choices[0].message.content})

    return Starlette(
        routes=[Route("/chat", chat, methods=["POST"]), Mount("/metrics", make_asgi_app(registry))],
        lifespan=lifespan,
    )
