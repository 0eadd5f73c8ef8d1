"""Clients that are slow, leave half-way, or take nothing: each keeps no more than its connection, and not for ever."""

from __future__ import annotations

import http.client
import json
import socket
import struct
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from resilient_llm.testing import FakeModel, FakeProvider, Fault, serve_in_thread
from tests.sidecar.raw import BODY, CHUNKED, LINE, LONG, Client, Served, chunk, post, served

pytestmark = pytest.mark.realtime

STREAM = post(BODY.replace(b"}", b',"stream":true}'))
NOWHERE = '[targets.main]\nurl = "http://127.0.0.1:9"\n'
ENOUGH = f"{'word' * 20} " * 50_000
"""A reply that no buffer of a socket holds four times."""


@contextmanager
def endless(toml: str = "", *, send_timeout: float = 60.0, token_delay: float = 0.0) -> Iterator[Served]:
    """Serve in front of a provider whose streams are longer than anybody waits for."""
    provider = FakeProvider(FakeModel(reply=ENOUGH))
    provider.script(None, lambda _request: Fault(token_delay=token_delay))
    with serve_in_thread(provider) as upstream:
        target = f'[targets.main]\nurl = "{upstream}/v1"\n'
        with served(toml, targets=target, send_timeout=send_timeout) as sidecar:
            sidecar.provider = provider
            yield sidecar


def idle(sidecar: Served) -> None:
    """Wait until nothing of any request is left."""
    sidecar.wait(lambda: not sidecar.sidecar.setup.running, "a request is still running")
    sidecar.wait(lambda: not sidecar.provider.active, "the provider is still asked")


def test_a_head_that_is_sent_slowly_is_not_waited_for() -> None:
    with served(targets=NOWHERE, head_timeout=0.3) as sidecar:
        for sent in (b"", b"\r\n", b"POST /v1/chat", LINE, LINE + b"x-a: b\r\n"):
            with Client(sidecar.url) as client:
                client.send(sent)
                assert client.answer().status == 408
                assert client.rest() == b""
        assert sum("Request Timeout" in line for line in sidecar.log.lines) == 5


def test_a_head_that_drips_is_not_waited_for() -> None:
    with served(targets=NOWHERE, head_timeout=0.3) as sidecar, Client(sidecar.url) as client:
        end = time.monotonic() + LONG
        client.send(LINE)
        while not sidecar.log.lines and time.monotonic() < end:
            client.send(b"x")
            time.sleep(0.02)
        assert "Request Timeout" in sidecar.log.lines[0]


def test_a_second_head_on_a_connection_has_its_limits_too() -> None:
    with served(head_timeout=0.3) as sidecar, Client(sidecar.url) as client:
        for _ in range(2):
            client.send(post())
            assert client.answer().status == 200
            time.sleep(0.5)  # longer than a head may take: nothing has begun
        client.send(LINE)
        assert client.answer().status == 408


@pytest.mark.parametrize("delay", [0.0, 1.0])
def test_what_comes_with_a_request_has_its_limits_too(delay: float) -> None:
    with served(head_timeout=0.3) as sidecar, Client(sidecar.url) as client:
        sidecar.provider.script(None, lambda _request: Fault(delay_headers=delay))
        client.send(post() + LINE)  # the beginning of another head, in one piece with a request
        assert [client.answer().status for _ in range(2)] == [200, 408]  # the one after the other


def test_whoever_waits_for_a_stream_has_time_for_the_next_head() -> None:
    with served(head_timeout=0.3) as sidecar, Client(sidecar.url) as client:
        sidecar.provider.script(None, [Fault(token_delay=0.2)])
        client.send(STREAM)
        client.send(post() + LINE)
        answers = [client.answer() for _ in range(3)]
        assert [answer.status for answer in answers] == [200, 200, 408]
        assert answers[0].body.endswith(b"data: [DONE]\n\n")


FAULTS = {
    "no HTTP": (b"\0\0\0\r\n\r\n", [400]),
    "no HTTP behind a request": (post() + b"\0\r\n\r\n", [200, 400]),
    "too long a head": (LINE + b"x-a: " + b"y" * 200_000, [431]),
    "a head that does not end": (LINE, [408]),
    "a body that is none, and a request": (CHUNKED + b"zz\r\n" + post(), [400]),
}


