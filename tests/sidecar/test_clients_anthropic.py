"""Anthropic's client sees through a sidecar what it sees without."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest
from anthropic import AsyncAnthropic

from resilient_llm.testing import Fault
from tests.sidecar.support import ANSWER, KEY
from tests.sidecar.twins import PIXEL, twins

pytestmark = [pytest.mark.anyio, pytest.mark.realtime]

HELLO: list[Any] = [{"role": "user", "content": "hi"}]
PICTURE: list[Any] = [
    {
        "role": "user",
        "content": [
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}},
            {"type": "text", "text": "What is this?"},
        ],
    }
]
TOOLS: list[Any] = [
    {
        "name": "weather",
        "description": "Say what the weather is like.",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
    }
]
TOOL_USE = {
    "id": "msg_tool",
    "type": "message",
    "role": "assistant",
    "model": "claude",
    "content": [{"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Rome"}}],
    "stop_reason": "tool_use",
    "stop_sequence": None,
    "usage": {"input_tokens": 5, "output_tokens": 7},
}


def client(url: str) -> AsyncAnthropic:
    return AsyncAnthropic(base_url=url, api_key=KEY, max_retries=0)


async def test_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask(url: str) -> Any:
        async with client(url) as llm:
            message = await llm.messages.create(model="claude", max_tokens=100, messages=HELLO)
            return message, message._request_id

    async with twins(monkeypatch) as ends:
        message, _ = await ends.same(ask)
        assert message.content[0].text == ANSWER
        entry = await ends.log.entry()
        assert (entry["target"], entry["input_tokens"], entry["output_tokens"]) == ("anthropic", 1, 9)


async def test_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask(url: str) -> Any:
        async with (
            client(url) as llm,
            llm.messages.stream(model="claude", max_tokens=100, messages=HELLO) as stream,
        ):
            return [event async for event in stream], await stream.get_final_message()

    async with twins(monkeypatch) as ends:
        events, message = await ends.same(ask)
        assert "".join(event.text for event in events if event.type == "text") == ANSWER
        assert message.usage.output_tokens == 9


async def test_a_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask(url: str) -> Any:
        async with client(url) as llm:
            return await llm.messages.create(model="claude", max_tokens=100, messages=PICTURE)

    async with twins(monkeypatch) as ends:
        await ends.same(ask)
        assert ends.asked_alike()["messages"] == PICTURE


async def test_the_call_of_a_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask(url: str) -> Any:
        async with client(url) as llm:
            return await llm.messages.create(model="claude", max_tokens=100, messages=HELLO, tools=TOOLS)

    async with twins(monkeypatch) as ends:
        ends.script([Fault(body=TOOL_USE)])
        message = await ends.same(ask)
        assert message.content[0].input == {"city": "Rome"}
        ends.asked_alike()


async def test_models(monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask(url: str) -> Any:
        async with client(url) as llm:
            return [model.id async for model in llm.models.list()]

    async with twins(monkeypatch, '[models.fast]\ntargets = ["anthropic/claude"]\n') as ends:
        assert await ask(ends.proxied) == ["fast"]


@pytest.mark.parametrize(
    ("fault", "raised"),
    [
        (Fault(status=400), anthropic.BadRequestError),
        (Fault(status=403), anthropic.PermissionDeniedError),
        (Fault(status=404), anthropic.NotFoundError),
        (Fault(status=413), anthropic.RequestTooLargeError),
        (Fault(status=429), anthropic.RateLimitError),
        (Fault(status=500), anthropic.InternalServerError),
        (Fault(status=529), anthropic.OverloadedError),
    ],
    ids=lambda value: str(value.status) if isinstance(value, Fault) else "",
)
@pytest.mark.parametrize("stream", [False, True])
async def test_errors(fault: Fault, raised: type, stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask(url: str) -> Any:
        async with client(url) as llm:
            return await llm.messages.create(model="claude", max_tokens=1, messages=HELLO, stream=stream)

    async with twins(monkeypatch) as ends:
        ends.script(lambda _request: fault)
        failed = await ends.same_failure(ask)
        assert failed.type is raised
        assert failed.status == fault.status


async def test_an_error_in_the_midst_of_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask(url: str) -> None:
        async with (
            client(url) as llm,
            llm.messages.stream(model="claude", max_tokens=100, messages=HELLO) as stream,
        ):
            await stream.get_final_message()

    async with twins(monkeypatch) as ends:
        failed = await ends.same_failure_after(Fault(error_event_at=3, status=529), ask)
        assert issubclass(failed.type, anthropic.APIStatusError)
