"""A server that does with each connection what a test says, and knows when its peer has gone."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import anyio

Script = Callable[["Connection"], Awaitable[None]]


class Connection:
    """One connection as the server has it."""

    def __init__(self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.number = number
        self.reader = reader
        self.writer = writer
        self.gone = asyncio.Event()

    async def head(self) -> bytes:
        """Read a request's head."""
        return await self.reader.readuntil(b"\r\n\r\n")

    async def request(self) -> tuple[bytes, bytes]:
        """Read a request, framing and all."""
        head = await self.head()
        lines = head.lower().split(b"\r\n")
        if b"transfer-encoding: chunked" in lines:
            body = await self.reader.readuntil(b"0\r\n\r\n")
        else:
            lengths = [int(line[15:]) for line in lines if line.startswith(b"content-length:")]
            body = await self.reader.readexactly(lengths[0]) if lengths else b""
        return head, body

    async def send(self, *parts: bytes, pause: float = 0.0) -> None:
        """Write what is given, byte for byte."""
        for part in parts:
            if self.writer.is_closing():
                raise ConnectionResetError
            self.writer.write(part)
            await self.writer.drain()
            await anyio.sleep(pause)

    def reset(self) -> None:
        """Break the connection off with a reset."""
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(1, 13, b"\x01\x00\x00\x00\x00\x00\x00\x00")  # SO_LINGER, 0 s
        self.writer.transport.abort()

    async def until_gone(self) -> None:
        """Wait until the peer has closed the connection, one way or the other."""
        with suppress(ConnectionError):
            while await self.reader.read(65_536):
                pass
        self.gone.set()


class Wire:
    """The server: its address, and the connections it has had."""

    def __init__(self, scheme: str) -> None:
        self.scheme = scheme
        self.url = ""
        self.connections: list[Connection] = []

    async def has(self, connections: int) -> None:
        """Wait until there are or have been so many connections."""
        while len(self.connections) < connections:  # noqa: ASYNC110 - counts what the loop accepts
            await anyio.sleep(0.002)

    async def gone(self, within: float = 0.25) -> bool:
        """Tell whether every connection is closed by its peer in so many seconds.

        They are counted in turns of the event loop, which both sides share: a busy machine is nobody's fault.
        """
        for _ in range(round(within / 0.005)):
            if all(connection.gone.is_set() for connection in self.connections):
                return True
            await anyio.sleep(0.005)
        return False


@asynccontextmanager
async def wire(script: Script, *, tls: ssl.SSLContext | None = None) -> AsyncIterator[Wire]:
    """Play `script` on each connection; the connection ends with it. A minute is enough for any test."""
    it = Wire("http" if tls is None else "https")
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = Connection(len(it.connections), reader, writer)
        it.connections.append(connection)
        try:
            with suppress(asyncio.IncompleteReadError, ConnectionError):
                await script(connection)
        finally:
            writer.close()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(serve(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    server = await asyncio.start_server(accept, "127.0.0.1", 0, ssl=tls, limit=1 << 20)
    it.url = f"{it.scheme}://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        with anyio.fail_after(60):
            yield it
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for connection in it.connections:
            connection.writer.transport.abort()
            with suppress(ConnectionError):
                await connection.writer.wait_closed()
