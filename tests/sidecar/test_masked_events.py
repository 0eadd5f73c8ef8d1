"""However a stream is cut, none of this side's keys is passed on in what is none of the answer."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import pytest

from resilient_llm.event_buffer import EventBuffer
from resilient_llm.providers import ANTHROPIC, OPENAI, UNKNOWN, Dialect, EventKind, StreamReader
from resilient_llm.sidecar.masked import Secrets
from tests.streams.scripted import DONE, says

KEY = "sk-Of/the+sidecar-0123456789"
SECRETS = Secrets([KEY, "another-key-of-the-sidecar"])
PLAIN = KEY.encode()
HI = says("hi")

TOLD = {
    "a comment": b": %b\n\n",
    "a comment between events": b":%b\n",
    "a comment in an event of the answer": b": %b\n" + HI,
    "a comment behind its data": HI[:-1] + b":%b\n\n",
    "an id": b"id: %b\n" + HI,
    "a time to wait": b"retry: %b\n" + HI,
    "a field that nobody knows": b"note: %b\n" + HI,
    "a line that is a name": b"%b\n" + HI,
    "a type": b"event: %b\n" + HI,
    "a type that is there twice": b"event: %b\nevent: x\n" + HI,
    "a type of the same name": b"event: %b\n" + HI + b"event: %b\n" + HI,
    "a type of no event": b"event: %b\n\n",
    "another event": b'data: {"detail": "%b"}\n\n',
    "an error": b'data: {"error": {"message": "%b"}}\n\n',
    "no JSON": b"data: %b\n\n",
    "lines of data": b"data: {\ndata: %b\ndata: }\n\n",
    "an event that breaks off": b'data: {"detail": "%b"}',
    "a line that breaks off": b": %b",
}
SPELLED = {
    "as it is": PLAIN,
    "JSON": PLAIN.replace(b"/", rb"\/"),
    "JSON, escaped": b"".join(b"\\u%04x" % one for one in PLAIN),
    "JSON, some of it": PLAIN.replace(b"s", rb"\u0073"),
    "JSON in JSON": PLAIN.replace(b"/", rb"\\\/").replace(b"+", rb"\\u002B"),
    "URL": PLAIN.replace(b"/", b"%2F").replace(b"+", b"%2b"),
    "URL, escaped": b"".join(b"%%%02x" % one for one in PLAIN),
}
SPLIT = [PLAIN[:10] + end + b"data: " + PLAIN[10:] for end in (b"\n", b"\r", b"\r\n")]


def cuts(stream: bytes) -> Iterator[list[bytes]]:
    """Cut a stream in two at every byte, and into single ones."""
    yield from ([stream[:at], stream[at:]] for at in range(1, len(stream)))
    yield [bytes([one]) for one in stream]


def passed(parts: list[bytes], dialect: Dialect) -> bytes:
    buffer = EventBuffer(StreamReader(dialect), whole_events=dialect is not UNKNOWN, masked=SECRETS.masked)
    got = b""
    for part in parts:
        taken = buffer.take(part)
        if taken is True:
            return got
        got += taken
    buffer.reader.close()
    return got + buffer.rest()


def leaks(text: bytes) -> bool:
    """Tell whether some of the key is in a text, without going by what is to be tested."""
    joined = text.replace(b"\r", b"\n").replace(b"\n\n", b"\n").replace(b"\ndata: ", b"")
    plain = joined.replace(b"\\\\", b"\\")
    for one in set(PLAIN):
        for spelled in (b"%%%02x", b"%%%02X", b"\\u%04x", b"\\u%04X"):
            plain = plain.replace(spelled % one, bytes([one]))
    return any(PLAIN[:8] in one for one in (text, joined, plain, plain.replace(b"\\", b"")))


@pytest.mark.parametrize("dialect", [OPENAI, ANTHROPIC, UNKNOWN], ids=["OpenAI", "Anthropic", "unknown"])
@pytest.mark.parametrize("told", TOLD)
def test_a_key_is_masked_wherever_a_stream_is_cut(told: str, dialect: Dialect) -> None:
    if dialect is UNKNOWN and told in ("another event", "no JSON"):
        return  # an answer, for all that is known
    text = TOLD[told].replace(b"%b", PLAIN)
    for ending in (b"\n", b"\r\n", b"\r"):
        stream = (HI + text + HI + DONE).replace(b"\n", ending)
        if told.endswith("breaks off"):
            stream = stream[: stream.index(PLAIN) + len(PLAIN)]
        assert leaks(stream)
        for parts in cuts(stream):
            got = passed(parts, dialect)
            assert not leaks(got), parts
            assert b"***" in got
            assert got.startswith(HI.replace(b"\n", ending).rstrip())


@pytest.mark.parametrize("spelled", SPELLED)
@pytest.mark.parametrize("told", ["a comment", "an id", "a type", "another event", "no JSON"])
def test_however_it_is_spelled(told: str, spelled: str) -> None:
    stream = HI + TOLD[told].replace(b"%b", SPELLED[spelled]) + HI
    assert leaks(stream)
    for parts in cuts(stream):
        got = passed(parts, OPENAI)
        assert not leaks(got), got
        assert got.count(HI) >= 1


@pytest.mark.parametrize("split", SPLIT, ids=["LF", "CR", "CRLF"])
@pytest.mark.parametrize("told", ["no JSON", "another event", "lines of data", "an event that breaks off"])
def test_a_key_that_is_split_among_lines_is_masked(told: str, split: bytes) -> None:
    stream = HI + TOLD[told].replace(b"%b", split)
    stream += b"" if told.endswith("breaks off") else b"\n\n" + HI
    assert leaks(stream)
    for parts in cuts(stream):
        got = passed(parts, OPENAI)
        assert not leaks(got), got
        assert got.startswith(HI)


def test_what_has_no_key_is_what_it_was() -> None:
    stream = HI + b": ping\n\nid: 1\n" + HI + b'data: {\ndata: "a": "%2F\\u0073"\ndata: }\n\n' + HI + DONE
    for parts in cuts(stream):
        assert passed(parts, OPENAI) == stream


def test_answers_are_not_searched() -> None:
    stream = says(KEY) + HI
    for parts in cuts(stream):
        assert passed(parts, OPENAI) == stream


@pytest.mark.parametrize(
    "aside", [b"data: {}\n\n", b": %2F\n\n", b"id: 1\n", b'data: {"a":\ndata: "%b"}\n\n']
)
def test_nor_is_what_is_read_together_with_something_else(aside: bytes) -> None:
    before, after = says(f"a {KEY}") + aside.replace(b"%b", PLAIN), says(KEY) + DONE
    for parts in ([before + after], *cuts(before + after)):
        assert passed(parts, OPENAI) == before.replace(b'"' + PLAIN, b'"***') + after


def test_what_is_left_out_does_not_move_what_is_masked() -> None:
    bad, told = b"data: {\n\n", b'data: {"detail": "%b"}\n\n' % PLAIN
    stream = says(KEY) + told + bad + says(KEY) + told + bad + bad + told + says(KEY) + DONE
    for parts in ([stream], *cuts(stream)):
        buffer = EventBuffer(
            StreamReader(OPENAI), whole_events=True, skipped={EventKind.MALFORMED}, masked=SECRETS.masked
        )
        got = b"".join(taken for part in parts if (taken := buffer.take(part)) is not True)
        assert got == stream.replace(bad, b"").replace(b'"detail": "' + PLAIN, b'"detail": "***'), parts


@pytest.mark.parametrize("told", TOLD)
def test_nothing_of_a_key_in_a_compressed_stream_is_passed_on(told: str) -> None:
    text = TOLD[told].replace(b"%b", PLAIN)
    for at in range(1, len(text)):
        compressor = zlib.compressobj(wbits=31)
        parts = [
            compressor.compress(part) + compressor.flush(zlib.Z_SYNC_FLUSH)
            for part in (HI, text[:at], text[at:], HI)
        ]
        reader = StreamReader(OPENAI, headers=[(b"content-encoding", b"gzip")])
        buffer = EventBuffer(reader, whole_events=False, masked=SECRETS.masked)
        got = b""
        for part in parts:
            taken = buffer.take(part)
            assert taken is not True
            if buffer.leaks:
                break
            got += taken
        else:
            reader.close()
            rest = buffer.rest()
            got += b"" if buffer.leaks else rest
        assert buffer.leaks
        plain = zlib.decompressobj(wbits=31).decompress(got)
        assert plain.startswith(HI)
        assert not leaks(plain), at


def test_a_compressed_stream_without_a_key_is_passed_on_whole() -> None:
    stream = HI + b": ping\n\n" + HI + DONE
    for parts in cuts(stream):
        compressor = zlib.compressobj(wbits=31)
        reader = StreamReader(OPENAI, headers=[(b"content-encoding", b"gzip")])
        buffer = EventBuffer(reader, whole_events=False, masked=SECRETS.masked)
        sent = got = b""
        for part in parts:
            read = compressor.compress(part) + compressor.flush(zlib.Z_SYNC_FLUSH)
            sent += read
            taken = buffer.take(read)
            assert taken is not True
            got += taken
            if reader.boundary == reader.offset:
                assert got == sent, "nothing is held between events"
        reader.close()
        assert got + buffer.rest() == sent
        assert not buffer.leaks
