"""A service as people build them, instrumented as they do."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Literal

import httpx
import httpx2
from fastapi import FastAPI
from opentelemetry.instrumentation.asgi import OpenTelemetryMiddleware
from opentelemetry.instrumentation.fastapi import FastAPIInstrumentor
from starlette.responses import StreamingResponse

from resilient_llm import Bulkhead, Retry
from resilient_llm.asgi import ResilienceMiddleware
from resilient_llm.httpx2 import ResilientTransport
from resilient_llm.testing import ASGIStreamTransport, FakeProvider
from tests.signals import Recording
from tests.telemetry.observed import BODY, FIXED, STREAM, URL, telemetry_of

__all__ = ["Instrument", "Service"]

Instrument = Literal["fastapi", "asgi"]


class Service:
    """A FastAPI app behind the middleware, which asks a provider, and the spans of it all."""

    def __init__(self, provider: FakeProvider, *, instrument: Instrument) -> None:
        self.recording = Recording()
        self._telemetry = telemetry_of(self.recording)
        self._provider = provider
        self.app = FastAPI()
        self.app.add_api_route("/v1/chat", self._chat, methods=["POST"])
        self.app.add_api_route("/v1/stream", self._stream, methods=["POST"])
        self.app.add_middleware(
            ResilienceMiddleware,
            tenant="x-tenant",
            policies=[Bulkhead(max_concurrent=1, max_queued=1)],
            telemetry=self._telemetry,
        )
        if instrument == "fastapi":
            FastAPIInstrumentor.instrument_app(
                self.app, tracer_provider=self.recording.tracer_provider, exclude_spans=["send", "receive"]
            )
        else:
            self.app.add_middleware(
                OpenTelemetryMiddleware,
                tracer_provider=self.recording.tracer_provider,
                exclude_spans=["send", "receive"],
            )

    def _llm(self) -> httpx2.AsyncClient:
        transport = ResilientTransport(
            self._provider.httpx2_transport(), policies=[Retry(backoff=FIXED)], telemetry=self._telemetry
        )
        return httpx2.AsyncClient(transport=transport, timeout=60)

    async def _chat(self) -> Any:
        async with self._llm() as llm:
            return (await llm.post(URL, json=BODY)).json()

    async def _stream(self) -> StreamingResponse:
        async def relay() -> AsyncIterator[bytes]:
            async with self._llm() as llm, llm.stream("POST", URL, json=STREAM) as response:
                async for chunk in response.aiter_raw():
                    yield chunk

        return StreamingResponse(relay(), media_type="text/event-stream")

    def client(self) -> httpx.AsyncClient:
        """Make a client of the service."""
        return httpx.AsyncClient(
            transport=ASGIStreamTransport(self.app),
            base_url="http://service.example",
            headers={"x-tenant": "acme"},
        )
