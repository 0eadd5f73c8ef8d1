import gc
import itertools
import json
import re
import sys
import tracemalloc
from collections.abc import Iterable, Iterator
from typing import Self, SupportsIndex, TypeAlias

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from resilient_llm.core import sse
from resilient_llm.core.sse import Event, EventTooLargeError, SSEParser, encode

Meaning: TypeAlias = tuple[str, str, str | None, int | None, bool]

# --- An independent account of the grammar: on the whole text at once, as the standard words it ---


def standard(raw: bytes) -> tuple[list[Meaning], int]:
    """Parse a whole stream; give what its events say and how many comments there are."""
    *lines, rest = re.split("\r\n|\r|\n", raw.decode("utf-8", "replace").removeprefix("\ufeff"))
    groups: list[list[str]] = [[]]
    for line in lines:
        if line:
            groups[-1].append(line)
        else:
            groups.append([])
    groups[-1].append(rest)
    found: list[Meaning] = []
    last_id = None
    for group in groups:
        matches = [re.fullmatch("(data|event|id|retry)(?:: ?(.*))?", line, re.DOTALL) for line in group]
        fields = [(match[1], match[2] or "") for match in matches if match]
        data, kinds, ids, retries = (
            [value for name, value in fields if name == wanted] for wanted in ("data", "event", "id", "retry")
        )
        last_id = next((value for value in reversed(ids) if "\0" not in value), last_id)
        times = [int(value) for value in retries if re.fullmatch("[0-9]{1,18}", value)]
        if data:
            kind = (kinds or [""])[-1] or "message"
            complete = group is not groups[-1]
            found.append((kind, "\n".join(data), last_id, times[-1] if times else None, complete))
    return found, sum(line.startswith(":") for line in [*lines, rest])


def blocks(raw: bytes) -> Iterator[tuple[int, int]]:
    """Give where each finished block of a stream begins and ends, a comment between blocks being one."""
    start = 0
    for line in re.finditer(rb"([^\r\n]*)(\r\n|\r|\n)", raw):
        text = line[1].removeprefix(b"\xef\xbb\xbf") if line.start() == 0 else line[1]
        if not text or (line.start() == start and text.startswith(b":")):
            yield start, line.end()
            start = line.end()


def boundary(raw: bytes) -> int:
    return max((end for _, end in blocks(raw)), default=0)


def largest_block(raw: bytes) -> int:
    """Give how many bytes of an unfinished block there are at most, at any time."""
    return max(end - boundary(raw[:end]) for end in range(len(raw) + 1))


# --- Streams, and ways to cut them ---

TOKENS = [b"data", b"event", b"id", b"retry", b":", b": ", b" ", b"\r", b"\n", b"\r\n", b"\n\n", b"\r\n\r\n"]
TOKENS += [
    b"\xef\xbb\xbf",
    b"\xe2\x80\xa8",
    b"\xc2\x85",
    b"\xf0\x9f\x99\x82",
    b"\xf0\x9f",
    b"\xff",
    b"\0",
    b"\x0b",
]
TOKENS += [
    b"x",
    b"12",
    b"\xc2\xb2",
    b"data: ",
    b"data:x\n\n",
    b": ping\n\n",
    b"id: 7\n",
    b"event:e\r",
    b"retry: 5\n",
]

streams = st.lists(st.sampled_from(TOKENS), max_size=24).map(b"".join) | st.binary(max_size=40)
cuts = st.lists(st.integers(0, 100), max_size=12) | st.just(range(100))


def chunks(raw: bytes, at: Iterable[int]) -> list[bytes]:
    edges = [0, *sorted(min(cut, len(raw)) for cut in at), len(raw)]
    return [raw[a:b] for a, b in itertools.pairwise(edges)]


def meanings(events: Iterable[Event]) -> list[Meaning]:
    return [(e.event, e.data, e.id, e.retry, e.complete) for e in events]


def parse(raw: bytes, at: Iterable[int] = ()) -> list[Event]:
    parser = SSEParser()
    return [event for chunk in chunks(raw, at) for event in parser.feed(chunk)] + parser.close()


# --- Properties ---


