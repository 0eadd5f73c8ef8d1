"""What a sidecar's traces show: the client's trace goes on, and no key is in it."""

from __future__ import annotations

import asyncio
import json

import anyio
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from resilient_llm import Telemetry
from resilient_llm.message import Reply, Request
from resilient_llm.sidecar import Sidecar, parse
from resilient_llm.streams import BufferedStream
from resilient_llm.testing import FakeProvider, Fault, serve_in_thread
from tests.sidecar.raw import BODY, post
from tests.sidecar.support import ASK, KEY, MemoryEngine, ask, over_sockets

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


class Telling(MemoryEngine):
    """A provider that calls itself by the key it was sent, and its reasons too."""

    def __init__(self, body: bytes) -> None:
        super().__init__(FakeProvider())
        self._body = body

    async def __call__(self, request: Request) -> Reply:
        self.sent.append(request)
        kind = b"text/event-stream" if self._body.startswith(b"data") else b"application/json"
        return Reply(200, [(b"content-type", kind)], BufferedStream([self._body]))


@pytest.mark.parametrize("streamed", [False, True])
async def test_no_key_is_in_a_span_whoever_puts_it_there(
    streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = "sk-provider-key-0123456789"
    monkeypatch.setenv("KEY_OF_ACME", KEY)
    monkeypatch.setenv("PROVIDER_KEY", ours)
    said = {"index": 0, "finish_reason": f"f-{ours}", "delta" if streamed else "message": {"content": "hi"}}
    body = json.dumps({"id": f"i-{ours}", "model": f"m-{ours}", "choices": [said]}).encode()
    engine = Telling(b"data: " + body + b"\n\ndata: [DONE]\n\n" if streamed else body)
    exporter, spans = InMemorySpanExporter(), TracerProvider()
    spans.add_span_processor(SimpleSpanProcessor(exporter))
    config = parse(
        '[tenants.acme]\nkey_env = "KEY_OF_ACME"\n'
        '[targets.main]\nurl = "http://provider.example/v1"\napi_key_env = "PROVIDER_KEY"\n'
    )
    sidecar = Sidecar(config, engine, telemetry=Telemetry(tracer_provider=spans))
    answered = await ask(
        sidecar,
        {**ASK, "stream": streamed},
        headers=[
            (b"x-api-key", KEY.encode()),
            (b"traceparent", f"00-{TRACE}-b7ad6b7169203331-01".encode()),
            (b"tracestate", f"vendor={KEY}".encode()),
            (b"x-request-id", KEY.encode()),
        ],
    )
    assert answered.status == 200
    everything = "".join(span.to_json() + str(span.context) for span in exporter.get_finished_spans())
    for shown in ("i-***", "m-***", "f-***", TRACE):
        assert shown in everything
    assert ours not in everything
    assert KEY not in everything + str(engine.sent[0].headers)


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
