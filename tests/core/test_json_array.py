"""A JSON array that comes bit by bit: its objects, whatever the reads are, and in a bounded memory."""

import json
import math
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient_llm.core.json_array import JSONArrayParser
from resilient_llm.core.sse import Event, EventTooLargeError

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(max_size=8)
    | st.sampled_from(['"', "\\", "}]", '\\"{[']),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.text(max_size=4), VALUES, max_size=4)
SPACES = st.sampled_from([None, 1])
CUTS = st.lists(st.integers(1, 9), min_size=1, max_size=5)


def parts(stream: bytes, cuts: list[int]) -> list[bytes]:
    found, at, turn = [], 0, 0
    while at < len(stream):
        size = cuts[turn % len(cuts)]
        found.append(stream[at : at + size])
        at, turn = at + size, turn + 1
    return found


@settings(max_examples=200)
@given(objects=st.lists(OBJECTS, max_size=4), indent=SPACES, ascii_only=st.booleans(), cuts=CUTS)
def test_its_objects_come_as_soon_as_they_are_whole(
    objects: list[object], indent: int | None, ascii_only: bool, cuts: list[int]
) -> None:
    stream = json.dumps(objects, indent=indent, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    parser = JSONArrayParser()
    events: list[Event] = []
    for part in parts(stream, cuts):
        events += parser.feed(part)
        assert parser.boundary == (events[-1].end if events else 0)
    assert parser.offset == len(stream)
    assert [json.loads(stream[event.start : event.end].lstrip(b"[ \n,")) for event in events] == objects
    assert [json.loads(event.data) for event in events if event.valid] == [
        found for found, event in zip(objects, events, strict=True) if event.valid
    ]
    assert [event.end for event in events[:-1]] == [event.start for event in events[1:]]
    assert parser.close() == []


@given(data=st.binary(max_size=60) | st.text('[]{}",\\ a', max_size=60).map(str.encode), cuts=CUTS)
def test_any_bytes_give_the_same_however_they_are_cut(data: bytes, cuts: list[int]) -> None:
    def read(reads: list[bytes]) -> tuple[list[Event], bool]:
        parser, events = JSONArrayParser(max_event_size=40), []
        try:
            for part in reads:
                events += parser.feed(part)
            return events + parser.close(), False
        except EventTooLargeError as error:
            with pytest.raises(EventTooLargeError):
                parser.feed(b"")
            with pytest.raises(EventTooLargeError):
                parser.close()
            return events + list(error.events), True

    assert read([data]) == read(parts(data, cuts)) == read(parts(data, [1]))


@pytest.mark.parametrize("stream", [b"[", b'[{"a": 1}', b'[{"a": 1},', b'[{"a": ', b'{"a": "', b"[[{"])
def test_an_end_that_is_none_gives_an_event_that_breaks_off(stream: bytes) -> None:
    parser = JSONArrayParser()
    parser.feed(stream)
    (event,) = parser.close()
    assert not event.complete
    assert parser.close() == []


def test_an_object_alone_is_given_and_nothing_else_is() -> None:
    parser = JSONArrayParser()
    (event,) = parser.feed(b' {"error": {"code": 503}}\n')
    assert json.loads(event.data) == {"error": {"code": 503}}
    assert parser.close() == []
    assert JSONArrayParser().feed(b'[1, "{}", [2], null]') == []


def test_what_is_no_utf_8_is_replaced_and_marked() -> None:
    (event,) = JSONArrayParser().feed(b'[{"a": "\xff"}]')
    assert (json.loads(event.data), event.valid) == ({"a": "�"}, False)


def test_an_object_is_bounded_also_before_it_is_whole() -> None:
    parser = JSONArrayParser(max_event_size=20)
    assert len(parser.feed(b'[{"a": 1}, {"b": 2}')) == 2
    with pytest.raises(EventTooLargeError) as raised:
        parser.feed(b', {"c": 3}, {"d": "' + b"x" * 30)
    assert [json.loads(event.data) for event in raised.value.events] == [{"c": 3}]
    with pytest.raises(ValueError, match="max_event_size"):
        JSONArrayParser(max_event_size=0)


def test_it_takes_linear_time() -> None:
    def seconds(count: int) -> float:
        stream = b"[" + b",".join([b'{"a": "\\"b"}'] * count) + b', {"x": "' + b"y" * count * 10
        best = math.inf
        for _ in range(3):
            parser, began = JSONArrayParser(), time.process_time()
            for at in range(0, len(stream), 7):
                parser.feed(stream[at : at + 7])
            best = min(best, time.process_time() - began)
        return best

    assert seconds(20_000) < 50 * seconds(2_000)  # ten times as long, and not a hundred
