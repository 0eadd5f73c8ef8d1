"""JSON in bytes is what the standard library says it is, however it is written."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_llm.core.json_parse import parse_json

ENCODINGS = ("utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be")
TEXT = st.text(st.characters(codec="utf-8"), max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
SPACE = st.text(" \t\n\r", max_size=3)


def both(document: bytes) -> tuple[object, object]:
    """Give what the standard library makes of a document, and what is made of it here: a value, or an error."""
    found: list[object] = []
    for parse in (json.loads, parse_json):
        try:
            found.append(repr(parse(document)))
        except (ValueError, RecursionError) as error:
            found.append(type(error))
    return found[0], found[1]


@given(
    value=VALUES,
    encoding=st.sampled_from(ENCODINGS),
    indent=st.sampled_from([None, 0, 2]),
    before=SPACE,
    after=SPACE,
)
def test_a_document_in_any_encoding(
    value: object, encoding: str, indent: int | None, before: str, after: str
) -> None:
    text = before + json.dumps(value, ensure_ascii=False, indent=indent) + after
    assert parse_json(text.encode(encoding)) == value


@given(start=st.sampled_from([b"", b'{"', b"{ ", b"{\n", b'{"a":1}', b'{"a":']), rest=st.binary(max_size=20))
def test_any_bytes(start: bytes, rest: bytes) -> None:
    theirs, ours = both(start + rest)
    assert ours == theirs


@pytest.mark.parametrize(
    "document",
    [
        b'{"a":1} x',
        b'{"a":1}{"b":2}',
        b'{"a":1}\x0b',  # a space, but not one of JSON's
        b'{"a":NaN,"b":-Infinity}',
        b'{"a":1,"a":2}',
        b'{"a":"\xed\xa0\x80"}',  # half of a character
        b'{"a":"\xff"}',
        b'{"a":"\x00"}',
        b'{"a":' + b"[" * 200_000,
        b'{"a":' + b"9" * 5000 + b"}",
        b"{",
        b"",
    ],
)
def test_an_unusual_document(document: bytes) -> None:
    theirs, ours = both(document)
    assert ours == theirs
