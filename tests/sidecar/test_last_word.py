"""A client that is still sending when it is answered for the last time gets to read the answer (RFC 9112, 9.6)."""

from __future__ import annotations

import time
from contextlib import suppress

import pytest

import resilient_llm.sidecar.protocol as under_test
from tests.sidecar.raw import CHUNKED, LINE, LONG, Client, chunk, get, served

pytestmark = pytest.mark.realtime

NOWHERE = '[targets.main]\nurl = "http://127.0.0.1:9"\n'
LARGE = LINE + b"content-length: 1000000\r\n\r\n"
LAST_WORDS = {
    "too large": (LARGE, 413),
    "too large in chunks": (CHUNKED + chunk(bytes(2000)), 413),
    "no request": (b"NO REQUEST\r\n\r\n", 400),
    "too long a head": (LINE + b"x: " + bytes(70_000).replace(b"\0", b"y"), 431),
}


@pytest.mark.parametrize("kind", LAST_WORDS)
def test_what_is_sent_after_the_last_word_does_not_destroy_it(kind: str) -> None:
    sent, status = LAST_WORDS[kind]
    with served("[server]\nmax_body = 1000\n", targets=NOWHERE) as sidecar, Client(sidecar.url) as client:
        client.send(sent)
        sidecar.wait(lambda: bool(sidecar.log.lines), "nothing was refused")
        for _ in range(20):  # a closed socket would answer with a reset, by which some drop what is unread
            client.socket.sendall(bytes(10_000))
            time.sleep(0.005)
        answer = client.answer()
        assert answer.status == status
        assert answer.headers["connection"] == "close"
        assert client.makefile("rb").read() == b""


def test_nothing_is_done_for_what_comes_after_the_last_word() -> None:
    with served("[server]\nmax_body = 1000\n", targets=NOWHERE) as sidecar, Client(sidecar.url) as client:
        client.send(LARGE)
        assert client.answer().status == 413
        client.send(bytes(1_000_000) + get(b"/healthz"))
        assert client.rest() == b""
        assert len(sidecar.entries(1)) == 1


def test_a_client_that_never_stops_is_not_listened_to_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(under_test, "LAST_STAGE", 0.2)
    with served("[server]\nmax_body = 1000\n", targets=NOWHERE) as sidecar, Client(sidecar.url) as client:
        client.send(LARGE)
        assert client.answer().status == 413
        end = time.monotonic() + LONG
        with suppress(BrokenPipeError, ConnectionResetError):
            while time.monotonic() < end:
                client.socket.sendall(b"x")
                time.sleep(0.01)
        assert time.monotonic() < end
