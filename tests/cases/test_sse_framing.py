"""Field cases of SSE framing: each stream read whole, one byte at a time, and cut at every point."""

import json
from collections.abc import Iterable

import pytest

from resilient_llm.core.sse import Event, EventTooLargeError, SSEParser

CHUNK = b'data: {"id":"c1","choices":[{"index":0,"delta":{"content":"hi"}}]}\n\n'
CHUNK_DATA = CHUNK[6:-2].decode()
FINISH = '{"choices":[{"delta":{},"finish_reason":"stop"}]}'
NO_CHOICES = [
    '{"id":"","choices":[],"prompt_filter_results":[{"prompt_index":0}]}',
    '{"usage":{"prompt_tokens":3,"completion_tokens":5}}',
    '{"choices":[{"index":0,"finish_reason":null}]}',
]

# id and slug: stream, then event type, data and whether the blank line came, for each event expected.
CASES: dict[str, tuple[bytes, list[tuple[str, str, bool]]]] = {
    "SSE-01 unicode line separators": (
        b'data: {"t":"a\xe2\x80\xa8b\xe2\x80\xa9c\xc2\x85d"}\n\n',
        [("message", '{"t":"a\u2028b\u2029c\x85d"}', True)],
    ),
    "SSE-01 ASCII separators that str.splitlines knows": (
        b"data: a\x0bb\x0cc\x1cd\x1de\x1ef\n\n",
        [("message", "a\x0bb\x0cc\x1cd\x1de\x1ef", True)],
    ),
    "SSE-02 split character": (
        b'data: {"t":"\xe4\xbd\xa0"}\n\ndata: {"t":"\xf0\x9f\x99\x82"}\n\n',
        [("message", '{"t":"你"}', True), ("message", '{"t":"🙂"}', True)],
    ),
    "SSE-02 split character in the event type": (
        b"event: \xc3\xa9t\xc3\xa9\ndata: a\n\n",
        [("été", "a", True)],
    ),
    "SSE-03 CRLF": (b"data: a\r\ndata: b\r\n\r\n", [("message", "a\nb", True)]),
    "SSE-03 CRLF twice": (
        b"data: a\r\n\r\ndata: b\r\n\r\n",
        [("message", "a", True), ("message", "b", True)],
    ),
    "SSE-03 CR alone": (b"data: a\rdata: b\r\r", [("message", "a\nb", True)]),
    "SSE-04 ping after id": (
        b"id: 1\n" + CHUNK + b": ping\n\n" + CHUNK,
        [("message", CHUNK_DATA, True), ("message", CHUNK_DATA, True)],
    ),
    "SSE-04 event type without data": (b"event: ping\n\n" + CHUNK, [("message", CHUNK_DATA, True)]),
    "SSE-06 empty data": (
        CHUNK + b"data:\n\n" + b"data: \n\n" + CHUNK,
        [
            ("message", CHUNK_DATA, True),
            ("message", "", True),
            ("message", "", True),
            ("message", CHUNK_DATA, True),
        ],
    ),
    "SSE-07 comment as data": (
        b"data: : keepalive\n\n" + CHUNK,
        [("message", ": keepalive", True), ("message", CHUNK_DATA, True)],
    ),
    "SSE-07 comment": (b": OPENROUTER PROCESSING\n\n" + CHUNK, [("message", CHUNK_DATA, True)]),
    "SSE-08 no space": (
        b"data:{}\n\ndata:[DONE]\n\n",
        [("message", "{}", True), ("message", "[DONE]", True)],
    ),
    "SSE-08 two spaces": (b"data:  x\n\n", [("message", " x", True)]),
    "SSE-08 event without space": (b"event:error\ndata:{}\n\n", [("error", "{}", True)]),
    "SSE-08 no colon": (b"data\n\n", [("message", "", True)]),
    "SSE-12 no newline": (
        CHUNK + b"data: " + FINISH.encode(),
        [("message", CHUNK_DATA, True), ("message", FINISH, False)],
    ),
    "SSE-12 one newline": (b"data: " + FINISH.encode() + b"\n", [("message", FINISH, False)]),
    "SSE-12 one CRLF": (b"data: " + FINISH.encode() + b"\r\n", [("message", FINISH, False)]),
    "SSE-12 DONE": (b"data: [DONE]", [("message", "[DONE]", False)]),
    "SSE-12 cut JSON": (b'data: {"choices":[{"de', [("message", '{"choices":[{"de', False)]),
    "SSE-12 cut character": (b'data: {"t":"\xe4\xbd', [("message", '{"t":"\ufffd', False)]),
    "SSE-12 only a comment": (CHUNK + b": bye", [("message", CHUNK_DATA, True)]),
    "SSE-12 only an event type": (CHUNK + b"event: done\n", [("message", CHUNK_DATA, True)]),
    "SSE-16 no usable choices": (
        "".join(f"data: {data}\n\n" for data in NO_CHOICES).encode(),
        [("message", data, True) for data in NO_CHOICES],
    ),
    "SSE-17 always UTF-8": (b'data: {"t":"\xe2\x9c\x85"}\n\n', [("message", '{"t":"✅"}', True)]),
}