@settings(max_examples=300)
@given(streams, cuts)
@example(b"\xef\xbb\xbfdata: a\r\ndata: b\r\n\r\n", range(30))
@example(b"data: a\r\ndata: b\r\n\r\n", [8, 8])  # an empty read between CR and LF
@example(b"\xef\xbb\xbf\xef\xbb\xbfdata: a\n\n", range(30))
@example(b"id: 1\n\ndata: a\n\nevent: e\ndata: b\n\n", [7])
def test_every_chunking_gives_the_events_of_the_standard(raw: bytes, at: Iterable[int]) -> None:
    parser = SSEParser()
    events = [event for chunk in chunks(raw, at) for event in parser.feed(chunk)] + parser.close()
    assert (meanings(events), parser.comments) == standard(raw)


@settings(max_examples=300)
@given(streams, cuts)
@example(b": a\r\n: b\r\ndata: c\r\n\r\n", range(30))
@example(b"data: a\r\n\r\ndata: b\r\n\r\n", [8])
@example(b"data: a\r\n\r\ndata: b\r\n\r\n", [10])
def test_boundary_is_where_blocks_end_after_every_read(raw: bytes, at: Iterable[int]) -> None:
    parser = SSEParser()
    read = b""
    for chunk in chunks(raw, at):
        read += chunk
        events = parser.feed(chunk)
        assert parser.offset == len(read)
        assert parser.boundary == boundary(read)
        assert {(e.start, e.end) for e in events} <= set(blocks(read))
    parser.close()
    assert (parser.offset, parser.boundary) == (len(raw), boundary(raw))


@settings(max_examples=300)
@given(streams, cuts)
@example(b"data: a\n\n\xef\xbb\xbfdata: b\ndata: c\n\n\xef\xbb\xbfdata: d", range(40))
def test_the_bytes_of_an_event_are_that_event(raw: bytes, at: Iterable[int]) -> None:
    def alone(start: int, end: int) -> list[Meaning]:
        # After a blank line, as in the stream: only at its very start is a BOM no part of a line.
        return standard((b"\n" if start else b"") + raw[start:end])[0]

    events = parse(raw, at)
    last_id = None
    for event in events:
        [(kind, data, own_id, retry, complete)] = alone(event.start, event.end)
        assert (kind, data, retry, complete) == (event.event, event.data, event.retry, event.complete)
        if own_id is not None:
            last_id = own_id
            assert event.id == last_id
    starts = [*(event.start for event in events), len(raw)]
    ends = [0, *(event.end for event in events)]
    for end, next_start in zip(ends, starts, strict=True):
        assert end <= next_start
        assert alone(end, next_start) == []


@settings(max_examples=300)
@given(streams, cuts, st.integers(1, 24))
@example(b"\xef\xbb\xbf\n", [], 2)
@example(b"\xef\xbb\xbf\n", range(30), 2)
@example(b"data: a\r\n\r\n", range(30), 9)
@example(b": abcdef\r\n", range(30), 8)
@example(b"data: a\n\ndata: bc\n\n", [], 8)  # with the line end of the last line one byte too long
@example(b"data: a\n\ndata: bc\n\n", [], 9)
def test_the_size_limit_does_not_depend_on_the_chunking(raw: bytes, at: Iterable[int], limit: int) -> None:
    parser = SSEParser(max_event_size=limit)
    events: list[Event] = []
    try:
        for chunk in chunks(raw, at):
            events += parser.feed(chunk)
        events += parser.close()
    except EventTooLargeError as error:
        events += error.events
        assert largest_block(raw) > limit
        allowed = next(end for end in range(len(raw) + 1) if largest_block(raw[:end]) > limit)
        assert meanings(events) == [m for m in standard(raw[:allowed])[0] if m[-1]]
        assert parser.boundary == boundary(raw[:allowed])
    else:
        assert largest_block(raw) <= limit
        assert meanings(events) == standard(raw)[0]


@given(st.text() | st.sampled_from(["", "\n", "a\n\nb", " a", ":", "a\u2028b\x85c"]), cuts)
def test_encoded_text_comes_back(data: str, at: Iterable[int]) -> None:
    [event] = parse(encode(data), at)
    text = data.encode("utf-8", "replace").decode()
    assert event == Event("message", re.sub("\r\n?", "\n", text), None, None, 0, len(encode(data)))