@pytest.mark.parametrize("together", [True, False], ids=["in one piece", "later"])
@pytest.mark.parametrize("sent", [post(), STREAM], ids=["whole", "streamed"])
@pytest.mark.parametrize(("more", "statuses"), FAULTS.values(), ids=FAULTS)
def test_what_has_a_fault_is_refused_behind_the_answer_to_what_has_none(
    more: bytes, statuses: list[int], sent: bytes, together: bool
) -> None:
    with served(head_timeout=0.3) as sidecar, Client(sidecar.url) as client:
        sidecar.provider.script(None, lambda _request: Fault(delay_headers=0.3, token_delay=0.1))
        if together:
            client.send(sent + more)
        else:
            client.send(sent)
            sidecar.wait(lambda: sidecar.provider.active, "the provider is asked")
            client.send(more)
        answer = client.answer()
        assert answer.status == 200
        assert sent == post() or answer.body.endswith(b"data: [DONE]\n\n")
        assert [client.answer().status for _ in statuses] == statuses
        assert client.rest() == b""
        idle(sidecar)


@pytest.mark.parametrize(
    "sent",
    [
        LINE + b"content-length: 27\r\n\r\n",
        CHUNKED + chunk(b"{"),
        CHUNKED + b"1",
        CHUNKED + chunk(BODY) + b"0\r\nx",
    ],
    ids=["no body", "some of a body", "half a size", "half a trailer"],
)
def test_a_body_that_stops_is_not_waited_for(sent: bytes) -> None:
    with served("[server]\nbody_timeout = 0.3\n") as sidecar:
        answer = sidecar.ask(sent)
        assert (answer.status, answer.json["error"]["code"]) == (408, "request_timeout")
        assert answer.headers["connection"] == "close"
        entry = sidecar.entries(1)[0]
        assert (entry["status"], entry["outcome"], entry["error"]) == (408, "refused", "request_timeout")
        sidecar.works()


@pytest.mark.parametrize(
    ("sent", "status", "code", "why"),
    [
        (b"zz\r\n", 400, "malformed_request", "Bad Request, Invalid character in chunk size"),
        (chunk(BODY) + b"0\r\nx\r\n", 400, "malformed_request", "Bad Request, Invalid header token"),
        (b"1;" + b"a" * 9_000_000, 431, "headers_too_large", "Request Header Fields Too Large, "),
        (chunk(BODY) + b"0\r\nx: " + b"y" * 9_000_000, 431, "headers_too_large", "Request Header Fields"),
    ],
    ids=["a size that is none", "a trailer that is none", "a long extension", "a long trailer"],
)
def test_what_becomes_no_body_is_logged_with_what_its_client_got(
    sent: bytes, status: int, code: str, why: str
) -> None:
    with served() as sidecar, Client(sidecar.url) as client:
        client.send(CHUNKED)
        sidecar.wait(lambda: sidecar.sidecar.setup.running, "it began")
        client.send(sent)
        assert client.answer().status == status
        entry = sidecar.entries(1)[0]
        assert (entry["status"], entry["outcome"], entry["error"]) == (status, "refused", code)
        assert sidecar.log.lines[0].find(why) > 0


def test_whoever_leaves_behind_what_is_no_http_ends_the_request() -> None:
    with endless(token_delay=30.0) as sidecar:
        with Client(sidecar.url) as client:
            client.send(post() + b"\0\r\n\r\n")
            sidecar.wait(lambda: sidecar.provider.active, "the provider is asked")
        entry = sidecar.entries(1)[0]
        assert entry["outcome"] == "cancelled"
        idle(sidecar)


@pytest.mark.parametrize(
    ("sent", "status", "why"),
    [
        (b"POST /secret HTTP/1.1\r\nhost: x\r\nsecret secret: x\r\n\r\n", 400, "Invalid header token"),
        (b"POST /secret HTTP/1.1\r\nx: secret\r\n\r\n", 400, "no host, or two, or one that is none"),
        (LINE + b"transfer-encoding: secret, chunked\r\n\r\n", 400, "a transfer coding that is not known"),
        (b"GET http://x:99999999/secret HTTP/1.1\r\nhost: x\r\n\r\n", 400, "a target that is none"),
        (b"GET /secret HTTP/2.1\r\nhost: x\r\n\r\n", 400, "Invalid HTTP version"),
        (b"SECRET / HTTP/1.1\r\nhost: x\r\n\r\n", 400, "Invalid method encountered"),
        (LINE + b"x: secret" + b"y" * 70_000, 431, "bytes of a head"),
        (LINE + b"x: secret", 408, "62 bytes of a head"),
    ],
)
def test_a_head_that_is_refused_is_logged_with_its_client_and_nothing_of_what_it_has(
    sent: bytes, status: int, why: str
) -> None:
    with served(targets=NOWHERE, head_timeout=0.3) as sidecar, Client(sidecar.url) as client:
        client.send(sent)
        answer = client.answer()
        assert answer.status == status
        assert why.encode() in answer.body
        lines = [json.loads(line) for line in sidecar.log.lines]
        assert [line["client"] for line in lines] == ["{}:{}".format(*client.socket.getsockname())]
        assert why in lines[0]["message"]
        assert "secret" not in str(lines).lower()
        assert not sidecar.log.entries


