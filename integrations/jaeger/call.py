"""One call that waits, is throttled, fails and ends well, sent to Jaeger. The provider is a fake one: no key.

Usage: call.py [URL], where URL takes OTLP over HTTP (default: http://127.0.0.1:4318). Run `scripts/jaeger run` first.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import anyio
import httpx2
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import TracerProvider as AnyTracerProvider
from opentelemetry.trace import format_trace_id

from resilient_llm import Backoff, Bulkhead, CircuitBreaker, Deadline, Policy, Retry, Telemetry
from resilient_llm.httpx2 import ResilientTransport
from resilient_llm.testing import FakeModel, FakeProvider, Fault, Latency

SERVICE = "app"


@contextmanager
def tracing_to(url: str) -> Iterator[TracerProvider]:
    """Set up OpenTelemetry's SDK as an application does, and send all spans before leaving.

    An application hands the provider to `opentelemetry.trace.set_tracer_provider` and needs no `telemetry=` then.
    """
    # A short name: Jaeger writes it before each span's, in one narrow column.
    provider = TracerProvider(resource=Resource.create({"service.name": SERVICE}), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(f"{url}/v1/traces", timeout=5)))
    try:
        yield provider
    finally:
        provider.shutdown()


def client_of(
    provider: FakeProvider, tracer_provider: AnyTracerProvider, *policies: Policy
) -> httpx2.AsyncClient:
    """Make a client of a provider whose calls go through policies and are traced."""
    transport = ResilientTransport(
        provider.httpx2_transport(),
        policies=policies,
        telemetry=Telemetry(tracer_provider=tracer_provider),
    )
    return httpx2.AsyncClient(transport=transport, base_url="http://provider.example/v1", timeout=30)


async def ask(client: httpx2.AsyncClient, model: str = "gpt-4o") -> httpx2.Response:
    """Ask a question, in one piece."""
    question = {"model": model, "messages": [{"role": "user", "content": "Why is the sky blue?"}]}
    return await client.post("/chat/completions", json=question)


async def troubled_call(tracer_provider: AnyTracerProvider) -> str:
    """Make the call, below a span of the application's own, and give its trace's id."""
    provider = FakeProvider(FakeModel(latency=Latency(headers=0.3)))
    provider.script("gpt-4o", [Fault(status=429, headers={"retry-after": "1"}), Fault(status=503)])
    policies = (
        Deadline(20),
        Bulkhead(max_concurrent=1),
        Retry(backoff=Backoff(initial=0.2, jitter="none")),
        CircuitBreaker(),
    )
    tracer = tracer_provider.get_tracer("application")
    async with (
        client_of(provider, tracer_provider, *policies) as client,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(ask, client, "gpt-4o-mini")  # takes the only slot, for 0.3 s
        await anyio.sleep(0.05)
        with tracer.start_as_current_span("answer") as span:
            await ask(client)
    return format_trace_id(span.get_span_context().trace_id)


if __name__ == "__main__":
    with tracing_to(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:4318") as tracer_provider:
        trace_id = anyio.run(troubled_call, tracer_provider)
    print(f"http://127.0.0.1:16686/trace/{trace_id}")  # noqa: T201
