"""Keys of requests: never one for two that differ in anything that matters, and one where nothing does."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from resilient_llm.core.request_key import canonical_body, owner_digest, question_digest, request_key

URL = "https://api.example/v1/chat/completions"
HEADERS = [(b"Content-Type", b"application/json"), (b"Authorization", b"Bearer one")]
BODY: dict[str, Any] = {
    "model": "m",
    "messages": [{"role": "user", "content": "hi"}],
    "temperature": 0,
    "stream": False,
}


def key(**changed: Any) -> str:
    asked = {"method": "POST", "url": URL, "headers": HEADERS, "body": BODY, "tenant": "acme"} | changed
    body = asked.pop("body")
    return request_key(
        asked.pop("method"),
        asked.pop("url"),
        asked.pop("headers"),
        body if isinstance(body, bytes) else json.dumps(body).encode(),
        **asked,
    )


DEEP = 200_000
"""What no parser of any Python goes through."""

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.sampled_from("abcdef") | st.text(max_size=4), JSON, max_size=5)


def same(one: Any, other: Any) -> bool:
    """Tell whether two values are written alike: `1`, `1.0` and `true` are not, though Python thinks so."""
    return json.dumps(one) == json.dumps(other)


@given(OBJECTS, OBJECTS)
def test_bodies_that_differ_have_keys_that_differ(one: dict[str, Any], other: dict[str, Any]) -> None:
    alike = one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    assert (key(body=one) == key(body=other)) is alike


@given(OBJECTS, st.text(max_size=6), JSON)
def test_any_member_counts(body: dict[str, Any], name: str, value: Any) -> None:
    assume(name not in ("user", "metadata") and name not in body)
    assert key(body=body) != key(body={**body, name: value})


@given(st.lists(st.tuples(st.text(max_size=4), JSON), min_size=1, max_size=5, unique_by=lambda item: item[0]))
def test_blanks_and_the_order_of_members_do_not_matter(members: list[tuple[str, Any]]) -> None:
    body = dict(members)
    turned = dict(reversed(members))
    assert key(body=json.dumps(body, indent=3).encode()) == key(body=json.dumps(turned).encode())
    assert key(body=json.dumps(body, ensure_ascii=False).encode("utf-8", "surrogatepass")) == key(body=body)


PART = st.text(max_size=5)
HEADER_LISTS = st.lists(
    st.tuples(st.sampled_from([b"a", b"b", b"accept", b"x-v"]), st.binary(max_size=3).map(bytes.strip)),
    max_size=4,
)
CALLS = st.tuples(PART, PART, HEADER_LISTS, st.binary(max_size=6), st.none() | PART)


@given(CALLS, CALLS)
def test_calls_that_differ_have_keys_that_differ(one: Any, other: Any) -> None:
    def key_of(call: Any) -> str:
        method, path, headers, body, tenant = call
        return request_key(method, f"https://h/{path}", headers, body, tenant=tenant)

    def by_name(call: Any) -> Any:
        return (
            *call[:2],
            sorted(call[2], key=lambda header: header[0]),
            canonical_body(call[3], ()),
            call[4],
        )

    assert (key_of(one) == key_of(other)) is (by_name(one) == by_name(other))


@pytest.mark.parametrize(
    "changed",
    [
        {"tenant": None},
        {"tenant": ""},
        {"tenant": "other"},
        {"method": "PUT"},
        {"url": URL + "?api-version=2"},
        {"url": URL.replace("v1", "v2")},
        {"headers": [*HEADERS, (b"anthropic-beta", b"x")]},
        {"headers": [*HEADERS, (b"accept-encoding", b"br")]},
        {"headers": [*HEADERS, (b"openai-organization", b"org")]},
        {"headers": [HEADERS[0], (b"authorization", b"Bearer two")]},
        {"headers": HEADERS[:1]},
        {"body": {**BODY, "stream": True}},
        {"body": {**BODY, "stream_options": {"include_usage": True}}},
        {"body": {**BODY, "service_tier": "flex"}},
        {"body": {**BODY, "temperature": 0.0}},
        {"body": b"x" + json.dumps(BODY).encode()},
    ],
)
def test_what_matters(changed: dict[str, Any]) -> None:
    assert key(**changed) != key()


@pytest.mark.parametrize(
    "changed",
    [
        {"headers": [(b"content-type", b" application/json "), HEADERS[1]]},
        {"headers": HEADERS[::-1]},
        {"headers": [*HEADERS, (b"Traceparent", b"00-1"), (b"X-Request-Id", b"1"), (b"User-Agent", b"u")]},
        {"headers": [*HEADERS, (b"x-stainless-retry-count", b"1"), (b"idempotency-key", b"k")]},
        {"headers": [*HEADERS, (b"x-mine", b"1")], "ignored_headers": {b"x-mine"}},
        {"body": {**BODY, "user": "u1", "metadata": {"a": "b"}, "safety_identifier": "s"}},
        {"body": {**BODY, "prompt_cache_key": "k", "prompt_cache_retention": "24h"}},
        {"body": dict(reversed(BODY.items()))},
    ],
)
def test_what_does_not_matter(changed: dict[str, Any]) -> None:
    assert key(**changed) == key()


def test_shared_keys_do_not_tell_owners_apart() -> None:
    mine = key(share=True)
    assert mine == key(share=True, tenant=None, headers=HEADERS[:1])
    assert mine == key(share=True, url=URL + "?key=secret", tenant="x")
    assert mine != key(share=True, url=URL + "?alt=sse")
    assert key(share=True, url=URL + "?alt=sse") == key(share=True, url=URL + "?alt=sse&key=secret")
    assert mine != key()


def test_members_that_an_answer_repeats_count_where_it_does() -> None:
    url = "https://api.example/v1/responses"
    assert key(url=url) != key(url=url, body={**BODY, "user": "u1"})


def test_the_order_of_a_schema_counts() -> None:
    """A model writes the members of an object in the order in which its schema has them."""
    schema: dict[str, Any] = {"properties": {"a": {}, "b": {}}}
    turned: dict[str, Any] = {"properties": {"b": {}, "a": {}}}
    assert key(body={"schema": schema}) != key(body={"schema": turned})


@pytest.mark.parametrize(
    "body",
    [
        b'{"a": 1, "a": 2}',
        b'{"a": {"b": 1, "b": 2}}',
        b'{"a": NaN}',
        b'{"a": 1e999}',
        b'{"a": -1e999}',
        b"[1]",
        b'"text"',
        b"",
        b"\xff",
        b"--boundary",
        b'{"a": ' + b"9" * 5000 + b"}",
        b'{"a":' * DEEP + b"1" + b"}" * DEEP,
    ],
    ids=lambda body: repr(body[:20]),
)
def test_what_is_not_read_alike_by_everybody_stays_as_it_is(body: bytes) -> None:
    assert canonical_body(body, ()) == b"=" + body


def test_a_signature_is_whose_it_is() -> None:
    def signed(who: bytes, date: bytes) -> list[tuple[bytes, bytes]]:
        value = (
            b"AWS4-HMAC-SHA256 Credential="
            + who
            + b"/"
            + date
            + b"/us/bedrock/aws4_request, Signature="
            + date
        )
        return [(b"authorization", value), (b"x-amz-date", date)]

    assert key(headers=signed(b"AKID", b"1")) == key(headers=signed(b"AKID", b"2"))
    assert key(headers=signed(b"AKID", b"1")) != key(headers=signed(b"OTHER", b"1"))


def test_owners() -> None:
    mine = owner_digest("acme", URL, HEADERS, b"k")
    assert mine == owner_digest("acme", URL, [*HEADERS, (b"x", b"y")], b"k")
    others = [
        owner_digest("acme", URL, HEADERS, b"l"),
        owner_digest("acme", URL + "?key=secret", HEADERS, b"k"),
        owner_digest(None, URL, HEADERS, b"k"),
        owner_digest("", URL, HEADERS, b"k"),
        owner_digest("acme", URL, HEADERS[:1], b"k"),
    ]
    assert len({mine, *others}) == 6


def test_questions() -> None:
    mine = question_digest("POST", URL, b'{"a": 1}')
    assert len(mine) == 32
    assert mine == question_digest("POST", URL, b'{"a":1}')
    assert mine != question_digest("POST", URL, b'{"a":1,"user":"u"}')
    assert mine != question_digest("PUT", URL, b'{"a":1}')
    assert mine != question_digest("POST", URL + "/", b'{"a":1}')
