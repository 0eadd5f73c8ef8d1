"""Calls that may share a reply, an upstream that counts them, and a look at what they leave behind."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import anyio
import httpx2

from resilient_llm import Policy
from resilient_llm.httpx2 import ResilientTransport
from resilient_llm.policies.cache import Cache
from resilient_llm.policies.coalesce import Coalesce
from resilient_llm.policies.idempotency import Idempotency
from tests.streams.scripted import DONE, ROLE, Spy, Upstream, read, says, send, streamed, usage

ASK: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "temperature": 0}
STREAMED = {**ASK, "stream": True}
STREAM = [ROLE, says("Hello "), says("world", "stop"), usage(3, 2), DONE]
WHOLE = b"".join(STREAM)


def answer(
    text: str = "Hello", *, status: int = 200, headers: dict[str, str] | None = None
) -> httpx2.Response:
    """Make a completion in one piece."""
    message = {"role": "assistant", "content": text}
    body = {
        "id": "c1",
        "object": "chat.completion",
        "model": "m",
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
    }
    return httpx2.Response(status, json=body, headers=headers)


def problem(status: int, code: str = "bad", headers: dict[str, str] | None = None) -> httpx2.Response:
    """Make an error."""
    body = {"error": {"message": "no", "type": "x", "code": code}}
    return httpx2.Response(status, json=body, headers=headers)


def slow_stream() -> httpx2.Response:
    """Make a stream that takes four seconds."""
    steps: list[Any] = []
    for event in STREAM:
        steps += [event, 1.0]
    return streamed(*steps[:-1])


class Setting:
    """One policy that shares replies before an upstream, and what becomes of the calls."""

    def __init__(
        self,
        policy: Coalesce | Cache | Idempotency,
        *replies: Callable[[], httpx2.Response] | Exception,
        delay: float = 1.0,
        outer: tuple[Policy, ...] = (),
        inner: tuple[Policy, ...] = (),
        **options: Any,
    ) -> None:
        self.policy = policy
        self.upstream = Upstream(*(replies or (answer,)), delay=delay)
        self.calls = Spy()
        self.transport = ResilientTransport(
            self.upstream, policies=[*outer, self.calls, policy, *inner], **options
        )

    @property
    def sent(self) -> int:
        """Count the requests that came to the upstream."""
        return len(self.upstream.sent)

    async def ask(self, body: Any = ASK, **options: Any) -> tuple[httpx2.Response, bytes]:
        """Ask, and read the answer."""
        response = await send(self.transport, body, **options)
        try:
            return response, await read(response)
        finally:
            with anyio.CancelScope(shield=True):
                await response.aclose()

    async def together(
        self, count: int, body: Any = ASK, **options: Any
    ) -> list[tuple[httpx2.Response, bytes]]:
        """Ask the same so many times at once."""
        answers: list[tuple[httpx2.Response, bytes]] = []

        async def one() -> None:
            answers.append(await self.ask(body, **options))

        async with anyio.create_task_group() as tasks:
            for _ in range(count):
                tasks.start_soon(one)
        return answers

    def check_nothing_is_left(self) -> None:
        """Tell whether every call has ended, every body is closed and nobody waits."""
        assert len(self.policy._replies) == 0
        assert all(call.finished for call in self.calls.calls)
        assert all(body.ended or body.closed is not None for body in self.upstream.bodies)


def served(response: httpx2.Response) -> str | None:
    """Say how a reply was served, `None` for one of the provider's."""
    return response.headers.get("x-resilient-llm-cache")


def code(body: bytes) -> str:
    """Give the code of an error."""
    found: str = json.loads(body)["error"]["code"]
    return found


class SlowStore:
    """A store that takes its time, and fails as told."""

    def __init__(self, *, delay: float = 0.1, error: Exception | None = None) -> None:
        self.delay = delay
        self.error = error
        self.values: dict[str, tuple[bytes, float]] = {}
        self.looked = 0

    async def get(self, key: str) -> tuple[bytes, float] | None:
        self.looked += 1
        await self.take_time()
        found = self.values.get(key)
        if found is None or found[1] <= anyio.current_time():
            return None
        return found[0], found[1] - anyio.current_time()

    async def put(self, key: str, value: bytes, ttl: float) -> None:
        await self.take_time()
        self.values[key] = value, anyio.current_time() + ttl

    async def delete(self, key: str) -> None:
        await self.take_time()
        self.values.pop(key, None)

    async def take_time(self) -> None:
        await anyio.sleep(self.delay)
        if self.error is not None:
            raise self.error
