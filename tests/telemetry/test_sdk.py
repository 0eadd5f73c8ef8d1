"""The application's SDK: there or not, now or later, globally or given."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from opentelemetry.metrics import NoOpMeterProvider
from opentelemetry.trace import NoOpTracerProvider

from resilient_llm import Bulkhead, Retry, Telemetry
from resilient_llm.telemetry import sdk
from resilient_llm.telemetry.silent import SILENT
from resilient_llm.testing import FakeProvider, Fault
from tests.signals import Recording
from tests.telemetry.observed import FIXED, ask, client_of

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    "telemetry",
    [Telemetry(), Telemetry(tracer_provider=NoOpTracerProvider(), meter_provider=NoOpMeterProvider())],
    ids=["none", "one that does nothing"],
)
async def test_without_an_sdk_nothing_is_made_and_sums_are_kept(telemetry: Telemetry) -> None:
    assert telemetry.begin() is SILENT
    seen = []

    async def keep(call, call_next):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        seen.append(call)
        return await call_next(call)

    provider = FakeProvider()
    provider.script(None, [Fault(status=503)])
    async with client_of(
        telemetry, provider, keep, Bulkhead(max_concurrent=1), Retry(backoff=FIXED)
    ) as client:
        assert (await ask(client)).status_code == 200
    assert (seen[0].attempts, seen[0].retries, seen[0].retry_delay) == (2, 1, 1.0)


async def test_traces_without_metrics_and_metrics_without_traces() -> None:
    recording = Recording()
    async with client_of(Telemetry(tracer_provider=recording.tracer_provider), FakeProvider()) as client:
        await ask(client)
    assert (len(recording.spans), len(recording.points)) == (2, 0)
    recording = Recording()
    async with client_of(Telemetry(meter_provider=recording.meter_provider), FakeProvider()) as client:
        await ask(client)
    assert len(recording.spans) == 0
    assert recording.points.one("gen_ai.client.operation.duration").count == 1


async def test_what_opentelemetry_keeps_its_providers_in_may_move(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sdk.nothing_global()
    monkeypatch.delattr("opentelemetry.trace._TRACER_PROVIDER")
    monkeypatch.setattr("opentelemetry.trace.get_tracer_provider", NoOpTracerProvider)
    assert not sdk.nothing_global()
    assert Telemetry().begin() is SILENT


LATER = """
    import anyio, httpx2
    from opentelemetry import metrics, trace
    from resilient_llm import Bulkhead, Telemetry
    from tests.signals import Recording
    from tests.telemetry.observed import ask, client_of
    from resilient_llm.testing import FakeProvider

    async def main():
        client = client_of(Telemetry(), FakeProvider(), Bulkhead(max_concurrent=1))
        await ask(client)
        recording = Recording()
        trace.set_tracer_provider(recording.tracer_provider)
        await ask(client)
        metrics.set_meter_provider(recording.meter_provider)
        await ask(client)
        # Given outright, it is still the same one: its gauges are not lost, nor counted twice.
        other = client_of(
            Telemetry(meter_provider=recording.meter_provider), FakeProvider(), Bulkhead(max_concurrent=1, name="two")
        )
        await ask(other)
        print(len(recording.spans.named("chat")), recording.points.one("gen_ai.client.operation.duration").count)
        print(sorted(point.attributes["resilient_llm.limiter.name"]
              for point in recording.points.of("resilient_llm.bulkhead.active")))

    anyio.run(main)
"""


def test_an_sdk_that_is_configured_later_is_used_from_then_on() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(LATER)],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert done.stderr == ""
    assert done.stdout.split("\n")[:2] == ["3 2", "['bulkhead', 'two']"]
