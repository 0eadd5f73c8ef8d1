"""What a server may say on a connection, in whatever pieces, and what of it is no reply."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_llm.message import Headers
from resilient_llm.transports.http1_parser import ReplyParser

OK = b"HTTP/1.1 200 OK\r\n"
LENGTH = OK + b"Content-Length: 5\r\n\r\nhello"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
CHUNKS = CHUNKED + b"2\r\nhe\r\n3;ext=1\r\nllo\r\n0\r\n\r\n"


class Seen(NamedTuple):
    """All that a parser says."""

    status: int
    headers: Headers
    body: bytes
    complete: bool
    keep_alive: bool
    unasked: bool
    failed: bool
    ends_with_connection: bool


def seen(*parts: bytes, bodiless: bool = False) -> Seen:
    parser = ReplyParser()
    parser.begin(bodiless=bodiless)
    body: list[bytes] = []
    for part in parts:
        parser.feed(part)
        body += parser.chunks
        parser.chunks.clear()
        if parser.error is not None or parser.complete:
            break
    return Seen(
        parser.status,
        parser.headers,
        b"".join(body),
        parser.complete,
        parser.keep_alive,
        parser.unasked,
        parser.error is not None,
        parser.ends_with_connection(),
    )


def whole(status: int, headers: Headers, body: bytes, *, keep_alive: bool = True) -> Seen:
    return Seen(status, headers, body, True, keep_alive, False, False, False)


ENCODED = [(b"Transfer-Encoding", b"chunked")]
WHOLE = {
    "length": (LENGTH, whole(200, [(b"Content-Length", b"5")], b"hello")),
    "no body": (OK + b"Content-Length: 0\r\n\r\n", whole(200, [(b"Content-Length", b"0")], b"")),
    "chunks": (CHUNKS, whole(200, ENCODED, b"hello")),
    "trailers": (
        CHUNKED + b"5\r\nhello\r\n0\r\nX-T: 1\r\nX-U:\r\n\r\n",
        whole(200, ENCODED, b"hello"),
    ),
    "headers": (
        OK
        + b"X-Empty:\r\nX-One: 1\r\nx-one:\t2\r\nX-Latin: \xe9\xff\r\nX-E2: \r\ncontent-length: 1\r\n\r\nx",
        whole(
            200,
            [
                (b"X-Empty", b""),
                (b"X-One", b"1"),
                (b"x-one", b"2"),
                (b"X-Latin", b"\xe9\xff"),
                (b"X-E2", b""),
                (b"content-length", b"1"),
            ],
            b"x",
        ),
    ),
    "interim": (
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Hints\r\nLink: </a>\r\n\r\n" + LENGTH,
        whole(200, [(b"Content-Length", b"5")], b"hello"),
    ),
    "204": (b"HTTP/1.1 204 No\r\nContent-Length: 5\r\n\r\n", whole(204, [(b"Content-Length", b"5")], b"")),
    "304": (b"HTTP/1.1 304 No\r\nTransfer-Encoding: chunked\r\n\r\n", whole(304, ENCODED, b"")),
    "no reason": (
        b"HTTP/1.1 200\r\nContent-Length: 1\r\n\r\nx",
        whole(200, [(b"Content-Length", b"1")], b"x"),
    ),
    "close": (
        OK + b"Connection: close\r\nContent-Length: 1\r\n\r\nx",
        whole(200, [(b"Connection", b"close"), (b"Content-Length", b"1")], b"x", keep_alive=False),
    ),
    "1.0": (
        b"HTTP/1.0 200 OK\r\nContent-Length: 1\r\n\r\nx",
        whole(200, [(b"Content-Length", b"1")], b"x", keep_alive=False),
    ),
    "1.0 that stays": (
        b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 1\r\n\r\nx",
        whole(200, [(b"Connection", b"keep-alive"), (b"Content-Length", b"1")], b"x"),
    ),
    "1.0 in chunks": (
        b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n\r\n",
        whole(200, [(b"Connection", b"keep-alive"), *ENCODED], b"x", keep_alive=False),
    ),
}


@pytest.mark.parametrize("name", WHOLE)
def test_a_reply_is_the_same_wherever_it_is_cut_in_two(name: str) -> None:
    raw, expected = WHOLE[name]
    assert seen(raw) == expected
    assert seen(*[raw[i : i + 1] for i in range(len(raw))]) == expected
    for at in range(1, len(raw)):
        assert seen(raw[:at], raw[at:]) == expected
        assert not seen(raw[:at]).complete  # nor is any beginning of it whole


@pytest.mark.parametrize("name", WHOLE)
def test_the_next_reply_on_a_connection_is_read_like_the_first(name: str) -> None:
    raw, expected = WHOLE[name]
    parser = ReplyParser()
    for _ in range(3 if expected.keep_alive else 1):
        parser.begin()
        parser.feed(raw)
        assert (parser.status, parser.headers, b"".join(parser.chunks), parser.complete) == expected[:4]
        assert (parser.keep_alive, parser.unasked, parser.error) == (expected.keep_alive, False, None)
        parser.chunks.clear()


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=6), st.data())
def test_chunks_in_any_pieces_are_the_body(chunks: list[bytes], data: st.DataObject) -> None:
    raw = CHUNKED + b"".join([b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks]) + b"0\r\n\r\n"
    cuts = sorted(data.draw(st.sets(st.integers(1, len(raw) - 1))))
    parts = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    assert seen(*parts) == whole(200, ENCODED, b"".join(chunks))


@given(st.binary(max_size=200), st.integers(0, 200))
def test_whatever_comes_it_is_a_reply_or_a_failure_or_not_all_there(data: bytes, at: int) -> None:
    for start in (b"", b"HTTP/1.1 ", OK, LENGTH[:-5], CHUNKED):
        raw = start + data
        assert seen(raw[:at], raw[at:]) == seen(raw) or seen(raw).unasked


def test_a_head_is_all_that_comes_in_answer_to_head() -> None:
    for raw in (LENGTH[:-5], CHUNKED, OK + b"\r\n"):
        got = seen(raw, bodiless=True)
        assert (got.status, got.body, got.complete, got.keep_alive) == (200, b"", True, False)
        assert seen(raw + b"5\r\nhello\r\n", bodiless=True).body == b""


def test_a_body_may_end_with_its_connection_only_where_nothing_else_says_where() -> None:
    assert seen(OK + b"\r\nhello").ends_with_connection
    assert seen(b"HTTP/1.0 200 OK\r\n\r\n").ends_with_connection
    for raw in (b"", OK, LENGTH[:-1], CHUNKS[:-1], LENGTH, OK + b"\r\n"[:1]):
        assert not seen(raw).ends_with_connection


@pytest.mark.parametrize(
    "extra", [LENGTH, b"H", b"HTTP/1.1 200 O", b"?", CHUNKS, b"HTTP/1.1 100 Continue\r\n\r\n"]
)
@pytest.mark.parametrize("name", ["length", "chunks", "204", "close"])
def test_what_comes_with_a_reply_is_not_its_own(name: str, extra: bytes) -> None:
    raw, expected = WHOLE[name]
    assert seen(raw + extra) == expected._replace(unasked=True)


BROKEN = {
    "ssh": b"SSH-2.0-OpenSSH_9.6\r\n",
    "http/3": b"HTTP/3.0 200 OK\r\n\r\n",
    "no status": b"HTTP/1.1 OK\r\n\r\n",
    "status 99": b"HTTP/1.1 099 OK\r\n\r\n",
    "status 1000": b"HTTP/1.1 1000 OK\r\n\r\n",
    "switching": b"HTTP/1.1 101 Switching\r\n\r\n",
    "upgrade": b"HTTP/1.1 101 Switching\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n",
    "interim with a length": b"HTTP/1.1 103 Hints\r\nContent-Length: 5\r\n\r\nhello",
    "interim in chunks": b"HTTP/1.1 199 X\r\nTransfer-Encoding: chunked\r\n\r\n",
    "bare lf": b"HTTP/1.1 200 OK\nContent-Length: 0\n\n",
    "folded": OK + b"X-A: 1\r\n 2\r\n\r\n",
    "space before the colon": OK + b"Content-Length : 5\r\n\r\n",
    "no colon": OK + b"Content-Length\r\n\r\n",
    "two lengths": OK + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n",
    "the same length twice": OK + b"Content-Length: 5\r\nContent-Length: 5\r\n\r\n",
    "a list of lengths": OK + b"Content-Length: 5, 5\r\n\r\n",
    "negative": OK + b"Content-Length: -5\r\n\r\n",
    "signed": OK + b"Content-Length: +5\r\n\r\n",
    "hexadecimal": OK + b"Content-Length: 0x5\r\n\r\n",
    "empty length": OK + b"Content-Length: \r\n\r\n",
    "huge": OK + b"Content-Length: 99999999999999999999\r\n\r\n",
    "length and chunks": OK + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
    "chunks and length": OK + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n",
    "another coding": OK + b"Transfer-Encoding: gzip\r\n\r\n",
    "two codings": OK + b"Transfer-Encoding: gzip, chunked\r\n\r\n",
    "chunked, then not": OK + b"Transfer-Encoding: chunked, identity\r\n\r\n",
}
BROKEN_CHUNKS = {
    "no size": b"zzz\r\n",
    "no size at all": b"\r\n",
    "signed": b"+5\r\nhello\r\n",
    "spaced": b" 5\r\nhello\r\n",
    "prefixed": b"0x5\r\nhello\r\n",
    "huge": b"fffffffffffffffff\r\n",
    "longer": b"5\r\nhello world\r\n",
    "bare lf": b"5\nhello\n0\n\n",
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_no_head(name: str) -> None:
    raw = BROKEN[name]
    assert seen(raw).failed
    assert seen(*[raw[i : i + 1] for i in range(len(raw))]).failed
    assert not seen(raw).status
    assert not seen(raw).ends_with_connection


@pytest.mark.parametrize("name", BROKEN_CHUNKS)
def test_what_is_no_chunk(name: str) -> None:
    got = seen(CHUNKED + b"3\r\none\r\n" + BROKEN_CHUNKS[name])
    assert (got.status, got.failed, got.complete, got.ends_with_connection) == (200, True, False, False)
    assert got.body.startswith(b"one")  # what came before it is not lost


@pytest.mark.parametrize("byte", [byte for byte in range(256) if byte < 32 or byte == 127])
def test_no_control_byte_comes_in_a_header(byte: int) -> None:
    for line in (b"X-A: 1%c2\r\n" % byte, b"X%cA: 1\r\n" % byte):
        if byte == 9 and line.startswith(b"X-A"):
            assert seen(OK + line + b"Content-Length: 0\r\n\r\n").complete
        else:
            assert seen(OK + line + b"Content-Length: 0\r\n\r\n").failed


X = b"x" * 80_000


@pytest.mark.parametrize(
    "raw",
    [
        OK + b"X-A: " + X,
        OK + b"X-A: " + X + b"\r\nContent-Length: 0\r\n\r\n",
        OK + b"X-A: 1\r\n" * 10_000 + b"Content-Length: 0\r\n\r\n",
        b"HTTP/1.1 103 Hints\r\nX-A: 1\r\n\r\n" * 3_000 + LENGTH,
        CHUNKED + b"5\r\nhello\r\n5;" + X,
        CHUNKED + b"5\r\nhello\r\n0\r\nX-T: " + X,
        CHUNKED + b"5\r\nhello\r\n0\r\n" + b"X-T: 1\r\n" * 10_000 + b"\r\n",
    ],
    ids=["endless", "long", "many", "interim", "extension", "trailer", "trailers"],
)
def test_what_is_no_body_has_a_bound(raw: bytes) -> None:
    assert seen(*[raw[i : i + 5_000] for i in range(0, len(raw), 5_000)]).failed


@pytest.mark.parametrize(
    ("raw", "what"), [(OK + b"X-A: " + X, "a head"), (CHUNKED + b"5;" + X, "what surrounds a body")]
)
def test_what_has_no_end_is_called_what_it_is(raw: bytes, what: str) -> None:
    parser = ReplyParser()
    for start in range(0, len(raw), 5_000):
        parser.feed(raw[start : start + 5_000])
    assert str(parser.error) == f"{what} has more than 65536 bytes"


def test_a_head_over_the_bound_is_refused_in_one_piece_too() -> None:
    assert seen(OK + b"X-A: " + X + b"\r\nContent-Length: 0\r\n\r\n").failed
    body = bytes(200_000)
    got = seen(OK + b"X-A: " + X[:60_000] + b"\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    assert (got.complete, got.body) == (True, body)
