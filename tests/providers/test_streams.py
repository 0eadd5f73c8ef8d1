"""What streams mean: a table for each dialect, each stream in reads of every kind."""

import gzip
import re
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient_llm.outcome import CANCELLED, Outcome, Verdict
from resilient_llm.providers import EventKind, StreamReader
from tests.providers.streams import anthropic, gemini, openai_chat, openai_responses, unknown
from tests.providers.streams.example import Example

EXAMPLES = [
    *openai_chat.EXAMPLES,
    *openai_responses.EXAMPLES,
    *anthropic.EXAMPLES,
    *gemini.EXAMPLES,
    *unknown.EXAMPLES,
]
NO_STREAMS = [
    example for example in EXAMPLES if re.search(rb"^\[?\{.*\}", example.stream, re.MULTILINE | re.DOTALL)
]
"""Streams with JSON in them that is not in an event: an error, or the whole of a reply."""

LETTERS = {
    EventKind.CONTENT: "c",
    EventKind.META: "m",
    EventKind.USAGE: "u",
    EventKind.END: "e",
    EventKind.ERROR: "!",
    EventKind.MALFORMED: "b",
}
RESET = Outcome(verdict=Verdict.FAILURE, error_type="read_error", retryable=True, ambiguous=True)


def read(reader: StreamReader, reads: Iterable[bytes]) -> str:
    return "".join(LETTERS[kind] for chunk in reads for kind, _ in reader.feed(chunk))


def cut(stream: bytes, size: int) -> list[bytes]:
    return [stream[at : at + size] for at in range(0, len(stream), size)]


def check(example: Example, reader: StreamReader, kinds: str, outcome: Outcome) -> None:
    assert kinds == example.kinds
    assert (outcome.verdict, outcome.scope, outcome.error_type) == example.outcome
    assert outcome.usage == example.usage
    answer = reader.answer
    assert (answer.model, answer.id, answer.finish_reasons) == (
        example.model,
        example.id,
        example.finish_reasons,
    )
    assert (reader.malformed, reader.keepalives) == (example.malformed, example.keepalives)
    assert reader.close() == outcome
    if not outcome.ok:
        assert outcome.retryable is example.retryable
        if outcome.error_type in ("truncated", "empty_stream"):
            assert outcome.status == 200
            assert outcome.ambiguous
        else:
            assert outcome.status == example.status
            assert outcome.ambiguous or "c" not in kinds or outcome.verdict is not Verdict.FAILURE


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
@pytest.mark.parametrize("ends", [b"\n", b"\r\n", b"\r"], ids=["LF", "CRLF", "CR"])
def test_a_stream_means(example: Example, ends: bytes) -> None:
    stream = example.stream.replace(b"\n", ends)
    for size in (max(1, len(stream)), 1, 7, 100):
        reader = StreamReader(example.dialect)
        kinds = read(reader, cut(stream, size))
        check(example, reader, kinds, reader.close())


@settings(max_examples=300)
@given(example=st.sampled_from(EXAMPLES), data=st.data())
def test_however_it_is_cut(example: Example, data: st.DataObject) -> None:
    ends = data.draw(st.lists(st.integers(0, len(example.stream)), max_size=8).map(sorted))
    reads = [
        example.stream[start:end] for start, end in zip([0, *ends], [*ends, len(example.stream)], strict=True)
    ]
    reader = StreamReader(example.dialect)
    kinds = read(reader, reads)
    check(example, reader, kinds, reader.close())


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_compressed_it_means_the_same(example: Example) -> None:
    reader = StreamReader(example.dialect, headers=[(b"Content-Encoding", b"gzip")])
    assert reader.encoded
    kinds = read(reader, cut(gzip.compress(example.stream), 9))
    assert not reader.blind
    check(example, reader, kinds, reader.close())


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_the_text_is_kept_on_request_and_nothing_else_differs(example: Example) -> None:
    reader = StreamReader(example.dialect, keep_text=True)
    kinds = read(reader, [example.stream])
    outcome = reader.close()
    assert reader.answer.text == example.text
    check(example, reader, kinds, outcome)
    reader = StreamReader(example.dialect)
    reader.feed(example.stream)
    assert reader.answer.text is None


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_content_and_completeness_are_known_as_soon_as_they_come(example: Example) -> None:
    """The commit point; and what a caller who stops reading, or a broken connection, then mean."""
    reader = StreamReader(example.dialect)
    kinds = ""
    for byte in cut(example.stream, 1):
        kinds += read(reader, [byte])
        assert reader.has_content is ("c" in kinds)
        said_nothing = example.dialect.marks_end and "e" in kinds and not reader.complete
        assert (reader.failure is not None) is ("!" in kinds or said_nothing)
        assert not reader.complete or "e" in kinds
        assert 0 <= reader.boundary <= reader.offset
    assert not reader.complete or reader.close().ok


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_a_connection_that_breaks_decides_only_what_was_open(example: Example) -> None:
    reader = StreamReader(example.dialect)
    reader.feed(example.stream)
    complete, failed = reader.complete, reader.failure
    outcome = reader.interrupted(RESET)
    assert reader.close() == outcome == reader.interrupted(CANCELLED)
    if complete or example in NO_STREAMS:
        assert (outcome.verdict, outcome.scope, outcome.error_type) == example.outcome
        assert outcome.usage == example.usage
    elif failed is not None:
        assert outcome.error_type == failed.error_type
    else:
        assert outcome.error_type == RESET.error_type
        assert outcome.ambiguous
        assert outcome.usage is None or outcome.usage.estimated or reader.answer.finished


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_a_caller_who_leaves_cancels_only_what_was_open(example: Example) -> None:
    reader = StreamReader(example.dialect)
    reader.feed(example.stream)
    finished = reader.answer.finished
    outcome = reader.interrupted(CANCELLED)
    if example in NO_STREAMS:
        assert (outcome.verdict, outcome.scope, outcome.error_type) == example.outcome
    elif reader.complete or (finished and reader.failure is None):
        assert outcome.ok
    elif reader.failure is None:
        assert outcome.verdict is Verdict.NEUTRAL
        assert outcome.error_type == "cancelled"
        assert not outcome.ambiguous
