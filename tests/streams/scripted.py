"""A transport that gives the replies it is told to, byte for byte and in time, and notes what becomes of them."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import anyio
import httpx2

from resilient_llm import Call, Outcome, Policy, Reply
from resilient_llm.call import CallNext
from resilient_llm.httpx2 import ResilientTransport

URL = "http://h.example/v1/chat/completions"
ASK = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}
EVENTS = {"content-type": "text/event-stream"}

Step = bytes | float | Exception
"""What comes next of a body: bytes, seconds of nothing, or the end of it by an exception."""


def data(body: object, event: str = "") -> bytes:
    """Write one event."""
    head = f"event: {event}\n" if event else ""
    return f"{head}data: {body if isinstance(body, str) else json.dumps(body)}\n\n".encode()


def says(text: str, finish: str | None = None) -> bytes:
    """Write a chunk of a completion."""
    return data({"id": "c", "choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}]})


def usage(prompt: int, completion: int) -> bytes:
    """Write the chunk that says what was used."""
    counts = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    return data({"choices": [], "usage": counts})


ROLE = data({"id": "c", "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
DONE = data("[DONE]")
PING = b": ping\n\n"
OVERLOADED = data({"error": {"message": "no", "type": "server_error", "code": "overloaded"}})
WHOLE = [ROLE, says("Hello "), says("world", "stop"), DONE]


class Body(httpx2.AsyncByteStream):
    """A body that comes in steps. Nothing of it is closed unless somebody does it."""

    def __init__(self, *steps: Step, closing: float = 0.0, close_error: Exception | None = None) -> None:
        self.steps = list(steps)
        self.closing = closing
        self.close_error = close_error
        self.reads = 0
        self.closed: float | None = None
        """When it was closed."""
        self.ended = False
        self.waiting = 0

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        self.reads += 1
        self.waiting += 1
        try:
            while self.steps:
                step = self.steps.pop(0)
                if isinstance(step, bytes):
                    return step
                if isinstance(step, Exception):
                    raise step
                await (anyio.sleep_forever() if step == math.inf else anyio.sleep(step))
        finally:
            self.waiting -= 1
        self.ended = True
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Take the time it takes."""
        if self.closing:
            await (anyio.sleep_forever() if self.closing == math.inf else anyio.sleep(self.closing))
        if self.closed is None:
            self.closed = anyio.current_time()
        if self.close_error is not None:
            raise self.close_error


def streamed(*steps: Step, headers: dict[str, str] | None = None, **options: Any) -> httpx2.Response:
    """Make a reply that is an event stream."""
    return httpx2.Response(
        200, headers=EVENTS if headers is None else headers, stream=Body(*steps, **options)
    )


class Upstream(httpx2.AsyncBaseTransport):
    """Give one reply after another, the last one again and again; a float before one is how long it takes."""

    def __init__(self, *replies: Callable[[], httpx2.Response] | Exception, delay: float = 0.0) -> None:
        self.replies = list(replies)
        self.delay = delay
        self.sent: list[float] = []
        self.requests: list[httpx2.Request] = []
        self.bodies: list[Body] = []

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Answer."""
        self.sent.append(anyio.current_time())
        self.requests.append(request)
        if self.delay:
            await anyio.sleep(self.delay)
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        if isinstance(reply, Exception):
            raise reply
        response = reply()
        if isinstance(response.stream, Body):
            self.bodies.append(response.stream)
        return response

    @property
    def all_closed(self) -> bool:
        """Tell whether no connection is left open."""
        return all(body.closed is not None for body in self.bodies)


class Spy:
    """A policy that keeps what it sees: calls or attempts, and each time one of them ended."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.ended: list[Outcome] = []

    async def __call__(self, call: Call, call_next: CallNext) -> Reply:
        """Let everything pass."""
        self.calls.append(call)
        call.on_finish(self.ended.append)
        return await call_next(call)


def resilient(upstream: Upstream, *policies: Policy, **options: Any) -> ResilientTransport:
    """Put policies on an upstream, each in its place, those that have none innermost."""
    ordered = sorted(policies, key=lambda policy: getattr(policy, "placement", 100))
    return ResilientTransport(upstream, policies=ordered, **options)


async def send(
    transport: ResilientTransport,
    body: Any = ASK,
    *,
    url: str = URL,
    method: str = "POST",
    headers: Any = None,
) -> httpx2.Response:
    """Send a request, and give the reply when it begins."""
    request = httpx2.Request(method, url, json=body, headers=headers)
    return await transport.handle_async_request(request)


async def read(response: httpx2.Response) -> bytes:
    """Read a body to its end."""
    assert isinstance(response.stream, httpx2.AsyncByteStream)
    return b"".join([chunk async for chunk in response.stream])


async def chunks(response: httpx2.Response) -> Sequence[tuple[float, bytes]]:
    """Read a body to its end, with the times at which its parts came."""
    assert isinstance(response.stream, httpx2.AsyncByteStream)
    began = anyio.current_time()
    return [(round(anyio.current_time() - began, 6), chunk) async for chunk in response.stream]
