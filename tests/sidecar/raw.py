"""A sidecar in a thread, asked byte by byte over a socket of the test's own."""

from __future__ import annotations

import http.client
import io
import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self, cast

from anyio.from_thread import start_blocking_portal

from resilient_llm.sidecar import Sidecar
from resilient_llm.testing import FakeProvider, serve_in_thread
from tests.sidecar.support import Log, logged, over_sockets

BODY = b'{"model":"m","messages":[]}'
LINE = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
CHUNKED = LINE + b"transfer-encoding: chunked\r\n\r\n"
LONG = 30.0
"""Seconds after which a test that waits has failed."""


def post(body: bytes = BODY, *headers: bytes) -> bytes:
    """Give a request with a body."""
    more = b"".join(header + b"\r\n" for header in headers)
    return LINE + more + b"content-length: %d\r\n\r\n" % len(body) + body


def get(path: bytes, *headers: bytes) -> bytes:
    """Give a request without one."""
    return (
        b"GET "
        + path
        + b" HTTP/1.1\r\nhost: localhost\r\n"
        + b"".join(one + b"\r\n" for one in headers)
        + b"\r\n"
    )


def chunk(data: bytes, extension: bytes = b"") -> bytes:
    """Give a part of a chunked body; the last is one of nothing."""
    return b"%x%s\r\n%s\r\n" % (len(data), extension, data)


class Answer(NamedTuple):
    """A response, whole and well-formed."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """Give the body, read as JSON."""
        return json.loads(self.body)


class _Shared(io.BufferedReader):
    """What comes from a socket, for one reader after another."""

    def close(self) -> None:
        """Stay open: the next response comes this way, too."""


class Client:
    """One connection, and what comes back on it."""

    def __init__(self, url: str, *, patience: float = LONG) -> None:
        host, port = url.removeprefix("http://").split(":")
        self.socket = socket.create_connection((host, int(port)), timeout=patience)
        self._file = _Shared(cast(io.RawIOBase, socket.SocketIO(self.socket, "rb")))

    def makefile(self, _mode: str) -> io.BufferedReader:
        """Let `http.client` read from here."""
        return self._file

    def send(self, data: bytes) -> None:
        """Send; what the other side does not want any more is its business."""
        with suppress(BrokenPipeError, ConnectionResetError):
            self.socket.sendall(data)

    def answer(self, method: str = "POST") -> Answer:
        """Read one response. Raises what `http.client` does for one that is none."""
        response = http.client.HTTPResponse(cast(socket.socket, self), method=method)
        response.begin()
        body = response.read()
        assert response.isclosed()
        return Answer(response.status, {name.lower(): value for name, value in response.getheaders()}, body)

    def rest(self) -> bytes:
        """Read to the end of the connection."""
        try:
            return self._file.read()
        except ConnectionResetError:
            return b""

    def rest_until_idle(self) -> bytes:
        """Read until a response is complete, or the connection is at its end."""
        received = b""
        with suppress(ConnectionResetError):
            while chunk := self.socket.recv(1 << 20):
                received += chunk
                head, found, body = received.partition(b"\r\n\r\n")
                chunked = b"transfer-encoding: chunked" in head.lower()
                if found and (
                    body.endswith(b"0\r\n\r\n")
                    if chunked
                    else b"-length: %d\r\n" % len(body) in head + b"\r\n"
                ):
                    break
        return received

    def close(self) -> None:
        """Leave."""
        self.socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass
class Served:
    """A sidecar that is being served, what it has logged, and the provider behind it."""

    url: str
    sidecar: Sidecar
    log: Log
    provider: FakeProvider = field(default_factory=FakeProvider)

    def ask(self, sent: bytes) -> Answer:
        """Send bytes over a connection of their own, and give the one response to them."""
        with Client(self.url) as client:
            client.send(sent)
            return client.answer("GET" if sent.startswith(b"GET") else "POST")

    def wait(self, until: Callable[[], object], why: str) -> None:
        """Wait for what happens in the other thread."""
        end = time.monotonic() + LONG
        while not until():
            assert time.monotonic() < end, f"{why}: {self.log.lines[-10:]}"
            time.sleep(0.005)

    def entries(self, count: int) -> list[dict[str, Any]]:
        """Wait for so many entries of the access log."""
        self.wait(lambda: len(self.log.entries) >= count, f"{count} entries")
        return self.log.entries

    def works(self) -> None:
        """Make sure that it answers a good request as if nothing had been."""
        answer = self.ask(post())
        assert answer.status == 200, answer
        assert answer.json["choices"][0]["message"]["content"], answer
        request_id = answer.headers["x-resilient-llm-request-id"]
        self.wait(lambda: any(request_id in line for line in self.log.lines), "its entry")


@contextmanager
def served(toml: str = "", *, targets: str | None = None, **options: Any) -> Iterator[Served]:
    """Serve a sidecar, in front of a fake provider called main unless `targets` says otherwise."""
    provider = FakeProvider()
    with serve_in_thread(provider) as upstream, logged() as log, start_blocking_portal() as portal:
        behind = (
            f'[targets.main]\nurl = "{upstream}/v1"\npassthrough = true\n' if targets is None else targets
        )
        serving = portal.wrap_async_context_manager(over_sockets(f"{toml}\n{behind}", **options))
        with serving as (url, sidecar):
            log.lines.clear()
            yield Served(url, sidecar, log, provider)
