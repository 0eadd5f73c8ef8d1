"""A provider that sends the bytes it is told to, and a sidecar in front of it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from tests.sidecar.raw import Served, post, served

KEY = "sk-of-the-sidecar-0123456789"
STREAM = post(b'{"model":"m","messages":[],"stream":true}')
GOOD = b'{"id":"1","choices":[{"index":0,"finish_reason":"stop","message":{"content":"hi"}}]}'
TOLD = b'{"error":{"message":"Incorrect API key: ' + KEY.encode() + b'","type":"invalid_request_error"}}'
ONE = b'data: {"choices":[{"index":0,"delta":{"content":"hi"}}]}\n\n'


class Upstream:
    """A provider that sends the bytes it is told to, whatever it is asked."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.reply = b""
        self.again = b""
        """What is sent over and over behind it."""
        self.asked: list[bytes] = []

    def serve(self) -> None:
        with suppress(OSError):  # closed
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            head = b""
            while b"\r\n\r\n" not in head:
                received = connection.recv(65536)
                if not received:
                    return
                head += received
            self.asked.append(head)
            connection.sendall(self.reply)
            while self.again:
                connection.sendall(self.again)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


@contextmanager
def hostile(more: str = "") -> Iterator[tuple[Served, Upstream]]:
    upstream = Upstream()
    threading.Thread(target=upstream.serve, daemon=True).start()
    target = f"""
[server]
deadline = 4
[retry]
enabled = false
[targets.main]
url = "{upstream.url}/v1"
api_key_env = "HOSTILE_KEY"
circuit = {{enabled = false}}
concurrency = {{enabled = false}}
timeouts = {{first_content = 1.0, content_gap = 1.0, whole_reply = 2.0}}
{more}
"""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOSTILE_KEY", KEY)
        with served(targets=target) as sidecar:
            yield sidecar, upstream
    upstream.close()


def head(status: bytes = b"200 OK", *headers: bytes) -> bytes:
    lines = b"".join(header + b"\r\n" for header in headers)
    return b"HTTP/1.1 " + status + b"\r\ncontent-type: application/json\r\n" + lines


def whole(body: bytes = GOOD, status: bytes = b"200 OK", *headers: bytes) -> bytes:
    return head(status, *headers) + b"content-length: %d\r\n\r\n" % len(body) + body


CHUNKED = head(b"200 OK", b"transfer-encoding: chunked") + b"\r\n"
EVENTS = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
