"""Load on a gateway: so many requests in flight over connections that stay open, as bare as a protocol can be.

Every reply is looked at: one that is not 200, too short, or a stream that lacks an event or its end, is an error, and
no figure. No benchmark itself.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["Asking", "Load", "offer"]

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_END = b"0\r\n\r\n"
_ENDING = 20.0
_EVENT = b'"chat.completion.chunk"'


@dataclass(kw_only=True)
class Asking:
    """Say what is asked, of whom, and how a reply that is right looks."""

    port: int
    path: str = "/v1/chat/completions"
    headers: Mapping[str, str] = field(default_factory=dict)
    at_least: int = 0
    """Bytes of a body that is whole."""
    events: int = 0
    """Events of a stream, where one is asked for, `pace` milliseconds apart."""
    pace: int = 0

    def request(self) -> bytes:
        """Write the request."""
        body: dict[str, object] = {
            "model": "gpt-4o-mini",
            "messages": [{"role": "user", "content": "What is the capital of France? " * 10}],
        }
        if self.events:
            body |= {"stream": True, "max_tokens": self.events, "seed": self.pace}
        raw = json.dumps(body).encode()
        headers = {
            "host": f"127.0.0.1:{self.port}",
            "content-type": "application/json",
            "accept": "*/*",
            "user-agent": "benchmark",
            **self.headers,
            "content-length": str(len(raw)),
        }
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        return f"POST {self.path} HTTP/1.1\r\n{head}\r\n".encode() + raw


@dataclass
class Load:
    """What came of it while it was measured."""

    seconds: float = 0.0
    latencies: list[float] = field(default_factory=list)
    """Seconds until a reply was whole; of a stream until its first event."""
    events: int = 0
    answered: int = 0
    """Replies in all, those among it that came after the end of the measurement."""
    answered_events: int = 0
    errors: list[str] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Replies a second."""
        return len(self.latencies) / self.seconds

    def quantile(self, ratio: float) -> float:
        """Give a latency in milliseconds."""
        ordered = sorted(self.latencies)
        return 1000 * ordered[min(len(ordered) - 1, int(ratio * len(ordered)))]


async def offer(asking: Asking, *, in_flight: int, seconds: float) -> Load:
    """Keep so many requests in flight for so long, and wait for the last of them, which do not count.

    Raises `RuntimeError` for the first reply that is not right, and for none at all.
    """
    load = Load()
    loop = asyncio.get_running_loop()
    clients = [_Client(asking, load) for _ in range(in_flight)]
    try:
        for client in clients:
            await loop.create_connection(lambda client=client: client, "127.0.0.1", asking.port)  # type: ignore[misc]
        began = time.perf_counter()
        await asyncio.sleep(seconds)
        load.seconds = time.perf_counter() - began
        counted = Load(load.seconds, list(load.latencies), load.events)
        for client in clients:
            client.leave()
        until = time.perf_counter() + _ENDING
        while any(client.waits for client in clients) and time.perf_counter() < until:  # noqa: ASYNC110 - as bare as can be
            await asyncio.sleep(0.002)  # the next load must not meet what is left of this one
        if not counted.latencies:  # so slow that nothing was done in time: then it is those that there were
            counted = Load(time.perf_counter() - began, list(load.latencies), load.events)
        counted.answered, counted.answered_events = len(load.latencies), load.events
    finally:
        for client in clients:
            client.stop()
        await asyncio.sleep(0)
    if load.errors:
        raise RuntimeError(load.errors[0])
    if not counted.latencies:
        raise RuntimeError(f"no reply in {seconds + _ENDING} s")
    return counted


class _Client(asyncio.Protocol):
    """Ask again whenever an answer is whole."""

    def __init__(self, asking: Asking, load: Load) -> None:
        self._request = asking.request()
        self._asking = asking
        self._load = load
        self._stopped = self._leaving = self._idle = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.WriteTransport = transport  # type: ignore[assignment]
        self._ask()

    @property
    def waits(self) -> bool:
        return not self._stopped and not self._idle

    def leave(self) -> None:
        self._leaving = True

    def stop(self) -> None:
        self._stopped = True
        if hasattr(self, "_transport"):
            self._transport.abort()

    def _ask(self) -> None:
        if self._leaving:
            self._idle = True
            return
        self._read: list[bytes] = []
        self._head = b""
        self._left: int | None = None
        self._first = 0.0
        self._began = time.perf_counter()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if not self._head:
            self._read.append(data)
            read = data if len(self._read) == 1 else b"".join(self._read)
            end = read.find(b"\r\n\r\n")
            if end < 0:
                return
            self._head, data = read[:end], read[end + 4 :]
            self._read.clear()
            if self._head[9:12] != b"200":
                self._fail(f"{self._head[:80]!r} {data[:300]!r}")
                return
            length = _LENGTH.search(self._head)
            self._left = None if length is None else int(length[1])
            if self._left is not None and self._left < self._asking.at_least:
                self._fail(f"a short reply: {data[:300]!r}")
                return
        if self._left is not None:
            self._left -= len(data)
            if self._left <= 0:
                self._load.latencies.append(time.perf_counter() - self._began)
                self._ask()
        elif data:
            self._take_chunks(data)

    def _take_chunks(self, data: bytes) -> None:
        self._read.append(data)
        if self._asking.events:
            events = data.count(_EVENT)
            self._load.events += events
            if events and not self._first:
                self._first = time.perf_counter() - self._began
                self._load.latencies.append(self._first)
        if not (data if len(data) > 4 else b"".join(self._read[-5:])).endswith(_END):
            return
        body = _unchunked(b"".join(self._read))
        if self._asking.events:
            events = body.count(_EVENT)
            if events < self._asking.events or not body.rstrip().endswith(b"data: [DONE]"):
                self._fail(f"a stream of {events} events that ends with {body[-200:]!r}")
                return
        elif len(body) < self._asking.at_least:
            self._fail(f"a short reply: {body[:300]!r}")
            return
        else:
            self._load.latencies.append(time.perf_counter() - self._began)
        self._ask()

    def _fail(self, message: str) -> None:
        self._load.errors.append(message)
        self.stop()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._stopped:
            self._fail(f"the connection was closed: {exc!r}")


def _unchunked(raw: bytes) -> bytes:
    parts: list[bytes] = []
    at = 0
    while True:
        end = raw.find(b"\r\n", at)
        size = int(raw[at:end].partition(b";")[0] or b"0", 16)
        if not size:
            return b"".join(parts)
        parts.append(raw[end + 2 : end + 2 + size])
        at = end + 2 + size + 2
