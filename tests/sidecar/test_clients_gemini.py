"""Google's client, whose paths only pass through, sees what it sees without a sidecar."""

from __future__ import annotations

from typing import Any

import anyio
import httpx2
import pytest
from google import genai
from google.genai import errors

from tests.sidecar.support import KEY
from tests.sidecar.twins import Twins, twins

pytestmark = [pytest.mark.anyio, pytest.mark.realtime]


async def ask(ends: Twins, url: str, question: str, *, stream: bool = False) -> Any:
    """Ask at a URL; the sidecar's has the name of the target in it."""
    base = f"{url}/gemini" if url == ends.proxied else url
    async with httpx2.AsyncClient(timeout=60) as http:
        with httpx2.Client(timeout=60) as idle:  # or it would make one, and not close it
            options = genai.types.HttpOptions(base_url=base, httpx_client=idle, httpx_async_client=http)
            llm = genai.Client(api_key=KEY, http_options=options)
            if not stream:
                reply = await llm.aio.models.generate_content(model="gemini-3", contents=question)
                return reply.model_dump(exclude={"sdk_http_response"})
            chunks = await llm.aio.models.generate_content_stream(model="gemini-3", contents=question)
            return [chunk.model_dump(exclude={"sdk_http_response"}) async for chunk in chunks]


@pytest.mark.parametrize("stream", [False, True])
async def test_it_generates(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    async with twins(monkeypatch) as ends:
        got = await ends.same(lambda url: ask(ends, url, "hi", stream=stream))
        text = [
            part["text"]
            for one in (got if stream else [got])
            for part in one["candidates"][0]["content"]["parts"]
        ]
        assert "".join(text) == "Once upon a time"
        entry = await ends.log.entry()
        assert (entry["target"], entry["tenant"], entry["outcome"]) == ("gemini", "acme", "ok")
        assert entry["output_tokens"] == 4


async def test_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async with twins(monkeypatch) as ends:
        with anyio.fail_after(20):
            failed = await ends.same_failure(lambda url: ask(ends, url, "too much"))
        assert issubclass(failed.type, errors.APIError)
        assert "429 RESOURCE_EXHAUSTED" in failed.message
        assert (await ends.log.entry())["attempts"] == 3
        assert len(ends.log.entries) == 1  # it makes no retries of its own
