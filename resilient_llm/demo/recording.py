"""OpenTelemetry's SDK as an application sets it up, with a copy of every span kept in memory.

The demo's figures and its trace are read from that copy. Nothing global is set.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import SpanKind, Status, StatusCode
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from resilient_llm import Telemetry
from resilient_llm.demo.collector import Collector

__all__ = ["Recording", "ServerSpans", "recording"]

_SERVICE: Final = "demo"  # short: viewers put it before every span name


class Recording:
    """Record spans, and metrics where a collector takes them."""

    def __init__(self, collector: Collector | None = None) -> None:
        resource = Resource.create({"service.name": _SERVICE})
        self._memory = InMemorySpanExporter()
        self._seen = 0
        self.tracer_provider = TracerProvider(ALWAYS_ON, resource, shutdown_on_exit=False)
        self.tracer_provider.add_span_processor(SimpleSpanProcessor(self._memory))
        self.meter_provider: MeterProvider | None = None
        if collector is not None:
            processor = BatchSpanProcessor(collector.spans, max_queue_size=50_000, schedule_delay_millis=1000)
            self.tracer_provider.add_span_processor(processor)
            if collector.metrics is not None:
                reader = PeriodicExportingMetricReader(collector.metrics, export_interval_millis=2000)
                self.meter_provider = MeterProvider([reader], resource, shutdown_on_exit=False)

    def telemetry(self) -> Telemetry:
        """Make what a door records with."""
        return Telemetry(tracer_provider=self.tracer_provider, meter_provider=self.meter_provider)

    def spans(self) -> tuple[ReadableSpan, ...]:
        """Give all spans that have ended."""
        return self._memory.get_finished_spans()

    def new_spans(self) -> tuple[ReadableSpan, ...]:
        """Give the spans that have ended since the last time."""
        spans = self.spans()[self._seen :]
        self._seen += len(spans)
        return spans

    def stop_keeping(self) -> None:
        """Keep no more spans in memory; a collector still gets them."""
        self._memory.shutdown()

    def flush(self) -> None:
        """Send a collector what has not been sent."""
        self.tracer_provider.force_flush()
        if self.meter_provider is not None:
            self.meter_provider.force_flush()

    def close(self) -> None:
        """Send the rest, and end."""
        self.tracer_provider.shutdown()
        if self.meter_provider is not None:
            self.meter_provider.shutdown()


@contextmanager
def recording(collector: Collector | None) -> Iterator[Recording]:
    """Record inside. What the SDK logs about a collector that goes away, `Collector` says more briefly."""
    logger = logging.getLogger("opentelemetry")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    recorded = Recording(collector)
    try:
        yield recorded
    finally:
        recorded.close()
        logger.setLevel(level)


class ServerSpans:
    """Open the server's span of each request: what an ASGI instrumentation does, in its simplest form."""

    def __init__(self, app: ASGIApp, *, tracer_provider: TracerProvider) -> None:
        self.app = app
        self._tracer = tracer_provider.get_tracer(_SERVICE)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request inside a span; pass on what is none."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        attributes = {"http.request.method": scope["method"], "url.path": scope["path"]}
        with self._tracer.start_as_current_span(
            f"{scope['method']} {scope['path']}", kind=SpanKind.SERVER, attributes=attributes
        ) as span:

            async def send_and_note(message: Message) -> None:
                if message["type"] == "http.response.start":
                    span.set_attribute("http.response.status_code", message["status"])
                    if message["status"] >= 500:
                        span.set_status(Status(StatusCode.ERROR))
                await send(message)

            await self.app(scope, receive, send_and_note)
