"""Spans and metrics as a backend sees them, in a form that tests can assert on.

Everything is decoded from the protobuf messages of OTLP, also what an exporter kept in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric
from opentelemetry.proto.trace.v1 import trace_pb2
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

Value = str | bool | int | float | tuple[Any, ...] | None
Attributes = Mapping[str, Value]


@dataclass(frozen=True, kw_only=True)
class Event:
    """An event of a span."""

    name: str
    at: int
    attributes: Attributes


@dataclass(frozen=True, kw_only=True)
class Span:
    """A span as a backend sees it; times are in nanoseconds since the epoch."""

    name: str
    kind: str
    trace_id: str
    span_id: str
    parent_id: str | None
    start: int
    end: int
    status: str
    attributes: Attributes
    events: tuple[Event, ...]
    scope: str

    @property
    def seconds(self) -> float:
        """How long it lasted."""
        return (self.end - self.start) / 1e9

    def event_names(self) -> list[str]:
        """The names of its events, in order."""
        return [event.name for event in self.events]

    def __repr__(self) -> str:
        return f"<{self.name} {self.seconds:.6f} s {self.status} {dict(self.attributes)}>"


@dataclass(frozen=True, kw_only=True)
class Point:
    """A data point of a metric: a number, or of a histogram the count, sum and counts by bucket."""

    name: str
    unit: str
    kind: str
    attributes: Attributes
    value: float
    count: int = 0
    bounds: tuple[float, ...] = ()
    exemplars: tuple[str, ...] = ()
    """The span ids that values of it point to."""


class Spans(Sequence[Span]):
    """Spans in the order they began."""

    def __init__(self, spans: Iterable[Span]) -> None:
        self._spans = sorted(spans, key=lambda span: (span.start, span.end))

    def __getitem__(self, index: Any) -> Any:
        return self._spans[index]

    def __len__(self) -> int:
        return len(self._spans)

    def __iter__(self) -> Iterator[Span]:
        return iter(self._spans)

    def named(self, name: str) -> list[Span]:
        """The spans of this name, or with this first word."""
        return [span for span in self if span.name == name or span.name.split(" ")[0] == name]

    def one(self, name: str) -> Span:
        """The only span of this name, or with this first word."""
        found = self.named(name)
        assert len(found) == 1, f"{len(found)} spans named {name!r} in\n{self.tree()}"
        return found[0]

    def children(self, span: Span) -> list[Span]:
        """The spans right below one."""
        return [child for child in self if child.parent_id == span.span_id]

    def roots(self) -> list[Span]:
        """The spans whose parent is not among these."""
        known = {span.span_id for span in self}
        return [span for span in self if span.parent_id not in known]

    def tree(self) -> str:
        """The spans as an indented tree of names, without those of the same level's order being lost."""

        def lines(spans: Iterable[Span], depth: int) -> Iterator[str]:
            for span in spans:
                yield "  " * depth + span.name
                yield from lines(self.children(span), depth + 1)

        return "\n".join(lines(self.roots(), 0))

    def uncovered(self, span: Span) -> float:
        """Seconds of a span's time during which none of its children ran."""
        covered, until = 0, span.start
        for child in self.children(span):
            begin, end = max(child.start, until), min(child.end, span.end)
            if end > begin:
                covered += end - begin
                until = end
        return (span.end - span.start - covered) / 1e9

    def assert_accounted(self, span: Span, *, stalled: float = 0.0) -> None:
        """Check that its children account for a span's time, but for 1 ms or 1 %.

        `stalled` is for how many seconds a test in real time was kept from going on.
        """
        gap = self.uncovered(span)
        allowed = max(0.001, 0.01 * span.seconds) + stalled
        listed = "\n".join(
            f"  {(child.start - span.start) / 1e9:.6f} .. {(child.end - span.start) / 1e9:.6f} {child.name}"
            for child in self.children(span)
        )
        assert gap <= allowed, (
            f"{gap:.6f} s of {span.seconds:.6f} s of {span.name} are in no child:\n{listed}"
        )


