"""OBS-06 and OBS-07: no prompt, reply, credential or secret of a URL in any span, metric, log or exception."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

import anyio
import httpx
import httpx2
import pytest

import resilient_llm.httpx
import resilient_llm.httpx2
from resilient_llm import (
    Bulkhead,
    Call,
    CallNext,
    CircuitBreaker,
    Deadline,
    Outcome,
    Policy,
    Reply,
    Request,
    ResilientLLMError,
    Retry,
    Telemetry,
)
from resilient_llm.testing import FakeModel, FakeProvider, Fault, Latency
from tests.signals import Recording
from tests.telemetry.observed import FIXED, telemetry_of

pytestmark = pytest.mark.anyio

PROMPT = "CANARY-123"
REPLY = "CANARY-456"
SECRETS = {
    "Bearer": "sk-CANARY-789",
    "x-api-key": "CANARY-abc",
    "cookie": "CANARY-def",
    "?key": "AIza-CANARY-FAKE",
}
URL = f"http://user:CANARY-ghi@provider.example/v1/chat/completions?key={SECRETS['?key']}&api_key=CANARY-jkl"
HEADERS = {
    "authorization": f"Bearer {SECRETS['Bearer']}",
    "x-api-key": SECRETS["x-api-key"],
    "cookie": f"session={SECRETS['cookie']}",
}
BODY = {
    "model": "gpt-4o",
    "messages": [{"role": "system", "content": PROMPT}, {"role": "user", "content": PROMPT}],
    "user": PROMPT,
    "metadata": {"note": PROMPT},
}
ECHO: dict[str, object] = {
    "error": {
        "message": f"cannot do {PROMPT}",
        "type": f"no {PROMPT}",
        "code": f"no {REPLY}",
        "param": PROMPT,
    }
}

Scenario = Callable[[Any], Awaitable[object]]


async def careless(call: Call, call_next: CallNext) -> Reply:
    """A policy whose clean-up fails, which is logged with what it was to be called with."""

    def forget(_request: Request, _outcome: Outcome) -> None:
        raise KeyError(call.number)

    call.on_finish(partial(forget, call.request))
    return await call_next(call)


async def ask(client: Any) -> None:
    await client.post(URL, json=BODY, headers=HEADERS)


async def stream(client: Any) -> None:
    async with client.stream("POST", URL, json={**BODY, "stream": True}, headers=HEADERS) as response:
        async for _ in response.aiter_raw():
            pass


async def leave(client: Any) -> None:
    with anyio.move_on_after(0.05):
        await stream(client)


async def crowd(client: Any) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(leave, client)
        await anyio.sleep(0.01)
        await ask(client)


PATHS: dict[str, tuple[Scenario, list[Fault]]] = {
    "success": (ask, []),
    "stream": (stream, []),
    "not found": (ask, [Fault(status=404, body=ECHO)]),
    "error that quotes": (ask, [Fault(status=400, body=ECHO)]),
    "error in prose": (ask, [Fault(status=500, body=f"{PROMPT} {REPLY}")] * 3),
    "retries": (
        ask,
        [Fault(status=503, body=ECHO), Fault(status=429, body=ECHO, headers={"retry-after": "1"})],
    ),
    "bad key": (ask, [Fault(status=401, body=ECHO)]),
    "lost connection": (ask, [Fault(reset=True)] * 3),
    "cut stream": (stream, [Fault(cut_after_tokens=1)]),
    "error event": (stream, [Fault(error_event_at=1, message=PROMPT)]),
    "out of time": (ask, [Fault(delay_headers=99.0)]),
    "left": (leave, [Fault(delay_headers=1.0)]),
    "refused": (crowd, [Fault(delay_headers=1.0)]),
}


def texts_of(error: BaseException | None, seen: set[int]) -> Iterator[str]:
    """Everything an exception says, with its causes, contexts, notes and members."""
    if error is None or id(error) in seen:
        return
    seen.add(id(error))
    yield f"{error} {error!r} {getattr(error, '__notes__', '')}"
    yield from texts_of(error.__cause__, seen)
    yield from texts_of(error.__context__, seen)
    for member in getattr(error, "exceptions", ()):
        yield from texts_of(member, seen)


def client_of(library: ModuleType, telemetry: Telemetry, provider: FakeProvider, *policies: Policy) -> Any:
    ours = resilient_llm.httpx if library is httpx else resilient_llm.httpx2
    inner = provider.transport() if library is httpx else provider.httpx2_transport()
    transport = ours.ResilientTransport(
        inner,
        policies=policies,
        telemetry=telemetry,
        on_rejection="raise",
    )
    return library.AsyncClient(transport=transport, timeout=60)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("library", [httpx, httpx2], ids=["httpx", "httpx2"])
@pytest.mark.parametrize("with_policies", [True, False], ids=["policies", "no policies"])
async def test_nothing_secret_is_told(
    path: str, library: ModuleType, with_policies: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    scenario, faults = PATHS[path]
    recording = Recording()
    provider = FakeProvider(FakeModel(reply=f"{REPLY} one two three", latency=Latency(headers=0.1)))
    provider.script(None, faults)
    policies: tuple[Policy, ...] = (
        careless,
        Deadline(30),
        Bulkhead(max_concurrent=1, max_queued=0),
        Retry(backoff=FIXED),
        CircuitBreaker(consecutive_failures=2),
    )
    told: list[str] = []
    async with client_of(
        library, telemetry_of(recording), provider, *policies[: 5 * with_policies]
    ) as client:
        try:
            await scenario(client)
        except (ResilientLLMError, httpx.HTTPError, httpx2.HTTPError, BaseExceptionGroup) as error:
            told += texts_of(error, set())

    assert recording.spans.named("chat")
    told += map(repr, recording.spans)
    told += [repr(event) for span in recording.spans for event in span.events]
    told += [repr(span.__dict__) for span in recording.spans]
    told += map(repr, recording.points)
    # What httpx itself logs of a call is the URL it was given; docs/telemetry.md says how to keep keys out of it.
    told += [
        f"{record.getMessage()} {record.exc_text}"
        for record in caplog.records
        if record.name.startswith("resilient")
    ]
    assert with_policies == ("a callback of a finished call failed" in caplog.text)
    for text in told:
        assert "CANARY" not in text


async def test_a_request_does_not_show_the_secrets_of_its_url() -> None:
    request = Request("POST", URL, [(b"authorization", b"Bearer sk-CANARY")], b'"CANARY"')
    assert "CANARY" not in repr(request)
    assert "provider.example/v1/chat/completions" in repr(request)
