"""Spans over OTLP from a sidecar's process to a collector: whose traces are gone on with, and which are sampled."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import httpx
import pytest
from opentelemetry.sdk.trace import TracerProvider

from resilient_llm.sidecar import observability, parse
from resilient_llm.testing import FakeProvider, serve_in_thread
from tests.otlp import Receiver
from tests.sidecar.process import PORTS, started
from tests.sidecar.support import ASK, OPEN

TRACES = {"sampled": f"00-{'a' * 32}-{'b' * 16}-01", "unsampled": f"00-{'c' * 32}-{'d' * 16}-00"}


@pytest.mark.realtime
@pytest.mark.parametrize(("ratio", "begun_here"), [(0.0, 0), (1.0, 1)])
def test_a_clients_trace_is_as_the_client_decided_and_of_others_a_share_is_sent(
    ratio: float, begun_here: int, tmp_path: Path
) -> None:
    provider = FakeProvider()
    file = tmp_path / "gateway.toml"
    with Receiver() as receiver, serve_in_thread(provider) as upstream:
        telemetry = f'otlp_endpoint = "{receiver.url}"\nsample_ratio = {ratio}\nservice_name = "gateway"\n'
        file.write_text(f'{PORTS}[targets.one]\nurl = "{upstream}/v1"\n[telemetry]\n{telemetry}')
        with started(file) as (process, url, admin):
            for headers in (
                {"traceparent": TRACES["sampled"]},
                {"traceparent": TRACES["unsampled"]},
                {},
            ):
                httpx.post(
                    f"{url}/v1/chat/completions", json=ASK, headers=headers, timeout=60
                ).raise_for_status()
            assert 'service_name="gateway"' in httpx.get(f"{admin}/metrics", timeout=60).text
            process.signal(signal.SIGTERM)  # what is left of the spans is sent then
            assert process.end() == (0, "")
        receiver.wait_for(lambda it: len(it.spans.named("chat gpt-4o")) >= 1 + begun_here)
        calls = receiver.spans.named("chat gpt-4o")
        traces = {span.trace_id for span in calls}
        assert len(calls) == 1 + begun_here
        assert "a" * 32 in traces
        assert "c" * 32 not in {span.trace_id for span in receiver.spans}
        [continued] = [span for span in calls if span.trace_id == "a" * 32]
        assert continued.parent_id == "b" * 16
    # And on to the provider, by the span of the attempt.
    received = [request.headers["traceparent"].split("-") for request in provider.requests]
    attempts = {span.span_id for span in receiver.spans if span.trace_id == "a" * 32}
    assert received[0][1] == "a" * 32
    assert received[0][2] in attempts
    assert (received[1][1], received[1][3]) == ("c" * 32, "00")
    assert int(received[2][3], 16) & 1 == begun_here


def test_a_collector_that_hangs_holds_up_the_end_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observability, "_LAST_SPANS", 0.05)
    ended, waited = threading.Event(), []

    def hang(_self: TracerProvider) -> None:
        waited.append(ended.wait(30))

    monkeypatch.setattr(TracerProvider, "shutdown", hang)
    seen = observability.observe(parse(f'{OPEN}[telemetry]\notlp_endpoint = "http://127.0.0.1:9"\n'))
    seen.shutdown()
    assert waited == []
    ended.set()
