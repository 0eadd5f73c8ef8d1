"""Upgrades are ignored: whoever asks for one is answered as without, and their body is a body (RFC 9110, 7.8)."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.sidecar.hostile_inputs import REFUSED, TAKEN
from tests.sidecar.process import PORTS, started
from tests.sidecar.raw import BODY, LINE, Client, Served, chunk, get, post, served

pytestmark = pytest.mark.realtime

H2C = (b"connection: Upgrade, HTTP2-Settings", b"upgrade: h2c", b"http2-settings: AAMAAABkAAQAAP__")
WEBSOCKET = (b"Connection: keep-alive, upgrade", b"UPGRADE: websocket", b"sec-websocket-version: 13")
TWICE = (b"upgrade: h2c", b"connection: upgrade", b"upgrade: websocket", b"connection: upgrade")
KINDS = {"h2c": H2C, "websocket": WEBSOCKET, "twice": TWICE}
LAST = chunk(b"")


@pytest.fixture(scope="module")
def sidecar() -> Iterator[Served]:
    with served("[server]\nmax_body = 1_000_000\n") as running:
        yield running


def sized(line: bytes, body: bytes, *headers: bytes) -> tuple[bytes, bytes]:
    """Give the head and the body of a request, by its length."""
    more = b"".join(header + b"\r\n" for header in headers)
    return line + more + b"content-length: %d\r\n\r\n" % len(body), body


def chunked(line: bytes, body: bytes, *headers: bytes) -> tuple[bytes, bytes]:
    """Give the head and the body of a request, in chunks."""
    more = b"".join(header + b"\r\n" for header in headers)
    return line + more + b"transfer-encoding: chunked\r\n\r\n", chunk(body[:3]) + chunk(body[3:]) + LAST


FRAMED = {"sized": sized, "chunked": chunked}
SEGMENTS = {
    "at once": lambda head, body: [head + body],
    "the body later": lambda head, body: [head, body],
    "in the midst of the end of the head": lambda head, body: [head[:-1], head[-1:] + body],
    "byte by byte": lambda head, body: [(head + body)[n : n + 1] for n in range(len(head + body))],
}


def send(client: Client, parts: list[bytes]) -> None:
    """Send each by itself."""
    client.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for part in parts:
        client.send(part)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("framed", FRAMED)
@pytest.mark.parametrize("segments", SEGMENTS)
def test_a_request_is_answered_as_without_and_so_is_the_next(
    kind: str, framed: str, segments: str, sidecar: Served
) -> None:
    asked = sidecar.provider.total_requests
    parts = SEGMENTS[segments](*FRAMED[framed](LINE, BODY, *KINDS[kind]))
    with Client(sidecar.url) as client:
        send(client, [*parts[:-1], parts[-1] + post() + get(b"/healthz", *KINDS[kind]) + post()])
        answers = [client.answer() for _ in range(4)]
        assert [answer.status for answer in answers] == [200] * 4
        assert [answer.body == b"ok\n" for answer in answers] == [False, False, True, False]
    assert sidecar.provider.total_requests == asked + 3
    for request in sidecar.provider.requests[-3:]:
        assert json.loads(request.raw_body) == json.loads(BODY)
        assert {"connection", "upgrade", "http2-settings"}.isdisjoint(request.headers)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("framed", FRAMED)
@pytest.mark.parametrize("segments", SEGMENTS)
@pytest.mark.parametrize("path", [b"/v1/chat/completions", b"/healthz", b"/nothing"])
def test_a_body_is_never_a_request(
    path: bytes, kind: str, framed: str, segments: str, sidecar: Served
) -> None:
    asked = sidecar.provider.total_requests
    line = b"POST " + path + b" HTTP/1.1\r\nhost: localhost\r\n"
    parts = SEGMENTS[segments](*FRAMED[framed](line, post() + post(), *KINDS[kind]))
    with Client(sidecar.url) as client:
        send(client, parts)
        assert 400 <= client.answer().status < 500
        with suppress(OSError):  # it may have closed already
            client.socket.shutdown(socket.SHUT_WR)
        assert client.rest() == b""
    assert sidecar.provider.total_requests == asked


@pytest.mark.parametrize("framed", FRAMED)
def test_a_body_that_comes_after_the_answer_is_never_a_request(framed: str, sidecar: Served) -> None:
    asked = sidecar.provider.total_requests
    head, body = FRAMED[framed](b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n", post(), *H2C)
    with Client(sidecar.url) as client:
        client.send(head)
        assert client.answer("GET").body == b"ok\n"
        client.send(body + get(b"/nothing"))
        assert client.answer("GET").status == 404
    assert sidecar.provider.total_requests == asked


def test_many_of_them_at_once_are_answered_one_by_one(sidecar: Served) -> None:
    with Client(sidecar.url) as client:
        client.send(get(b"/healthz", *H2C) * 500 + get(b"/nothing"))
        assert [client.answer("GET").status for _ in range(501)] == [200] * 500 + [404]


def test_a_connection_that_ends_with_its_request_ends(sidecar: Served) -> None:
    with Client(sidecar.url) as client:
        client.send(b"".join(sized(LINE, BODY, b"connection: close, upgrade", b"upgrade: h2c")) + post())
        answer = client.answer()
        assert (answer.status, answer.headers["connection"]) == (200, "close")
        assert client.rest() == b""


UPGRADED = {
    name: sent.replace(
        b"host: localhost\r\n", b"host: localhost\r\nconnection: upgrade\r\nupgrade: h2c\r\n", 1
    )
    for name, sent in {**REFUSED, **TAKEN}.items()
    if b"host: localhost\r\n" in sent
}


@pytest.mark.parametrize("name", UPGRADED)
def test_what_is_odd_is_answered_as_without(name: str, sidecar: Served) -> None:
    said = []
    for sent in ({**REFUSED, **TAKEN}[name], UPGRADED[name]):
        with Client(sidecar.url) as client:
            client.send(sent)
            said.append(client.answer().status)
            with suppress(OSError):
                client.socket.shutdown(socket.SHUT_WR)
            assert b"HTTP/1." not in client.rest()
    assert said[0] == said[1]


@pytest.mark.parametrize(
    "sent",
    [
        b"CONNECT evil.example:443 HTTP/1.1\r\nhost: localhost\r\n\r\n",
        b"CONNECT x:443 HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n",
        b"CONNECT x:443 HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
)
def test_a_tunnel_and_the_preface_of_http_2_are_refused(sent: bytes, sidecar: Served) -> None:
    asked = sidecar.provider.total_requests
    with Client(sidecar.url) as client:
        client.send(sent + post())
        assert (client.answer().status, client.rest()) == (400, b"")
    assert sidecar.provider.total_requests == asked


def test_a_head_has_its_limit(sidecar: Served) -> None:
    assert sidecar.ask(post(BODY, *H2C, b"x: " + b"y" * 66_000)).status == 431
    assert sidecar.ask(post(BODY, b"connection: upgrade", b"upgrade: " + b"y" * 66_000)).status == 431


def test_nobody_is_told_to_install_anything(sidecar: Served) -> None:
    sidecar.log.lines.clear()
    assert sidecar.ask(post(BODY, *WEBSOCKET)).status == 200
    sidecar.entries(1)
    assert [json.loads(line)["message"] for line in sidecar.log.lines] == ["request"]


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
@pytest.mark.parametrize("chunks", [(), ("-H", "transfer-encoding: chunked")], ids=["sized", "chunked"])
def test_curl_asks_for_http_2_and_takes_what_there_is(chunks: tuple[str, ...], sidecar: Served) -> None:
    url = f"{sidecar.url}/v1/chat/completions"
    command = ["curl", "-sSv", "--http2", "--noproxy", "*", "--max-time", "60", *chunks, "-d", BODY.decode()]
    done = subprocess.run([*command, url, "--next", *command[1:], url], capture_output=True, check=True)
    if b"HTTP2-Settings" not in done.stderr:
        pytest.skip("this curl has no HTTP/2")
    assert done.stdout.count(b'"choices"') == 2, done
    assert done.stderr.count(b"< HTTP/1.1 200") == 2


@pytest.mark.parametrize("segments", SEGMENTS)
@pytest.mark.parametrize("framed", FRAMED)
def test_operators_are_answered_as_without_too(framed: str, segments: str, admin: str) -> None:
    line = b"POST /admin/targets/one/weight HTTP/1.1\r\nhost: localhost\r\n"
    parts = SEGMENTS[segments](*FRAMED[framed](line, b'{"weight": 2.0}', *H2C))
    with Client(admin) as client:
        send(client, [*parts[:-1], parts[-1] + b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n"])
        assert client.answer().json == {"weight": ["one"]}
        assert client.answer("GET").body == b"ok\n"


@pytest.fixture(scope="module")
def admin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    file: Path = tmp_path_factory.mktemp("admin") / "gateway.toml"
    file.write_text(f'{PORTS}[targets.one]\nurl = "http://127.0.0.1:9/v1"\n')
    with started(file) as (_process, _url, admin):
        assert admin is not None
        yield admin
