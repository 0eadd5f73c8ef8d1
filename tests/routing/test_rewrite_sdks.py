"""What real SDKs write, as it arrives at another provider: URL, credentials, model, and their bodies as they were."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import anthropic
import httpx2
import openai
import pytest

from resilient_llm import Credential, NoTargetError, Retry, Router, Target
from resilient_llm.httpx2 import ResilientTransport
from resilient_llm.presets import ANTHROPIC, AZURE_OPENAI, GEMINI, GROQ, OPENAI

pytestmark = pytest.mark.anyio

KEY = Credential(value=lambda: "sk-of-the-target", name="own")
CALLERS = "sk-CANARY"
CHAT: dict[str, Any] = {"model": "caller", "messages": [{"role": "user", "content": '{"model": "ü"}'}]}

Ask = Callable[[httpx2.AsyncClient], Awaitable[object]]


async def ask_openai(http: httpx2.AsyncClient) -> object:
    client = openai.AsyncOpenAI(api_key=CALLERS, organization="org-CANARY", http_client=http)
    return await client.chat.completions.create(**CHAT)


async def ask_azure(http: httpx2.AsyncClient) -> object:
    client = openai.AsyncAzureOpenAI(
        api_key=CALLERS,
        azure_endpoint="https://caller.openai.azure.com",
        api_version="2024-10-21",
        http_client=http,
    )
    return await client.chat.completions.create(**CHAT)


async def ask_anthropic(http: httpx2.AsyncClient) -> object:
    client = anthropic.AsyncAnthropic(
        api_key=CALLERS, base_url="http://gateway.example/claude", http_client=http
    )
    return await client.messages.create(**CHAT, max_tokens=5)


async def ask_gemini(http: httpx2.AsyncClient) -> object:
    genai = pytest.importorskip("google.genai")
    client = genai.Client(api_key=CALLERS, http_options=genai.types.HttpOptions(httpx_async_client=http))
    return await client.aio.models.generate_content(model="caller", contents='{"model": "ü"}')


async def embed_gemini(http: httpx2.AsyncClient) -> object:
    genai = pytest.importorskip("google.genai")
    client = genai.Client(api_key=CALLERS, http_options=genai.types.HttpOptions(httpx_async_client=http))
    return await client.aio.models.embed_content(model="caller", contents=["one", "two"])


async def transcribe(http: httpx2.AsyncClient) -> object:
    client = openai.AsyncOpenAI(api_key=CALLERS, http_client=http)
    return await client.audio.transcriptions.create(model="caller", file=("a.mp3", b"\0\xffmodel\r\n" * 99))


async def received(ask: Ask, *targets: Target) -> tuple[httpx2.Request, httpx2.Request]:
    """Give what an SDK writes, and what of that arrives at a target."""

    async def refuse(request: httpx2.Request) -> httpx2.Response:
        await request.aread()
        requests.append(request)
        return httpx2.Response(400, json={"error": {"message": "not today"}})

    requests: list[httpx2.Request] = []
    direct = httpx2.MockTransport(refuse)
    for transport in (direct, ResilientTransport(direct, policies=[Retry(), Router(targets)])):
        async with httpx2.AsyncClient(transport=transport) as http:
            with pytest.raises(Exception, match="not today"):
                await ask(http)
    written, arrived = requests
    return written, arrived


@pytest.mark.parametrize(
    ("ask", "target", "url", "header"),
    [
        (
            ask_openai,
            GROQ.target(model="m", credential=KEY),
            "https://api.groq.com/openai/v1/chat/completions",
            "authorization",
        ),
        (
            ask_openai,
            AZURE_OPENAI.target(url="https://r.openai.azure.com", api_version="1", model="m", credential=KEY),
            "https://r.openai.azure.com/openai/deployments/m/chat/completions?api-version=1",
            "api-key",
        ),
        (
            ask_azure,
            OPENAI.target(model="m", credential=KEY),
            "https://api.openai.com/v1/chat/completions",
            "authorization",
        ),
        (
            ask_azure,
            AZURE_OPENAI.target(url="https://r.openai.azure.com", model="m", credential=KEY),
            "https://r.openai.azure.com/openai/deployments/m/chat/completions?api-version=2024-10-21",
            "api-key",
        ),
        (
            ask_anthropic,
            ANTHROPIC.target(model="m", credential=KEY),
            "https://api.anthropic.com/v1/messages",
            "x-api-key",
        ),
        (
            ask_gemini,
            GEMINI.target(model="m", credential=KEY),
            "https://generativelanguage.googleapis.com/v1beta/models/m:generateContent",
            "x-goog-api-key",
        ),
        (
            embed_gemini,
            GEMINI.target(model="m", credential=KEY),
            "https://generativelanguage.googleapis.com/v1beta/models/m:batchEmbedContents",
            "x-goog-api-key",
        ),
        (
            transcribe,
            OPENAI.target(model="m", credential=KEY),
            "https://api.openai.com/v1/audio/transcriptions",
            "authorization",
        ),
    ],
)
async def test_what_an_sdk_writes_arrives_as_the_target_wants_it(
    ask: Ask, target: Target, url: str, header: str
) -> None:
    written, arrived = await received(ask, target)
    assert str(arrived.url) == url
    assert arrived.headers["host"] == arrived.url.host
    assert arrived.headers[header].removeprefix("Bearer ") == "sk-of-the-target"
    assert "CANARY" not in str(arrived.headers.raw) + str(arrived.url)
    assert int(arrived.headers["content-length"]) == len(arrived.content)
    expected = written.content.replace(b'"model":"caller"', b'"model":"m"').replace(
        b"models/caller", b"models/m"
    )
    if ask is transcribe:
        boundary = written.headers["content-type"].partition("boundary=")[2]
        expected = expected.replace(b"\r\n\r\ncaller\r\n", b"\r\n\r\nm\r\n")
        expected = expected.replace(
            boundary.encode(), arrived.headers["content-type"].partition("boundary=")[2].encode()
        )
    else:
        assert json.loads(arrived.content) != {}
    assert arrived.content == expected
    assert b"caller" not in arrived.content


async def test_an_upload_that_nobody_has_read_goes_on_as_it_is() -> None:
    async def stream() -> AsyncIterator[bytes]:
        yield b'{"model":"cal'
        yield b'ler"}'

    async def answer(request: httpx2.Request) -> httpx2.Response:
        assert await request.aread() == b'{"model":"caller"}'
        assert str(request.url) == "https://api.openai.com/v1/chat/completions"
        assert "CANARY" not in str(request.headers.raw)
        return httpx2.Response(200, json={"choices": []})

    router = Router([OPENAI.target(model="m", credential=KEY)])
    transport = ResilientTransport(httpx2.MockTransport(answer), policies=[router])
    async with httpx2.AsyncClient(transport=transport, headers={"authorization": CALLERS}) as http:
        response = await http.post("http://gateway.example/v1/chat/completions", content=stream())
    assert response.status_code == 200


async def test_a_body_that_cannot_be_written_anew_says_so() -> None:
    transport = ResilientTransport(
        httpx2.MockTransport(lambda _request: httpx2.Response(200)),
        policies=[Router([OPENAI.target(model="m", credential=KEY)])],
        on_rejection="raise",
    )
    async with httpx2.AsyncClient(transport=transport) as http:
        with pytest.raises(NoTargetError, match="the model in a compressed body cannot be replaced"):
            await http.post(
                "http://gateway.example/v1/chat/completions",
                content=b"\x1f\x8b",
                headers={"content-encoding": "gzip"},
            )
