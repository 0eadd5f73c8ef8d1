"""OpenAI's Python client sees through a sidecar what it sees without: the same objects, chunks and exceptions."""

from __future__ import annotations

from typing import Any

import anyio
import openai
import pytest
from openai import AsyncOpenAI

from resilient_llm.testing import Fault
from tests.sidecar.rest import calls_the_tool
from tests.sidecar.support import ANSWER, KEY
from tests.sidecar.twins import HELLO, SEEING, TOOLS, twins

pytestmark = [pytest.mark.anyio, pytest.mark.realtime]


def client(url: str, prefix: str = "") -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{url}{prefix}/v1", api_key=KEY, max_retries=0)


async def test_a_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask(url: str) -> Any:
        async with client(url) as llm:
            completion = await llm.chat.completions.create(model="gpt-4o", messages=HELLO)
            return completion, completion._request_id

    async with twins(monkeypatch) as ends:
        completion, request_id = await ends.same(ask)
        assert completion.choices[0].message.content == ANSWER
        assert completion.usage.total_tokens == 10
        assert request_id is not None


async def test_a_stream_with_usage(monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask(url: str) -> Any:
        async with client(url) as llm:
            stream = await llm.chat.completions.create(
                model="gpt-4o", messages=HELLO, stream=True, stream_options={"include_usage": True}
            )
            return [chunk async for chunk in stream]

    async with twins(monkeypatch) as ends:
        chunks = await ends.same(ask)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == ANSWER
        assert chunks[-1].usage.completion_tokens == 9
        entry = await ends.log.entry()
        assert (entry["input_tokens"], entry["output_tokens"]) == (1, 9)
        assert "usage_estimated" not in entry


@pytest.mark.parametrize("stream", [False, True])
async def test_the_call_of_a_tool_and_its_result(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask(url: str) -> Any:
        async with client(url) as llm:
            if stream:
                async with llm.chat.completions.stream(model="gpt-4o", messages=HELLO, tools=TOOLS) as events:
                    message: Any = (await events.get_final_completion()).choices[0].message
            else:
                completion = await llm.chat.completions.create(model="gpt-4o", messages=HELLO, tools=TOOLS)
                message = completion.choices[0].message
            assert message.tool_calls
            called = message.tool_calls[0]
            turns = [
                *HELLO,
                message.model_dump(
                    exclude_none=True, exclude={"tool_calls": {0: {"function": {"parsed_arguments"}}}}
                ),
                {"role": "tool", "tool_call_id": called.id, "content": "sunny"},
            ]
            return message, await llm.chat.completions.create(model="gpt-4o", messages=turns, tools=TOOLS)

    async with twins(monkeypatch) as ends:
        ends.script(calls_the_tool)
        message, then = await ends.same(ask)
        assert (message.tool_calls[0].function.name, message.tool_calls[0].function.arguments) == (
            "weather",
            '{"city": "Rome"}',
        )
        assert then.choices[0].message.content == ANSWER
        assert ends.asked_alike()["messages"][-1]["content"] == "sunny"


async def test_a_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask(url: str) -> Any:
        async with client(url) as llm:
            return await llm.chat.completions.create(model="gpt-4o", messages=SEEING)

    async with twins(monkeypatch) as ends:
        assert (await ends.same(ask)).choices[0].message.content == ANSWER
        assert ends.asked_alike()["messages"] == SEEING


async def test_embeddings(monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask(url: str) -> Any:
        async with client(url) as llm:
            return await llm.embeddings.create(model="e", input=["one", "two"], dimensions=16)

    async with twins(monkeypatch) as ends:
        got = await ends.same(ask)
        assert [len(each.embedding) for each in got.data] == [16, 16]
        ends.asked_alike()


async def test_responses(monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask(url: str) -> Any:
        async with client(url) as llm:
            whole = await llm.responses.create(model="gpt-4o", input="hi")
            events = [
                event async for event in await llm.responses.create(model="gpt-4o", input="hi", stream=True)
            ]
            return whole, events

    async with twins(monkeypatch) as ends:
        whole, events = await ends.same(ask)
        assert whole.output_text == ANSWER
        assert events[-1].response.output_text == ANSWER
        assert events[-1].type == "response.completed"


async def test_completions_as_they_were_before_chats(monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask(url: str) -> Any:
        async with client(url) as llm:
            whole = await llm.completions.create(model="davinci", prompt="Tell")
            stream = await llm.completions.create(model="davinci", prompt="Tell", stream=True)
            return whole, [chunk async for chunk in stream]

    async with twins(monkeypatch) as ends:
        whole, chunks = await ends.same(ask)
        assert (
            whole.choices[0].text == "".join(chunk.choices[0].text for chunk in chunks) == "Once upon a time"
        )


async def test_files_pass_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """They go to the target that is named; the boundary of a form is drawn anew for each, and as long."""

    async def direct(url: str) -> Any:
        prefix = "/openai" if url == ends.proxied else ""
        async with client(url, prefix) as llm:
            return (await llm.files.create(file=("a.jsonl", b"{}\n" * 50_000), purpose="batch")).bytes

    async with twins(monkeypatch) as ends:
        assert await ends.same(direct) > 150_000
        assert (await ends.log.entry())["target"] == "openai"


async def test_models(monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask(url: str) -> Any:
        async with client(url) as llm:
            return [model async for model in llm.models.list()]

    async with twins(monkeypatch) as ends:
        await ends.same(ask)
    async with twins(monkeypatch, '[models.fast]\ntargets = ["openai/gpt-4o"]\n') as ends:
        assert [model.id for model in await ask(ends.proxied)] == ["fast"]


@pytest.mark.parametrize(
    ("fault", "raised"),
    [
        (Fault(status=400, code="context_length_exceeded"), openai.BadRequestError),
        (Fault(status=403), openai.PermissionDeniedError),
        (Fault(status=404), openai.NotFoundError),
        (Fault(status=409), openai.ConflictError),
        (Fault(status=422), openai.UnprocessableEntityError),
        (Fault(status=429), openai.RateLimitError),
        (Fault(status=429, code="insufficient_quota"), openai.RateLimitError),
        (Fault(status=500), openai.InternalServerError),
        (Fault(status=503), openai.InternalServerError),
    ],
    ids=lambda value: f"{value.status} {value.code or ''}".strip() if isinstance(value, Fault) else "",
)
@pytest.mark.parametrize("stream", [False, True])
async def test_errors(fault: Fault, raised: type, stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask(url: str) -> Any:
        async with client(url) as llm:
            return await llm.chat.completions.create(model="gpt-4o", messages=HELLO, stream=stream)

    async with twins(monkeypatch) as ends:
        ends.script(lambda _request: fault)
        failed = await ends.same_failure(ask)
        assert (failed.type, failed.status) == (raised, fault.status)


async def test_an_error_in_the_midst_of_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, list[str]] = {}

    async def ask(url: str) -> None:
        seen[url] = []
        async with client(url) as llm:
            async for chunk in await llm.chat.completions.create(model="gpt-4o", messages=HELLO, stream=True):
                seen[url].append(chunk.choices[0].delta.content or "")

    async with twins(monkeypatch) as ends:
        failed = await ends.same_failure_after(Fault(error_event_at=3, status=429), ask)
        assert failed.type is openai.APIError
        assert seen[ends.proxied] == seen[ends.direct]


async def test_its_own_retries_rest_where_the_sidecars_have_been_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with twins(monkeypatch) as ends:
        ends.script(lambda _request: Fault(status=500))
        with pytest.raises(openai.InternalServerError):
            async with AsyncOpenAI(base_url=f"{ends.proxied}/v1", api_key=KEY) as llm:
                await llm.chat.completions.create(model="gpt-4o", messages=HELLO)
        assert ends.providers[1].total_requests == 3


async def test_the_synchronous_client(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(url: str) -> Any:
        with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as llm:
            whole = llm.chat.completions.create(model="gpt-4o", messages=HELLO)
            stream = llm.chat.completions.create(model="gpt-4o", messages=HELLO, stream=True)
            return whole, list(stream)

    async with twins(monkeypatch) as ends:
        whole, chunks = await ends.same(lambda url: anyio.to_thread.run_sync(ask, url))
        assert whole.choices[0].message.content == ANSWER
        assert len(chunks) == 11
