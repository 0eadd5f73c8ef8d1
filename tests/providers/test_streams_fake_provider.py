"""What the fake provider sends, over the in-memory transport, in virtual time and on both event loops."""

from __future__ import annotations

import httpx
import pytest

from resilient_llm.message import Request
from resilient_llm.outcome import Outcome
from resilient_llm.providers import (
    Answer,
    StreamReader,
    classify_exception,
    dialect_for,
    is_event_stream,
    read_body,
)
from resilient_llm.testing import OK, FakeModel, FakeProvider, Fault

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
WORDS = 60


async def ask(path: str, fault: Fault, *, stream: bool = True) -> tuple[Outcome, Answer, StreamReader | None]:
    """Ask, and read the reply as the client door will."""
    provider = FakeProvider(FakeModel(reply=" ".join(["four"] * WORDS)))
    provider.script(None, [fault])
    prompt = {"input": "hi"} if path == RESPONSES else {"messages": [{"role": "user", "content": "hi"}]}
    body = {"model": "m", "stream": stream, **prompt}
    if path == CHAT and stream:
        body["stream_options"] = {"include_usage": True}
    url = f"http://provider.example{path}"
    dialect = dialect_for(Request("POST", url, []))
    async with (
        httpx.AsyncClient(transport=provider.transport()) as client,
        client.stream("POST", url, json=body, timeout=10) as response,
    ):
        headers = response.headers.raw
        if not is_event_stream(headers):
            try:
                content = b"".join([chunk async for chunk in response.aiter_raw()])
            except httpx.TransportError as error:
                return classified(error), Answer(), None
            return *read_body(dialect, response.status_code, headers, content, operation="chat"), None
        reader = StreamReader(dialect, headers=headers)
        try:
            async for chunk in response.aiter_raw():
                reader.feed(chunk)
            outcome = reader.close()
        except httpx.TransportError as error:
            outcome = reader.interrupted(classified(error))
        return outcome, reader.answer, reader


def classified(error: Exception) -> Outcome:
    outcome = classify_exception(error)
    assert outcome is not None
    return outcome


FAULTS: dict[str, tuple[Fault, str | None, str | None, str | None]] = {
    # fault: outcome of a chat completion, a response, a message; None is success
    "nothing": (OK, None, None, None),
    "no terminal marker": (Fault(omit_done=True), None, "truncated", None),
    "cut at the end": (
        Fault(cut_after_tokens=WORDS),
        "remote_protocol_error",
        "remote_protocol_error",
        "remote_protocol_error",
    ),
    "cut after the role": (
        Fault(cut_after_tokens=0),
        "remote_protocol_error",
        "remote_protocol_error",
        "remote_protocol_error",
    ),
    "reset": (Fault(reset_after_tokens=20), "read_error", "read_error", "read_error"),
    "ends early": (Fault(end_after_tokens=40), "truncated", "truncated", "truncated"),
    "ends after the role": (Fault(end_after_tokens=0), "truncated", "truncated", "truncated"),
    "empty": (Fault(empty_stream=True), "empty_stream", "empty_stream", "empty_stream"),
    "stalls": (Fault(stall_after_tokens=20), "read_timeout", "read_timeout", "read_timeout"),
    "malformed event": (Fault(malformed_event_at=3), None, None, None),
    "pings": (Fault(delay_first_token=9, ping_every=1), None, None, None),
    "one byte per read": (Fault(chunk_size=1), None, None, None),
    "error first": (Fault(error_event_at=0), "server_error", "server_error", "api_error"),
    "error later": (Fault(error_event_at=5), "server_error", "server_error", "api_error"),
    "429 inside": (
        Fault(error_event_at=0, status=429),
        "rate_limit_exceeded",
        "rate_limit_exceeded",
        "rate_limit_error",
    ),
    "529 inside": (Fault(error_event_at=2, status=529), "server_error", "server_error", "overloaded_error"),
    "429 instead": (Fault(status=429), "rate_limit_exceeded", "rate_limit_exceeded", "rate_limit_error"),
    "a page instead": (Fault(body="<html>"), "unexpected_body", "unexpected_body", "unexpected_body"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
async def test_a_stream_with(fault: str, path: str) -> None:
    scripted, *expected = FAULTS[fault]
    error_type = expected[(CHAT, RESPONSES, MESSAGES).index(path)]
    outcome, answer, reader = await ask(path, scripted)
    assert outcome.error_type == error_type
    assert outcome.ok is (error_type is None)
    if outcome.ok:
        assert answer.model == "m"
        assert answer.finish_reasons
        assert outcome.usage is not None
        assert (outcome.usage.input_tokens, outcome.usage.output_tokens) == (1, WORDS)
        assert not outcome.usage.estimated
    if reader is not None:
        assert reader.malformed == (fault == "malformed event")
        assert reader.keepalives >= (8 if fault == "pings" else 0)


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
async def test_the_usage_of_a_cut_stream_is_estimated_from_what_was_said(path: str) -> None:
    outcome, _, _ = await ask(path, Fault(cut_after_tokens=40))
    assert outcome.usage is not None
    assert outcome.usage.estimated
    assert outcome.usage.output_tokens == (40 * 5 - 1) // 4 + 1
    assert outcome.usage.input_tokens == (1 if path == MESSAGES else None)


BODIES: dict[str, tuple[Fault, str | dict[str, str] | None]] = {
    "nothing": (OK, None),
    "cut": (Fault(cut_after_tokens=1), "remote_protocol_error"),
    "broken off": (Fault(malformed_event_at=0), "truncated"),
    "empty": (Fault(empty_stream=True), "empty_body"),
    "an error": (Fault(error_event_at=0, status=429), {MESSAGES: "rate_limit_error"}),
    "a page": (Fault(body="<html>"), "unexpected_body"),
}


@pytest.mark.parametrize("fault", BODIES)
@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
async def test_a_body_with(fault: str, path: str) -> None:
    scripted, error_type = BODIES[fault]
    if isinstance(error_type, dict):
        error_type = error_type.get(path, "rate_limit_exceeded")
    outcome, answer, _ = await ask(path, scripted, stream=False)
    assert outcome.error_type == error_type
    if outcome.ok:
        assert outcome.usage is not None
        assert (outcome.usage.input_tokens, outcome.usage.output_tokens) == (1, WORDS)
        assert (answer.model, len(answer.finish_reasons)) == ("m", 1)
