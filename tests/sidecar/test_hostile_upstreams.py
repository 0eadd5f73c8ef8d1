"""Providers that are broken or hostile: their reply goes on as it is, or is a 502, and no defect."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator

import pytest

from tests.sidecar.hostile_upstream import (
    CHUNKED,
    EVENTS,
    GOOD,
    KEY,
    ONE,
    STREAM,
    TOLD,
    Upstream,
    head,
    hostile,
    whole,
)
from tests.sidecar.raw import Client, Served, post

pytestmark = pytest.mark.realtime


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Served, Upstream]]:
    with hostile() as both:
        yield both


BROKEN: dict[str, bytes] = {
    "nothing": b"",
    "no HTTP": b"SSH-2.0-OpenSSH_9.6\r\n",
    "HTTP/0.9": GOOD,
    "half a head": head(),
    "a status that is none": whole(status=b"abc OK"),
    "a status of four digits": whole(status=b"2000 OK"),
    "a status of 999": whole(status=b"999 OK"),
    "a switch of protocols": head(b"101 Switching Protocols", b"upgrade: websocket", b"connection: upgrade")
    + b"\r\n",
    "a header without a colon": head(b"200 OK", b"nonsense") + b"content-length: 2\r\n\r\n{}",
    "a header name with a blank": head(b"200 OK", b"x a: b") + b"content-length: 2\r\n\r\n{}",
    "a header of 200 kB": whole(GOOD, b"200 OK", b"x-a: " + b"y" * 200_000),
    "20,000 headers": whole(GOOD, b"200 OK", *(b"x-%d: y" % n for n in range(20_000))),
    "two lengths": head(b"200 OK", b"content-length: 5") + b"content-length: 100\r\n\r\n" + GOOD,
    "a length that is none": head(b"200 OK", b"content-length: abc") + b"\r\n" + GOOD,
    "a negative length": head(b"200 OK", b"content-length: -5") + b"\r\n" + GOOD,
    "a body that is too short": head(b"200 OK", b"content-length: 10000") + b"\r\n" + GOOD,
    "a chunk of no size": CHUNKED + b"zz\r\n" + GOOD,
    "a chunk of a negative size": CHUNKED + b"-5\r\n" + GOOD,
    "a chunk of too large a size": CHUNKED + b"f" * 40 + b"\r\n" + GOOD,
    "a chunk without its end": CHUNKED + b"2\r\n{}xx0\r\n\r\n",
    "chunks without their end": CHUNKED + b"%x\r\n" % len(GOOD) + GOOD + b"\r\n",
    "no JSON": whole(b"<html>hello"),
    "half of the JSON": whole(GOOD[:-10]),
    "an empty body": whole(b""),
    "compressed, and not so": whole(GOOD, b"200 OK", b"content-encoding: gzip"),
}
"""Replies to a request that is not streamed. A client gets what came of them, or a 502; never a defect."""


def defects(sidecar: Served) -> list[str]:
    """Give what was logged as an error, but for replies that were cut short, of which the server's log says nothing."""
    return [line for line in sidecar.log.lines if '"level": "error"' in line and "CutShortError" not in line]


@pytest.mark.parametrize("reply", BROKEN.values(), ids=BROKEN)
def test_a_broken_reply_is_no_defect(reply: bytes, pair: tuple[Served, Upstream]) -> None:
    sidecar, upstream = pair
    sidecar.log.lines.clear()
    upstream.reply, upstream.again = reply, b""
    with Client(sidecar.url) as client:
        client.send(post())
        answer = client.answer()
    entry = sidecar.entries(1)[0]
    assert (entry["status"], entry["outcome"]) == (answer.status, "error")
    if answer.status != 200:
        assert (answer.status, answer.json["error"]["code"]) == (502, "bad_gateway")
    assert defects(sidecar) == []
    assert KEY not in str(sidecar.log.lines)
    upstream.reply = whole()
    sidecar.works()


ENDLESS = {
    "interim responses": (b"", b"HTTP/1.1 102 Processing\r\n\r\n" * 100),
    "headers": (head(), b"x-a: b\r\n" * 100),
    "one header": (head() + b"x-a: ", b"y" * 1000),
    "white space": (CHUNKED, b"3e8\r\n" + b" " * 1000 + b"\r\n"),
    "an extension of a chunk": (CHUNKED + b"5;", b"a" * 1000),
    "trailers": (CHUNKED + b"0\r\n", b"x-a: b\r\n" * 100),
    "an error": (
        head(b"500 Oh", b"transfer-encoding: chunked") + b"\r\n",
        b"3e8\r\n" + b"x" * 1000 + b"\r\n",
    ),
}


@pytest.mark.parametrize("sent", [post(), STREAM], ids=["whole", "streamed"])
@pytest.mark.parametrize(("begin", "again"), ENDLESS.values(), ids=ENDLESS)
def test_what_does_not_end_is_ended(
    sent: bytes, begin: bytes, again: bytes, pair: tuple[Served, Upstream]
) -> None:
    sidecar, upstream = pair
    sidecar.log.lines.clear()
    upstream.reply, upstream.again = begin, again
    with Client(sidecar.url) as client:
        client.send(sent)
        received = client.rest_until_idle()
    assert received.startswith(b"HTTP/1.1 ")
    sidecar.entries(1)
    sidecar.wait(lambda: not sidecar.sidecar.setup.running, "it is over")
    assert defects(sidecar) == []
    upstream.reply, upstream.again = whole(), b""
    sidecar.works()


