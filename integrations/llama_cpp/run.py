"""Ask a real model through the service in `app.py`, while its connection fails once, and show the trace.

Usage: run.py BASE_URL, the model server's with its `/v1`.
"""

from __future__ import annotations

import sys

import anyio
import httpx
import httpx2
from opentelemetry import trace
from opentelemetry.instrumentation.asgi import OpenTelemetryMiddleware
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from rich.console import Console

from integrations.llama_cpp.app import make_app
from resilient_llm.demo.trace_tree import draw, trees
from resilient_llm.testing import serve

QUESTION = "What is the capital of France?"


class FailsFirst(httpx2.AsyncHTTPTransport):
    """A network that loses the first request it is given, so that there is something to see."""

    failed = False

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Fail once."""
        if not self.failed:
            self.failed = True
            raise httpx2.ConnectError("the first connection is lost on purpose", request=request)
        return await super().handle_async_request(request)


async def main(base_url: str) -> None:
    """Ask twice, in one piece and as a stream, and print answers and trace."""
    spans = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    trace.set_tracer_provider(provider)
    app = make_app(base_url, FailsFirst())
    app.add_middleware(OpenTelemetryMiddleware, exclude_spans=["send", "receive"])
    console = Console()
    async with serve(app) as url, httpx.AsyncClient(timeout=120) as client:
        params, headers = {"question": QUESTION}, {"x-tenant": "acme"}
        answer = await client.get(f"{url}/ask", params=params, headers=headers)
        console.print(f"in one piece ({answer.status_code}): {answer.json()['answer']}", highlight=False)
        async with client.stream("GET", f"{url}/stream", params=params, headers=headers) as streamed:
            pieces = [piece async for piece in streamed.aiter_text()]
        console.print(
            f"streamed ({streamed.status_code}, {len(pieces)} pieces): {''.join(pieces)}", highlight=False
        )
    for root in trees(spans.get_finished_spans()):
        console.print()
        console.print(draw(root, console.width))


if __name__ == "__main__":
    anyio.run(main, sys.argv[1])
