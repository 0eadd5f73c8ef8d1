"""The spans right below a call account for its time, whatever happens to it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress

import anyio
import httpx2
import pytest

from resilient_llm import Bulkhead, CircuitBreaker, Deadline, Retry, ambient
from resilient_llm.testing import FakeModel, FakeProvider, Fault, Latency
from tests.signals import Recording
from tests.support import cancel_at_every_await
from tests.telemetry.observed import FIXED, STREAM, URL, ask, client_of, read_stream

pytestmark = pytest.mark.anyio

UNEVEN = FakeModel(latency=Latency(headers=0.3, first_token=0.2, per_token=0.05), reply="one two three four")
"""0.3 s to the head of a reply, 0.65 s to its end."""

Scenario = Callable[[httpx2.AsyncClient], Awaitable[object]]


async def read_the_first_chunk(client: httpx2.AsyncClient) -> None:
    async with client.stream("POST", URL, json=STREAM) as response:
        chunks = response.aiter_raw()
        await anext(chunks)
        await anyio.sleep(0.5)
        await chunks.aclose()


async def upload_slowly(client: httpx2.AsyncClient) -> None:
    async def body() -> AsyncIterator[bytes]:
        for piece in (b'{"model": "gpt-4o",', b' "messages": []}'):
            await anyio.sleep(0.2)
            yield piece

    await client.post(URL, content=body())


class Setting:
    """A provider in trouble behind every policy there is, whose only slot is taken for the first half second."""

    def __init__(self, *faults: Fault) -> None:
        self.recording = Recording()
        self.provider = FakeProvider(UNEVEN)
        self.bulkhead = Bulkhead(max_concurrent=1)
        self.faults = faults
        self.policies = (
            Deadline(30),
            self.bulkhead,
            Retry(backoff=FIXED, budget_min_per_second=100),
            CircuitBreaker(consecutive_failures=3),
        )

    async def run(self, scenario: Scenario) -> None:
        """Carry out a scenario while the slot is taken."""
        self.provider.script("gpt-4o", self.faults)
        self.recording.clear()
        client = client_of(self.recording, self.provider, *self.policies)
        async with client, anyio.create_task_group() as tasks:
            tasks.start_soon(ask, client, "the one before")
            await anyio.sleep(0.15)
            await scenario(client)
            tasks.cancel_scope.cancel()

    def check(self) -> str:
        """Check that nothing is open and all time is accounted for; give the names of the call's children."""
        spans = self.recording.spans
        assert self.recording.open == 0
        assert self.bulkhead.in_use() == 0
        for call in spans.named("chat"):
            spans.assert_accounted(call)
            for child in spans.children(call):
                assert call.start <= child.start <= child.end <= call.end
        calls = spans.named("chat gpt-4o") or spans.named("chat provider.example:8080")
        return " ".join(child.name.split()[0] for child in spans.children(calls[0])) if calls else ""


@pytest.mark.parametrize(
    ("scenario", "faults", "children"),
    [
        (ask, (), "wait attempt"),
        (ask, (Fault(status=503), Fault(reset=True)), "wait attempt backoff attempt backoff attempt"),
        (ask, (Fault(status=400),), "wait attempt"),
        (ask, (Fault(status=500),) * 9, "wait attempt backoff attempt backoff attempt"),
        (read_stream, (), "wait attempt"),
        (read_stream, (Fault(status=429, headers={"retry-after": "3"}),), "wait attempt backoff attempt"),
        (read_stream, (Fault(delay_headers=1.0, token_delay=1.0, chunk_size=7),), "wait attempt"),
        (read_the_first_chunk, (), "wait attempt"),
        (upload_slowly, (Fault(status=503),), "wait read attempt backoff attempt"),
    ],
    ids=[
        "success",
        "retries",
        "failure",
        "exhausted",
        "stream",
        "retried stream",
        "slow stream",
        "abandoned stream",
        "slow upload",
    ],
)
async def test_of_a_call(scenario: Scenario, faults: tuple[Fault, ...], children: str) -> None:
    setting = Setting(*faults)
    await setting.run(scenario)
    assert setting.check() == children


@pytest.mark.parametrize(
    ("after", "children"),
    [
        (0.1, "wait"),
        (0.65, "wait attempt"),
        (1.3, "wait attempt backoff"),
        (1.95, "wait attempt backoff attempt"),
        (2.3, "wait attempt backoff attempt"),
    ],
    ids=["in the queue", "before the head", "in the backoff", "before the second head", "in the stream"],
)
async def test_of_a_call_that_is_cancelled(after: float, children: str) -> None:
    setting = Setting(Fault(status=503))

    async def cut_short(client: httpx2.AsyncClient) -> None:
        with anyio.move_on_after(after):
            await read_stream(client)

    await setting.run(cut_short)
    assert setting.check() == children
    call = setting.recording.spans.one("chat gpt-4o")
    assert call.seconds == pytest.approx(after)
    assert call.status == "UNSET"


@pytest.mark.parametrize(
    ("after", "children"),
    [
        (0.1, "wait"),
        (0.65, "wait attempt"),
        (1.3, "wait attempt"),  # a backoff that does not fit is not begun
        (1.95, "wait attempt backoff attempt"),
        (2.3, "wait attempt backoff attempt"),
    ],
    ids=["in the queue", "before the head", "no backoff", "before the second head", "in the stream"],
)
async def test_of_a_call_that_runs_out_of_time(after: float, children: str) -> None:
    setting = Setting(Fault(status=503))

    async def run_out(client: httpx2.AsyncClient) -> None:
        with ambient(timeout=after), suppress(httpx2.ReadTimeout):
            await read_stream(client)

    await setting.run(run_out)
    assert setting.check() == children
    assert setting.recording.spans.one("chat gpt-4o").status == "ERROR"


@pytest.mark.parametrize("scenario", [ask, read_stream, upload_slowly])
async def test_of_a_call_that_is_cancelled_at_any_await(scenario: Scenario) -> None:
    setting = Setting(Fault(status=503))

    async def check() -> None:
        setting.check()

    suspensions = await cancel_at_every_await(lambda: setting.run(scenario), check)
    assert suspensions > 5
