"""Streams in every encoding: in reads of any size, wrong from the start, going wrong, and far too large."""

import gzip
import random
import zlib
from collections.abc import Callable, Iterable
from types import ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient_llm.outcome import CANCELLED, Verdict
from resilient_llm.providers import OPENAI, ContentDecoder, StreamReader
from tests.providers.streams import openai_chat
from tests.providers.streams.example import sse
from tests.providers.test_content import deflate_raw, encoded_with

STREAM = openai_chat.WHOLE[0].stream
BOMB = bytes(4_000_000)


def flushed(stream: bytes, *, wbits: int) -> list[bytes]:
    """Compress a stream event by event, as servers do that want each to arrive."""
    compressor = zlib.compressobj(wbits=wbits)
    chunks = [
        compressor.compress(event + b"\n\n") + compressor.flush(zlib.Z_SYNC_FLUSH)
        for event in stream.split(b"\n\n")[:-1]
    ]
    return [*chunks, compressor.flush()]


def members(stream: bytes) -> list[bytes]:
    return [gzip.compress(event + b"\n\n") for event in stream.split(b"\n\n")[:-1]]


def brotli(stream: bytes) -> list[bytes]:
    library = pytest.importorskip("brotli")
    compressor = library.Compressor()
    parts = [compressor.process(event + b"\n\n") + compressor.flush() for event in stream.split(b"\n\n")[:-1]]
    return [*parts, compressor.finish()]


def zstd(stream: bytes) -> list[bytes]:
    library = pytest.importorskip("zstandard")
    compressor = library.ZstdCompressor().compressobj()
    parts = [
        compressor.compress(event + b"\n\n") + compressor.flush(library.COMPRESSOBJ_FLUSH_BLOCK)
        for event in stream.split(b"\n\n")[:-1]
    ]
    return [*parts, compressor.flush()]


def zstd_frames(stream: bytes) -> list[bytes]:
    library = pytest.importorskip("zstandard")
    return [library.ZstdCompressor().compress(event + b"\n\n") for event in stream.split(b"\n\n")[:-1]]


class StandardDecompressor:
    """What Python 3.14's compression.zstd does, with another compression: one frame, and not a byte more."""

    def __init__(self) -> None:
        self._decompressor = zlib.decompressobj()

    @property
    def eof(self) -> bool:
        return self._decompressor.eof

    @property
    def unused_data(self) -> bytes:
        return self._decompressor.unused_data

    def decompress(self, data: bytes, max_length: int) -> bytes:
        if self.eof:
            raise EOFError("already at the end of a frame")
        return self._decompressor.decompress(data, max_length)


def test_zstd_of_the_standard_library_reads_one_frame_after_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = ModuleType("compression.zstd")
    module.ZstdDecompressor = StandardDecompressor  # type: ignore[attr-defined]
    monkeypatch.setattr("resilient_llm.providers.content._library", lambda *_: module)
    frames = [zlib.compress(event + b"\n\n") for event in STREAM.split(b"\n\n")[:-1]]
    whole = b"".join(frames)
    for reads in (frames, [whole], [whole[at : at + 1] for at in range(len(whole))]):
        assert b"".join(decode(b"zstd", reads)) == STREAM
    decoder = ContentDecoder(encoded_with(b"zstd"), max_size=1000)
    decoder.feed(zlib.compress(BOMB))
    assert decoder.blind


ENCODERS: dict[str, tuple[bytes, Callable[[bytes], list[bytes]]]] = {
    "gzip": (b"gzip", lambda stream: flushed(stream, wbits=31)),
    "gzip in one piece": (b"gzip", lambda stream: [gzip.compress(stream)]),
    "gzip in members": (b"x-gzip", members),
    "gzip with padding": (b"gzip", lambda stream: [gzip.compress(stream), b"\0" * 64]),
    "deflate": (b"deflate", lambda stream: flushed(stream, wbits=15)),
    "deflate without a header": (b"deflate", lambda stream: flushed(stream, wbits=-15)),
    "deflate and more": (b"deflate", lambda stream: [zlib.compress(stream), b"more"]),
    "deflate in gzip": (b"deflate, gzip", lambda stream: [gzip.compress(deflate_raw(stream))]),
    "br": (b"br", brotli),
    "zstd": (b"zstd", zstd),
    "zstd in frames": (b"zstd", zstd_frames),
    "identity": (b"identity", lambda stream: [stream]),
}


def decode(encoding: bytes, reads: Iterable[bytes]) -> list[bytes]:
    decoder = ContentDecoder(encoded_with(encoding))
    decoded = [decoder.feed(read) for read in reads]
    assert not decoder.blind
    return decoded


@pytest.mark.parametrize("name", ENCODERS)
def test_a_stream_is_decoded_as_it_comes(name: str) -> None:
    encoding, encode = ENCODERS[name]
    chunks = encode(STREAM)
    decoded = decode(encoding, chunks)
    assert b"".join(decoded) == STREAM
    if len(chunks) > 2:
        events = [event + b"\n\n" for event in STREAM.split(b"\n\n")[:-1]]
        assert decoded[: len(events)] == events  # nothing is held back that could be known
    whole = b"".join(chunks)
    assert b"".join(decode(encoding, [whole[at : at + 1] for at in range(len(whole))])) == STREAM


