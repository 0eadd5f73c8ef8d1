"""Our spans through a collector that is somebody else's: it decodes what we sent and encodes it anew."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import anyio
import pytest
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from resilient_llm import Backoff, CircuitBreaker, Retry, ambient
from resilient_llm.testing import FakeProvider, Fault
from tests.otlp import Receiver
from tests.signals import Recording
from tests.telemetry.observed import ask, client_of, read_stream

pytestmark = [pytest.mark.anyio, pytest.mark.realtime]

rotel = pytest.importorskip("rotel", reason="the collector rotel is not there for this platform")
AGENT = Path(rotel.__file__).with_name("rotel-agent")
QUICK = Backoff(initial=0.01, maximum=0.01, jitter="none")


def a_free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port: int = bound.getsockname()[1]
        return port


@contextmanager
def collector(onward: str, folder: Path) -> Iterator[str]:
    """Run rotel, which sends on what it receives; give its URL."""
    port = a_free_port()
    options = {
        "otlp-http-endpoint": f"127.0.0.1:{port}",
        "otlp-grpc-endpoint": f"127.0.0.1:{a_free_port()}",
        "exporter": "otlp",
        "otlp-exporter-protocol": "http",
        "otlp-exporter-endpoint": onward,
        "batch-timeout": "50ms",
        "pid-file": str(folder / "pid"),
        "log-file": str(folder / "log"),
    }
    arguments = [f"--{name}={value}" for name, value in options.items()]
    process = subprocess.Popen(
        [AGENT, "start", *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        until = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < until:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.02)
        assert process.poll() is None, f"rotel ended with {process.returncode}"
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(60)


async def test_what_another_collector_understands_is_what_we_said(tmp_path: Path) -> None:
    recording = Recording()
    provider = FakeProvider()
    provider.script(None, [Fault(status=503), Fault(status=429), Fault(), Fault(), Fault(status=500)])
    policies = (Retry(backoff=QUICK), CircuitBreaker(consecutive_failures=2))
    with Receiver() as receiver, collector(receiver.url, tmp_path) as url:
        exporter = BatchSpanProcessor(OTLPSpanExporter(f"{url}/v1/traces"))
        recording.tracer_provider.add_span_processor(exporter)
        async with client_of(recording, provider, *policies) as client:
            with ambient(tenant="acme"):
                await ask(client)
            await read_stream(client, "gpt-5")
            await ask(client, "gpt-6")
        sent = list(recording.spans)
        await anyio.to_thread.run_sync(exporter.force_flush)
        await anyio.to_thread.run_sync(
            lambda: receiver.wait_for(lambda received: len(received.spans) >= len(sent))
        )
        recording.tracer_provider.shutdown()
    assert len(sent) > 8
    assert list(receiver.spans) == sent
