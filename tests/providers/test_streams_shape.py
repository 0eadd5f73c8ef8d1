"""What is recognised without parsing is what parsing says: the same kinds, counts and outcome, always."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient_llm.outcome import Outcome
from resilient_llm.providers import (
    ANTHROPIC,
    GEMINI,
    OPENAI,
    UNKNOWN,
    Answer,
    Dialect,
    EventKind,
    StreamReader,
)
from resilient_llm.providers import event_reader as module
from resilient_llm.providers.shape import MAX_LEARNT, Shape, learn
from tests.providers.streams import anthropic, gemini, openai_chat
from tests.providers.streams.example import sse

CHUNK = {
    "id": "chatcmpl-1",
    "object": "chat.completion.chunk",
    "created": 1741569952,
    "model": "gpt-4o",
    "choices": [{"index": 0, "delta": {"content": "Hello"}, "finish_reason": None}],
}


@contextmanager
def without_shapes() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "learn", lambda *_: None)
        yield


def everything(dialect: Dialect, events: Sequence[bytes], *, status: bool) -> tuple[object, ...]:
    """Give all there is to know after reading some events; with `status`, after each of them."""
    reader = StreamReader(dialect)
    log: list[object] = []
    for event in events:
        log.append([kind for kind, _ in reader.feed(event)])
        if status:
            log.append(known(reader.answer))
            log.append((reader.complete, reader.has_content, reader.failure, reader.malformed))
    outcome: Outcome = reader.close()
    return (*log, known(reader.answer), outcome)


def known(answer: Answer) -> tuple[object, ...]:
    return (
        answer.model,
        answer.id,
        answer.usage,
        answer.characters,
        answer.finish_reasons,
        answer.finished,
        answer.sequence,
        answer.estimate(),
    )


WORDS = st.text(max_size=6) | st.sampled_from(
    [
        '"',
        "\\",
        "\\u0041",
        "\n",
        "\u2028",
        "\x7f",
        '"}',
        "null",
        "🙂",
        "你好",
        '","finish_reason":"stop"',
        '"error":1',
    ]
)
NUMBERS = st.integers(0, 3) | st.integers(-2, 10**20) | st.floats(allow_nan=True) | st.none() | st.booleans()


@st.composite
def openai_events(draw: st.DrawFn) -> bytes:
    text = draw(WORDS)
    delta = draw(
        st.sampled_from(
            [
                {"content": text},
                {"content": text, "refusal": None},
                {"content": "", "reasoning_content": text},
                {"reasoning": text, "reasoning_details": [{"type": "t", "text": text}]},
                {"content": [{"type": "text", "text": text}]},
                {"tool_calls": [{"index": 0, "id": text, "function": {"name": "f", "arguments": text}}]},
                {"role": text},
                {"content": text, "content_type": text},
                {},
                {"audio": {"transcript": text, "data": text}},
            ]
        )
    )
    finish = draw(st.sampled_from([None, None, None, "stop", "", "error"]))
    body: dict[str, Any] = {
        **CHUNK,
        "id": draw(st.sampled_from(["chatcmpl-1", "chatcmpl-1", "x", ""])),
        "created": draw(st.sampled_from([1, 1, 2]) | NUMBERS),
        "choices": [{"index": draw(st.sampled_from([0, 0, 0, 1])), "delta": delta, "finish_reason": finish}],
    }
    for name, values in {
        "obfuscation": WORDS,
        "usage": st.none() | st.fixed_dictionaries({"prompt_tokens": NUMBERS, "total_tokens": NUMBERS}),
        "error": st.sampled_from([None, None, "e"]),
        "model": st.sampled_from(["gpt-4o", "gpt-4o", "other"]),
    }.items():
        if draw(st.booleans()):
            body[name] = draw(values)
    return sse(body)


@st.composite
def response_events(draw: st.DrawFn) -> bytes:
    kind = draw(
        st.sampled_from(["response.output_text.delta"] * 3 + ["response.reasoning_text.delta", "x", "error"])
    )
    place = {"item_id": "msg_1", "output_index": 0, "sequence_number": draw(NUMBERS)}
    delta = draw(WORDS | st.just({"stdout": "x"}))
    return sse({"type": kind, **place, "delta": delta, "logprobs": [], "obfuscation": draw(WORDS)}, kind)


@st.composite
def anthropic_events(draw: st.DrawFn) -> bytes:
    name = draw(st.sampled_from(["text", "text", "thinking", "partial_json", "signature"]))
    kind = {"partial_json": "input_json_delta"}.get(name, f"{name}_delta")
    delta = {"type": draw(st.sampled_from([kind, kind, kind, "other_delta"])), name: draw(WORDS)}
    return anthropic.event("content_block_delta", index=draw(st.sampled_from([0, 0, 1])), delta=delta)


@st.composite
def gemini_events(draw: st.DrawFn) -> bytes:
    part = draw(
        st.fixed_dictionaries({"text": WORDS}, optional={"thought": st.booleans()})
        | st.just({"functionCall": {"name": "f", "args": {"text": "x"}}})
    )
    return gemini.chunk(part, written=draw(st.none() | st.integers(0, 99)), thoughtsTokenCount=draw(NUMBERS))


SPECIAL = st.sampled_from(
    ['"', "\\", "{", "}", "[", ",", ":", "0", "1", " ", "\\u12", "\x00", "é", "e5", ".5"]
)


@st.composite
def mangled(draw: st.DrawFn, events: st.SearchStrategy[bytes]) -> bytes:
    """Damage an event, mostly not at all."""
    event = draw(events)
    if not draw(st.integers(0, 9)):
        return b"event: " + draw(st.sampled_from([b"error", b"ping", b"other"])) + b"\n" + event
    if draw(st.integers(0, 3)):
        return event
    text = event.decode()
    start = draw(st.integers(6, len(text) - 2))
    end = min(start + draw(st.integers(0, 3)), len(text) - 2)
    return (text[:start] + draw(SPECIAL | st.just("")) + text[end:]).encode()


def streams(events: st.SearchStrategy[bytes]) -> st.SearchStrategy[list[bytes]]:
    """Give streams in which many events are alike."""
    few = st.lists(mangled(events), min_size=1, max_size=4)
    picked = few.flatmap(lambda pool: st.lists(st.sampled_from(pool) | mangled(events), max_size=10))
    return picked | st.lists(mangled(events), max_size=10)


@pytest.mark.parametrize(
    ("dialect", "events"),
    [
        (OPENAI, openai_events()),
        (OPENAI, response_events()),
        (ANTHROPIC, anthropic_events()),
        (GEMINI, gemini_events()),
        (UNKNOWN, openai_events() | anthropic_events() | gemini_events()),
    ],
    ids=["chat", "responses", "anthropic", "gemini", "unknown"],
)
@settings(max_examples=80)
@given(data=st.data())
def test_recognising_is_parsing(
    dialect: Dialect, events: st.SearchStrategy[bytes], data: st.DataObject
) -> None:
    stream = data.draw(streams(events))
    status = data.draw(st.booleans())
    recognised = everything(dialect, stream, status=status)
    with without_shapes():
        assert recognised == everything(dialect, stream, status=status)


def counting(dialect: Dialect, events: Sequence[bytes]) -> tuple[int, int]:
    """Say how many of the content events were parsed, of how many."""
    parsed = 0
    reader = StreamReader(dialect)
    read = module.parse_data
    with pytest.MonkeyPatch.context() as patch:

        def counted(data: str) -> object:
            nonlocal parsed
            parsed += 1
            return read(data)

        patch.setattr(module, "parse_data", counted)
        kinds = [kind for event in events for kind, _ in reader.feed(event)]
    return parsed, kinds.count(EventKind.CONTENT)


@pytest.mark.parametrize(
    ("dialect", "events", "parsed"),
    [
        (OPENAI, [openai_chat.says(f" {n}") for n in range(50)], 1),
        (OPENAI, [openai_chat.says(f" {n}", obfuscation="x" * (n % 9 + 1)) for n in range(50)], 2),
        (
            OPENAI,
            [openai_chat.says("x", usage={"prompt_tokens": 1, "total_tokens": n}) for n in range(50)],
            2,
        ),
        (OPENAI, [openai_chat.chunk({"reasoning_content": f"{n}\n"}) for n in range(50)], 1),
        (
            OPENAI,
            [openai_chat.chunk({"tool_calls": [{"function": {"arguments": f'"{n}'}}]}) for n in range(50)],
            1,
        ),
        (
            OPENAI,
            [
                sse(
                    {
                        "type": "response.output_text.delta",
                        "sequence_number": n,
                        "delta": "x",
                        "obfuscation": f"y{n}",
                    }
                )
                for n in range(50)
            ],
            2,
        ),
        (ANTHROPIC, [anthropic.text(f" {n}").split(b"\n\n")[1] + b"\n\n" for n in range(50)], 1),
        (GEMINI, [gemini.says(f" {n}", written=n + 1) for n in range(50)], 2),
    ],
    ids=["chat", "obfuscated", "usage", "thinking", "arguments", "responses", "anthropic", "gemini"],
)
def test_what_is_alike_is_not_parsed(dialect: Dialect, events: list[bytes], parsed: int) -> None:
    assert counting(dialect, events) == (parsed, 50)


def test_an_event_of_another_type_is_not_alike() -> None:
    reader = StreamReader(OPENAI)
    event = openai_chat.says("Hello")
    for name, kind in [("", EventKind.CONTENT), ("x", EventKind.CONTENT), ("error", EventKind.ERROR)]:
        head = f"event: {name}\n".encode() if name else b""
        assert [found for found, _ in reader.feed(head + event)] == [kind]


def test_where_nothing_is_alike_it_is_not_tried_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    lessons = 0

    def counted(*args: Any) -> Shape | None:
        nonlocal lessons
        lessons += 1
        return learn(*args)

    monkeypatch.setattr(module, "learn", counted)
    reader = StreamReader(OPENAI)
    for n in range(100):
        reader.feed(openai_chat.says("x", **{f"field{n}": n}))
    assert lessons == module._MAX_LESSONS


def test_the_first_event_of_all_does_not_wait_for_its_shape_to_be_learnt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    learnt: list[object] = []
    monkeypatch.setattr(module, "learn", lambda *args: learnt.append(args))
    reader = StreamReader(OPENAI)
    assert [kind for kind, _ in reader.feed(openai_chat.says("Hello"))] == [EventKind.CONTENT]
    assert not learnt
    reader.feed(openai_chat.says(" there"))
    assert len(learnt) == 1


@given(
    start=st.sampled_from(["", "{", "{}", '{"a": 1}', " {}", "[1]", "\ufeff{}", "1"]),
    rest=st.text('{}[]" \t\r\n:,a1\\', max_size=6) | st.text(max_size=6),
)
def test_data_is_parsed_as_the_standard_library_does(start: str, rest: str) -> None:
    try:
        theirs = json.loads(start + rest)
    except ValueError:
        theirs = module.MALFORMED
    assert module.parse_data(start + rest) == theirs


def text(data: dict[str, Any]) -> str:
    return json.dumps(data)


SOURCE = text(CHUNK)


def matches(data: str, source: str = SOURCE, characters: int = 5) -> int:
    shape = learn("message", source, characters, None)
    assert shape is not None
    return shape.match(data)


@pytest.mark.parametrize(
    ("said", "characters"),
    [
        ("Hello", 5),
        (" there, world", 13),
        ("é", 1),
        ("你好", 2),
        ("\\n", 1),
        ('\\"', 1),
        ("\\u0041", 1),
        ("\\ud83d\\ude42", 1),
        ("\u2028", 1),
        ("", 0),
        ('"', 0),
        ("\\", 0),
        ("\\x", 0),
        ("\\u12", 0),
        ("a\nb", 0),
        ("\x00", 0),
        ('a","b":"c', 0),
    ],
)
def test_text_is_counted_as_json_means_it(said: str, characters: int) -> None:
    data = SOURCE.replace("Hello", said)
    assert matches(data) == characters
    try:
        parsed = json.loads(data)
    except ValueError:
        assert not characters
    else:
        assert len(parsed["choices"][0]["delta"]["content"]) == characters or not characters


@pytest.mark.parametrize("number", ["0", "7", "123456789012345678"])
def test_numbers_may_differ_once_they_have(number: str) -> None:
    first = learn("message", SOURCE, 5, None)
    other = SOURCE.replace("1741569952", "1741569953")
    assert first is not None
    assert not first.match(other)
    both = learn("message", other, 5, first)
    assert both is not None
    assert both.match(SOURCE.replace("1741569952", number)) == 5


@pytest.mark.parametrize("number", ["01", "-1", "1.5", "1e5", "²", "٣", "", "null", "1" * 5000, "1 1"])
def test_no_other_numbers_do(number: str) -> None:
    first = learn("message", SOURCE, 5, None)
    both = learn("message", SOURCE.replace("1741569952", "1741569953"), 5, first)
    assert both is not None
    assert both.match(SOURCE) == 5
    assert not both.match(SOURCE.replace("1741569952", number))


@pytest.mark.parametrize(
    ("source", "characters"),
    [
        (text({"content": "Hello", "text": "there"}), 5),  # one of them is not counted
        (text({"content": "Hello"}), 6),
        (text({"content": ""}), 0),
        (text({"role": "assistant"}), 0),
        ('{"content":"Hello","content":"there"}', 5),
        ('{"\\u0063ontent":"Hello","text":"there"}', 5),  # a name that hides
        (text({"content": "Hello", "input": {"text": "x"}}), 6),
        (text({"content": "x" * MAX_LEARNT}), MAX_LEARNT),
    ],
)
def test_what_cannot_be_told_apart_is_not_learnt(source: str, characters: int) -> None:
    assert learn("message", source, characters, None) is None


def test_a_shape_is_of_one_structure() -> None:
    for other in (
        SOURCE.replace("null", '"stop"'),
        SOURCE.replace('"index": 0', '"index": 1'),
        SOURCE.replace("gpt-4o", "gpt-4"),
        SOURCE.replace(": ", ":"),
        SOURCE + " ",
        SOURCE[:-1],
        SOURCE[: len(SOURCE) // 2],
        "",
        SOURCE.replace('"choices"', '"error": "x", "choices"'),
    ):
        assert not matches(other)
