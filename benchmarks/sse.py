"""What it costs to look at a stream on its way: microseconds for each server-sent event.

The same events, a token of a chat completion each, go through our reader (framing, and what each event means: content,
usage, the end), httpx-sse, the decoder of the openai SDK (framing only, of a synchronous stream), and a copy of the
bytes; and through a whole `ResilientTransport` to a caller that reads them, with and without clocks, as against a bare
transport. Everything is measured in turns; figures are medians. Only their ratios hold.

    python benchmarks/sse.py [--full]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import httpx
import httpx2
import httpx_sse
from openai._streaming import SSEDecoder

from benchmarks._running import run
from resilient_llm import AttemptTimeout, Deadline, Policy, Retry
from resilient_llm.httpx2 import ResilientTransport
from resilient_llm.providers import OPENAI, StreamReader

EVENTS = 1000
HEADERS = {"content-type": "text/event-stream"}


def chunk(delta: object, finish: str | None = None) -> bytes:
    """Write an event as OpenAI does."""
    body = {
        "id": "chatcmpl-AbCdEfGhIjKlMnOpQrStUvWx",
        "object": "chat.completion.chunk",
        "created": 1780000000,
        "model": "gpt-4o-2024-08-06",
        "service_tier": "default",
        "system_fingerprint": "fp_0123456789",
        "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}],
    }
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"


STREAM = [
    chunk({"role": "assistant", "content": "", "refusal": None}),
    *(chunk({"content": f" word{number}"}) for number in range(EVENTS - 3)),
    chunk({}, "stop"),
    b"data: [DONE]\n\n",
]


def read() -> None:
    """Frame and understand."""
    reader = StreamReader(OPENAI)
    for part in STREAM:
        reader.feed(part)
    assert reader.close().ok


def openai_decoder() -> None:
    """Frame, as the SDK does."""
    for _ in SSEDecoder().iter_bytes(iter(STREAM)):
        pass


class _Parts(httpx.SyncByteStream):
    def __iter__(self) -> Iterator[bytes]:
        return iter(STREAM)


def sse() -> None:
    """Frame, as httpx-sse does."""
    for _ in httpx_sse.EventSource(httpx.Response(200, headers=HEADERS, stream=_Parts())).iter_sse():
        pass


def copy() -> None:
    """Copy the bytes."""
    buffer = bytearray()
    for part in STREAM:
        buffer += part
        bytes(buffer)
        buffer.clear()


class _AsyncParts(httpx2.AsyncByteStream):
    def __init__(self) -> None:
        self._parts = iter(STREAM)

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        for part in self._parts:
            return part
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Hold nothing."""


class _Upstream(httpx2.AsyncBaseTransport):
    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:  # noqa: ARG002
        return httpx2.Response(200, headers=HEADERS, stream=_AsyncParts())


def relay(transport: httpx2.AsyncBaseTransport) -> Callable[[], Awaitable[None]]:
    """Read the stream through a transport."""
    request = httpx2.Request(
        "POST", "http://h.example/v1/chat/completions", json={"model": "m", "messages": [], "stream": True}
    )

    async def run() -> None:
        stream: Any = (await transport.handle_async_request(request)).stream
        async for _ in stream:
            pass
        await stream.aclose()

    return run


def resilient(*policies: Policy) -> Callable[[], Awaitable[None]]:
    """Read it through ours."""
    return relay(ResilientTransport(_Upstream(), policies=policies))


def measured(work: Callable[[], None]) -> Callable[[], Awaitable[None]]:
    """Make one kind of function of two."""

    async def run() -> None:
        work()

    return run


async def main(rounds: int) -> None:
    """Measure, print a table, and the figures as JSON in the last line."""
    cases: dict[str, Callable[[], Awaitable[None]]] = {
        "event": measured(read),
        "openai_decoder": measured(openai_decoder),
        "httpx_sse": measured(sse),
        "copy": measured(copy),
        "bare_relay": relay(_Upstream()),
        "relay": resilient(Retry()),
        "relay_with_clocks": resilient(Deadline(60), Retry(), AttemptTimeout(content_gap=30)),
    }
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, case in cases.items():
            began = time.perf_counter()
            await case()
            times[name].append((time.perf_counter() - began) / EVENTS * 1e6)
    figures = {name: statistics.median(values) for name, values in times.items()}
    for name, value in figures.items():
        print(
            f"{name:<20}{value:>8.2f} us an event{value / figures['openai_decoder']:>8.2f} x the SDK's decoder"
        )
    print(json.dumps({f"{name}_us": round(value, 3) for name, value in figures.items()}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--full", action="store_true", help="five times as many rounds")
    run(main(250 if parser.parse_args().full else 50))
