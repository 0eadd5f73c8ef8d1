"""An SDK that exports over OTLP, as applications configure it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from resilient_llm import Telemetry

__all__ = ["Exporting", "exporting_to"]

_NOT_BY_ITSELF = 600_000.0  # milliseconds: so that no exporting thread runs while calls are timed


class Exporting:
    """Providers that send to a collector when told to."""

    def __init__(self, url: str, *, export_interval: float = _NOT_BY_ITSELF, timeout: float = 5.0) -> None:
        self.tracer_provider = TracerProvider(shutdown_on_exit=False)
        self.tracer_provider.add_span_processor(
            BatchSpanProcessor(
                OTLPSpanExporter(f"{url}/v1/traces", timeout=timeout), schedule_delay_millis=export_interval
            )
        )
        reader = PeriodicExportingMetricReader(
            OTLPMetricExporter(f"{url}/v1/metrics", timeout=timeout), export_interval_millis=export_interval
        )
        self.meter_provider = MeterProvider(metric_readers=[reader], shutdown_on_exit=False)
        self.telemetry = Telemetry(tracer_provider=self.tracer_provider, meter_provider=self.meter_provider)

    def flush(self) -> None:
        """Send what there is."""
        self.tracer_provider.force_flush()
        self.meter_provider.force_flush()

    def shutdown(self) -> None:
        """Stop the exporting threads."""
        self.tracer_provider.shutdown()
        self.meter_provider.shutdown()


@contextmanager
def exporting_to(url: str) -> Iterator[Exporting]:
    """Export to a collector for as long as the block runs."""
    exporting = Exporting(url)
    try:
        yield exporting
    finally:
        exporting.shutdown()
