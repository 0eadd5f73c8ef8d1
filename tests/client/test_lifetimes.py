"""What a call holds at the client door, until when, and that it always gives it back."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import aclosing
from types import ModuleType
from typing import Any

import anyio
import httpx
import httpx2
import openai
import pytest

import resilient_llm.httpx
import resilient_llm.httpx2
from resilient_llm import (
    Backoff,
    Bulkhead,
    CircuitBreaker,
    CircuitState,
    Deadline,
    Policy,
    RejectedError,
    Retry,
    ambient,
)
from resilient_llm.source import _kept
from resilient_llm.testing import FakeModel, FakeProvider, Fault, Latency, serve
from tests.support import A_HANG, cancel_at_every_await, until

pytestmark = pytest.mark.anyio

LIBRARIES = pytest.mark.parametrize("library", [httpx, httpx2], ids=["httpx", "httpx2"])
FIXED = Backoff(initial=1.0, maximum=1.0, jitter="none")
URL = "http://provider.example/v1/chat/completions"
BODY = {"model": "gpt-4o", "messages": [{"role": "user", "content": "hi"}]}
STREAM = {**BODY, "stream": True}


def client_of(library: ModuleType, provider: FakeProvider, *policies: Policy, **options: Any) -> Any:
    ours = resilient_llm.httpx if library is httpx else resilient_llm.httpx2
    inner = provider.transport() if library is httpx else provider.httpx2_transport()
    return library.AsyncClient(
        transport=ours.ResilientTransport(inner, policies=policies, **options), timeout=60
    )


@LIBRARIES
async def test_a_slot_is_held_until_the_stream_has_been_read(library: ModuleType) -> None:
    bulkhead = Bulkhead(max_concurrent=1)
    client = client_of(library, FakeProvider(), bulkhead)
    async with client, client.stream("POST", URL, json=STREAM) as response:
        assert bulkhead.in_use() == 1
        async for _chunk in response.aiter_raw():
            pass
        assert bulkhead.in_use() == 0


# httpx leaves the generators of a stream that is left early to the garbage collector, which trio reports.
@pytest.mark.filterwarnings("ignore:Exception ignored:pytest.PytestUnraisableExceptionWarning")
@LIBRARIES
async def test_closing_a_stream_early_frees_the_slot_and_tells_the_provider(library: ModuleType) -> None:
    provider = FakeProvider(FakeModel(latency=Latency(per_token=1.0)))
    bulkhead = Bulkhead(max_concurrent=1)
    async with client_of(library, provider, Deadline(1000), bulkhead) as client:
        async with (
            client.stream("POST", URL, json=STREAM) as response,
            aclosing(response.aiter_raw()) as chunks,
        ):
            await anext(chunks)
        assert bulkhead.in_use() == 0
        with anyio.fail_after(1):
            await provider.wait_until_idle()
    assert provider.requests[0].disconnected_at is not None


@LIBRARIES
async def test_a_stream_forgotten_gives_back_its_slot(library: ModuleType) -> None:
    provider = FakeProvider()
    bulkhead = Bulkhead(max_concurrent=1)
    async with client_of(library, provider, bulkhead) as client:
        response = await client.send(client.build_request("POST", URL, json=STREAM), stream=True)
        assert bulkhead.in_use() == 1
        del response
        gc.collect()
        await anyio.sleep(0.01)
        assert bulkhead.in_use() == 0
        assert (await client.post(URL, json=BODY)).status_code == 200


@LIBRARIES
async def test_a_stream_closed_by_another_task(library: ModuleType) -> None:
    bulkhead = Bulkhead(max_concurrent=1)
    provider = FakeProvider(FakeModel(latency=Latency(per_token=5.0)))
    async with client_of(library, provider, Deadline(1000), bulkhead) as client:
        response = await client.send(client.build_request("POST", URL, json=STREAM), stream=True)
        async with anyio.create_task_group() as group:
            group.start_soon(response.aclose)
        assert bulkhead.in_use() == 0


@LIBRARIES
async def test_the_deadline_counts_while_the_stream_is_read(library: ModuleType) -> None:
    provider = FakeProvider(FakeModel(latency=Latency(per_token=2.0)))
    bulkhead = Bulkhead(max_concurrent=1)
    async with client_of(library, provider, Deadline(5), bulkhead) as client:
        started = anyio.current_time()
        async with client.stream("POST", URL, json=STREAM) as response:
            body = await response.aread()
        assert b"deadline_exceeded" in body
        assert b"[DONE]" not in body
        assert anyio.current_time() - started == pytest.approx(5)
        assert bulkhead.in_use() == 0
        await provider.wait_until_idle()


@pytest.mark.parametrize("policies", [[Deadline(100)], [Retry()], []], ids=["deadline", "retry", "none"])
@LIBRARIES
async def test_an_ambient_deadline_is_inherited(library: ModuleType, policies: list[Policy]) -> None:
    provider = FakeProvider(FakeModel(latency=Latency(headers=60.0)))
    async with client_of(library, provider, *policies) as client:
        started = anyio.current_time()
        with ambient(timeout=3):
            response = await client.post(URL, json=BODY)
        assert response.status_code == 504
        assert anyio.current_time() - started == pytest.approx(3)


@LIBRARIES
@pytest.mark.parametrize("body", [BODY, STREAM], ids=["json", "stream"])
async def test_nothing_is_held_wherever_a_call_is_cancelled(
    library: ModuleType, body: dict[str, object]
) -> None:
    provider = FakeProvider(FakeModel(latency=Latency(headers=0.2, per_token=0.1), reply="one two three"))
    bulkhead = Bulkhead(max_concurrent=1)
    breaker = CircuitBreaker(consecutive_failures=1, break_duration=0.5)
    client = client_of(
        library, provider, Deadline(100), bulkhead, Retry(backoff=FIXED, budget_ratio=1.0), breaker
    )

    async def scenario() -> None:
        provider.script(None, [Fault(status=429, headers={"retry-after": "1"}), Fault(status=500)])
        async with client.stream("POST", URL, json=body) as response:
            async for _chunk in response.aiter_raw():
                pass

    async def check() -> None:
        await provider.wait_until_idle()
        assert (bulkhead.in_use(), bulkhead.queued(), provider.active) == (0, 0, 0)
        provider.script(None, [])
        await anyio.sleep(60)
        assert (await client.post(URL, json=BODY)).status_code == 200
        assert breaker.state("provider.example") is CircuitState.CLOSED

    async with client:
        assert await cancel_at_every_await(scenario, check) >= 8


@LIBRARIES
async def test_cb_11_streams_that_break_open_the_circuit(library: ModuleType) -> None:
    provider = FakeProvider()
    provider.script(None, [Fault(cut_after_tokens=2)] * 5)
    breaker = CircuitBreaker(consecutive_failures=5)
    async with client_of(library, provider, breaker) as client:
        for _ in range(5):
            async with client.stream("POST", URL, json=STREAM) as response:
                assert response.status_code == 200
                body = await response.aread()
            assert b'"error"' in body.splitlines()[-2]
            assert b"[DONE]" not in body
        assert breaker.state("provider.example") is CircuitState.OPEN


@LIBRARIES
async def test_rty_08_an_upload_is_kept_and_sent_again_whole(library: ModuleType) -> None:
    provider = FakeProvider()
    provider.script(None, [Fault(status=503)])

    async def upload() -> AsyncIterator[bytes]:
        yield b'{"model": "gpt-4o", '
        yield b'"messages": []}'

    async with client_of(library, provider, Retry(backoff=FIXED)) as client:
        response = await client.post(URL, content=upload())
    assert response.status_code == 200
    first, second = provider.requests
    assert first.raw_body == second.raw_body == b'{"model": "gpt-4o", "messages": []}'


@LIBRARIES
async def test_rty_08_an_upload_over_the_limit_is_sent_once_and_whole(library: ModuleType) -> None:
    provider = FakeProvider()
    provider.script(None, [Fault(status=503)])

    async def upload() -> AsyncIterator[bytes]:
        yield b'{"model": "gpt-4o", "messages": [], "pad": "'
        for _ in range(10):
            yield b"x" * 100
        yield b'"}'

    async with client_of(library, provider, Retry(backoff=FIXED, max_replay_body=500)) as client:
        response = await client.post(URL, content=upload())
    assert response.status_code == 503
    assert provider.total_requests == 1
    assert len(provider.requests[0].raw_body) == 44 + 1000 + 2


@LIBRARIES
async def test_on_rejection_raise_gives_the_exception(library: ModuleType) -> None:
    provider = FakeProvider()
    breaker = CircuitBreaker()
    breaker.isolate("provider.example")
    async with client_of(library, provider, breaker, on_rejection="raise") as client:
        with pytest.raises(RejectedError, match="isolated"):
            await client.post(URL, json=BODY)
    async with client_of(library, provider, breaker) as client:
        response = await client.post(URL, json=BODY)
    assert response.status_code == 503
    assert response.headers["x-should-retry"] == "false"
    assert "retry-after" not in response.headers
    assert provider.total_requests == 0


@LIBRARIES
async def test_the_tenant_comes_from_the_context(library: ModuleType) -> None:
    provider = FakeProvider(FakeModel(latency=Latency(headers=1.0)))
    async with client_of(library, provider, Bulkhead(max_concurrent=1)) as client:
        started = anyio.current_time()

        async def ask(tenant: str) -> None:
            with ambient(tenant=tenant):
                await client.post(URL, json=BODY)

        async with anyio.create_task_group() as group:
            for tenant in "aab":
                group.start_soon(ask, tenant)
        assert anyio.current_time() - started == pytest.approx(2)
        assert provider.peak_active == 2


@LIBRARIES
async def test_a_long_error_body_passes_whole_and_is_still_retried(library: ModuleType) -> None:
    long = b"<html>" + b"x" * 600_000
    provider = FakeProvider()
    provider.script(None, [Fault(status=502, body=long)])
    async with client_of(library, provider, Retry(backoff=FIXED)) as client:
        assert (await client.post(URL, json=BODY)).status_code == 200
        provider.script(None, [Fault(status=400, body=long)])
        response = await client.post(URL, json=BODY)
    assert response.status_code == 400
    assert response.content == long


@pytest.mark.realtime
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_an_sdks_stream_that_is_left_in_the_middle_ends_without_a_word_from_the_event_loop() -> None:
    """What asyncio does with generators that are garbage must not meet what closes the connection."""
    complaints: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: complaints.append(context))
    provider = FakeProvider(FakeModel(latency=Latency(per_token=0.01)))
    bulkhead = Bulkhead(max_concurrent=5)
    policies: list[Policy] = [Deadline(60), bulkhead, Retry()]
    async with (
        serve(provider) as url,
        httpx2.AsyncClient(transport=resilient_llm.httpx2.ResilientTransport(policies=policies)) as http,
    ):
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", http_client=http)

        async def leave() -> None:
            stream = await client.chat.completions.create(model="m", messages=[], stream=True)
            async for _chunk in stream:
                break

        for _ in range(5):
            await leave()
        gc.collect()  # the SDK's stream and its generator hold each other
        with anyio.fail_after(A_HANG):
            await provider.wait_until_idle()
        gc.collect()
        await until(lambda: bulkhead.in_use() == 0)
        await anyio.sleep(0.2)  # for a word that comes later
    assert complaints == []
    assert _kept == {}
