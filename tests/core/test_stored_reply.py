"""Replies as bytes: what is written is read again, and nothing else is taken for it."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from resilient_llm.core.stored_reply import StoredReply

REPLIES = st.builds(
    StoredReply,
    status=st.integers(100, 599),
    headers=st.lists(st.tuples(st.binary(max_size=20), st.binary(max_size=40)), max_size=5).map(tuple),
    body=st.binary(max_size=300),
    ttl=st.floats(0, 1e9),
    fingerprint=st.binary(max_size=32),
)


@given(REPLIES)
def test_round_trip(reply: StoredReply) -> None:
    assert StoredReply.decode(reply.encode()) == reply


@given(REPLIES, st.data())
def test_no_part_of_one_is_one(reply: StoredReply, data: st.DataObject) -> None:
    written = reply.encode()
    assert StoredReply.decode(written[: data.draw(st.integers(0, len(written) - 1))]) is None
    assert StoredReply.decode(written + b"x") is None


@given(st.binary(max_size=200))
@example(b"")
@example(b"RLR1" + b"\xff" * 60)
@example(b"RLR0" + StoredReply(status=200, headers=(), body=b"x").encode()[4:])
def test_anything_else_is_none(data: bytes) -> None:
    assert StoredReply.decode(data) is None


def test_more_headers_than_can_be_written_are_an_error() -> None:
    with pytest.raises(ValueError, match="too many headers"):
        StoredReply(status=200, headers=((b"a", b"b"),) * 0x10000, body=b"").encode()
    with pytest.raises(ValueError, match="too long a name"):
        StoredReply(status=200, headers=((b"a" * 0x10000, b"b"),), body=b"").encode()
