"""What a listener hears of calls, with an SDK and without one, and that it can do them no harm."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anyio
import pytest

from resilient_llm import Bulkhead, Call, CircuitBreaker, ConfigurationError, Retry, Router, Target, Telemetry
from resilient_llm.telemetry import CallListener, Routing, safety
from resilient_llm.testing import FakeModel, FakeProvider, Fault, Latency
from tests.signals import Recording
from tests.telemetry.observed import FIXED, ask, client_of, telemetry_of

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def nothing_reported_yet() -> Iterator[None]:
    safety._reported.clear()
    yield
    safety._reported.clear()


class Heard(CallListener):
    """Note what it is told, in words."""

    def __init__(self, words: list[str]) -> None:
        self.words = words

    def start(self, call: Call) -> None:
        self.words.append("start")
        call.on_finish(lambda outcome: self.words.append(f"end {outcome.verdict.value}"))

    def attempt(self, attempt: Call) -> None:
        self.words.append(f"attempt {attempt.number}")

    def waited(self, call: Call, limiter: str, *, since: float, outcome: str, unit: str, depth: int) -> None:
        self.words.append(f"waited {limiter} {outcome}")

    def backoff(self, call: Call, **said: Any) -> None:
        self.words.append(f"backoff {said['source']}")

    def routed(self, routing: Routing) -> None:
        self.words.append(f"routed {routing.selected}")

    def rejected(self, call: Call, error: Exception, *, dry_run: bool) -> None:
        self.words.append(f"rejected {type(error).__name__}")

    def retry_suppressed(self, call: Call, why: str) -> None:
        self.words.append(f"no retry {why}")

    def breaker_changed(self, call: Call, name: str, from_: str, to: str, reason: str) -> None:
        self.words.append(f"{name} {from_} {to}")


class Deaf(Heard):
    detailed = False


class Broken(CallListener):
    """Raise whatever it is told."""

    def __getattribute__(self, name: str) -> Any:
        if callable(vars(CallListener).get(name)):
            raise LookupError(name)  # noqa: TRY004 - as an application would
        return super().__getattribute__(name)


EXPECTED = ["routed main", "attempt 1", "backoff exponential", "routed main", "attempt 2"]


def router() -> Router:
    return Router([Target(name="main", url="http://provider.example:8080/v1")])


def failing_once() -> FakeProvider:
    provider = FakeProvider()
    provider.script(None, [Fault(status=503)])
    return provider


@pytest.mark.parametrize("with_sdk", [False, True])
async def test_it_hears_of_a_call_with_an_sdk_and_without(with_sdk: bool) -> None:
    words: list[str] = []
    recording = Recording()
    telemetry = telemetry_of(recording) if with_sdk else Telemetry()
    telemetry.listener = lambda: Heard(words)
    async with client_of(telemetry, failing_once(), Retry(backoff=FIXED), router()) as client:
        assert (await ask(client)).status_code == 200
    assert words == ["start", *EXPECTED, "end success"]
    names = sorted(span.name for span in recording.spans)
    assert names == (
        ["attempt openai/gpt-4o", "attempt openai/gpt-4o", "backoff", "chat gpt-4o", "route", "route"]
        if with_sdk
        else []
    )


async def test_it_hears_of_waits_and_refusals_and_a_wait_counts_once() -> None:
    words: list[str] = []
    waits: list[float] = []

    class Summed(Heard):
        def start(self, call: Call) -> None:
            call.on_finish(lambda _: waits.append(call.wait_time))

    telemetry = Telemetry(listener=lambda: Summed(words))
    provider = FakeProvider(FakeModel(latency=Latency(headers=2.0)))
    bulkhead = Bulkhead(max_concurrent=1, max_queued=1)
    async with client_of(telemetry, provider, bulkhead) as client, anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(ask, client)
            await anyio.sleep(0.1)
    assert words == ["attempt 1", "rejected BulkheadFullError", "waited bulkhead acquired", "attempt 1"]
    assert sorted(waits) == pytest.approx([0.0, 0.0, 1.9])


async def test_it_hears_of_circuits_and_of_what_is_not_retried() -> None:
    words: list[str] = []
    provider = FakeProvider()
    provider.script(None, [Fault(status=503)])
    policies = (Retry(max_attempts=1), CircuitBreaker(consecutive_failures=1))
    async with client_of(Telemetry(listener=lambda: Heard(words)), provider, *policies) as client:
        await ask(client)
    assert words == [
        "start",
        "attempt 1",
        "circuit:provider.example:8080 closed open",
        "no retry max_attempts",
        "end failure",
    ]


async def test_decisions_are_not_worked_out_for_one_that_does_not_want_them() -> None:
    words: list[str] = []
    async with client_of(
        Telemetry(listener=lambda: Deaf(words)), failing_once(), Retry(backoff=FIXED), router()
    ) as client:
        await ask(client)
    assert words == ["start", "attempt 1", "backoff exponential", "attempt 2", "end success"]


@pytest.mark.parametrize("with_sdk", [False, True])
async def test_calls_go_on_whatever_it_raises(with_sdk: bool, caplog: pytest.LogCaptureFixture) -> None:
    recording = Recording()
    telemetry = telemetry_of(recording) if with_sdk else Telemetry()
    telemetry.listener = Broken
    async with client_of(telemetry, failing_once(), Retry(backoff=FIXED), router()) as client:
        for _ in range(3):
            assert (await ask(client)).status_code == 200
    warnings = [record for record in caplog.records if record.levelname == "WARNING"]
    assert warnings
    assert len(warnings) == len({record.getMessage() for record in warnings})
    assert len([span for span in recording.spans if span.name == "chat gpt-4o"]) == (3 if with_sdk else 0)


async def test_calls_go_on_when_none_can_be_made(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> CallListener:
        raise LookupError

    async with client_of(Telemetry(listener=fail), FakeProvider()) as client:
        assert (await ask(client)).status_code == 200
    assert "telemetry failed in listener" in caplog.text


def test_it_has_to_be_a_function() -> None:
    with pytest.raises(ConfigurationError, match="allowed are functions that make a CallListener"):
        Telemetry(listener="Heard")  # type: ignore[arg-type]