@given(st.lists(st.tuples(st.binary(), st.from_regex(r"[^\r\n]+", fullmatch=True)), max_size=5), cuts)
def test_encoded_events_follow_each_other(pairs: list[tuple[bytes, str]], at: Iterable[int]) -> None:
    events = parse(b"".join(encode(data, event=name) for data, name in pairs), at)
    assert [(e.event, e.data) for e in events] == [
        (name, re.sub(b"\r\n?", b"\n", data).decode("utf-8", "replace")) for data, name in pairs
    ]
    assert all(event.complete for event in events)


# --- The grammar, by example ---


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"data: a\n\ndata: b\n\n", ["a", "b"]),
        (b"data: a\rdata: b\r\r", ["a\nb"]),
        (b"data: a\n\rdata: b\r\n\n", ["a", "b"]),
        (b"data\n\ndata\ndata\n\ndata:", ["", "\n", ""]),
        (b"data:  two\n\ndata:none\n\ndata:\ttab\n\n", [" two", "none", "\ttab"]),
        (b"data: a:b\n\n", ["a:b"]),
        (b" data: a\n\nDATA: b\n\ndata : c\n\nunknown: d\n\n", []),
        (b"\xef\xbb\xbfdata: a\n\n", ["a"]),
        (b"\xef\xbb\xbf\xef\xbb\xbfdata: a\n\ndata: b\n\n", ["b"]),
        (b"\n\xef\xbb\xbfdata: a\n\n", []),
        (b"\xef\xbb\xbfdata: a", ["a"]),
        (b"\xef\xbb\xbf", []),
        (b"data: \xff\xf0\x9f\n\n", ["\ufffd\ufffd"]),
        (b"data: a\x0b\x0c\x1c\x1d\xc2\x85\xe2\x80\xa8\n\n", ["a\x0b\x0c\x1c\x1d\x85\u2028"]),
        (b":\n: b\ndata: a\n:c\n\n", ["a"]),
        (b"\n\n\r\n", []),
        (b"", []),
    ],
)
def test_data(raw: bytes, expected: list[str]) -> None:
    assert [event.data for event in parse(raw)] == expected


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"event: a\ndata\n\ndata\n\n", ["a", "message"]),
        (b"event: a\n\ndata\n\n", ["message"]),
        (b"event: a\nevent: b\ndata\n\n", ["b"]),
        (b"event: a\nevent:\ndata\n\n", ["message"]),
        (b"event: \xc3\xa9\ndata\n\n", ["é"]),
    ],
)
def test_event_type_is_of_its_block(raw: bytes, expected: list[str]) -> None:
    assert [event.event for event in parse(raw)] == expected


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"data\n\nid: 1\ndata\n\ndata\n\n", [None, "1", "1"]),
        (b"id: 1\n\ndata\n\n", ["1"]),
        (b"id: 1\ndata\n\nid\ndata\n\n", ["1", ""]),
        (b"id: 1\nid: 2\0\ndata\n\n", ["1"]),
    ],
)
def test_id_persists(raw: bytes, expected: list[str | None]) -> None:
    assert [event.id for event in parse(raw)] == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (b"3000", 3000),
        (b"007", 7),
        (b"", None),
        (b"-1", None),
        (b"+1", None),
        (b"1.5", None),
        (b"1 ", None),
        (b"1_0", None),
        ("²".encode(), None),
        ("٣".encode(), None),
        (b"9" * 18, 10**18 - 1),
        (b"9" * 5000, None),
    ],
)
def test_retry_takes_digits_only(value: bytes, expected: int | None) -> None:
    events = parse(b"retry: " + value + b"\ndata\n\ndata\n\n")
    assert [event.retry for event in events] == [expected, None]


