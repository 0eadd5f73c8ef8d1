"""Real SDKs over real sockets: what their users see, and what the provider saw."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator

import anthropic
import anyio
import httpx
import httpx2
import openai
import pytest

import resilient_llm.httpx
import resilient_llm.httpx2
from resilient_llm import Backoff, CircuitBreaker, Deadline, Policy, Retry
from resilient_llm.testing import FakeModel, FakeProvider, Fault, Latency, serve
from tests.support import A_HANG, stalls

pytestmark = [pytest.mark.anyio, pytest.mark.realtime]

QUICK = Backoff(initial=0.01, maximum=0.01)
MODEL = "gpt-4o"


@contextlib.asynccontextmanager
async def openai_client(url: str, *policies: Policy) -> AsyncIterator[openai.AsyncOpenAI]:
    transport = resilient_llm.httpx2.ResilientTransport(policies=policies)
    async with httpx2.AsyncClient(transport=transport) as http:
        yield openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="fake", http_client=http)


@contextlib.asynccontextmanager
async def anthropic_client(url: str, *policies: Policy) -> AsyncIterator[anthropic.AsyncAnthropic]:
    transport = resilient_llm.httpx2.ResilientTransport(policies=policies)
    async with httpx2.AsyncClient(transport=transport) as http:
        yield anthropic.AsyncAnthropic(base_url=url, api_key="fake", http_client=http)


async def ask_openai(client: openai.AsyncOpenAI) -> str:
    completion = await client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "hi"}]
    )
    return completion.choices[0].message.content or ""


async def ask_anthropic(client: anthropic.AsyncAnthropic) -> str:
    message = await client.messages.create(
        model=MODEL, max_tokens=64, messages=[{"role": "user", "content": "hi"}]
    )
    return message.content[0].text if message.content[0].type == "text" else ""


async def test_success() -> None:
    provider = FakeProvider()
    async with serve(provider) as url, openai_client(url, Deadline(30), Retry(), CircuitBreaker()) as client:
        assert await ask_openai(client)
        stream = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hi"}], stream=True
        )
        assert [chunk async for chunk in stream][-1].choices[0].finish_reason == "stop"
    async with (
        serve(provider) as url,
        anthropic_client(url, Deadline(30), Retry(), CircuitBreaker()) as claude,
    ):
        assert await ask_anthropic(claude)
        async with claude.messages.stream(
            model=MODEL, max_tokens=64, messages=[{"role": "user", "content": "hi"}]
        ) as events:
            assert await events.get_final_text()
    assert [request.status for request in provider.requests] == [200] * 4


async def test_a_429_is_retried_no_sooner_than_told() -> None:
    provider = FakeProvider()
    provider.script(MODEL, [Fault(status=429, headers={"retry-after": "2"})])
    async with serve(provider) as url, openai_client(url, Retry()) as client:
        assert await ask_openai(client)
    first, second = provider.requests
    assert first.answered is not None
    assert 2.0 <= second.arrived - first.answered < 4.0


async def test_a_503_until_exhaustion_is_the_providers_own_error_and_the_sdk_does_not_retry() -> None:
    provider = FakeProvider()
    provider.script(MODEL, lambda _request: Fault(status=503, message="down for maintenance"))
    async with serve(provider) as url:
        async with openai_client(url, Retry(max_attempts=3, backoff=QUICK)) as client:
            with pytest.raises(openai.InternalServerError, match="down for maintenance") as raised:
                await ask_openai(client)  # the SDK's own max_retries is 2
            assert raised.value.status_code == 503
        assert provider.total_requests == 3
        async with anthropic_client(url, Retry(max_attempts=3, backoff=QUICK)) as claude:
            with pytest.raises(anthropic.InternalServerError, match="down for maintenance"):
                await ask_anthropic(claude)
        assert provider.total_requests == 6


async def test_rty_01_layers_of_retries_do_not_multiply() -> None:
    provider = FakeProvider()
    provider.script(MODEL, lambda _request: Fault(status=429, headers={"retry-after-ms": "5"}))
    async with serve(provider) as url, openai_client(url, Retry(max_attempts=4, backoff=QUICK)) as client:
        with pytest.raises(openai.RateLimitError):
            await ask_openai(client)
    assert provider.total_requests == 4


def unused_port() -> int:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port: int = unused.getsockname()[1]
        return port


class Counting(httpx2.AsyncHTTPTransport):
    """Count the requests an SDK lets through to the network."""

    sent = 0

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Count, then send."""
        self.sent += 1
        return await super().handle_async_request(request)


