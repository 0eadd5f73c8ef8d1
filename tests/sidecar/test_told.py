"""What a provider says of a failure under a status that is none of an error: without the sidecar's keys."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib

import anyio
import pytest

from tests.sidecar.hostile_upstream import GOOD, KEY, TOLD, hostile, whole
from tests.sidecar.raw import Client, get, post
from tests.sidecar.support import logged, over_sockets
from tests.streams.scripted import ASK, says
from tests.support import A_HANG
from tests.transports.wire import Connection, wire

pytestmark = pytest.mark.realtime

SAFE = TOLD.replace(KEY.encode(), b"***")
EVENT = b"data: " + TOLD + b"\n\n"
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ntransfer-encoding: chunked\r\n%b\r\n"
SSE = b"text/event-stream"
PASSTHROUGH = "passthrough = true"
GEMINI = "/main/v1beta/models/gemini-2.5-pro:streamGenerateContent"
HI = b'{"candidates":[{"content":{"parts":[{"text":"hi"}]},"index":0}]}'


def chunked(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def stream(
    parts: list[bytes],
    *,
    path: str = "/v1/chat/completions",
    kind: bytes = SSE,
    headers: bytes = b"",
    more: str = "",
) -> bytes:
    """Have a provider answer with `parts`, each once the client has got something of the one before; give it all."""
    received = asyncio.Semaphore(0)

    async def provider(connection: Connection) -> None:
        await connection.request()
        await connection.send(HEAD % (kind, headers))
        for index, part in enumerate(parts):
            if index:
                await received.acquire()
            await connection.send(chunked(part))
        await connection.send(b"0\r\n\r\n")
        await connection.until_gone()

    body = json.dumps({**ASK, "temperature": 0}).encode()  # so that it could be kept
    got = b""
    with anyio.fail_after(A_HANG):
        async with wire(provider) as upstream:
            toml = f'[targets.main]\nurl = "{upstream.url}/v1"\napi_key_env = "HOSTILE_KEY"\n{more}\n'
            async with over_sockets(toml) as (url, _sidecar):
                host, port = url.removeprefix("http://").split(":")
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(
                    b"POST %b HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%b"
                    % (path.encode(), len(body), body)
                )
                got = await reader.readuntil(b"\r\n\r\n")
                while data := await reader.read(65536):
                    got += data
                    received.release()
                writer.close()
    return got


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOSTILE_KEY", KEY)


RETRY_OFF = "[retry]\nenabled = false"
ONCE = "[retry]\nmax_attempts = 1"
RECORDED = "[cache]"


@pytest.mark.anyio
@pytest.mark.parametrize("more", ["", RETRY_OFF, ONCE, RECORDED], ids=["retry", "none", "one", "kept"])
@pytest.mark.parametrize(
    "parts",
    [
        [EVENT],
        [says("hi") + EVENT],
        [says("hi"), EVENT],
        [says("hi"), says("ho"), says("hm") + EVENT + says("ha")],
        [says("hi") + EVENT[:50], EVENT[50:]],
    ],
    ids=["first", "second, at once", "second", "last of several", "in two parts"],
)
async def test_a_key_in_an_error_among_events_is_masked(parts: list[bytes], more: str) -> None:
    got = await stream(parts, more=more)
    assert KEY.encode() not in got
    assert got.startswith(b"HTTP/1.1 200") or parts == [EVENT]
    assert SAFE in got, "and the rest of the error is there"
    if parts != [EVENT]:
        assert b'"content": "hi"' in got


ASIDE = [
    b'data: {"detail": "bad key %b"}\n\n',
    b'data: {"message": "bad key %b"}\n\n',
    b'data: {"errors": [{"message": "bad key %b"}]}\n\n',
    b"data: bad key %b\n\n",
    b'data: {"choices": [], "note": "bad key %b"}\n\n',
]


@pytest.mark.anyio
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/main/v1/chat/completions"])
@pytest.mark.parametrize("together", [True, False], ids=["at once", "alone"])
@pytest.mark.parametrize("aside", ASIDE, ids=["detail", "message", "errors", "text", "chunk"])
async def test_a_key_in_an_event_that_is_no_answer_is_masked(aside: bytes, together: bool, path: str) -> None:
    told = aside % KEY.encode()
    parts = [says("hi"), says("ho"), told, says("hm")]
    if together:
        parts[1:] = [b"".join(parts[1:])]
    got = await stream(parts, path=path, more=PASSTHROUGH)
    assert KEY.encode() not in got
    assert aside % b"***" in got
    assert b'"content": "hm"' in got


@pytest.mark.anyio
async def test_a_key_in_what_a_stream_ends_with_is_masked() -> None:
    parts = [says("hi"), b"data: [DONE]\n\n", b'data: {"detail": "' + KEY.encode()]
    assert KEY.encode() not in await stream(parts)


@pytest.mark.anyio
async def test_a_compressed_stream_is_broken_off_before_a_key_in_any_event() -> None:
    parts = deflated([says("hi"), ASIDE[0] % KEY.encode(), says("ho")])
    got = await stream(parts, headers=b"content-encoding: gzip\r\n")
    assert inflated(got) == says("hi")


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("path", "kind", "parts"),
    [
        (GEMINI, b"application/json", [b"[" + HI, b"," + TOLD, b"]"]),
        (f"{GEMINI}?alt=sse", SSE, [b"data: " + HI + b"\n\n", EVENT]),
        (f"{GEMINI}?alt=sse", SSE, [b"data: " + HI + b"\n\n", TOLD]),
        ("/main/v1/unheard-of", SSE, [b"data: 1\n\n", EVENT, b"data: 2\n\n"]),
        ("/main/v1/unheard-of", SSE, [b"data: 1\n\n" + EVENT + EVENT]),
    ],
    ids=["array", "events", "no event", "unknown", "unknown, twice"],
)
async def test_a_key_in_an_error_in_another_protocol_is_masked(
    path: str, kind: bytes, parts: list[bytes]
) -> None:
    got = await stream(parts, path=path, kind=kind, more=PASSTHROUGH)
    assert KEY.encode() not in got
    assert SAFE in got


def deflated(parts: list[bytes]) -> list[bytes]:
    compressor = zlib.compressobj(wbits=31)
    return [compressor.compress(part) + compressor.flush(zlib.Z_SYNC_FLUSH) for part in parts]


def inflated(got: bytes) -> bytes:
    body, whole = got.partition(b"\r\n\r\n")[2], b""
    while body:
        size, _, body = body.partition(b"\r\n")
        whole, body = whole + body[: int(size, 16)], body[int(size, 16) + 2 :]
    return zlib.decompressobj(wbits=31).decompress(whole)


@pytest.mark.anyio
@pytest.mark.parametrize("more", ["", RECORDED], ids=["passed on", "kept"])
async def test_a_compressed_stream_is_broken_off_before_a_key(more: str) -> None:
    parts = deflated([says("hi"), EVENT])
    with logged() as log:
        got = await stream(parts, headers=b"content-encoding: gzip\r\n", more=more)
    assert not got.endswith(b"0\r\n\r\n")
    assert inflated(got) == says("hi")
    assert any("a key in its error" in line for line in log.lines)


@pytest.mark.anyio
async def test_a_compressed_stream_has_its_error_where_there_is_no_key_in_it() -> None:
    error = b'data: {"error": {"message": "overloaded", "type": "server_error"}}\n\n'
    got = await stream(deflated([says("hi"), error]), headers=b"content-encoding: gzip\r\n")
    assert inflated(got) == says("hi") + error


@pytest.mark.parametrize("encoding", ["", "gzip"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/main/v1/chat/completions"])
def test_a_key_in_an_error_under_a_200_is_masked(path: str, encoding: str) -> None:
    headers = [b"content-encoding: gzip"] if encoding else []
    with hostile(PASSTHROUGH) as (sidecar, upstream):  # without retries it stays a 200
        upstream.reply = whole(gzip.compress(TOLD) if encoding else TOLD, b"200 OK", *headers)
        answer = sidecar.ask(post().replace(b"/v1/chat/completions", path.encode()))
        assert (answer.status, answer.body) == (200, SAFE)
        assert sidecar.entries(1)[0]["outcome"] == "error"
        upstream.reply = whole(GOOD.replace(b"hi", KEY.encode()))
        answer = sidecar.ask(post())
        assert KEY.encode() in answer.body, "an answer is not searched"


@pytest.mark.parametrize("status", [b"200 OK", b"302 Found", b"304 Not", b"307 Again", b"400 Bad"])
def test_a_key_in_headers_and_redirects_is_masked(status: bytes) -> None:
    with hostile(PASSTHROUGH) as (sidecar, upstream):
        body = b"" if status.startswith(b"304") else b"see " + KEY.encode()
        if status.startswith(b"200"):
            body = GOOD
        told = (b"location: https://evil.example/?key=" + KEY.encode(), b"x-told: <" + KEY.encode() + b">")
        upstream.reply = whole(body, status, *told)
        with Client(sidecar.url) as client:
            client.send(get(b"/main/v1/files"))
            answer = client.answer("GET")
        assert answer.status == int(status[:3])
        assert answer.headers["location"] == "https://evil.example/?key=***"
        assert answer.headers["x-told"] == "<***>"
        assert answer.body == body.replace(KEY.encode(), b"***")
        assert KEY not in str(sidecar.log.lines)
