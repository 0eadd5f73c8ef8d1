"""What becomes of headers on their way to a target, by their names."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from resilient_llm.message import Headers
from resilient_llm.routing.header_rules import HeaderRules

NAMES = (
    b"Host",
    b"host",
    b"Content-Length",
    b"Digest",
    b"X-Api-Key",
    b"authorization",
    b"X-Own",
    b"accept",
    b"my-auth-token",
)


def rules(*, strip: bool = False, resized: bool = False, host: bytes | None = b"target") -> HeaderRules:
    return HeaderRules(host, [b"x-own"], strip=strip, resized=resized)


def test_headers_keep_their_order_and_their_spelling() -> None:
    headers = [(b"Accept", b"1"), (b"HOST", b"caller"), (b"accept", b"2"), (b"X-OWN", b"3")]
    assert rules().apply(headers, None) == [(b"Accept", b"1"), (b"HOST", b"target"), (b"accept", b"2")]


def test_a_target_without_a_host_of_its_own_leaves_the_callers() -> None:
    assert rules(host=None).apply([(b"host", b"caller")], None) == [(b"host", b"caller")]


def test_credentials_stay_behind_only_where_they_are_to() -> None:
    headers = [(b"Authorization", b"secret"), (b"My-Auth-Token", b"secret"), (b"accept", b"*/*")]
    assert rules().apply(headers, None) == headers
    assert rules(strip=True).apply(headers, None) == [(b"accept", b"*/*")]


def test_another_body_has_its_own_length_and_no_digest() -> None:
    headers = [(b"Content-Length", b"3"), (b"Content-MD5", b"x"), (b"digest", b"x")]
    assert rules(resized=True).apply(headers, 12) == [(b"Content-Length", b"12")]
    assert rules().apply(headers, None) == headers


@given(
    headers=st.lists(st.tuples(st.sampled_from(NAMES), st.binary(max_size=3))),
    strip=st.booleans(),
    resized=st.booleans(),
)
def test_what_was_decided_once_is_decided_alike_again(headers: Headers, strip: bool, resized: bool) -> None:
    size = 7 if resized else None
    known = rules(strip=strip, resized=resized)
    first = known.apply(headers, size)
    assert known.apply(headers, size) == first
    one_by_one = [
        header for each in headers for header in rules(strip=strip, resized=resized).apply([each], size)
    ]
    assert first == one_by_one


def test_names_that_callers_invent_take_no_memory_for_good() -> None:
    known = rules(strip=True)
    invented = [(f"x-{number}".encode(), b"") for number in range(3_000)]
    assert known.apply(invented, None) == invented
    assert known.apply([(b"x-2999", b""), (b"x-9-api-key", b"")], None) == [(b"x-2999", b"")]
    assert known.known == 256


def test_a_long_name_takes_none_at_all() -> None:
    known = rules(strip=True)
    assert known.apply([(b"x" * 65, b""), (b"x" * 60 + b"-api-key", b"")], None) == [(b"x" * 65, b"")]
    assert known.known == 0