async def test_connection_refused_until_exhaustion_is_an_sdk_error_and_the_sdk_does_not_retry() -> None:
    url = f"http://127.0.0.1:{unused_port()}"
    for inner in (Counting(), Counting()):
        transport = resilient_llm.httpx2.ResilientTransport(inner, policies=[Retry(backoff=QUICK)])
        async with httpx2.AsyncClient(transport=transport) as http:
            with pytest.raises(openai.InternalServerError, match="connect_error") as raised:
                await ask_openai(openai.AsyncOpenAI(base_url=url, api_key="fake", http_client=http))
            assert raised.value.status_code == 502
            assert inner.sent == 3
            with pytest.raises(anthropic.InternalServerError, match="connect_error"):
                await ask_anthropic(anthropic.AsyncAnthropic(base_url=url, api_key="fake", http_client=http))
            assert inner.sent == 6


async def test_without_a_retry_policy_the_sdk_keeps_its_own() -> None:
    inner = Counting()
    transport = resilient_llm.httpx2.ResilientTransport(inner, policies=[Deadline(60)])
    async with httpx2.AsyncClient(transport=transport) as http:
        client = openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{unused_port()}", api_key="fake", http_client=http, max_retries=1
        )
        with pytest.raises(openai.APIConnectionError):
            await ask_openai(client)
    assert inner.sent == 2


async def test_an_open_circuit_refuses_without_a_connection_and_the_sdk_does_not_retry() -> None:
    provider = FakeProvider()
    provider.script(MODEL, lambda _request: Fault(status=500))
    inner = Counting()
    breaker = CircuitBreaker(consecutive_failures=2)
    transport = resilient_llm.httpx2.ResilientTransport(
        inner, policies=[Retry(max_attempts=2, backoff=QUICK), breaker]
    )
    async with serve(provider) as url, httpx2.AsyncClient(transport=transport) as http:
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="fake", http_client=http)
        claude = anthropic.AsyncAnthropic(base_url=url, api_key="fake", http_client=http)
        with pytest.raises(openai.InternalServerError):
            await ask_openai(client)
        assert inner.sent == 2
        with pytest.raises(openai.InternalServerError, match=r"circuit:.* is open") as raised:
            await ask_openai(client)
        assert raised.value.status_code == 503
        assert raised.value.code == "circuit_open"
        assert 1 <= int(raised.value.response.headers["retry-after"]) <= 15
        with pytest.raises(anthropic.InternalServerError, match=r"circuit:.* is open"):
            await ask_anthropic(claude)
        assert inner.sent == 2


async def test_a_deadline_is_an_sdk_error_and_the_sdk_does_not_retry() -> None:
    provider = FakeProvider(FakeModel(latency=Latency(headers=60.0)))
    inner = Counting()
    transport = resilient_llm.httpx2.ResilientTransport(inner, policies=[Deadline(0.2), Retry()])
    async with serve(provider) as url, httpx2.AsyncClient(transport=transport) as http:
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="fake", http_client=http)
        with anyio.fail_after(A_HANG), pytest.raises(openai.InternalServerError, match="deadline") as raised:
            await ask_openai(client)
        assert raised.value.status_code == 504
    assert inner.sent == 1


async def test_str_11_error_replies_to_streaming_calls_free_their_connections() -> None:
    provider = FakeProvider()
    provider.script(MODEL, [Fault(status=429, headers={"retry-after": "3600"})] * 20)
    inner = httpx2.AsyncHTTPTransport(limits=httpx2.Limits(max_connections=10))
    transport = resilient_llm.httpx2.ResilientTransport(inner, policies=[Retry()])
    async with serve(provider) as url, httpx2.AsyncClient(transport=transport, timeout=A_HANG) as http:
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="fake", http_client=http)

        async def one() -> None:
            with pytest.raises(openai.RateLimitError):
                await client.chat.completions.create(
                    model=MODEL, messages=[{"role": "user", "content": "hi"}], stream=True
                )

        async with anyio.create_task_group() as group:
            for _ in range(20):
                group.start_soon(one)
        assert await ask_openai(client)


async def test_a_client_of_httpx_too() -> None:
    provider = FakeProvider()
    provider.script(MODEL, [Fault(status=503), Fault(reset=True)])
    transport = resilient_llm.httpx.ResilientTransport(policies=[Retry(backoff=QUICK), CircuitBreaker()])
    async with serve(provider) as url, httpx.AsyncClient(transport=transport) as client:
        response = await client.post(
            f"{url}/v1/chat/completions",
            json={"model": MODEL, "messages": [{"role": "user", "content": "hi"}]},
        )
    assert response.status_code == 200
    assert provider.total_requests == 3


async def test_a_stream_that_is_left_early_is_closed_at_the_provider_within_a_second() -> None:
    provider = FakeProvider(FakeModel(latency=Latency(per_token=0.05), reply="word " * 200))
    async with serve(provider) as url, openai_client(url, Deadline(60), Retry()) as client:
        stream = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hi"}], stream=True
        )
        async for _chunk in stream:
            break
        async with stalls() as lost:
            left = anyio.current_time()
            await stream.close()
            with anyio.fail_after(A_HANG):
                await provider.wait_until_idle()
            assert anyio.current_time() - left < 1 + lost.total
    assert provider.requests[0].disconnected_at is not None