def decode_spans(data: bytes) -> list[Span]:
    """Decode an `ExportTraceServiceRequest`."""
    request = ExportTraceServiceRequest.FromString(data)
    return [
        _span(span, scope.scope.name)
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


def decode_points(data: bytes) -> list[Point]:
    """Decode an `ExportMetricsServiceRequest`."""
    request = ExportMetricsServiceRequest.FromString(data)
    return [
        point
        for resource in request.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
        for point in _points(metric)
    ]


def _span(span: trace_pb2.Span, scope: str) -> Span:
    return Span(
        name=span.name,
        kind=trace_pb2.Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex() or None,
        start=span.start_time_unix_nano,
        end=span.end_time_unix_nano,
        status=trace_pb2.Status.StatusCode.Name(span.status.code).removeprefix("STATUS_CODE_"),
        attributes=_attributes(span.attributes),
        events=tuple(
            Event(name=event.name, at=event.time_unix_nano, attributes=_attributes(event.attributes))
            for event in span.events
        ),
        scope=scope,
    )


def _points(metric: Metric) -> Iterator[Point]:
    kind = metric.WhichOneof("data")
    if kind == "histogram":
        for histogram in metric.histogram.data_points:
            yield Point(
                name=metric.name,
                unit=metric.unit,
                kind=kind,
                attributes=_attributes(histogram.attributes),
                value=histogram.sum,
                count=histogram.count,
                bounds=tuple(histogram.explicit_bounds),
                exemplars=tuple(exemplar.span_id.hex() for exemplar in histogram.exemplars),
            )
        return
    assert kind in ("sum", "gauge"), f"{metric.name} is a {kind}"
    for number in (metric.sum if kind == "sum" else metric.gauge).data_points:
        value = number.as_double if number.WhichOneof("value") == "as_double" else number.as_int
        yield Point(
            name=metric.name,
            unit=metric.unit,
            kind=kind,
            attributes=_attributes(number.attributes),
            value=value,
            exemplars=tuple(exemplar.span_id.hex() for exemplar in number.exemplars),
        )


def _attributes(attributes: Iterable[KeyValue]) -> Attributes:
    return {attribute.key: _value(attribute.value) for attribute in attributes}


def _value(value: AnyValue) -> Value:
    kind = value.WhichOneof("value")
    if kind is None:
        return None
    if kind == "array_value":
        return tuple(_value(item) for item in value.array_value.values)
    plain: Value = getattr(value, kind)
    return plain


@dataclass(kw_only=True)
class Points(Sequence[Point]):
    """Data points, with ways to pick some."""

    points: list[Point] = field(default_factory=list)

    def __getitem__(self, index: Any) -> Any:
        return self.points[index]

    def __len__(self) -> int:
        return len(self.points)

    def names(self) -> set[str]:
        """The names of all metrics."""
        return {point.name for point in self.points}

    def of(self, name: str, **attributes: Value) -> list[Point]:
        """The points of a metric; attributes are given by the end of their name, with _ for each dot."""
        return [
            point
            for point in self.points
            if point.name == name
            and all(
                any(
                    key.replace(".", "_").endswith(end) and value == wanted
                    for key, value in point.attributes.items()
                )
                for end, wanted in attributes.items()
            )
        ]

    def one(self, name: str, **attributes: Value) -> Point:
        """The only point of a metric with these attributes."""
        found = self.of(name, **attributes)
        assert len(found) == 1, f"{len(found)} points of {name} {attributes} among {self.of(name)}"
        return found[0]


class Recording(SpanProcessor):
    """An SDK that keeps spans and measurements in memory, and counts the spans that are open."""

    def __init__(self, **options: Any) -> None:
        self.open = 0
        self._exporter = InMemorySpanExporter()
        self._reader = InMemoryMetricReader()
        self.tracer_provider = TracerProvider(shutdown_on_exit=False, **options)
        self.tracer_provider.add_span_processor(self)
        self.tracer_provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.meter_provider = MeterProvider(metric_readers=[self._reader], shutdown_on_exit=False)

    @property
    def spans(self) -> Spans:
        """The spans that have ended, decoded from OTLP."""
        return Spans(decode_spans(encode_spans(self._exporter.get_finished_spans()).SerializeToString()))

    def on_start(self, span: object, parent_context: object = None) -> None:
        """Count a span that began."""
        self.open += 1

    def on_end(self, span: object) -> None:
        """Count a span that ended."""
        self.open -= 1

    def clear(self) -> None:
        """Forget the spans so far."""
        self._exporter.clear()

    @property
    def points(self) -> Points:
        """What has been measured, decoded from OTLP."""
        data = self._reader.get_metrics_data()
        return Points(points=[] if data is None else decode_points(encode_metrics(data).SerializeToString()))
