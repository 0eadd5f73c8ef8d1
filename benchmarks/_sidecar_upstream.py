"""A provider that answers at once, from memory, in a process of its own: what gateways are measured in front of.

What a request asks for is in fields that gateways pass on: `stream`, `max_tokens` as the number of events, and `seed`
as the milliseconds between two of them. No benchmark itself.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from functools import lru_cache

from benchmarks._running import run

__all__ = ["ANSWER", "EVENT"]

ANSWER = json.dumps(
    {
        "id": "chatcmpl-0123456789abcdef",
        "object": "chat.completion",
        "created": 1_790_000_000,
        "model": "gpt-4o-mini",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Paris is the capital of France. " * 12},
                "finish_reason": "stop",
            }
        ],
        "usage": {"prompt_tokens": 24, "completion_tokens": 96, "total_tokens": 120},
    }
).encode()

EVENT = (
    b'data: {"id":"chatcmpl-0123456789abcdef","object":"chat.completion.chunk","created":1790000000,'
    b'"model":"gpt-4o-mini","choices":[{"index":0,"delta":{"content":" word"},"finish_reason":null}]}\n\n'
)
_LAST = EVENT.replace(b'{"content":" word"},"finish_reason":null', b'{},"finish_reason":"stop"')

_HEAD = b"HTTP/1.1 200 OK\r\ndate: Mon, 30 Nov 2026 12:00:00 GMT\r\n"
_WHOLE = _HEAD + b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
_REPLY = _WHOLE % (len(ANSWER), ANSWER)
_MODELS = b'{"object":"list","data":[{"id":"gpt-4o-mini","object":"model","owned_by":"openai"}]}'
_BEGINNING = _HEAD + b"content-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_CHUNKED = re.compile(rb"\r\ntransfer-encoding: *chunked", re.IGNORECASE)
_STREAMS = re.compile(rb'"stream": ?true')
_EVENTS = re.compile(rb'"max_(?:completion_)?tokens": ?(\d+)')
_PACE = re.compile(rb'"seed": ?(\d+)')


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


_CHUNK, _END = _chunk(EVENT), _chunk(_LAST) + _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


@lru_cache(maxsize=64)
def _asked(body: bytes) -> tuple[int, float] | None:
    """Give the number of events and the seconds between them, if the body asks for a stream."""
    if not _STREAMS.search(body):
        return None
    events, pace = _EVENTS.search(body), _PACE.search(body)
    return int(events[1]) if events else 10, int(pace[1]) / 1000 if pace else 0.0


class Provider(asyncio.Protocol):
    """Answer each request of one connection."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self._transport: asyncio.WriteTransport = transport  # type: ignore[assignment]
        self._loop = asyncio.get_running_loop()
        self._read = b""

    def data_received(self, data: bytes) -> None:
        """Look for whole requests."""
        self._read = read = self._read + data if self._read else data
        while (end := read.find(b"\r\n\r\n")) >= 0:
            head, start = read[:end], end + 4
            length = _LENGTH.search(head)
            if length is not None:
                stop = start + int(length[1])
            elif _CHUNKED.search(head):
                stop = read.find(b"0\r\n\r\n", start) + 5
                if stop < start + 5:
                    return
            else:
                stop = start
            if len(read) < stop:
                return
            self._read, body = read[stop:], read[start:stop]
            self._answer(body)
            read = self._read

    def _answer(self, body: bytes) -> None:
        if not body:
            self._transport.write(_WHOLE % (len(_MODELS), _MODELS))  # somebody looks whether it is well
            return
        asked = _asked(body)
        if asked is None:
            self._transport.write(_REPLY)
        else:
            self._transport.write(_BEGINNING)
            self._stream(*asked)

    def _stream(self, left: int, pace: float) -> None:
        """Send an event and come back for the next: each is a packet of its own."""
        if self._transport.is_closing():
            return
        if not left:
            self._transport.write(_END)
            return
        self._transport.write(_CHUNK)
        if pace:
            self._loop.call_later(pace, self._stream, left - 1, pace)
        else:
            self._loop.call_soon(self._stream, left - 1, pace)


async def main() -> None:
    """Serve until killed; the port is the only line it prints."""
    server = await asyncio.get_running_loop().create_server(Provider, "127.0.0.1", 0, backlog=1024)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await server.serve_forever()


if __name__ == "__main__":
    run(main())
