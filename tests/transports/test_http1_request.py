"""Where a URL leads, and what bytes a request is."""

from __future__ import annotations

import pytest

from resilient_llm.message import Headers, Request
from resilient_llm.transports.failures import InvalidURLError, LocalProtocolError, UnsupportedProtocolError
from resilient_llm.transports.http1_request import Origin, place_of, written
from resilient_llm.transports.request_head import Form, check_head, upload

LENGTH = b"content-length"


@pytest.mark.parametrize(
    ("url", "origin", "authority", "target"),
    [
        ("http://a", (False, "a", 80), b"a", b"/"),
        ("https://A.example/", (True, "a.example", 443), b"a.example", b"/"),
        ("HTTPS://a:443/x", (True, "a", 443), b"a", b"/x"),
        ("http://a:443/x", (False, "a", 443), b"a:443", b"/x"),
        ("http://a:/x", (False, "a", 80), b"a", b"/x"),
        ("http://a?b=c", (False, "a", 80), b"a", b"/?b=c"),
        ("http://a/b?c#d?e", (False, "a", 80), b"a", b"/b?c"),
        ("http://a#b", (False, "a", 80), b"a", b"/"),
        ("http://a./", (False, "a", 80), b"a", b"/"),
        ("http://[::1]:8080/", (False, "::1", 8080), b"[::1]:8080", b"/"),
        ("https://[2001:DB8::1]/", (True, "2001:db8::1", 443), b"[2001:db8::1]", b"/"),
        ("http://a//b/../%2F;[x]?q=%e9+", (False, "a", 80), b"a", b"//b/../%2F;[x]?q=%e9+"),
        ("http://user@a:1/@b:2", (False, "a", 1), b"a:1", b"/@b:2"),
    ],
)
def test_urls(url: str, origin: tuple[bool, str, int], authority: bytes, target: bytes) -> None:
    place = place_of(url)
    assert (place.origin, place.authority, place.target) == (Origin(*origin), authority, target)


