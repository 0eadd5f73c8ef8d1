"""An OpenTelemetry collector somebody else runs: whether it answers, and what was sent to it.

A collector that is away, or goes away, costs the demo one timeout at most. What is sent is recorded elsewhere.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

import httpx
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.environment_variables import OTEL_EXPORTER_OTLP_HEADERS
from opentelemetry.sdk.metrics.export import MetricExportResult, MetricsData
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.util.re import parse_env_headers

__all__ = ["Collector", "CollectorError"]

_TIMEOUT: Final = 3.0
_TRACES, _METRICS = "/v1/traces", "/v1/metrics"


class CollectorError(Exception):
    """Nothing at a URL that takes traces by OTLP/HTTP; the message says what is there instead."""


class Collector:
    """A collector at a base URL (`http://localhost:4318`), found by asking it.

    Raises `CollectorError` when it does not take traces. Metrics are left out when it does not take those.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/").removesuffix(_TRACES)
        refusal = _ask(self.url + _TRACES)
        if refusal is not None:
            raise CollectorError(
                f"no collector takes OTLP/HTTP traces at {self.url}: {refusal}. Is it running, "
                "and is this its OTLP/HTTP port (usually 4318)?"
            )
        self.spans = _SpanExporter(endpoint=self.url + _TRACES, timeout=_TIMEOUT)
        takes_metrics = _ask(self.url + _METRICS) is None
        self.metrics = (
            _MetricExporter(endpoint=self.url + _METRICS, timeout=_TIMEOUT) if takes_metrics else None
        )

    def __str__(self) -> str:
        """Say what it has been sent."""
        sent = (
            f"{self.spans.sent} spans" if self.metrics is None else f"{self.spans.sent} spans, and metrics,"
        )
        lost = f"; {self.spans.lost} were lost" if self.spans.lost else ""
        return f"{sent} were sent to {self.url}{lost}"


class _SpanExporter(OTLPSpanExporter):
    """Count, and after a first failure give up: what is left is flushed at the end, a timeout a batch."""

    sent = 0
    lost = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = SpanExportResult.FAILURE if self.lost else super().export(spans)
        if result is SpanExportResult.SUCCESS:
            self.sent += len(spans)
        else:
            self.lost += len(spans)
        return result


class _MetricExporter(OTLPMetricExporter):
    """Give up after a first failure."""

    failed = False

    def export(
        self, metrics_data: MetricsData, timeout_millis: float | None = 10_000, **kwargs: object
    ) -> MetricExportResult:
        if self.failed:
            return MetricExportResult.FAILURE
        result = super().export(metrics_data, timeout_millis, **kwargs)
        self.failed = result is not MetricExportResult.SUCCESS
        return result


def _ask(url: str) -> str | None:
    """Post an empty export request (no bytes, in protobuf); say why it is not taken, None when it is."""
    credentials = parse_env_headers(os.environ.get(OTEL_EXPORTER_OTLP_HEADERS, ""), liberal=True)
    headers = {**credentials, "content-type": "application/x-protobuf"}
    try:
        reply = httpx.post(url, headers=headers, timeout=_TIMEOUT)
    except httpx.TimeoutException:
        return f"no answer within {_TIMEOUT:g} s"
    except httpx.HTTPError as error:
        return str(error) or type(error).__name__
    return None if reply.is_success else f"it answers {reply.status_code} {reply.reason_phrase}"