def read(parser: SSEParser, reads: Iterable[bytes]) -> list[Event]:
    return [event for chunk in reads for event in parser.feed(chunk)] + parser.close()


def cut(stream: bytes, size: int) -> list[bytes]:
    return [stream[at : at + size] for at in range(0, len(stream), size)]


@pytest.mark.parametrize("case", CASES)
def test_case(case: str) -> None:
    stream, expected = CASES[case]
    splits = [[stream], cut(stream, 1), *([stream[:at], stream[at:]] for at in range(1, len(stream)))]
    for reads in splits:
        events = read(SSEParser(), reads)
        assert [(event.event, event.data, event.complete) for event in events] == expected, reads


def test_sse_04_id_persists_over_the_ping() -> None:
    events = read(SSEParser(), [CASES["SSE-04 ping after id"][0]])
    assert [event.id for event in events] == ["1", "1"]


def test_sse_07_comments_are_counted_and_belong_to_no_event() -> None:
    stream = CASES["SSE-07 comment"][0]
    parser = SSEParser()
    [event] = read(parser, cut(stream, 1))
    assert parser.comments == 1
    assert stream[event.start : event.end] == CHUNK


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("SSE-12")])
def test_sse_12_the_unfinished_tail_can_be_told_from_the_rest(case: str) -> None:
    stream, expected = CASES[case]
    parser = SSEParser()
    events = read(parser, cut(stream, 7))
    finished = len(CHUNK) if stream.startswith(CHUNK) else 0
    assert (parser.boundary, parser.offset) == (finished, len(stream))
    assert [event.complete for event in events] == [complete for _, _, complete in expected]


@pytest.mark.parametrize("size", [130_000, 600_000, 2_000_000], ids=lambda size: f"SSE-13 {size}")
@pytest.mark.parametrize("read_size", [1024, 65_536, 4_000_000])
def test_sse_13_large_event(size: int, read_size: int) -> None:
    stream = b'data: {"b64_json":"' + b"A" * size + b'"}\n\n'
    [event] = read(SSEParser(), cut(stream, read_size))
    assert json.loads(event.data) == {"b64_json": "A" * size}
    assert (event.start, event.end) == (0, len(stream))


@pytest.mark.parametrize("read_size", [1024, 65_536, 4_000_000])
def test_sse_13_event_over_the_maximum(read_size: int) -> None:
    stream = CHUNK + b"data: " + b"A" * 600_000 + b"\n\n" + CHUNK
    parser = SSEParser(max_event_size=500_000)
    seen: list[Event] = []
    reads = iter(cut(stream, read_size))
    with pytest.raises(EventTooLargeError, match="500000") as caught:
        seen.extend(event for chunk in reads for event in parser.feed(chunk))
    assert [event.data for event in (*seen, *caught.value.events)] == [CHUNK_DATA]
    assert parser.boundary == len(CHUNK)