@pytest.mark.parametrize(
    ("url", "error"),
    [
        ("ftp://a/", UnsupportedProtocolError),
        ("//a/", UnsupportedProtocolError),
        ("a/b", UnsupportedProtocolError),
        ("", InvalidURLError),
        ("http:a", InvalidURLError),
        ("http//a", InvalidURLError),
        ("http:///a", InvalidURLError),
        ("http://:80/", InvalidURLError),
        ("http://./", InvalidURLError),
        ("http://a:0/", InvalidURLError),
        ("http://a:65536/", InvalidURLError),
        ("http://a:x/", InvalidURLError),
        ("http://a b/", InvalidURLError),
        ("http://a/b c", InvalidURLError),
        ("http://a/\r\n", InvalidURLError),
        ("http://\u00e4/", InvalidURLError),
        ("http://[::1/", InvalidURLError),
        ("http://[a.example]/", InvalidURLError),
        ("http://a<b/", InvalidURLError),
        ('http://a"b/', InvalidURLError),
    ],
)
def test_urls_that_lead_nowhere(url: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        place_of(url)


def test_a_url_of_any_length_is_read_and_a_long_one_is_not_kept() -> None:
    long, short = ["http://a/?" + "q" * length for length in (100_000, 100)]
    assert place_of(long).target == b"/?" + b"q" * 100_000
    assert place_of(long) is not place_of(long)
    assert place_of(short) is place_of(short)


def test_a_query_is_shown_to_nobody() -> None:
    for url in ("ftp://a/?key=secret", "http:///?key=secret", "http://a/\u00e9?key=secret"):
        with pytest.raises((InvalidURLError, UnsupportedProtocolError)) as raised:
            place_of(url)
        assert "secret" not in str(raised.value)


def head(method: str, headers: Headers, body: bytes, url: str = "http://a/b") -> bytes:
    return written(Request(method, url, headers, body), place_of(url))[0]


@pytest.mark.parametrize(
    ("method", "headers", "body", "expected"),
    [
        ("GET", [], b"", [b"GET /b HTTP/1.1", b"Host: a"]),
        ("OPTIONS", [], b"", [b"OPTIONS /b HTTP/1.1", b"Host: a"]),
        ("post", [], b"", [b"POST /b HTTP/1.1", b"Host: a", b"Content-Length: 0"]),
        ("PUT", [], b"xy", [b"PUT /b HTTP/1.1", b"Host: a", b"Content-Length: 2"]),
        ("GET", [], b"xy", [b"GET /b HTTP/1.1", b"Host: a", b"Content-Length: 2"]),
        (
            "POST",
            [(b"hOST", b"c"), (LENGTH, b"2")],
            b"xy",
            [b"POST /b HTTP/1.1", b"hOST: c", LENGTH + b": 2"],
        ),
        (
            "POST",
            [
                (b"x-a", b"1"),
                (b"Transfer-Encoding", b"chunked"),
                (b"X-A", b"2"),
                (b"expect", b"100-continue"),
            ],
            b"xy",
            [b"POST /b HTTP/1.1", b"Host: a", b"x-a: 1", b"X-A: 2", b"Content-Length: 2"],
        ),
    ],
)
def test_heads(method: str, headers: Headers, body: bytes, expected: list[bytes]) -> None:
    assert head(method, headers, body) == b"\r\n".join([*expected, b"", b""])


def test_an_upload_says_its_length_or_comes_in_chunks() -> None:
    async def nothing() -> None: ...

    for headers, framing in (([(LENGTH, b"7")], LENGTH + b": 7"), ([], b"Transfer-Encoding: chunked")):
        request = upload("POST", "http://a/b", headers, nothing)  # type: ignore[arg-type]  # not read
        lines = [b"POST /b HTTP/1.1", b"Host: a", framing, b"", b""]
        length = 7 if headers else None
        assert written(request, place_of(request.url)) == (b"\r\n".join(lines), length)


def test_credentials_in_a_url_are_sent_unless_others_are() -> None:
    url = "http://Aladdin:open%20sesame@a/b"
    assert b"\r\nAuthorization: Basic QWxhZGRpbjpvcGVuIHNlc2FtZQ==\r\n" in head("GET", [], b"", url)
    given = head("GET", [(b"authorization", b"Bearer x")], b"", url)
    assert given.lower().count(b"authorization") == 1
    assert b"Bearer x" in given


@pytest.mark.parametrize("length", [b"1", b"3", b"-2", b"", b"2 ", b"2, 2"])
def test_a_length_that_is_not_the_bodys_is_not_sent(length: bytes) -> None:
    with pytest.raises(LocalProtocolError, match="content-length"):
        head("POST", [(LENGTH, length)], b"xy")


def test_what_is_said_of_a_url_that_is_none_has_no_password() -> None:
    with pytest.raises(InvalidURLError) as refused:
        place_of("http://user:secret@host.example:99999/v1")
    assert "secret" not in str(refused.value)
    assert "host.example" in str(refused.value)


def test_a_length_of_thousands_of_digits_is_refused_as_any_other_that_is_none() -> None:
    request = Request("POST", "http://host.example/", [(b"content-length", b"1" * 5000)], b"x")
    with pytest.raises(LocalProtocolError):
        written(request, place_of(request.url))


def form_of(names: list[bytes]) -> Form:
    return check_head(Request("POST", "http://host.example/", [(name, b"x") for name in names]))[0]


def test_names_of_any_length_and_number_are_sent_and_kept_only_where_they_are_few_and_short() -> None:
    few = [b"x-%d" % number for number in range(30)]
    many, long = few * 10, [b"x" * 100_000]
    assert form_of(few) is form_of(few)
    for names in (many, long):
        assert form_of(names) is not form_of(names)
        assert form_of(names).lines == b"".join(b"%b: %%b\r\n" % name for name in names)


def test_a_name_with_a_percent_sign_is_sent_as_it_is() -> None:
    assert b"\r\n%s%b%%: %s\r\n" in head("GET", [(b"%s%b%%", b"%s")], b"")


@pytest.mark.parametrize(
    ("headers", "why"),
    [
        ([(b"a", b"1"), (b"b c", b"2")], "header b'b c' cannot"),
        ([(b"", b"1")], "header b'' cannot"),
        ([(b"a", b"1\n2")], "header b'a' cannot"),
        ([(b"Host", b"a"), (b"hOST", b"a")], "header b'hOST' is there twice"),
        ([(b"expect", b"a"), (b"b", b"\r"), (b"Expect", b"a")], "header b'b' cannot"),
    ],
)
def test_what_cannot_be_sent_is_named(headers: Headers, why: str) -> None:
    for _ in range(2):  # the second time by what is known of the names
        with pytest.raises(LocalProtocolError, match=why):
            head("GET", headers, b"")