def test_a_cr_ends_a_block_without_waiting_for_the_next_byte() -> None:
    parser = SSEParser()
    [event] = parser.feed(b"data: a\r\n\r")
    assert (event.end, parser.boundary) == (10, 10)
    assert parser.feed(b"") == []
    assert parser.feed(b"\n") == []
    assert (parser.boundary, parser.offset) == (11, 11)
    assert parser.feed(b"\n") == []  # a second line feed is a blank line of its own
    assert parser.boundary == 12
    [event] = parser.feed(b"data: b\r\n\r\n")
    assert (event.start, event.end) == (12, 23)


def test_a_line_feed_inside_a_block_does_not_move_the_boundary() -> None:
    parser = SSEParser()
    parser.feed(b"data: a\r")
    parser.feed(b"\n")
    assert (parser.boundary, parser.offset) == (0, 9)


def test_close_gives_the_pending_event_once_and_leaves_the_boundary() -> None:
    parser = SSEParser()
    parser.feed(b"data: a\n\nevent: e\ndata: b\nda")
    assert parser.boundary == 9
    parser.feed(b"ta: c")
    assert parser.close() == [Event("e", "b\nc", None, None, 9, 33, complete=False)]
    assert (parser.boundary, parser.offset) == (9, 33)
    assert parser.close() == []
    with pytest.raises(RuntimeError, match="after close"):
        parser.feed(b"x")


def test_the_error_keeps_what_came_before_it_and_is_raised_again() -> None:
    parser = SSEParser(max_event_size=16)
    with pytest.raises(EventTooLargeError, match="max_event_size=16 bytes") as caught:
        parser.feed(b"data: a\n\ndata: " + b"b" * 20)
    assert [event.data for event in caught.value.events] == ["a"]
    assert isinstance(caught.value, ValueError)
    with pytest.raises(EventTooLargeError) as caught:
        parser.feed(b"\n\ndata: c\n\n")
    assert caught.value.events == ()
    with pytest.raises(EventTooLargeError):
        parser.close()


@pytest.mark.parametrize("at", [[], range(30)])
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_data_that_is_no_utf_8_is_replaced_and_said_to_be_none(at: Iterable[int], end: bytes) -> None:
    events = parse(b"data: a\xff" + end * 2 + b"data: \xc3\xa4" + end * 2, at)
    assert [(event.data, event.valid) for event in events] == [("a\ufffd", False), ("\u00e4", True)]


def test_comments_between_blocks_never_add_up_to_an_event_too_large() -> None:
    parser = SSEParser(max_event_size=16)
    for _ in range(100):
        assert parser.feed(b": ping\n") == []
    assert parser.comments == 100


@pytest.mark.parametrize("size", [0, -1])
def test_max_event_size_is_validated(size: int) -> None:
    with pytest.raises(ValueError, match=f"max_event_size must be .* at least 1, not {size}"):
        SSEParser(max_event_size=size)


def test_an_event_cannot_be_changed() -> None:
    [event] = parse(b"data: a\n\n")
    assert not hasattr(event, "__dict__")
    with pytest.raises(AttributeError):
        event.data = "b"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("data", "event", "expected"),
    [
        ("", None, b"data: \n\n"),
        (b'{"a":1}', None, b'data: {"a":1}\n\n'),
        ("[DONE]", "done", b"event: done\ndata: [DONE]\n\n"),
        ("a\r\nb\rc\n", None, b"data: a\ndata: b\ndata: c\ndata: \n\n"),
        ("é\u2028\ud800", "ü", b"event: \xc3\xbc\ndata: \xc3\xa9\xe2\x80\xa8?\n\n"),
    ],
)
def test_encode(data: str | bytes, event: str | None, expected: bytes) -> None:
    assert encode(data, event=event) == expected


@pytest.mark.parametrize("name", ["a\nb", "a\rb", "a\n"])
def test_encode_refuses_an_event_type_of_two_lines(name: str) -> None:
    with pytest.raises(ValueError, match="event must be a single line"):
        encode("a", event=name)


# --- Linear time and bounded memory, by counting what is done ---