STREAMS = {
    "no event": b"hello",
    "half an event": b"data: {\n",
    "an event that is no JSON": b"data: {\n\n" + ONE,
    "an event that is no UTF-8": b"data: \xff\xfe\n\n",
    "an event of NULs": b"data: \0\0\n\n",
    "an event of a list": b"data: []\n\n",
    "an event of other types": b'data: {"choices":{"a":1},"usage":"x","error":5}\n\n',
    "deep JSON": b"data: " + b"[" * 100_000 + b"\n\n",
    "a line of 8 MB": b"data: " + b"x" * 8_000_000 + b"\n\n",
    "comments alone": b": ping\n\n" * 10_000,
    "an error with the key": b"event: error\ndata: " + TOLD + b"\n\n",
    "an event, and nothing more": ONE,
}


@pytest.mark.parametrize("events", STREAMS.values(), ids=STREAMS)
def test_a_broken_stream_is_no_defect(events: bytes, pair: tuple[Served, Upstream]) -> None:
    sidecar, upstream = pair
    sidecar.log.lines.clear()
    upstream.reply, upstream.again = EVENTS + b"%x\r\n" % len(events) + events + b"\r\n0\r\n\r\n", b""
    with Client(sidecar.url) as client:
        client.send(STREAM)
        received = client.rest_until_idle()
    assert received.startswith((b"HTTP/1.1 200", b"HTTP/1.1 401", b"HTTP/1.1 5"))
    assert KEY.encode() not in received
    assert sidecar.entries(1)[0]["outcome"] == "error"
    assert defects(sidecar) == []
    assert KEY not in str(sidecar.log.lines)
    upstream.reply = whole()
    sidecar.works()


@pytest.mark.parametrize("status", [b"301 Moved", b"302 Found", b"303 See", b"307 Again", b"308 For ever"])
def test_a_redirect_is_not_followed(status: bytes, pair: tuple[Served, Upstream]) -> None:
    sidecar, upstream = pair
    elsewhere = Upstream()
    threading.Thread(target=elsewhere.serve, daemon=True).start()
    upstream.reply, upstream.again = (
        whole(b"{}", status, b"location: " + elsewhere.url.encode() + b"/v1"),
        b"",
    )
    answer = sidecar.ask(post())
    assert (answer.status, answer.json["error"]["code"]) == (502, "redirected")
    assert "location" not in answer.headers
    assert elsewhere.asked == []
    elsewhere.close()


def test_what_is_of_its_connection_stays_there(pair: tuple[Served, Upstream]) -> None:
    sidecar, upstream = pair
    its_own = (
        b"connection: x-a, keep-alive",
        b"keep-alive: timeout=5",
        b"x-a: 1",
        b"upgrade: h2c",
        b"trailer: x-b",
    )
    more = (b"proxy-authenticate: Basic", b"set-cookie: a=b; domain=evil.example", b"x-c: \xff")
    upstream.reply, upstream.again = whole(GOOD, b"200 OK", *its_own, *more), b""
    for _ in range(2):
        answer = sidecar.ask(post())
        assert answer.json["id"] == "1"
        names = ("keep-alive", "x-a", "upgrade", "trailer", "proxy-authenticate")
        assert not [name for name in names if name in answer.headers]
    assert b"cookie" not in upstream.asked[-1].lower()


@pytest.mark.parametrize("encoding", ["", "gzip", "snappy"])
@pytest.mark.parametrize(
    "status", [b"400 Bad", b"403 No", b"404 None", b"429 Slowly", b"500 Oh", b"599 What"]
)
def test_the_key_in_an_error_is_not_passed_on(status: bytes, encoding: str) -> None:
    body = gzip.compress(TOLD) if encoding == "gzip" else TOLD
    headers = (b"x-told: " + KEY.encode(), *([b"content-encoding: " + encoding.encode()] if encoding else []))
    with hostile() as (sidecar, upstream):
        upstream.reply = whole(body, status, *headers)
        answer = sidecar.ask(post(b'{"model":"m","messages":[]}', b"accept-encoding: gzip"))
        assert answer.status == int(status[:3])
        assert answer.body == (b"" if encoding == "snappy" else TOLD.replace(KEY.encode(), b"***"))
        assert "content-encoding" not in answer.headers
        assert answer.headers["x-told"] == "***"
        assert KEY not in str(sidecar.log.lines)


def test_a_refusal_of_the_key_is_not_the_client_s() -> None:
    with hostile() as (sidecar, upstream):
        upstream.reply = whole(TOLD, b"401 No", b"www-authenticate: Bearer")
        answer = sidecar.ask(post())
        assert (answer.status, answer.json["error"]["code"]) == (502, "provider_credentials")
        assert "www-authenticate" not in answer.headers
