"""Which headers pass: none of one connection, whoever names them, and none that nobody may write."""

from __future__ import annotations

import pytest

from resilient_llm.message import Headers
from resilient_llm.sidecar.headers import first_of, for_client, for_provider
from resilient_llm.sidecar.masked import Secrets

LENGTH = (b"content-length", b"5")
KEY = "sk-of-the-sidecar-0123456789"
NONE = Secrets()


@pytest.mark.parametrize(
    ("given", "passed"),
    [
        ([], []),
        (
            [(b"Date", b"now"), (b"Keep-Alive", b"timeout=5"), (b"X-A", b"1")],
            [(b"date", b"now"), (b"x-a", b"1")],
        ),
        ([(b"Connection", b"close, X-A"), (b"x-a", b"1"), (b"X-B", b"2")], [(b"x-b", b"2")]),
        ([(b"connection", b"x-a"), (b"x-a", b"1"), (b"connection", b"x-b"), (b"x-b", b"2")], []),
        ([(b"x-a", b"1\r\nset-cookie: 2"), (b"x-b", b"\t2")], [(b"x-b", b"\t2")]),
        (
            [
                (b"Access-Control-Allow-Origin", b"*"),
                (b"access-control-anything", b"1"),
                (b"vary", b"origin"),
            ],
            [(b"vary", b"origin")],
        ),
        (
            [
                (b"Set-Cookie", b"a=b"),
                (b"Alt-Svc", b'h3=":443"'),
                (b"strict-transport-security", b"max-age=1"),
                (b"clear-site-data", b"*"),
                (b"www-authenticate", b"Basic"),
                (b"x-accel-redirect", b"/secret"),
                (b"content-security-policy", b"default-src 'none'"),
                (b"server", b"theirs"),
            ],
            [(b"content-security-policy", b"default-src 'none'"), (b"server", b"theirs")],
        ),
        ([(b"x a", b"1"), (b"", b"2"), (b"x:", b"3"), (b"x%b", b"4")], [(b"x%b", b"4")]),
    ],
)
def test_what_goes_to_the_client(given: Headers, passed: Headers) -> None:
    assert for_client(given, sized=True, secrets=NONE) == passed
    assert for_client(given, sized=True, secrets=NONE) == passed, "also once the names are known"


def test_names_that_are_known_have_values_of_their_own() -> None:
    assert for_client([(b"X-A", b"1"), LENGTH], sized=True, secrets=NONE) == [(b"x-a", b"1"), LENGTH]
    assert for_client([(b"X-A", b"2"), LENGTH], sized=False, secrets=NONE) == [(b"x-a", b"2")]
    assert for_client([(b"X-A", b"3"), LENGTH], sized=True, secrets=NONE) == [(b"x-a", b"3"), LENGTH]


@pytest.mark.parametrize(
    ("given", "passed"),
    [
        (
            [(b"accept", b"*/*"), (b"authorization", b"Bearer mine"), (b"host", b"here")],
            [(b"accept", b"*/*")],
        ),
        ([(b"connection", b"x-a"), (b"x-a", b"1"), (b"x-b", b"2")], [(b"x-b", b"2")]),
        ([(b"connection", b"host, via, content-length"), (b"x-b", b"2")], [(b"x-b", b"2")]),
        ([(b"connection", b""), (b"x-b", b"2")], [(b"x-b", b"2")]),
        (
            [(b"x-http-method-override", b"DELETE"), (b"x-original-url", b"/"), (b"x-b", b"2")],
            [(b"x-b", b"2")],
        ),
    ],
)
def test_what_goes_to_the_provider(given: Headers, passed: Headers) -> None:
    host, via = (b"host", b"there"), (b"via", b"1.1 resilient-llm")
    assert for_provider(given, first_of(given), b"there", 5) == [host, *passed, LENGTH, via]
    assert for_provider(given, first_of(given), b"there", None) == [host, *passed, via]


def test_the_id_of_a_request_is_this_sides_to_give() -> None:
    assert for_client(
        [(b"X-Resilient-LLM-Request-ID", b"theirs"), (b"x-request-id", b"1")], sized=True, secrets=NONE
    ) == [(b"x-request-id", b"1")]


@pytest.mark.parametrize("name", [b"location", b"x-request-id", b"content-type"])
def test_a_key_in_any_header_is_masked(name: bytes) -> None:
    secrets = Secrets(["another-key-of-ours", KEY])
    told = [(name, b"https://evil.example/?key=" + KEY.encode() + b"&a=1"), (b"x-b", b"2")]
    for _ in range(2):
        passed = for_client(told, sized=True, secrets=secrets)
        assert passed == [(name, b"https://evil.example/?key=***&a=1"), (b"x-b", b"2")]
    assert for_client([(b"x-a", KEY[:-1].encode())], sized=True, secrets=secrets)[0][1] == KEY[:-1].encode()


def test_a_header_is_left_out_whose_name_has_a_key_but_for_one_that_is_made_up() -> None:
    told = [(b"x-" + KEY.encode(), b"1"), (b"X-LM-Studio-Version", b"2")]
    assert for_client(told, sized=True, secrets=Secrets([KEY, "lm-studio"])) == [
        (b"x-lm-studio-version", b"2")
    ]
