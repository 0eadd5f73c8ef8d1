"""The collector's configuration: taken by a real collector, which keeps the traces that it says it keeps.

Jaeger's program is an OpenTelemetry Collector with all the parts that the configuration names. Without it the names of
attributes and events are still compared with those of spans that were really made.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import anyio
import httpx
import httpx2
import pytest
import yaml
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource

from benchmarks._children import Watch
from integrations.jaeger.call import SERVICE, ask, tracing_to
from integrations.jaeger.remarkable import CALLS, all_of_them
from integrations.jaeger.server import _free_ports, find_jaeger, running
from integrations.prometheus.live import FOLDER as PROMETHEUS
from resilient_llm import Bulkhead, CircuitBreaker, Retry, Telemetry
from resilient_llm.httpx2 import ResilientTransport
from resilient_llm.testing import FakeProvider, Fault
from tests.signals import Recording, Spans

FILE: Final = Path(__file__).with_name("collector.yaml")
CONFIG: Final[dict[str, Any]] = yaml.safe_load(FILE.read_text())
POLICIES: Final[list[dict[str, Any]]] = CONFIG["processors"]["tail_sampling"]["policies"]
SHORTER: Final = {
    "decision_wait: 120s": "decision_wait: 2s",
    '"] > 5.0': '"] > 1.5',
    "threshold_ms: 30000": "threshold_ms: 3000",
    "sampling_percentage: 5": "sampling_percentage: 0",
}
"""What is seconds there is less here, and of the rest nothing is kept, so that every trace has its own reason."""


@pytest.fixture(scope="module")
def program() -> Path:
    found = find_jaeger()
    if found is None:
        pytest.skip(
            "there is no Jaeger, which is the collector here: neither on PATH nor built by scripts/jaeger"
        )
    return found


# What can be said without a collector


def test_there_is_a_call_for_each_policy() -> None:
    assert [policy["name"] for policy in POLICIES] == [*CALLS, "the-rest"]


@pytest.mark.realtime
def test_policies_go_by_names_that_spans_have() -> None:
    recording = Recording()
    anyio.run(all_of_them, recording.tracer_provider)
    spans = recording.spans
    text = yaml.safe_dump(POLICIES)
    attributes = set(re.findall(r'attributes\["([^"]+)"\]', text)) | set(re.findall(r"key: (\S+)", text))
    events = set(re.findall(r'name == "([^"]+)"', text))
    assert attributes == {
        "gen_ai.response.time_to_first_chunk",
        "resilient_llm.attempts",
        "resilient_llm.outcome",
        "resilient_llm.wait_time",
    }
    assert attributes <= {key for span in spans for key in span.attributes}
    assert events == {"resilient_llm.rejected"}
    assert events <= {event for span in spans for event in span.event_names()}


# What a collector does


@contextmanager
def collecting(program: Path, config: str, folder: Path, jaeger: str) -> Iterator[tuple[str, str]]:
    """Run the collector; give the base URL it takes OTLP at, and the URL of its metrics."""
    file = folder / "collector.yaml"
    file.write_text(config)
    names = ("COLLECTOR_OTLP_HTTP_PORT", "COLLECTOR_OTLP_GRPC_PORT", "COLLECTOR_METRICS_PORT")
    http, _, metrics = ports = _free_ports(len(names))
    environment = dict(zip(names, map(str, ports), strict=True))
    with (folder / "collector.log").open("w") as log:
        process = subprocess.Popen(
            [program, f"--config={file}", "--feature-gates=processor.tailsamplingprocessor.recordpolicy"],
            env={**os.environ, **environment, "JAEGER_OTLP_GRPC": jaeger, "COLLECTOR_LOG_LEVEL": "warn"},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    watch = Watch(process)
    try:
        until = time.monotonic() + 60
        while not answers(f"http://127.0.0.1:{metrics}/metrics"):
            assert process.poll() is None, (folder / "collector.log").read_text()
            assert time.monotonic() < until
            time.sleep(0.05)
        yield f"http://127.0.0.1:{http}", f"http://127.0.0.1:{metrics}/metrics"
    finally:
        watch.release()
        process.kill()
        process.wait()


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def test_a_collector_takes_it(program: Path) -> None:
    ran = subprocess.run(
        [program, "validate", f"--config={FILE}"], capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode == 0, ran.stderr


@pytest.mark.realtime
def test_each_policy_keeps_what_it_is_for(
    program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "60000")  # a trace's spans are sent together, at the end
    config = FILE.read_text()
    for written, shorter in SHORTER.items():
        assert config.count(written) == 1
        config = config.replace(written, shorter)
    with running(program) as jaeger, collecting(program, config, tmp_path, jaeger.grpc) as (otlp, _):
        with tracing_to(otlp) as traces:
            anyio.run(all_of_them, traces)
        kept = jaeger.wait_for(lambda: calls(jaeger.traces(SERVICE)), set(CALLS).__le__, timeout=60)
        by = {name: jaeger.search(SERVICE, **{"tailsampling.policy": name}) for name in CALLS}
        reasons = {
            name: set().union(*(calls(jaeger.trace(trace_id)) for trace_id in ids))
            for name, ids in by.items()
        }
    assert kept == set(CALLS)
    assert reasons == {name: {name} for name in CALLS}


def calls(spans: Spans) -> set[str]:
    """Give what the calls of some traces are called, here after the policy that is to keep them."""
    return {root.name.split()[-1].removeprefix("/") for root in spans.roots()}


@pytest.mark.realtime
def test_metrics_have_the_names_that_rules_and_dashboard_go_by(program: Path, tmp_path: Path) -> None:
    (job,) = (
        job
        for job in yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())["scrape_configs"]
        if job["job_name"] == "collector"
    )
    (rename,) = job["metric_relabel_configs"]
    with collecting(program, FILE.read_text(), tmp_path, "127.0.0.1:1") as (otlp, metrics):
        anyio.run(one_retried_call, f"{otlp}/v1/metrics")
        until = time.monotonic() + 30
        while "resilient_llm" not in (shown := httpx.get(metrics, timeout=10, trust_env=False).text):
            assert time.monotonic() < until
            time.sleep(0.1)
    named = set(re.findall(r"^(\w+)\{", shown, re.MULTILINE))
    assert "resilient_llm_breaker_state_ratio" in named
    renamed = {
        re.sub(rename["regex"] + "$", rename["replacement"].replace("$", "\\"), name) for name in named
    }
    assert renamed >= {
        "gen_ai_client_operation_duration_seconds_count",
        "resilient_llm_attempt_duration_seconds_bucket",
        "resilient_llm_call_retries_total",
        "resilient_llm_breaker_state",
        "resilient_llm_bulkhead_active",
    }
    assert 'job="app"' in shown
    assert 'resilient_llm_outcome="success"' in shown


async def one_retried_call(url: str) -> None:
    reader = PeriodicExportingMetricReader(OTLPMetricExporter(url))
    meters = MeterProvider([reader], Resource.create({"service.name": SERVICE}))
    provider = FakeProvider()
    provider.script(None, [Fault(status=503)])
    transport = ResilientTransport(
        provider.httpx2_transport(),
        policies=[Bulkhead(max_concurrent=1), Retry(), CircuitBreaker()],
        telemetry=Telemetry(meter_provider=meters),
    )
    async with httpx2.AsyncClient(
        transport=transport, base_url="http://provider.example/v1", timeout=60
    ) as made:
        assert (await ask(made)).status_code == 200
        await anyio.to_thread.run_sync(meters.shutdown)
