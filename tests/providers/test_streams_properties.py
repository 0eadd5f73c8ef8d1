"""Whatever comes in, and however it is cut: the same comes out, and nothing raises."""

import json
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient_llm.core.sse import encode
from resilient_llm.outcome import CANCELLED, Outcome, Verdict
from resilient_llm.providers import ANTHROPIC, GEMINI, OPENAI, Dialect, StreamReader, read_body
from tests.providers.streams import openai_chat
from tests.providers.test_properties import HEADERS, SPEAKERS, VALUES
from tests.providers.test_streams import EXAMPLES
from tests.providers.test_streams_shape import known

NAMES = st.sampled_from(
    [
        "candidates", "choices", "code", "content", "content_block", "delta", "error", "event_type", "finishReason",
        "finish_reason", "id", "index", "interaction", "item", "message", "model", "object", "parts", "promptFeedback",
        "response", "status", "stop_reason", "text", "tool_calls", "type", "usage", "usageMetadata", "x_groq",
    ]
)  # fmt: skip
WORDS = st.sampled_from(
    [
        "completion", "content_block_delta", "content_block_start", "error", "failed", "interaction.completed",
        "message_delta", "message_start", "message_stop", "response", "response.completed", "response.failed",
        "response.output_item.added", "response.output_item.done", "response.output_text.delta", "step.delta", "text",
        "text_delta", "thread.message.delta",
    ]
)  # fmt: skip
OBJECTS = st.recursive(
    VALUES | WORDS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=10,
)
DATA = st.one_of(
    OBJECTS.map(json.dumps),
    st.dictionaries(NAMES, OBJECTS, max_size=4).map(json.dumps),
    st.sampled_from(["[DONE]", "", " ", ": x", "{", "null", "[]", "[" * 5000]),
    st.text(max_size=20),
)
EVENTS = st.builds(encode, DATA, event=st.none() | WORDS | st.just("ping"))
CHUNKS = (
    st.binary(max_size=30)
    | EVENTS
    | st.sampled_from([b"{", b'{"error": {}}', b'{"error": 1}', b"\r", b"\n\n", b": x\n\n", b"\xef\xbb\xbf"])
    | st.sampled_from([example.stream for example in EXAMPLES])
)


def read(dialect: Dialect, reads: Sequence[bytes], headers: list[tuple[bytes, bytes]]) -> tuple[object, ...]:
    reader = StreamReader(dialect, headers=headers, max_event_size=2000)
    kinds = []
    for chunk in reads:
        kinds += [(kind, event.event, event.data, event.start) for kind, event in reader.feed(chunk)]
        assert not (reader.complete and reader.failure)
    outcome = reader.close()
    assert reader.feed(b"data: [DONE]\n\n") == []
    assert reader.interrupted(CANCELLED) == reader.close() == outcome
    assert outcome.ok is (outcome.verdict is Verdict.SUCCESS)
    assert outcome.ok or outcome.error_type
    reported = outcome.usage is None or outcome.ok or outcome.usage.estimated
    assert reported or reader.answer.finished or reader.failure is not None
    return kinds, outcome, known(reader.answer), reader.malformed, reader.keepalives, reader.boundary


@settings(max_examples=250)
@given(
    dialect=SPEAKERS,
    parts=st.lists(CHUNKS, max_size=5),
    headers=HEADERS.map(
        lambda headers: [(name, value) for name, value in headers if name.lower() != b"date"]
    ),
    data=st.data(),
)
def test_any_bytes_mean_the_same_however_they_are_cut(
    dialect: Dialect, parts: list[bytes], headers: list[tuple[bytes, bytes]], data: st.DataObject
) -> None:
    stream = b"".join(parts)
    whole = read(dialect, [stream], headers)
    assert read(dialect, [stream[at : at + 1] for at in range(len(stream))], headers) == whole
    ends = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    reads = [stream[start:end] for start, end in zip([0, *ends], [*ends, len(stream)], strict=True)]
    assert read(dialect, reads, headers) == whole


@pytest.mark.parametrize(
    "data",
    [
        '{"error": %s}',
        '{"type": "error", "x": %s}',
        '{"candidates": [{"content": {"parts": [{"functionCall": {"args": %s}}]}}]}',
        '{"type": "content_block_start", "content_block": {"type": "tool_use", "input": %s}}',
        '{"choices": [{"delta": {"content": %s}}]}',
    ],
)
def test_however_deep_it_goes(data: str) -> None:
    """JSON that can just be parsed, and then not be written again."""
    for depth in range(700, 1000):
        nested = data % ("[" * depth + "]" * depth)
        for dialect in (OPENAI, ANTHROPIC, GEMINI):
            reader = StreamReader(dialect)
            reader.feed(encode(nested))
            assert isinstance(reader.close(), Outcome)
            assert isinstance(read_body(dialect, 200, [], nested.encode())[0], Outcome)


@pytest.mark.parametrize("size", [100, 1000])
def test_an_event_that_is_too_large_ends_it(size: int) -> None:
    start = openai_chat.says("Hello")
    large = encode("x" * size)
    for reads in (
        [start + large + start],
        [start, large, start],
        [bytes([byte]) for byte in start + large + start],
    ):
        reader = StreamReader(OPENAI, max_event_size=min(size, len(start)))
        kinds = [kind for chunk in reads for kind, _ in reader.feed(chunk)]
        outcome = reader.close()
        assert (outcome.verdict, outcome.error_type) == (Verdict.FAILURE, "event_too_large")
        assert not outcome.retryable
        assert outcome.ambiguous
        assert reader.failure is not None
        assert reader.failure.error_type == "event_too_large"
        assert len(kinds) == (1 if size > len(start) else 0)
        assert reader.interrupted(CANCELLED) == outcome


def test_an_event_that_is_too_large_after_the_end_does_not_matter() -> None:
    stream = openai_chat.WHOLE[0].stream
    reader = StreamReader(OPENAI, max_event_size=1000)
    reader.feed(stream + encode("x" * 2000))
    assert reader.failure is None
    assert reader.close().ok


def test_a_size_must_be_a_size() -> None:
    with pytest.raises(ValueError, match="max_event_size"):
        StreamReader(OPENAI, max_event_size=0)


def test_memory_is_bounded_by_what_is_unfinished() -> None:
    reader = StreamReader(OPENAI)
    for _ in range(3000):
        reader.feed(b": " + b"x" * 1000 + b"\n\n")
    assert len(reader._rest) <= 1 << 20
    reader.feed(openai_chat.says("Hello"))
    assert not reader._rest
