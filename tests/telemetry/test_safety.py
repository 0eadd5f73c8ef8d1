"""Whatever an application's telemetry does, calls go on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import pytest
from opentelemetry import propagate
from opentelemetry.metrics import MeterProvider, NoOpMeter
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.sampling import Sampler
from opentelemetry.trace import Tracer

from resilient_llm import Bulkhead, CircuitBreaker, Retry, Telemetry
from resilient_llm.telemetry import safety
from resilient_llm.testing import FakeProvider, Fault
from tests.signals import Recording
from tests.telemetry.observed import FIXED, ask, client_of, read_stream, telemetry_of

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def nothing_reported_yet() -> Iterator[None]:
    safety._reported.clear()
    yield
    safety._reported.clear()


class ExplosionError(Exception):
    """What the application's telemetry raises."""


def explode(*_: Any, **__: Any) -> Any:
    raise ExplosionError


class StartExplodes(SpanProcessor):
    on_start = explode


class EndExplodes(SpanProcessor):
    on_end = explode


class SamplerExplodes(Sampler):
    should_sample = explode

    def get_description(self) -> str:
        return "explodes"


class Explosive:
    """An object of which every method explodes, but for those with an answer."""

    def __init__(self, **answers: Any) -> None:
        self._answers = answers

    def __getattr__(self, name: str) -> Any:
        return (lambda *_, **__: self._answers[name]) if name in self._answers else explode


def traced(*processors: SpanProcessor, **options: Any) -> TracerProvider:
    provider = TracerProvider(shutdown_on_exit=False, **options)
    for processor in processors:
        provider.add_span_processor(processor)
    return provider


class Tracing:
    """A tracer provider that is no SDK's."""

    def __init__(self, tracer: Any) -> None:
        self._tracer = tracer

    def get_tracer(self, *_: Any, **__: Any) -> Tracer:
        tracer: Tracer = self._tracer
        return tracer


class MeasuringExplodes(MeterProvider):
    """A meter provider whose instruments explode when something is recorded."""

    def get_meter(self, name: str, *_: Any, **__: Any) -> Any:
        meter: Any = NoOpMeter(name)
        meter.create_histogram = meter.create_counter = lambda *_, **__: Explosive()
        return meter


SETTINGS: dict[str, Callable[[], Any]] = {
    "a processor at the start": lambda: {"tracer_provider": traced(StartExplodes())},
    "a processor at the end": lambda: {"tracer_provider": traced(EndExplodes())},
    "a sampler": lambda: {"tracer_provider": traced(sampler=SamplerExplodes())},
    "a tracer": lambda: {"tracer_provider": Tracing(Explosive())},
    "a span": lambda: {
        "tracer_provider": Tracing(Explosive(start_span=Explosive(is_recording=True, get_span_context=None)))
    },
    "a meter": lambda: {"meter_provider": MeasuringExplodes()},
}


@pytest.mark.parametrize("setting", SETTINGS)
async def test_an_explosion_harms_no_call(setting: str, caplog: pytest.LogCaptureFixture) -> None:
    telemetry = Telemetry(**SETTINGS[setting]())
    provider = FakeProvider()
    provider.script(None, [Fault(status=503), Fault(status=503)])
    bulkhead = Bulkhead(max_concurrent=1)
    policies = (bulkhead, Retry(backoff=FIXED), CircuitBreaker(consecutive_failures=2, break_duration=0.5))
    async with client_of(telemetry, provider, *policies) as client:
        assert (await ask(client)).status_code == 200
        assert await read_stream(client)
        provider.script(None, [Fault(status=400)])
        assert (await ask(client)).status_code == 400
    assert bulkhead.in_use() == 0
    assert provider.total_requests == 5
    assert "calls go on without it" in caplog.text


async def test_what_explodes_again_and_again_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    async with client_of(Telemetry(tracer_provider=traced(EndExplodes())), FakeProvider()) as client:
        for _ in range(10):
            await ask(client)
    told = [record for record in caplog.records if record.name == "resilient_llm"]
    assert [record.levelno for record in told] == [logging.WARNING] * 2  # an attempt's span, and a call's
    assert all(record.exc_info for record in told)


async def test_an_explosion_in_one_signal_does_not_keep_from_the_other() -> None:
    recording = Recording()
    telemetry = Telemetry(tracer_provider=traced(EndExplodes()), meter_provider=recording.meter_provider)
    async with client_of(telemetry, FakeProvider()) as client:
        await ask(client)
    assert recording.points.one("gen_ai.client.operation.duration").count == 1
    telemetry = Telemetry(tracer_provider=recording.tracer_provider, meter_provider=MeasuringExplodes())
    async with client_of(telemetry, FakeProvider()) as client:
        await ask(client)
    assert recording.open == 0
    assert recording.spans.tree() == "chat gpt-4o\n  attempt openai/gpt-4o"


async def test_a_gauge_that_explodes_takes_no_other_with_it() -> None:
    recording = Recording()
    telemetry = telemetry_of(recording)

    class Broken:
        def observe(self) -> Any:
            raise ExplosionError

    broken = Broken()
    telemetry.observe("bulkhead.active", broken.observe, "{call}", "Calls that hold a slot")
    async with client_of(telemetry, FakeProvider(), Bulkhead(max_concurrent=1)) as client:
        await ask(client)
        assert recording.points.one("resilient_llm.bulkhead.active").value == 0


@pytest.fixture
def global_propagator() -> Iterator[Any]:
    before = propagate.get_global_textmap()
    yield propagate.set_global_textmap
    propagate.set_global_textmap(before)


class Says:
    """A propagator that sets one header."""

    fields = frozenset[str]()

    def __init__(self, name: str, value: str) -> None:
        self._header = (name, value)

    def inject(self, carrier: Any, context: Any = None, setter: Any = None) -> None:
        name, value = self._header
        carrier[name] = value


@pytest.mark.parametrize(
    "propagator",
    [Explosive(), Says("x-trace", "a\r\nx-admin: 1"), Says("x-trace", "ünïcode"), Says("x-trace", 7)],  # type: ignore[arg-type]
    ids=["raises", "line break", "not ascii", "not text"],
)
async def test_a_propagator_that_goes_wrong_adds_nothing(propagator: Any, global_propagator: Any) -> None:
    global_propagator(propagator)
    seen: list[httpx2.Headers] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        seen.append(request.headers)
        return httpx2.Response(200, json={})

    async with client_of(Recording(), answer) as client:
        assert (await ask(client)).status_code == 200
    assert "x-trace" not in seen[0]
    assert "x-admin" not in seen[0]
