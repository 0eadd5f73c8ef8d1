"""What a sidecar's traces show: the client's trace goes on, and no key is in it."""

from __future__ import annotations

import asyncio

import anyio
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from resilient_llm import Telemetry
from resilient_llm.sidecar import Sidecar, parse
from resilient_llm.testing import FakeProvider, Fault, serve_in_thread
from tests.sidecar.raw import BODY, post
from tests.sidecar.support import KEY, MemoryEngine, ask, over_sockets

pytestmark = pytest.mark.anyio

TRACE = "0af7651916cd43dd8448eb211c80319c"


async def test_a_clients_trace_goes_on_to_the_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY_OF_ACME", KEY)
    monkeypatch.setenv("PROVIDER_KEY", "sk-provider-key")
    exporter, spans = InMemorySpanExporter(), TracerProvider()
    spans.add_span_processor(SimpleSpanProcessor(exporter))
    provider = FakeProvider()
    provider.script(None, [Fault(status=503)])
    config = parse(
        '[tenants.acme]\nkey_env = "KEY_OF_ACME"\n'
        '[targets.main]\nurl = "http://provider.example/v1"\napi_key_env = "PROVIDER_KEY"\n'
    )
    sidecar = Sidecar(config, MemoryEngine(provider), telemetry=Telemetry(tracer_provider=spans))
    answered = await ask(
        sidecar,
        headers=[
            (b"x-api-key", KEY.encode()),
            (b"traceparent", f"00-{TRACE}-b7ad6b7169203331-01".encode()),
            (b"baggage", b"user=secret"),
        ],
    )
    assert answered.status == 200
    finished = exporter.get_finished_spans()
    assert {format(span.context.trace_id, "032x") for span in finished if span.context} == {TRACE}
    assert sum(span.name.startswith("attempt") for span in finished) == 2
    for request in provider.requests:
        assert request.headers["traceparent"].split("-")[1] == TRACE
        assert "baggage" not in request.headers
    everything = "".join(span.to_json() for span in finished)
    assert "acme" in everything
    assert KEY not in everything
    assert "sk-provider-key" not in everything


@pytest.mark.realtime
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_what_comes_next_over_a_connection_is_of_no_trace_that_came_before() -> None:
    exporter, spans = InMemorySpanExporter(), TracerProvider()
    spans.add_span_processor(SimpleSpanProcessor(exporter))
    provider = FakeProvider()
    traced = post(BODY, b"traceparent: " + f"00-{TRACE}-b7ad6b7169203331-01".encode())
    large = post(b'{"model": "m", "messages": [{"role": "user", "content": "%s"}]}' % (b"x" * 300_000))
    with serve_in_thread(provider) as upstream:
        toml = f'[targets.main]\nurl = "{upstream}/v1"\n'
        async with over_sockets(toml, telemetry=Telemetry(tracer_provider=spans)) as (url, _sidecar):
            reader, writer = await asyncio.open_connection(*url.removeprefix("http://").split(":"))
            writer.write(traced + large + post())  # in line: begun where those before them end
            for _ in range(3):
                with anyio.fail_after(60):
                    await reader.readuntil(b"}}}")
            writer.write(post())
            with anyio.fail_after(60):
                await reader.readuntil(b"}}}")
            writer.close()
    traces = [request.headers["traceparent"].split("-")[1] for request in provider.requests]
    assert traces[0] == TRACE
    assert len(set(traces)) == 4
