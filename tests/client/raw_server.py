"""A loopback server that answers with the very bytes a test gives it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

Handler = Callable[[bytes, bytes, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
"""Gets the request's head and body, and the connection to answer on."""


@asynccontextmanager
async def raw_server(handler: Handler) -> AsyncIterator[str]:
    """Serve `handler` on a free loopback port; yields the base URL."""
    connections: set[asyncio.Task[None]] = set()

    async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connections.add(task)
        try:
            with suppress(asyncio.IncompleteReadError, ConnectionError):
                while not writer.is_closing():
                    head = await reader.readuntil(b"\r\n\r\n")
                    await handler(head, await _body(head, reader), reader, writer)
                    await writer.drain()
        except asyncio.CancelledError:
            pass  # the test is over
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    server = await asyncio.start_server(connection, "127.0.0.1", 0)
    try:
        host, port = server.sockets[0].getsockname()
        yield f"http://{host}:{port}"
    finally:
        server.close()
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)


async def _body(head: bytes, reader: asyncio.StreamReader) -> bytes:
    lines = head.lower().split(b"\r\n")
    for line in lines:
        if line.startswith(b"content-length:"):
            return await reader.readexactly(int(line.split(b":")[1]))
    if b"transfer-encoding: chunked" in lines:
        body = b""
        while size := int(await reader.readline(), 16):
            body += (await reader.readexactly(size + 2))[:-2]
        await reader.readline()
        return body
    return b""


def answer(body: bytes, *headers: bytes, status: bytes = b"200 OK") -> bytes:
    """Write a whole response."""
    head = [b"HTTP/1.1 " + status, b"content-length: " + str(len(body)).encode(), *headers, b"", b""]
    return b"\r\n".join(head) + body
