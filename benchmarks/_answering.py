"""A server that answers from memory, in a process of its own: what is measured is who asks. No benchmark itself."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

from benchmarks._running import run
from benchmarks._sidecar_upstream import ANSWER, EVENT

__all__ = ["ANSWER", "BODY", "COMPLETION", "SIZES", "server"]

COMPLETION = "/v1/chat/completions"
BODY = json.dumps(
    {
        "model": "gpt-4o",
        "messages": [{"role": "user", "content": "What is the capital of France? " * 10}],
    }
).encode()
"""Of every request."""
EVENTS = 50
REPLIES = {
    COMPLETION.encode(): b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
    % (len(ANSWER), ANSWER),
    b"/stream": b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    + b"%x\r\n%b\r\n" % (len(EVENT), EVENT) * EVENTS
    + b"0\r\n\r\n",
}
SIZES = {COMPLETION: len(ANSWER), "/stream": len(EVENT) * EVENTS}
"""How large the body of an answer is, by the path."""


class Answering(asyncio.Protocol):
    """Answer each request at once, whatever it says."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self.transport = transport
        self.read = b""

    def data_received(self, data: bytes) -> None:
        """Look for whole requests; every one has the same body."""
        self.read += data
        while True:
            head, separator, rest = self.read.partition(b"\r\n\r\n")
            if not separator or len(rest) < len(BODY):
                return
            self.read = rest[len(BODY) :]
            self.transport.write(REPLIES[head.split(b" ", 2)[1]])  # type: ignore[attr-defined]


def answer_all(port: Connection) -> None:
    """Be the server, until the process is ended."""

    async def main() -> None:
        server = await asyncio.get_running_loop().create_server(Answering, "127.0.0.1", 0, backlog=1024)
        port.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    run(main())


@contextmanager
def server() -> Iterator[str]:
    """Start the server; gives its address."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=answer_all, args=(theirs,), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{ours.recv()}"
    finally:
        process.kill()
        process.join()
