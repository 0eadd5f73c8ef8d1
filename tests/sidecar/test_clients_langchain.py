"""LangChain's models see through a sidecar what they see without, and raise OpenAI's exceptions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import anyio
import httpx2
import openai
import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import SecretStr

from resilient_llm.testing import Fault
from tests.sidecar.rest import calls_the_tool
from tests.sidecar.support import ANSWER, KEY
from tests.sidecar.twins import SEEING, TOOLS, twins

pytestmark = [pytest.mark.anyio, pytest.mark.realtime]


@pytest.fixture
async def pools() -> AsyncIterator[dict[str, Any]]:
    """Give connections of a test's own; LangChain would keep some for all of them."""
    async with httpx2.AsyncClient(timeout=60) as client:
        with httpx2.Client(timeout=60) as other:
            yield {"http_async_client": client, "http_client": other}


def model(url: str, pools: dict[str, Any], **options: Any) -> ChatOpenAI:
    return ChatOpenAI(
        model="gpt-4o", base_url=f"{url}/v1", api_key=SecretStr(KEY), max_retries=0, **pools, **options
    )


def plain(message: Any) -> dict[str, Any]:
    """Give all of a message but for the ids of runs, which LangChain draws."""
    return {name: value for name, value in dict(message).items() if name != "id"}


async def test_it_invokes(pools: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask(url: str) -> Any:
        return plain(await model(url, pools).ainvoke("hi"))

    async with twins(monkeypatch) as ends:
        message = await ends.same(ask)
        assert message["content"] == ANSWER
        assert message["usage_metadata"]["total_tokens"] == 10


async def test_it_invokes_without_async(pools: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    async with twins(monkeypatch) as ends:
        message = await ends.same(
            lambda url: anyio.to_thread.run_sync(lambda: plain(model(url, pools).invoke("hi")))
        )
        assert message["content"] == ANSWER


async def test_it_streams(pools: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask(url: str) -> Any:
        return [plain(chunk) async for chunk in model(url, pools, stream_usage=True).astream("hi")]

    async with twins(monkeypatch) as ends:
        chunks = await ends.same(ask)
        assert "".join(chunk["content"] for chunk in chunks) == ANSWER
        assert [chunk["usage_metadata"]["output_tokens"] for chunk in chunks if chunk["usage_metadata"]] == [
            9
        ]


async def test_it_calls_tools(pools: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask(url: str) -> Any:
        llm = model(url, pools).bind_tools(TOOLS)
        question = HumanMessage("hi")
        called = await llm.ainvoke([question])
        assert isinstance(called, AIMessage)
        told = ToolMessage("sunny", tool_call_id=called.tool_calls[0]["id"])
        return called.tool_calls, plain(await llm.ainvoke([question, called, told]))

    async with twins(monkeypatch) as ends:
        ends.script(calls_the_tool)
        [call], message = await ends.same(ask)
        assert (call["name"], call["args"], message["content"]) == ("weather", {"city": "Rome"}, ANSWER)
        ends.asked_alike()


async def test_it_shows_pictures(pools: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask(url: str) -> Any:
        return plain(await model(url, pools).ainvoke(SEEING))

    async with twins(monkeypatch) as ends:
        await ends.same(ask)
        assert ends.asked_alike()["messages"] == SEEING


async def test_it_embeds(pools: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask(url: str) -> Any:
        embeddings = OpenAIEmbeddings(
            model="e", base_url=f"{url}/v1", api_key=SecretStr(KEY), check_embedding_ctx_length=False, **pools
        )
        return await embeddings.aembed_documents(["one", "two"])

    async with twins(monkeypatch) as ends:
        assert [len(vector) for vector in await ends.same(ask)] == [8, 8]
        ends.asked_alike()


@pytest.mark.parametrize("status", [400, 404, 429, 500, 503])
async def test_errors(status: int, pools: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    async with twins(monkeypatch) as ends:
        ends.script(lambda _request: Fault(status=status))
        failed = await ends.same_failure(lambda url: model(url, pools).ainvoke("hi"))
        assert issubclass(failed.type, openai.APIStatusError)
        assert failed.status == status


async def test_a_tenants_own_limit_is_openais_rate_limit_error(
    pools: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = "[quota]\nrequests_per_minute = 1\nmax_wait = 0\n"
    async with twins(monkeypatch, limit) as ends:
        assert (await model(ends.proxied, pools).ainvoke("hi")).content == ANSWER
        with pytest.raises(openai.RateLimitError) as limited:
            await model(ends.proxied, pools).ainvoke("hi")
        assert int(limited.value.response.headers["retry-after"]) >= 1
        assert ends.providers[1].total_requests == 1
        assert (await ends.log.entry(2))["outcome"] == "refused"
