"""Spans of the real SDK on a clock that the test sets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TypeAlias

from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import Span, SpanKind

Attributes: TypeAlias = Mapping[str, str | int | float]


class Trace:
    """Make spans, one inside another; `now` is in seconds and only a test moves it."""

    def __init__(self) -> None:
        self.now = 0.0
        self._memory = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._memory))
        self._tracer = provider.get_tracer("tests")

    @property
    def spans(self) -> tuple[ReadableSpan, ...]:
        """Those that have ended, in that order."""
        return self._memory.get_finished_spans()

    @contextmanager
    def span(self, name: str, attributes: Attributes, kind: SpanKind = SpanKind.INTERNAL) -> Iterator[Span]:
        """Open a span inside the one that is open."""
        span = self._tracer.start_span(name, kind=kind, attributes=attributes, start_time=self._ns(self.now))
        with trace.use_span(span):
            yield span
        span.end(self._ns(self.now))

    def add_event(self, span: Span, to: str, at: float) -> None:
        """Note a circuit's change."""
        attributes = {"resilient_llm.breaker.to": to}
        span.add_event("resilient_llm.breaker.state_change", attributes, self._ns(at))

    @staticmethod
    def _ns(seconds: float) -> int:
        return 1_000_000_000_000 + round(seconds * 1e9)
