"""Requests that are changed on their way."""

from __future__ import annotations

import json

from resilient_llm import Request
from resilient_llm.message import without
from resilient_llm.providers.stream_options import with_usage

HEADERS = [
    (b"Content-Type", b"application/json"),
    (b"Content-Length", b"2"),
    (b"Content-Digest", b"sha-256=:RBNvo1WzZ4oRRq0W9+hknpT7T8If536DEMBg9hyq/4o=:"),
    (b"content-md5", b"mZFLkyvTelC5g8XnyQrpOw=="),
    (b"X-Id", b"7"),
    (b"x-id", b"8"),
]


def test_headers_are_left_out_however_they_are_spelled() -> None:
    assert without(HEADERS, b"x-id", b"content-md5") == HEADERS[:3]
    assert without(HEADERS) == HEADERS


def test_with_another_body_nothing_is_said_of_the_old_one() -> None:
    request = Request("POST", "http://h/v1", HEADERS, b"{}")
    changed = request.with_body(b'{"a": 1}', dropped=(b"x-id",))
    assert changed.headers == [HEADERS[0], (b"content-length", b"8")]
    assert changed.body == b'{"a": 1}'
    assert changed.json == {"a": 1}
    assert request.headers == HEADERS


def test_neither_is_it_where_usage_is_asked_for() -> None:
    body = json.dumps({"model": "m", "messages": [], "stream": True}).encode()
    asked = with_usage(Request("POST", "https://api.openai.com/v1/chat/completions", HEADERS, body))
    assert asked.json["stream_options"] == {"include_usage": True}
    assert [name for name, _ in asked.headers] == [b"Content-Type", b"X-Id", b"x-id", b"content-length"]
