"""A sidecar in front of a fake provider: in memory and virtual time, or over sockets."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import anyio
import httpx2
import uvicorn

from resilient_llm import Telemetry
from resilient_llm.message import Headers, Reply, Request
from resilient_llm.sidecar import Sidecar, parse
from resilient_llm.sidecar.access_log import JSONFormatter
from resilient_llm.sidecar.protocol import guarded
from resilient_llm.streams import BufferedStream, LibraryErrors
from resilient_llm.testing import FakeProvider
from resilient_llm.transports.http1 import Http1Transport
from tests.asgi.server import Connection

KEY = "key-of-acme-0123456789"
BEARER = (b"authorization", f"Bearer {KEY}".encode())
ASK = {"model": "gpt-4o", "messages": [{"role": "user", "content": "hi"}]}
ANSWER = "The quick brown fox jumps over the lazy dog."


class Watched:
    """What else a `departure.Connection` does than to say who has left: all of it the ASGI way."""

    left: Callable[[], None] | None = None
    """What is called when the client leaves."""

    rejection = None

    def has_whole_body(self) -> bool:
        return True

    def unwatch(self) -> None:
        self.left = None

    def answer(self, *_whole: object) -> bool:
        return False

    def outlet(self) -> None:
        return None

    def is_behind(self) -> bool:
        return False

    async def taken(self) -> bool:
        return True


class MemoryEngine:
    """Send requests to an ASGI app in memory, on either event loop."""

    errors = LibraryErrors(timed_out=httpx2.ReadTimeout, broken=httpx2.RemoteProtocolError)

    def __init__(self, provider: FakeProvider) -> None:
        self._transport = provider.httpx2_transport()
        self.sent: list[Request] = []
        self.closed = False

    async def __call__(self, request: Request) -> Reply:
        self.sent.append(request)
        native = httpx2.Request(
            request.method,
            request.url,
            headers=request.headers,
            stream=httpx2.ByteStream(request.body or b""),
        )
        response = await self._transport.handle_async_request(native)
        stream = response.stream
        assert isinstance(stream, httpx2.AsyncByteStream)
        return Reply(response.status_code, response.headers.raw, stream, native=response)

    def synthesise(self, status: int, headers: Headers, body: bytes) -> Reply:
        stream = BufferedStream([body])
        return Reply(status, headers, stream, native=stream, complete=True)

    async def aclose(self) -> None:
        self.closed = True


OPEN = """
[targets.main]
url = "http://provider.example/v1"
"""


def memory(provider: FakeProvider, toml: str = OPEN) -> Sidecar:
    """Make a sidecar that asks a provider in memory."""
    return Sidecar(parse(toml), MemoryEngine(provider))


async def ask(
    sidecar: Sidecar,
    body: object = ASK,
    *,
    path: str = "/v1/chat/completions",
    method: str = "POST",
    headers: Headers | tuple[tuple[bytes, bytes], ...] = (),
) -> Connection:
    """Carry one request to a sidecar in memory."""
    sent = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection = Connection(sent, method=method, path=path, headers=headers)
    connection.scope["query_string"] = b""
    return await connection.run(sidecar)


class Log:
    """What the access log has, entry by entry."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    @property
    def entries(self) -> list[dict[str, Any]]:
        parsed = [json.loads(line) for line in self.lines]
        return [line for line in parsed if line["logger"] == "resilient_llm.access"]

    async def line(self) -> str:
        """Wait for a line of any kind and give it: it may be written just after the reply."""
        with anyio.fail_after(20):
            while not self.lines:  # noqa: ASYNC110 - what is waited for tells nobody
                await anyio.sleep(0.01)
        return self.lines[0]

    async def entry(self, number: int = 1) -> dict[str, Any]:
        """Wait for so many entries and give the last of them."""
        with anyio.fail_after(20):
            while len(self.entries) < number:  # noqa: ASYNC110 - what is waited for tells nobody
                await anyio.sleep(0.01)
        return self.entries[number - 1]


@contextmanager
def logged() -> Iterator[Log]:
    """Collect everything that is logged, as the server writes it."""
    log = Log()

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            log.lines.append(JSONFormatter().format(record))

    handler, root = Collect(), logging.getLogger()
    # Servers of other tests may have turned uvicorn's loggers down, and away from the root.
    heard = [logging.getLogger(name) for name in ("resilient_llm", "uvicorn", "uvicorn.error")]
    before = [(each.level, each.propagate, each.disabled) for each in heard]
    for each in heard:
        each.propagate, each.disabled = True, False
        each.setLevel(logging.INFO)  # which also forgets what was decided at another level
    root.addHandler(handler)
    try:
        yield log
    finally:
        root.removeHandler(handler)
        for each, (level, each.propagate, each.disabled) in zip(heard, before, strict=True):
            each.setLevel(level)


@asynccontextmanager
async def over_sockets(
    toml: str,
    *,
    max_head: int = 64 * 1024,
    head_timeout: float = 10.0,
    send_timeout: float = 60.0,
    max_connections: int | None = None,
    telemetry: Telemetry | None = None,
) -> AsyncIterator[tuple[str, Sidecar]]:
    """Serve a sidecar as its server does, with its own HTTP client on the other side; give its URL and itself."""
    sidecar = Sidecar(parse(toml), Http1Transport(), telemetry=telemetry)
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.bind(("127.0.0.1", 0))
    settings = uvicorn.Config(
        sidecar,
        http=guarded(
            max_head=max_head,
            head_timeout=head_timeout,
            send_timeout=send_timeout,
            max_connections=max_connections,
        ),
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(settings)
    with sock:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(server._serve, [sock])
            while not server.started:  # noqa: ASYNC110 - what is waited for tells nobody
                await anyio.sleep(0.005)
            try:
                yield f"http://127.0.0.1:{sock.getsockname()[1]}", sidecar
            finally:
                server.should_exit = True


async def exchange(url: str, sent: bytes, *, patience: float = 5.0) -> bytes:
    """Send bytes as they are, and give all that comes back until the other side closes or says no more."""
    host, port = url.removeprefix("http://").split(":")
    received = b""
    async with await anyio.connect_tcp(host, int(port)) as stream:
        try:
            with anyio.move_on_after(patience):
                await stream.send(sent)
                while True:
                    received += await stream.receive()
                    head, found, body = received.partition(b"\r\n\r\n")
                    if found and b"content-length: %d" % len(body) in head.lower():
                        break
        except (anyio.EndOfStream, anyio.BrokenResourceError):
            pass
    return received
