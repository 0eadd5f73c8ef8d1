"""Real clients on one side of the sidecar, the fake provider on the other, sockets between all of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import anthropic
import anyio
import httpx
import openai
import pytest

from resilient_llm.testing import FakeProvider, Fault, serve
from tests.sidecar.support import ANSWER, KEY, Log, logged, over_sockets
from tests.support import stalls, until

pytestmark = [pytest.mark.anyio, pytest.mark.realtime]


@asynccontextmanager
async def serving(provider: FakeProvider, more: str = "") -> AsyncIterator[tuple[str, Log]]:
    """Serve a sidecar in front of a provider, both over sockets."""
    async with serve(provider) as upstream:
        toml = f"""
        [tenants.acme]
        key_env = "KEY_OF_ACME"
        [targets.openai]
        url = "{upstream}/v1"
        dialect = "openai"
        api_key_env = "PROVIDER_KEY"
        [targets.anthropic]
        url = "{upstream}"
        dialect = "anthropic"
        provider = "anthropic"
        api_key_env = "PROVIDER_KEY"
        [retry]
        backoff = {{initial = 0.01, maximum = 0.05}}
        {more}
        """
        with logged() as log:
            async with over_sockets(toml) as (url, _):
                yield url, log


@pytest.fixture(autouse=True)
def _keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY_OF_ACME", KEY)
    monkeypatch.setenv("PROVIDER_KEY", "sk-of-the-provider")


def openai_at(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)


def anthropic_at(url: str) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=url, api_key=KEY, max_retries=0)


async def streamed(client: openai.AsyncOpenAI) -> str:
    stream = await client.chat.completions.create(
        model="gpt-4o", messages=[{"role": "user", "content": "hi"}], stream=True
    )
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])


async def test_openais_client() -> None:
    provider = FakeProvider(api_keys=["sk-of-the-provider"])
    async with serving(provider) as (url, log), openai_at(url) as client:
        completion = await client.chat.completions.create(
            model="gpt-4o", messages=[{"role": "user", "content": "hi"}]
        )
        assert completion.choices[0].message.content == ANSWER
        assert await streamed(client) == ANSWER
        assert (await client.responses.create(model="gpt-4o", input="hi")).output_text == ANSWER
        assert len((await client.embeddings.create(model="e", input="hi")).data) == 1
        entry = await log.entry(4)
    assert (entry["tenant"], entry["path"], entry["target"]) == ("acme", "/v1/embeddings", "openai")
    assert {request.path for request in provider.requests} == {
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/embeddings",
    }


async def test_anthropics_client() -> None:
    provider = FakeProvider(api_keys=["sk-of-the-provider"])
    async with serving(provider) as (url, log), anthropic_at(url) as client:
        message = await client.messages.create(
            model="claude", max_tokens=100, messages=[{"role": "user", "content": "hi"}]
        )
        assert message.content[0].type == "text"
        assert message.content[0].text == ANSWER
        async with client.messages.stream(
            model="claude", max_tokens=100, messages=[{"role": "user", "content": "hi"}]
        ) as stream:
            assert await stream.get_final_text() == ANSWER
        assert (await log.entry(2))["target"] == "anthropic"
    assert provider.requests[0].headers["x-api-key"] == "sk-of-the-provider"


async def test_clients_see_errors_as_the_providers_own() -> None:
    provider = FakeProvider()
    provider.script("bad", [Fault(status=400, code="unsupported_value", message="no")])
    provider.script("claude", [Fault(status=400, type="invalid_request_error", message="no")])
    async with serving(provider) as (url, _log):
        async with openai_at(url) as client:
            with pytest.raises(openai.BadRequestError) as bad:
                await client.chat.completions.create(model="bad", messages=[])
            assert bad.value.code == "unsupported_value"
            with pytest.raises(openai.AuthenticationError) as unknown:
                await client.with_options(api_key="nobodys").chat.completions.create(model="m", messages=[])
            assert unknown.value.code == "invalid_api_key"
        async with anthropic_at(url) as claude:
            with pytest.raises(anthropic.BadRequestError):
                await claude.messages.create(model="claude", max_tokens=1, messages=[])
            with pytest.raises(anthropic.AuthenticationError):
                await claude.with_options(api_key="nobodys").messages.create(
                    model="claude", max_tokens=1, messages=[]
                )


@pytest.mark.parametrize(
    ("fault", "attempts"),
    [
        (Fault(status=429, headers={"retry-after-ms": "20"}), 2),
        (Fault(status=500), 2),
        (Fault(status=503), 2),
        (Fault(reset=True), 2),
        (Fault(cut_after_tokens=0), 2),
        (Fault(end_after_tokens=0), 2),
        (Fault(empty_stream=True), 2),
        (Fault(error_event_at=0), 2),
        (Fault(chunk_size=3), 1),
        (Fault(delay_first_token=0.2), 1),
    ],
    ids=["429", "500", "503", "reset", "cut", "end", "empty", "error event", "pieces", "slow"],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_faults_before_content_are_not_seen(fault: Fault, attempts: int, stream: bool) -> None:
    if not stream and (fault.end_after_tokens is not None or fault.empty_stream):
        pytest.skip("means nothing there")
    provider = FakeProvider()
    provider.script(None, [fault])
    async with serving(provider) as (url, log), openai_at(url) as client:
        if stream:
            text = await streamed(client)
        else:
            completion = await client.chat.completions.create(model="gpt-4o", messages=[])
            text = str(completion.choices[0].message.content)
        entry = await log.entry()
    assert text == ANSWER
    assert (entry["outcome"], entry["attempts"]) == ("ok", attempts)


@pytest.mark.parametrize(
    "fault",
    [Fault(cut_after_tokens=3), Fault(reset_after_tokens=3), Fault(error_event_at=3)],
    ids=["cut", "reset", "error event"],
)
async def test_a_stream_that_breaks_after_content_ends_with_an_error(fault: Fault) -> None:
    for delay in (0.05, 0.5, 2.5):  # until content is on its way to the caller before, also on a slow machine
        provider = FakeProvider()
        provider.script(None, [replace(fault, token_delay=delay)])
        async with serving(provider) as (url, log), openai_at(url) as client:
            try:
                await streamed(client)
            except openai.APIError:
                entry = await log.entry()
                assert await streamed(client) == ANSWER  # and the sidecar is as well as before
                break
    else:
        pytest.fail("it was not told")
    assert (entry["outcome"], entry["attempts"]) == ("error", 1)


async def test_a_reply_that_breaks_off_is_made_again() -> None:
    provider = FakeProvider()
    provider.script(None, [Fault(cut_after_tokens=3)])
    async with serving(provider) as (url, _log), openai_at(url) as client:
        completion = await client.chat.completions.create(model="gpt-4o", messages=[])
    assert completion.choices[0].message.content == ANSWER
    assert len(provider.requests) == 2


async def test_silence_is_left_for_another_target() -> None:
    slow, quick = FakeProvider(), FakeProvider()
    slow.script(None, lambda _request: Fault(delay_headers=60))
    async with serve(slow) as first, serve(quick) as second:
        toml = f"""
        [targets.slow]
        url = "{first}/v1"
        timeouts = {{headers = 0.2}}
        [targets.quick]
        url = "{second}/v1"
        [models."gpt-4o"]
        targets = ["slow", "quick"]
        [routing]
        balancer = "priority"
        """
        with logged() as log:
            async with over_sockets(toml) as (url, _), openai_at(url) as client:
                assert await streamed(client) == ANSWER
                entry = await log.entry()
    assert (entry["target"], entry["attempts"]) == ("quick", 2)


async def test_every_provider_fails() -> None:
    provider = FakeProvider()
    provider.script(None, lambda _request: Fault(status=500))
    async with serving(provider) as (url, log), openai_at(url) as client:
        with pytest.raises(openai.InternalServerError) as failed:
            await client.chat.completions.create(model="gpt-4o", messages=[])
        entry = await log.entry()
    assert failed.value.response.headers["x-should-retry"] == "false"
    assert (entry["status"], entry["outcome"], entry["attempts"]) == (500, "error", 3)


async def read(client: httpx.AsyncClient, url: str, stream: bool) -> None:
    """Ask, and read whatever comes."""
    body = {"model": "gpt-4o", "messages": [], "stream": stream}
    headers = {"authorization": f"Bearer {KEY}"}
    async with client.stream("POST", f"{url}/v1/chat/completions", json=body, headers=headers) as reply:
        async for _ in reply.aiter_raw():
            pass


async def test_a_client_that_leaves_frees_the_provider() -> None:
    provider = FakeProvider()
    provider.script(None, [Fault(delay_headers=60), Fault(stall_after_tokens=2)])
    async with serving(provider) as (url, log):
        for number, stream in enumerate((False, True), 1):
            async with httpx.AsyncClient(timeout=60) as client, anyio.create_task_group() as tasks:
                tasks.start_soon(read, client, url, stream)
                await provider.wait_for_requests(number)
                await anyio.sleep(0.2)
                tasks.cancel_scope.cancel()
            async with stalls() as lost:
                left = anyio.current_time()
                await until(lambda: provider.requests[-1].disconnected_at is not None)
                assert anyio.current_time() - left < 1 + lost.total
            assert (await log.entry(number))["outcome"] == "cancelled"


async def test_a_pass_through_is_byte_for_byte() -> None:
    provider = FakeProvider()
    async with serve(provider) as upstream:
        toml = f'[targets.raw]\nurl = "{upstream}/v1"\npassthrough = true\n'
        async with over_sockets(toml) as (url, _), httpx.AsyncClient(timeout=60) as client:
            direct = await client.get(f"{upstream}/v1/models")
            proxied = await client.get(f"{url}/raw/v1/models?limit=5")
            head, direct_head = [await client.head(f"{at}/v1/models") for at in (f"{url}/raw", upstream)]
    assert proxied.content == direct.content
    ours = {"date", "server", "x-resilient-llm-request-id", "x-resilient-llm-target"}
    assert [h for h in proxied.headers.raw if h[0].decode().lower() not in ours] == [
        (name.lower(), value) for name, value in direct.headers.raw if name.decode().lower() not in ours
    ]
    assert (head.status_code, head.content) == (direct_head.status_code, b"")


async def test_http_05_chunked_is_said_once() -> None:
    provider = FakeProvider()
    async with serving(provider) as (url, _log), httpx.AsyncClient(timeout=60) as client:
        body = {"model": "gpt-4o", "messages": [], "stream": True}
        headers = {"authorization": f"Bearer {KEY}"}
        async with client.stream("POST", f"{url}/v1/chat/completions", json=body, headers=headers) as reply:
            await reply.aread()
    assert reply.headers.get_list("transfer-encoding") == ["chunked"]
    assert "content-length" not in reply.headers