def test_a_body_that_drips_is_waited_for_no_longer_than_a_call() -> None:
    with served("[server]\nbody_timeout = 20.0\ndeadline = 0.5\n") as sidecar, Client(sidecar.url) as client:
        client.send(LINE + b"content-length: 10000\r\n\r\n")
        end = time.monotonic() + LONG
        while not sidecar.log.entries and time.monotonic() < end:
            client.send(b"{")
            time.sleep(0.02)
        assert client.answer().status == 408


@pytest.mark.parametrize("sent", [LINE + b"content-length: 27\r\n\r\n{", CHUNKED + b"5\r\n{", post(), STREAM])
@pytest.mark.parametrize("how", ["leave", "reset", "half"])
def test_whoever_leaves_ends_the_request(sent: bytes, how: str) -> None:
    with endless(token_delay=0.01) as sidecar:
        with Client(sidecar.url) as client:
            client.send(sent)
            sidecar.wait(lambda: sidecar.sidecar.setup.running, "it began")
            if how == "half":
                client.socket.shutdown(socket.SHUT_WR)
                client.rest()
            elif how == "reset":
                client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        entry = sidecar.entries(1)[0]
        assert entry["outcome"] == "cancelled"
        idle(sidecar)
        assert len(sidecar.log.lines) == 1


def test_whoever_leaves_ends_what_waits_behind_it_too() -> None:
    with endless(token_delay=0.01) as sidecar:
        with Client(sidecar.url) as client:
            client.send(STREAM + post() + post())
            assert client.socket.recv(65536).startswith(b"HTTP/1.1 200")
        assert sidecar.entries(1)[0]["outcome"] == "cancelled"
        idle(sidecar)
        assert sidecar.provider.total_requests == 1


@pytest.mark.parametrize("sent", [post(), STREAM], ids=["whole", "streamed"])
def test_whoever_takes_nothing_is_left(sent: bytes) -> None:
    with endless(send_timeout=0.5) as sidecar, Client(sidecar.url) as client:
        client.send(sent * 4)  # one or another may fit between the two
        sidecar.wait(lambda: any("took nothing" in line for line in sidecar.log.lines), "it is left")
        idle(sidecar)
        assert sidecar.entries(1)[-1]["outcome"] in ("cancelled", "ok")  # ok: but for the sending it was over
        with pytest.raises((http.client.HTTPException, ConnectionResetError)):
            deque((client.answer() for _ in range(4)), maxlen=0)  # one of them is not there in full


def test_whoever_takes_a_little_all_the_time_is_not_left() -> None:
    with endless(send_timeout=0.5) as sidecar, Client(sidecar.url) as client:
        client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.send(STREAM)
        end = time.monotonic() + 3.0  # for several times as long as somebody is waited for who takes nothing
        while time.monotonic() < end:
            assert client.socket.recv(2000)
            time.sleep(0.02)
        assert not any("took nothing" in line for line in sidecar.log.lines)


def test_more_connections_than_allowed_are_refused_and_the_others_served() -> None:
    with served(max_connections=3) as sidecar:
        kept = [Client(sidecar.url) for _ in range(3)]
        for client in kept:
            client.send(post())
            assert client.answer().status == 200
        with Client(sidecar.url) as client:
            answer = client.answer()
            assert (answer.status, answer.headers["connection"]) == (503, "close")
        assert any("3 connections are open" in line for line in sidecar.log.lines)
        for client in kept:
            client.send(post())
            assert client.answer().status == 200
            client.close()
        end = time.monotonic() + LONG
        while True:  # until it has noticed
            with Client(sidecar.url) as client:
                client.send(post())
                if client.answer().status == 200:
                    break
                assert time.monotonic() < end


def test_whoever_leaves_while_queued_keeps_no_place() -> None:
    toml = "[bulkhead]\nmax_concurrent = 1\nmax_queued = 50\n"
    with endless(toml, token_delay=0.01) as sidecar, Client(sidecar.url) as first:
        first.send(STREAM)
        assert first.socket.recv(65536).startswith(b"HTTP/1.1 200")
        waiting = [Client(sidecar.url) for _ in range(20)]
        for client in waiting:
            client.send(post())
        sidecar.wait(lambda: sidecar.sidecar.setup.running == 21, "all wait")
        for client in waiting:
            client.close()
        entries = sidecar.entries(20)
        assert {entry["outcome"] for entry in entries} == {"cancelled"}
        assert {entry["attempts"] for entry in entries} == {0}
        assert sidecar.provider.total_requests == 1
        first.close()
        idle(sidecar)
        sidecar.provider.script(None, [])
        sidecar.works()