class CountingBuffer(bytearray):
    """Count the bytes that are read or written; a method that is called may look at the whole buffer."""

    touched = 0

    def __iadd__(self, other: bytes) -> Self:  # type: ignore[misc, override]
        CountingBuffer.touched += len(other)
        super().__iadd__(other)
        return self

    def __bytes__(self) -> bytes:
        CountingBuffer.touched += len(self)
        return bytes(memoryview(self))

    def __contains__(self, item: SupportsIndex | bytes) -> bool:  # type: ignore[override]
        CountingBuffer.touched += len(self)
        return super().__contains__(item)

    def __getattribute__(self, name: str) -> object:
        if not name.startswith("__"):
            CountingBuffer.touched += len(self)
        return super().__getattribute__(name)


def work(pieces: list[bytes]) -> tuple[int, int]:
    """Give the calls made and the bytes of the parser's own buffers touched while it reads `pieces`."""
    CountingBuffer.touched = calls = 0

    def profile(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in {"call", "c_call"}

    parser = SSEParser()
    previous = sys.getprofile()
    gc.disable()  # what other tests have left behind may make calls when it is collected
    sys.setprofile(profile)
    try:
        for piece in pieces:
            parser.feed(piece)
    finally:
        sys.setprofile(previous)
        gc.enable()
    return calls, CountingBuffer.touched


LONG_LINE = b"data: " + b"x" * (2 * 1024 * 1024) + b"\n\n"
SHAPES = {
    "2 MB line in 1 KB pieces": chunks(LONG_LINE, range(0, len(LONG_LINE), 1024)),
    "20 KB line, one byte per read": chunks(LONG_LINE[-20_000:], range(20_000)),
    "one event of 5,000 lines, one per read": [b"data: abc\n"] * 5000 + [b"\n"],
    "one event of 5,000 lines in one read": [b"data: abc\r\n" * 5000 + b"\r\n"],
    "5,000 events in one read": [b"event: e\ndata: abc\n\n" * 5000],
    "5,000 events, one per read": [b"event: e\ndata: abc\n\n"] * 5000,
    "10,000 split line ends": [b"\r", b"\n"] * 10_000,
}


@pytest.mark.parametrize("shape", SHAPES)
def test_every_byte_is_looked_at_a_fixed_number_of_times(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "bytearray", CountingBuffer, raising=False)
    pieces = SHAPES[shape]
    calls, touched = work(pieces)
    size = sum(map(len, pieces))
    lines = sum(len(piece.splitlines()) for piece in pieces)
    assert calls <= 12 * len(pieces) + 12 * lines
    # Each buffer (line, data) takes a byte in once, gives it out once, and is emptied once.
    assert touched <= 6 * size


def test_buffers_grow_in_place() -> None:
    parser = SSEParser()
    parser.feed(b"data: a\ndata: b\nda")
    buffers = parser._data, parser._line
    parser.feed(b"ta: c\ndata: d\ndat")
    assert parser._data is buffers[0]
    assert parser._line is buffers[1]


def test_the_count_would_notice_a_rescan(monkeypatch: pytest.MonkeyPatch) -> None:
    class Rescanning(SSEParser):
        __slots__ = ()

        def feed(self, data: bytes) -> list[Event]:
            self._line.find(b"\n")
            return super().feed(data)

    monkeypatch.setattr(sse, "bytearray", CountingBuffer, raising=False)
    monkeypatch.setitem(globals(), "SSEParser", Rescanning)
    pieces = SHAPES["2 MB line in 1 KB pieces"]
    assert work(pieces)[1] > 100 * sum(map(len, pieces))


@pytest.mark.parametrize("piece", [b"xy", b"\ndata:", b"\n: y", b"\nfoo: x", b"\nid: x"])
def test_memory_is_bounded_by_the_size_of_an_event(piece: bytes) -> None:
    limit = 64 * 1024
    parser = SSEParser(max_event_size=limit)
    parser.feed(b"data: ")
    tracemalloc.start()
    try:
        for _ in range((limit - parser.offset) // len(piece)):
            parser.feed(piece)
        with pytest.raises(EventTooLargeError):
            parser.feed(piece)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1.5 * limit


def test_a_large_event_is_whole() -> None:
    text = json.dumps({"image": "A" * 2_000_000})
    parser = SSEParser()
    events = [
        event for chunk in chunks(encode(text), range(0, 2_100_000, 1024)) for event in parser.feed(chunk)
    ]
    assert [event.data for event in events] == [text]
