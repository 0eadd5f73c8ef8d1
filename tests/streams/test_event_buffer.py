"""However a stream is cut, the same of it is passed on, in whole events, and nothing of it is lost."""

from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from resilient_llm.event_buffer import EventBuffer
from resilient_llm.providers import OPENAI, UNKNOWN, EventKind, StreamReader
from tests.streams.scripted import DONE, PING, ROLE, data, says, usage

BROKEN = b'data: {"choices": [{"del\n\n'
NO_JSON = b"data: x\ndata: y\n\n"
ERROR = data({"error": {"message": "no", "code": "overloaded"}})
EVENTS = st.lists(
    st.sampled_from(
        [
            ROLE,
            says("Hello"),
            says("\u4f60\u2028"),
            PING,
            BROKEN,
            usage(3, 4),
            DONE,
            b"\n",
            NO_JSON,
        ]
    )
)
ENDINGS = st.sampled_from([b"\n", b"\r\n", b"\r"])
CUTS = st.lists(st.integers(min_value=1, max_value=60), min_size=1)


def parts(stream: bytes, cuts: list[int]) -> list[bytes]:
    """Cut a stream up, in turns of these sizes."""
    found, at, turn = [], 0, 0
    while at < len(stream):
        size = cuts[turn % len(cuts)]
        found.append(stream[at : at + size])
        at, turn = at + size, turn + 1
    return found


def buffered(whole: bytes, cuts: list[int], **options: object) -> tuple[bytes, list[bytes], EventBuffer]:
    """Give what is passed on, in which pieces, and the buffer in the end."""
    reader = StreamReader(options.pop("dialect", OPENAI), max_event_size=500)  # type: ignore[arg-type]
    buffer = EventBuffer(reader, whole_events=True, **options)  # type: ignore[arg-type]
    passed: list[bytes] = []
    for part in parts(whole, cuts):
        taken = buffer.take(part)
        if taken is True:
            break
        if taken:
            passed.append(taken)
    return b"".join(passed), passed, buffer


@given(events=EVENTS, ending=ENDINGS, cuts=CUTS, held=st.integers(min_value=0, max_value=5))
def test_nothing_is_lost_or_changed(events: list[bytes], ending: bytes, cuts: list[int], held: int) -> None:
    whole = b"".join([says("Hi"), *events]).replace(b"\n", ending)
    reader = StreamReader(OPENAI)
    buffer = EventBuffer(reader, whole_events=True)
    passed: list[bytes] = []
    for number, part in enumerate(parts(whole, cuts)):
        if number < held:
            buffer.keep(part)
            continue
        ready = buffer.ready()
        taken = buffer.take(part)
        assert taken is not True
        passed += [ready, taken]
    assert b"".join(passed) + buffer.ready() + buffer.rest() == whole
    assert len(buffer) == 0


@given(events=EVENTS, ending=ENDINGS, cuts=CUTS)
def test_an_error_could_be_put_after_whatever_was_passed_on(
    events: list[bytes], ending: bytes, cuts: list[int]
) -> None:
    whole = b"".join(events).replace(b"\n", ending)
    _, passed, _ = buffered(whole, cuts)
    sofar = b""
    for part in passed:
        sofar += part
        reader = StreamReader(OPENAI)
        found = reader.feed(sofar + ERROR)
        assert found[-1][0] in (EventKind.ERROR, EventKind.META)  # of its own, after [DONE] too
        assert found[-1][1].data == json.dumps(json.loads(ERROR[6:]))


@given(events=EVENTS, ending=ENDINGS, cuts=CUTS)
def test_what_is_skipped_is_out_and_the_rest_is_there(
    events: list[bytes], ending: bytes, cuts: list[int]
) -> None:
    events = [event for event in events if event != DONE]  # nothing is read any more after that
    whole = b"".join(events).replace(b"\n", ending)
    passed, _, buffer = buffered(whole, cuts, skipped=(EventKind.MALFORMED,))
    left = b"".join(event for event in events if event not in (BROKEN, NO_JSON))
    # Of the blank line of a skipped event a half may stay, which is one of nobody's.
    assert (passed + buffer.rest()).translate(None, b"\r\n") == left.translate(None, b"\r\n")


@given(before=st.lists(st.sampled_from([ROLE, says("Hello"), PING])), after=EVENTS, ending=ENDINGS, cuts=CUTS)
def test_an_error_is_the_last_that_is_passed_on(
    before: list[bytes], after: list[bytes], ending: bytes, cuts: list[int]
) -> None:
    seen = b"".join([*before, ERROR]).replace(b"\n", ending)
    whole = seen + b"".join(after).replace(b"\n", ending)
    passed, _, buffer = buffered(whole, cuts)
    assert buffer.stop is not None
    assert passed.rstrip(b"\r\n") == seen.rstrip(b"\r\n")  # of its last line end a half may be missing
    unseen, _, buffer = buffered(whole, cuts, stop_before_error=True)
    assert unseen == b"".join(before).replace(b"\n", ending)


@given(after=EVENTS, cuts=CUTS)
def test_what_is_skipped_after_an_error_takes_nothing_of_it_away(after: list[bytes], cuts: list[int]) -> None:
    seen = says("Hello") + BROKEN + ERROR
    for cut in (cuts, [10_000]):  # which mostly brings all of it at once
        passed, _, buffer = buffered(
            seen + b"".join(after), cut, skipped=(EventKind.MALFORMED, EventKind.USAGE)
        )
        assert buffer.stop is not None
        assert passed == says("Hello") + ERROR


@given(before=st.lists(st.sampled_from([ROLE, says("Hello"), PING])), cuts=CUTS)
@settings(max_examples=50)
def test_an_event_that_is_too_large_is_not_passed_on_and_not_kept(
    before: list[bytes], cuts: list[int]
) -> None:
    whole = b"".join(before) + b"data: " + b"x" * 5000
    passed, _, buffer = buffered(whole, cuts)
    assert passed == b"".join(before)
    assert buffer.unreadable
    assert len(buffer) <= 500 + max(cuts)


def test_what_came_before_an_event_that_is_too_large_is_passed_on_though_they_come_together() -> None:
    passed, _, buffer = buffered(says("Hello") + b"data: " + b"x" * 1000, [2000])
    assert passed == says("Hello")
    assert buffer.unreadable
    assert buffer.stop == len(says("Hello"))


@given(whole=st.binary(max_size=500), cuts=CUTS)
def test_any_bytes(whole: bytes, cuts: list[int]) -> None:
    for dialect, whole_events in ((UNKNOWN, False), (OPENAI, True)):
        buffer = EventBuffer(StreamReader(dialect), whole_events=whole_events)
        passed = b""
        for part in parts(whole, cuts):
            taken = buffer.take(part)
            if taken is True:
                break
            passed += taken
        else:
            assert passed + buffer.rest() == whole or buffer.stop is not None
