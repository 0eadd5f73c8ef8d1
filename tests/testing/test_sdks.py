"""The real openai and anthropic SDKs against the fake provider, in memory, on both event loops."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import anyio
import httpx2
import openai
import pytest

from resilient_llm.testing import FakeModel, FakeProvider, Fault, Latency, RateLimits

pytestmark = [
    pytest.mark.anyio,
    # The SDKs leave generators unfinished after the last event, which trio warns of when they are collected.
    pytest.mark.filterwarnings("ignore:.*<async_generator object:pytest.PytestUnraisableExceptionWarning"),
]

HI: list[Any] = [{"role": "user", "content": "hi"}]


@asynccontextmanager
async def openai_client(provider: FakeProvider) -> AsyncIterator[openai.AsyncOpenAI]:
    http = httpx2.AsyncClient(transport=provider.httpx2_transport())
    async with openai.AsyncOpenAI(
        api_key="k", base_url="http://fake/v1", max_retries=0, http_client=http
    ) as client:
        yield client


@asynccontextmanager
async def anthropic_client(provider: FakeProvider) -> AsyncIterator[anthropic.AsyncAnthropic]:
    http = httpx2.AsyncClient(transport=provider.httpx2_transport())
    async with anthropic.AsyncAnthropic(
        api_key="k", base_url="http://fake", max_retries=0, http_client=http
    ) as client:
        yield client


async def test_openai_chat() -> None:
    provider = FakeProvider(FakeModel(reply="one two three"))
    async with openai_client(provider) as client:
        completion = await client.chat.completions.create(model="m", messages=HI)
    assert completion.id == "chatcmpl-fake000001"
    assert completion._request_id == "req_fake000001"
    assert completion.choices[0].message.content == "one two three"
    assert completion.choices[0].finish_reason == "stop"
    assert completion.usage is not None
    assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (1, 3)
    assert provider.requests[0].api_key == "k"


async def test_openai_chat_stream_event_by_event() -> None:
    provider = FakeProvider(FakeModel(reply="one two three", latency=Latency(headers=1)))
    provider.script("m", [Fault(delay_first_token=2, token_delay=0.5)])
    seen: list[tuple[float, str | None]] = []
    async with openai_client(provider) as client:
        stream = await client.chat.completions.create(
            model="m", messages=HI, stream=True, stream_options={"include_usage": True}
        )
        assert anyio.current_time() == 1
        chunks = []
        async for chunk in stream:
            chunks.append(chunk)
            if chunk.choices and chunk.choices[0].delta.content:
                seen.append((anyio.current_time(), chunk.choices[0].delta.content))
    assert seen == [(3, "one"), (3.5, " two"), (4, " three")]
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 3


async def test_openai_responses_embeddings_and_models() -> None:
    provider = FakeProvider(models={"m": FakeModel(reply="one two three")})
    async with openai_client(provider) as client:
        response = await client.responses.create(model="m", input="hi", instructions="be brief")
        assert (response.output_text, response.status) == ("one two three", "completed")
        assert response.usage is not None
        assert response.usage.total_tokens == 3 + 3
        cut = await client.responses.create(model="m", input="hi", max_output_tokens=2)
        assert cut.incomplete_details is not None
        assert (cut.output_text, cut.incomplete_details.reason) == ("one two", "max_output_tokens")
        async with client.responses.stream(model="m", input="hi") as stream:
            numbers = [event.sequence_number async for event in stream]
            assert (await stream.get_final_response()).output_text == "one two three"
        assert numbers == list(range(11))
        embeddings = await client.embeddings.create(model="m", input=["a", "b", "a"])
        assert len(embeddings.data[0].embedding) == 8
        assert embeddings.data[0].embedding == embeddings.data[2].embedding != embeddings.data[1].embedding
        assert [model.id async for model in client.models.list()] == ["m"]


@pytest.mark.parametrize(
    ("fault", "error", "status"),
    [
        (Fault(status=400), openai.BadRequestError, 400),
        (Fault(status=401), openai.AuthenticationError, 401),
        (Fault(status=429, headers={"retry-after": "2"}), openai.RateLimitError, 429),
        (Fault(status=503, body={"error": {"message": "x"}}), openai.InternalServerError, 503),
    ],
)
async def test_openai_errors(fault: Fault, error: type[openai.APIStatusError], status: int) -> None:
    provider = FakeProvider()
    provider.script("m", [fault])
    async with openai_client(provider) as client:
        with pytest.raises(error) as caught:
            await client.chat.completions.create(model="m", messages=HI)
    assert caught.value.status_code == status
    assert caught.value.request_id == "req_fake000001"
    for name, value in fault.headers.items():
        assert caught.value.response.headers[name] == value


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (Fault(reset=True), openai.APIConnectionError),
        (Fault(cut_after_tokens=1), openai.APIConnectionError),
        (Fault(error_event_at=1), openai.APIError),
        (Fault(stall_after_tokens=1), openai.APITimeoutError),
    ],
)
async def test_openai_broken_streams(fault: Fault, error: type[openai.APIError]) -> None:
    provider = FakeProvider()
    provider.script("m", [fault])
    async with openai_client(provider) as client:
        with pytest.raises(error) as caught:
            async for _ in await client.chat.completions.create(
                model="m", messages=HI, stream=True, timeout=9
            ):
                pass
        await provider.wait_until_idle()
    assert type(caught.value) is error
    assert anyio.current_time() == (9 if fault.stall_after_tokens else 0)
    assert provider.requests[0].disconnected is (fault.stall_after_tokens is not None)


async def test_anthropic_messages() -> None:
    provider = FakeProvider(FakeModel(reply="one two three"))
    async with anthropic_client(provider) as client:
        message = await client.messages.create(model="claude", max_tokens=100, system="be brief", messages=HI)
    (block,) = message.content
    assert block.type == "text"
    assert (block.text, message.stop_reason, message._request_id) == (
        "one two three",
        "end_turn",
        "req_fake000001",
    )
    assert (message.usage.input_tokens, message.usage.output_tokens) == (3, 3)


async def test_anthropic_stream_event_by_event() -> None:
    provider = FakeProvider(FakeModel(reply="one two three", latency=Latency(headers=1)))
    provider.script("claude", [Fault(delay_first_token=2, token_delay=0.5, ping_every=0.75)])
    async with (
        anthropic_client(provider) as client,
        client.messages.stream(model="claude", max_tokens=100, messages=HI) as stream,
    ):
        seen = [(anyio.current_time(), text) async for text in stream.text_stream]
        final = await stream.get_final_message()
    assert seen == [(3, "one"), (3.5, " two"), (4, " three")]
    assert (final.stop_reason, final.usage.output_tokens, final.usage.input_tokens) == ("end_turn", 3, 1)


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (Fault(status=529), anthropic.InternalServerError),
        (Fault(status=529, error_event_at=2), anthropic.APIStatusError),
        (Fault(status=401), anthropic.AuthenticationError),
    ],
)
async def test_anthropic_errors(fault: Fault, error: type[anthropic.APIStatusError]) -> None:
    provider = FakeProvider()
    provider.script("claude", [fault])
    async with anthropic_client(provider) as client:
        with pytest.raises(error) as caught:
            async with client.messages.stream(model="claude", max_tokens=100, messages=HI) as stream:
                await stream.get_final_message()
    assert caught.value.status_code == (200 if fault.error_event_at else fault.status)
    assert isinstance(caught.value.body, dict)
    assert (
        caught.value.body["error"]["type"]
        == {529: "overloaded_error", 401: "authentication_error"}[fault.status or 0]
    )


async def test_anthropic_rate_limits() -> None:
    provider = FakeProvider(FakeModel(rate_limits=RateLimits(requests_per_minute=2)))
    async with anthropic_client(provider) as client:
        for _ in range(2):
            await client.messages.create(model="claude", max_tokens=100, messages=HI)
        with pytest.raises(anthropic.RateLimitError) as caught:
            await client.messages.create(model="claude", max_tokens=100, messages=HI)
        await anyio.sleep(int(caught.value.response.headers["retry-after"]))
        await client.messages.create(model="claude", max_tokens=100, messages=HI)
    assert anyio.current_time() == 30


async def test_cancelling_an_sdk_call_ends_the_request() -> None:
    provider = FakeProvider(FakeModel(latency=Latency(headers=60)))
    async with openai_client(provider) as client:
        with anyio.move_on_after(5):
            await client.chat.completions.create(model="m", messages=HI)
        await provider.wait_until_idle()
    assert provider.requests[0].disconnected_at == 5