@settings(max_examples=30)
@given(name=st.sampled_from([name for name in ENCODERS if name[:2] not in ("br", "zs")]), data=st.data())
def test_however_it_is_cut(name: str, data: st.DataObject) -> None:
    encoding, encode = ENCODERS[name]
    whole = b"".join(encode(STREAM))
    ends = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=9)))
    reads = [whole[start:end] for start, end in zip([0, *ends], [*ends, len(whole)], strict=True)]
    assert b"".join(decode(encoding, reads)) == STREAM


def brotli_bomb() -> bytes:
    return bytes(pytest.importorskip("brotli").compress(BOMB))


def zstd_bomb() -> bytes:
    return bytes(pytest.importorskip("zstandard").ZstdCompressor().compress(BOMB))


@pytest.mark.parametrize(
    ("encoding", "bomb"),
    [
        (b"gzip", lambda: gzip.compress(BOMB)),
        (b"gzip, gzip", lambda: gzip.compress(gzip.compress(BOMB))),
        (b"deflate", lambda: zlib.compress(BOMB)),
        (b"deflate", lambda: deflate_raw(BOMB)),
        (b"br", brotli_bomb),
        (b"zstd", zstd_bomb),
    ],
)
def test_a_bomb_does_not_go_off(encoding: bytes, bomb: Callable[[], bytes]) -> None:
    packed = bomb()
    decoder = ContentDecoder(encoded_with(encoding), max_size=100_000)
    assert decoder.feed(packed) == b""
    assert decoder.blind
    assert decoder.feed(packed) == b""
    decoder = ContentDecoder(encoded_with(encoding), max_size=len(BOMB))
    assert len(decoder.feed(packed)) == len(BOMB)
    assert not decoder.blind


@pytest.mark.parametrize("encoding", [b"compress", b"gzip;q=1", b"gzip, gzip, gzip, gzip", b"br", b"zstd"])
def test_what_is_unknown_is_not_read(encoding: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resilient_llm.providers.content._library", lambda *_: None)
    reader = StreamReader(OPENAI, headers=encoded_with(encoding))
    assert reader.blind
    assert reader.encoded
    assert not reader.has_content
    assert reader.feed(b"") == []
    assert reader.close().error_type == "empty_stream"
    reader = StreamReader(OPENAI, headers=encoded_with(encoding))
    assert reader.feed(b"whatever") == []
    assert reader.has_content
    assert not reader.complete
    assert reader.close().ok
    assert reader.close().usage is None


@pytest.mark.parametrize("encoding", [b"gzip", b"deflate"])
def test_what_is_not_what_it_says_is_not_read(encoding: bytes) -> None:
    reader = StreamReader(OPENAI, headers=encoded_with(encoding))
    assert reader.feed(STREAM) == []
    assert reader.blind
    outcome = reader.close()
    assert (outcome.verdict, outcome.error_type) == (Verdict.FAILURE, "unexpected_body")
    assert outcome.retryable


def test_a_stream_that_goes_wrong_on_the_way_is_read_no_further() -> None:
    noise = random.Random(1).randbytes(200)
    chunks = flushed(STREAM, wbits=31)
    reader = StreamReader(OPENAI, headers=encoded_with(b"gzip"))
    for chunk in chunks[:2]:
        reader.feed(chunk)
    assert not reader.blind
    assert reader.feed(noise) == []
    assert reader.blind
    assert reader.answer.model == openai_chat.MODEL
    assert reader.interrupted(CANCELLED).error_type == "cancelled"


def test_an_error_counts_even_if_the_rest_cannot_be_read() -> None:
    chunks = flushed(sse({"error": {"code": "rate_limit_exceeded"}}), wbits=31)
    reader = StreamReader(OPENAI, headers=encoded_with(b"gzip"))
    reader.feed(chunks[0])
    reader.feed(b"noise" * 100)
    assert reader.close().error_type == "rate_limit_exceeded"


def test_a_stream_without_an_encoding_is_left_alone() -> None:
    for headers in ([], encoded_with(b"identity"), encoded_with(b"")):
        assert ContentDecoder(headers).identity
        assert not StreamReader(OPENAI, headers=headers).encoded
    assert not ContentDecoder(encoded_with(b"x")).identity


def test_padding_is_not_kept() -> None:
    decoder = ContentDecoder(encoded_with(b"gzip"))
    decoder.feed(gzip.compress(b"x"))
    for _ in range(100):
        assert decoder.feed(b"\0" * 10_000) == b""
    member = decoder._steps[0]._member  # type: ignore[attr-defined]
    assert member.unused_data == b""


@given(
    encoding=st.sampled_from([b"gzip", b"deflate", b"br", b"zstd", b"gzip, deflate", b"x"])
    | st.binary(max_size=20),
    reads=st.lists(st.binary(max_size=60) | st.binary(max_size=60).map(gzip.compress), max_size=5),
    max_size=st.integers(0, 100),
)
def test_nothing_raises_and_nothing_grows(encoding: bytes, reads: list[bytes], max_size: int) -> None:
    decoder = ContentDecoder(encoded_with(encoding), max_size=max_size)
    for read in reads:
        assert len(decoder.feed(read)) <= max_size or decoder.identity
