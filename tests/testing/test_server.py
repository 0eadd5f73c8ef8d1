"""Over real sockets: uvicorn within a test, and what the fake provider's faults look like on the wire."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anthropic
import anyio
import anyio.to_thread
import httpx
import openai
import pytest
from starlette.applications import Starlette
from starlette.types import ASGIApp, Receive, Scope, Send

import resilient_llm.testing
from resilient_llm.testing import (
    FakeModel,
    FakeProvider,
    Fault,
    Latency,
    run_virtual,
    serve,
    serve_forever,
    serve_in_thread,
)
from resilient_llm.testing._connection import break_connection
from tests.support import A_HANG

pytestmark = [pytest.mark.anyio, pytest.mark.realtime]

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


async def nobody_listens(base_url: str) -> None:
    async with httpx.AsyncClient() as http:
        with pytest.raises(httpx.ConnectError):
            await http.get(base_url)


async def test_serving_an_app() -> None:
    provider = FakeProvider()
    async with serve(provider) as base_url, httpx.AsyncClient(base_url=base_url) as http:
        assert base_url.startswith("http://127.0.0.1:")
        response = await http.post("/v1/chat/completions", json=CHAT)
        assert response.json()["choices"][0]["message"]["content"].startswith("The quick")
        assert provider.requests[0].status == 200
    await nobody_listens(base_url)


async def test_the_real_sdks_over_a_socket() -> None:
    provider = FakeProvider(FakeModel(reply="one two three"))
    async with serve(provider) as base_url:
        async with openai.AsyncOpenAI(api_key="k", base_url=f"{base_url}/v1", max_retries=0) as client:
            completion = await client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "hi"}]
            )
            assert completion.choices[0].message.content == "one two three"
            stream = await client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "hi"}], stream=True
            )
            assert (
                "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "one two three"
            )
        async with anthropic.AsyncAnthropic(api_key="k", base_url=base_url, max_retries=0) as claude:
            message = await claude.messages.create(
                model="m", max_tokens=9, messages=[{"role": "user", "content": "hi"}]
            )
            assert [block.text for block in message.content if block.type == "text"] == ["one two three"]
            async with claude.messages.stream(
                model="m", max_tokens=9, messages=[{"role": "user", "content": "hi"}]
            ) as events:
                assert await events.get_final_text() == "one two three"
    assert [request.complete for request in provider.requests] == [True] * 4


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (Fault(reset=True), httpx.ReadError),
        (Fault(reset_after_tokens=2), httpx.ReadError),
        (Fault(cut_after_tokens=2), httpx.RemoteProtocolError),
    ],
)
async def test_broken_connections_are_broken_and_nobody_complains(
    fault: Fault, error: type[Exception], stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    provider = FakeProvider()
    provider.script("m", [fault])
    async with serve(provider) as base_url, httpx.AsyncClient(base_url=base_url) as http:
        with pytest.raises(error):
            await http.post("/v1/chat/completions", json={**CHAT, "stream": stream})
        assert (await http.post("/v1/chat/completions", json=CHAT)).status_code == 200
        await provider.wait_until_idle()
    assert not provider.requests[0].disconnected
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_a_connection_that_its_client_has_closed_is_broken_without_complaint(
    caplog: pytest.LogCaptureFixture,
) -> None:
    broken = anyio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http"
        while (await receive())["type"] != "http.disconnect":
            pass
        await anyio.sleep(0.05)  # by now the socket is closed on this side, too
        await break_connection(scope, receive, send, "reset")
        broken.set()

    async with (
        serve(app) as base_url,
        httpx.AsyncClient(base_url=base_url, timeout=httpx.Timeout(60, read=0.1)) as http,
    ):
        with pytest.raises(httpx.ReadTimeout):
            await http.get("/")
        with anyio.fail_after(A_HANG):
            await broken.wait()
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_a_client_that_leaves_is_noticed() -> None:
    provider = FakeProvider(FakeModel(latency=Latency(per_token=30)))
    async with serve(provider) as base_url:
        async with (
            httpx.AsyncClient(base_url=base_url) as http,
            http.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as response,
        ):
            await anext(response.aiter_raw())
            assert provider.active == 1
        with anyio.fail_after(A_HANG):
            await provider.wait_until_idle()
        assert provider.requests[0].disconnected
        assert provider.requests[0].tokens_sent == 1


async def test_a_stalled_stream_does_not_hold_up_the_end(caplog: pytest.LogCaptureFixture) -> None:
    provider = FakeProvider()
    provider.script("m", [Fault(stall_after_tokens=1)])
    async with httpx.AsyncClient() as http:
        with anyio.fail_after(60):
            async with serve(provider) as base_url:
                request = http.build_request(
                    "POST", f"{base_url}/v1/chat/completions", json={**CHAT, "stream": True}
                )
                response = await http.send(request, stream=True)
        with pytest.raises(httpx.RemoteProtocolError):
            await response.aread()


async def test_a_server_in_a_thread() -> None:
    provider = FakeProvider()
    before = threading.active_count()
    with serve_in_thread(provider) as base_url:
        async with httpx.AsyncClient() as http:
            assert (await http.post(f"{base_url}/v1/chat/completions", json=CHAT)).status_code == 200
    await nobody_listens(base_url)
    assert threading.active_count() <= before
    assert len(provider.requests) == 1


async def test_a_server_on_a_virtual_loop_keeps_real_time() -> None:
    provider = FakeProvider(FakeModel(latency=Latency(headers=0.05)))

    async def main() -> int:
        async with serve(provider) as base_url, httpx.AsyncClient(timeout=30) as http:
            return (await http.post(f"{base_url}/v1/chat/completions", json=CHAT)).status_code

    thread_result: list[int] = []
    thread = threading.Thread(target=lambda: thread_result.append(run_virtual(main)))
    thread.start()
    await anyio.to_thread.run_sync(thread.join)
    assert thread_result == [200]


def failing_lifespan() -> ASGIApp:
    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        raise RuntimeError("no database")
        yield

    return Starlette(lifespan=lifespan)


async def test_an_app_that_does_not_start_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="the app failed to start"):
        async with serve(failing_lifespan()):
            raise AssertionError
    with pytest.raises(RuntimeError, match="the app failed to start"), serve_in_thread(failing_lifespan()):
        raise AssertionError


async def test_the_lifespan_is_run() -> None:
    events: list[str] = []

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        events.append("up")
        yield
        events.append("down")

    async with serve(Starlette(lifespan=lifespan)):
        assert events == ["up"]
    assert events == ["up", "down"]


async def test_a_port_that_is_taken_is_an_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match="in use"):
            async with serve(FakeProvider(), port=port):
                raise AssertionError


async def test_an_exception_within_stops_the_server() -> None:
    with pytest.raises(KeyError):
        async with serve(FakeProvider()) as base_url:
            raise KeyError
    await nobody_listens(base_url)
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("server of")]


async def test_uvicorn_is_asked_for_when_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "resilient_llm.testing._uvicorn", raising=False)
    monkeypatch.delattr(resilient_llm.testing, "_uvicorn", raising=False)
    with pytest.raises(ImportError, match=r"pip install 'resilient-llm\[cli\]'"):
        async with serve(FakeProvider()):
            raise AssertionError
    with pytest.raises(ImportError, match="uvicorn"):
        serve_forever(FakeProvider(), "127.0.0.1", 0)


async def test_serving_for_ever_is_uvicorns_business(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[object, object]] = []
    monkeypatch.setattr("uvicorn.run", lambda app, **options: calls.append((app, options)))
    provider = FakeProvider()
    serve_forever(provider, "127.0.0.1", 8123)
    options = {"host": "127.0.0.1", "port": 8123, "log_level": "warning", "timeout_keep_alive": 3600}
    assert calls == [(provider, options)]
