"""STR-13 and STR-14: a service whose caller leaves stops the provider's work within a second, wherever it is.

Everything is real: a client on a socket, a FastAPI app under uvicorn, an SDK in it, and a provider on a socket.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import anyio
import anyio.abc
import httpx2
import openai
import pytest
from fastapi import FastAPI
from starlette.responses import StreamingResponse

from resilient_llm import AttemptTimeout, Bulkhead, CircuitBreaker, ConcurrencyLimit, Deadline, Retry, Stream
from resilient_llm.asgi import ResilienceMiddleware
from resilient_llm.httpx2 import ResilientTransport
from resilient_llm.testing import FakeModel, FakeProvider, Fault, Latency, serve
from tests.support import stalls, until

pytestmark = [pytest.mark.anyio, pytest.mark.realtime]


class Service(NamedTuple):
    """A service that asks a provider in its callers' names."""

    address: str
    provider: FakeProvider
    calls: Bulkhead
    """Of its calls."""
    attempts: ConcurrencyLimit
    door: Bulkhead
    """Of the requests made to it."""

    @property
    def busy(self) -> tuple[int, int, int, int, int]:
        """Tell what is held, and who waits."""
        return (
            self.provider.active,
            self.calls.in_use(),
            self.calls.queued(),
            self.attempts.in_use(),
            self.door.in_use(),
        )


@asynccontextmanager
async def service(resume: str, *, words: int = 3_000) -> AsyncIterator[Service]:
    provider = FakeProvider(FakeModel(reply="word " * words, latency=Latency(per_token=0.02)))
    calls = Bulkhead(max_concurrent=1)
    attempts = ConcurrencyLimit(initial=5)
    door = Bulkhead(max_concurrent=10, name="door")
    transport = ResilientTransport(
        policies=[
            Deadline(600),
            calls,
            Stream(resume=resume),  # type: ignore[arg-type]
            Retry(),
            attempts,
            CircuitBreaker(),
            AttemptTimeout(first_content=50, content_gap=50),
        ]
    )
    app = FastAPI()
    app.add_middleware(ResilienceMiddleware, tenant=None, policies=[door])
    async with serve(provider) as upstream, httpx2.AsyncClient(transport=transport, timeout=60) as http:
        client = openai.AsyncOpenAI(base_url=f"{upstream}/v1", api_key="none", http_client=http)
        question: Any = {"model": "gpt-4o", "messages": [{"role": "user", "content": "hi"}]}

        @app.post("/stream")
        async def stream() -> StreamingResponse:
            answer = await client.chat.completions.create(**question, stream=True)

            async def relay() -> AsyncIterator[bytes]:
                async with answer:
                    async for chunk in answer:
                        yield (chunk.choices[0].delta.content or "").encode()

            return StreamingResponse(relay(), media_type="text/plain")

        @app.post("/whole")
        async def whole() -> str:
            answer = await client.chat.completions.create(**question)
            return answer.choices[0].message.content or ""

        async with serve(app) as address:
            yield Service(address, provider, calls, attempts, door)


@asynccontextmanager
async def caller(address: str, path: str) -> AsyncIterator[anyio.abc.SocketStream]:
    """Ask, and leave at the end of the block, as a browser does that is closed."""
    host, port = address.removeprefix("http://").split(":")
    async with await anyio.connect_tcp(host, int(port)) as connection:
        await connection.send(f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n".encode())
        yield connection


async def freed(running: Service) -> None:
    """See that within a second nothing is held any more, but for what the machine takes."""
    async with stalls() as lost:
        left = anyio.current_time()
        await until(lambda: running.busy == (0, 0, 0, 0, 0))
        assert anyio.current_time() - left < 1.0 + lost.total


WAYS = {
    "before headers": Fault(delay_headers=math.inf),
    "before the first token": Fault(delay_first_token=math.inf, ping_every=0.1),
    "in backoff": Fault(status=429, headers={"retry-after": "30"}),
    "between tokens": Fault(stall_after_tokens=3),
    "while it streams": Fault(),
}


@pytest.mark.parametrize(
    ("way", "path", "resume"),
    [
        *[(way, path, "error") for way in WAYS for path in ("/stream", "/whole")],
        *[(way, "/stream", "buffer") for way in ("between tokens", "while it streams")],
    ],
)
async def test_str_13_14_a_caller_who_leaves(way: str, path: str, resume: str) -> None:
    async with service(resume) as running:
        running.provider.script(None, [WAYS[way]])
        async with caller(running.address, path) as connection:
            await running.provider.wait_for_requests(1)
            if way == "in backoff":
                await until(lambda: not running.provider.active)
            elif way in ("between tokens", "while it streams") and path == "/stream" and resume == "error":
                while b"word" not in await connection.receive():
                    pass
            await anyio.sleep(0.1)
            assert running.calls.in_use() == 1
        await freed(running)
        assert running.provider.total_requests == 1
        assert way == "in backoff" or running.provider.requests[0].disconnected_at is not None


@pytest.mark.parametrize("path", ["/stream", "/whole"])
async def test_str_13_14_a_caller_who_leaves_the_queue(path: str) -> None:
    async with service("error", words=60) as running:
        running.provider.script(None, [Fault(delay_headers=math.inf)])
        async with caller(running.address, path):
            await running.provider.wait_for_requests(1)
            async with caller(running.address, path):
                await until(lambda: running.calls.queued() == 1)
            await until(lambda: running.calls.queued() == 0)
            assert running.provider.total_requests == 1
            assert running.door.in_use() == 1
        await freed(running)
        async with caller(running.address, path) as connection:  # and the next one is served
            assert (await connection.receive()).startswith(b"HTTP/1.1 200")
