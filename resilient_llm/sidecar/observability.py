"""Where a sidecar's spans and metrics go: OpenTelemetry's SDK, set up from a configuration, once a process.

What is recorded is the library's to say. The SDK and its exporters are extras, loaded on use.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import anyio
import anyio.to_thread

from resilient_llm.sidecar.problems import needing
from resilient_llm.sidecar.ui import Recent
from resilient_llm.telemetry import Telemetry

if TYPE_CHECKING:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.metrics.export import MetricReader
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from prometheus_client import Metric as PrometheusMetric

    from resilient_llm.sidecar.config import Config

__all__ = ["Metrics", "Observability", "load_exporter", "observe"]

_LAST_SPANS = 2.0
"""Seconds in which spans that are left are sent at the end."""

Metrics: TypeAlias = Callable[[], Awaitable[tuple[bytes, str]]]


class Observability(NamedTuple):
    """Hold what records calls, what writes the metrics down, and what sends the rest of the spans at the end."""

    telemetry: Telemetry | None
    metrics: Metrics | None
    """Gives metrics in the text format of Prometheus, and its content type."""
    shutdown: Callable[[], None]

    def relabel(self, config: Config) -> None:
        """Have the models and tenants of another configuration be the labels of metrics."""
        if self.telemetry is not None:
            self.telemetry.relabel(models=_models(config), tenants=_tenants(config))


def observe(config: Config) -> Observability:
    """Set up what a configuration asks for.

    Raises `ConfigError` without the package that a key of it needs, and `ModuleNotFoundError` without those of the
    sidecar's own extra.
    """
    options = config.telemetry
    recent = Recent() if config.admin.enabled else None  # for the page
    if not options.prometheus and options.otlp_endpoint is None:
        return Observability(None if recent is None else Telemetry(listener=recent), None, _nothing)
    from opentelemetry.sdk.metrics import MeterProvider  # noqa: PLC0415 - an extra
    from opentelemetry.sdk.resources import Resource  # noqa: PLC0415 - an extra

    resource = Resource.create({"service.name": options.service_name})
    closing: list[Callable[[], None]] = []
    readers: list[MetricReader] = []
    metrics: Metrics | None = None
    traces: TracerProvider | None = None
    if options.prometheus:
        reader, metrics = _prometheus()
        readers.append(reader)
    if options.otlp_endpoint is not None:
        traces = _otlp_traces(options.otlp_endpoint, resource, options.sample_ratio)
        closing.append(traces.shutdown)
    meters = MeterProvider(readers, resource)
    closing.append(meters.shutdown)
    telemetry = Telemetry(
        tracer_provider=traces,
        meter_provider=meters,
        semconv=options.semconv,
        record_tenant=options.record_tenant,
        models=_models(config),
        tenants=_tenants(config),
        listener=recent,
    )

    def close_all() -> None:
        for close in closing:
            close()

    def shutdown() -> None:
        # Whoever takes the spans may be gone or hang, and then a sidecar that is to stop must not.
        thread = threading.Thread(target=close_all, name="telemetry", daemon=True)
        thread.start()
        thread.join(_LAST_SPANS)

    return Observability(telemetry, metrics, shutdown)


def _prometheus() -> tuple[MetricReader, Metrics]:
    from opentelemetry.exporter.prometheus import PrometheusMetricReader  # noqa: PLC0415 - an extra
    from prometheus_client import CollectorRegistry, generate_latest  # noqa: PLC0415 - an extra
    from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4  # noqa: PLC0415 - an extra

    registry = CollectorRegistry()
    reader = PrometheusMetricReader(scope_info_enabled=False, registry=registry)
    one_at_a_time = anyio.CapacityLimiter(1)

    async def metrics() -> tuple[bytes, str]:
        # The values are read here, since those of gauges are the policies' own and hold still only while nothing else
        # runs in this loop. Writing them down, megabytes of them with many tenants, takes longer and needs no loop.
        read = CollectorRegistry()
        read.register(_Families(list(registry.collect())))
        text = await anyio.to_thread.run_sync(generate_latest, read, limiter=one_at_a_time)
        return text, CONTENT_TYPE_PLAIN_0_0_4

    return reader, metrics


class _Families:
    """Give metrics that have been read before; a collector of Prometheus' client."""

    def __init__(self, families: Sequence[PrometheusMetric]) -> None:
        self._families = families

    def describe(self) -> Iterable[PrometheusMetric]:
        """Name none of them, so that they are not read for it."""
        return ()

    def collect(self) -> Iterable[PrometheusMetric]:
        return self._families


def load_exporter(config: Config) -> None:
    """Load what sends spans where a configuration asks for it. Raises `ConfigError` where it is not installed."""
    if config.telemetry.otlp_endpoint is not None:
        _exporter()


def _exporter() -> type[OTLPSpanExporter]:
    with needing("OpenTelemetry's OTLP exporter", "otel", "telemetry", "otlp_endpoint"):
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415 - an extra
    return OTLPSpanExporter


def _otlp_traces(endpoint: str, resource: Resource, sample_ratio: float) -> TracerProvider:
    from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415 - an extra
    from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415 - an extra
    from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio  # noqa: PLC0415 - an extra

    provider = TracerProvider(sampler=ParentBasedTraceIdRatio(sample_ratio), resource=resource)
    exporter = _exporter()(endpoint=f"{endpoint.rstrip('/')}/v1/traces")
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


def _models(config: Config) -> Collection[str] | None:
    return {*config.models, *config.tiers, *_called(config)} if config.models else None


def _tenants(config: Config) -> Collection[str] | None:
    return config.tenants.keys() if config.telemetry.tenants_in_metrics else None


def _called(config: Config) -> Iterator[str]:
    """Give what targets call the models of a configuration."""
    for model in config.models.values():
        for target in model.targets:
            name = target.model or config.targets[target.target].model
            if name is not None:
                yield name


def _nothing() -> None:
    pass
