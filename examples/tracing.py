"""What happened to a call, as a tree of spans: what you see in Jaeger, printed. In virtual time.

Prints:
    chat gpt-4o              3.9 s  outcome=success attempts=3
      wait bulkhead          0.3 s  wait.outcome=acquired
      attempt openai/gpt-4o  0.4 s  attempt.outcome=retryable
      backoff                0.2 s  backoff.source=exponential
      attempt openai/gpt-4o  0.4 s  attempt.outcome=retryable attempt.retry_after=2.0
      backoff                2.1 s  backoff.source=retry_after
      attempt openai/gpt-4o  0.4 s  attempt.outcome=success
"""

import random

import anyio
import httpx
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from resilient_llm import Bulkhead, CircuitBreaker, Deadline, Retry, Telemetry
from resilient_llm.httpx import ResilientTransport
from resilient_llm.testing import FakeModel, FakeProvider, Fault, Latency, run_virtual

SHOWN = ("outcome", "attempts", "wait.outcome", "attempt.outcome", "attempt.retry_after", "backoff.source")
exporter = InMemorySpanExporter()
tracing = TracerProvider()  # an application sets a global one, and needs no `telemetry=` below
tracing.add_span_processor(SimpleSpanProcessor(exporter))


async def main() -> None:
    provider = FakeProvider(FakeModel(latency=Latency(headers=0.4)))
    provider.script("gpt-4o", [Fault(status=503), Fault(status=429, headers={"retry-after": "2"})])
    transport = ResilientTransport(
        provider.transport(),
        policies=[Deadline(60), Bulkhead(max_concurrent=1), Retry(random=random.Random(1)), CircuitBreaker()],
        telemetry=Telemetry(tracer_provider=tracing),
    )
    async with httpx.AsyncClient(transport=transport, base_url="http://provider/v1") as client:

        async def ask(model: str) -> None:
            await client.post("/chat/completions", json={"model": model, "messages": []})

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, "other")  # takes the only slot
            await anyio.sleep(0.1)
            tasks.start_soon(ask, "gpt-4o")


if __name__ == "__main__":
    run_virtual(main)
    spans = exporter.get_finished_spans()
    call = next(span for span in spans if span.name == "chat gpt-4o")
    children = [span for span in spans if span.parent and span.parent.span_id == call.context.span_id]
    for span in [call, *sorted(children, key=lambda span: span.start_time or 0)]:
        seconds = ((span.end_time or 0) - (span.start_time or 0)) / 1e9
        said = {name: (span.attributes or {}).get(f"resilient_llm.{name}") for name in SHOWN}
        words = " ".join(f"{name}={value}" for name, value in said.items() if value is not None)
        print(f"{'  ' * bool(span.parent) + span.name:<24} {seconds:.1f} s  {words}")
