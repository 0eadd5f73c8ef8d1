"""Bodies in every encoding, whole, cut, wrong and far too large."""

import gzip
import sys
import zlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_llm.providers import content, decode_body

Compress: TypeAlias = Callable[[bytes], bytes]

BODY = b'{"error": {"message": "m"}}' * 40


def encoded_with(*encodings: bytes) -> list[tuple[bytes, bytes]]:
    return [(b"Content-Encoding", encoding) for encoding in encodings]


def deflate_raw(body: bytes) -> bytes:
    compressor = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return compressor.compress(body) + compressor.flush()


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ([], BODY),
        ([(b"content-type", b"application/json")], BODY),
        (encoded_with(b"identity"), BODY),
        (encoded_with(b""), BODY),
        (encoded_with(b"gzip"), gzip.compress(BODY)),
        (encoded_with(b" X-GZIP "), gzip.compress(BODY)),
        (encoded_with(b"deflate"), zlib.compress(BODY)),
        (encoded_with(b"deflate"), deflate_raw(BODY)),
        (encoded_with(b"deflate, gzip"), gzip.compress(zlib.compress(BODY))),
        (encoded_with(b"deflate", b"gzip"), gzip.compress(zlib.compress(BODY))),
    ],
)
def test_a_body_is_decoded(headers: list[tuple[bytes, bytes]], body: bytes) -> None:
    assert decode_body(headers, body) == BODY


def test_brotli_is_decoded_where_it_is_installed() -> None:
    brotli = pytest.importorskip("brotli")
    compressed = brotli.compress(BODY)
    assert decode_body(encoded_with(b"br"), compressed) == BODY
    assert decode_body(encoded_with(b"br"), brotli.compress(bytes(10_000_000)), max_size=100) == bytes(100)
    assert decode_body(encoded_with(b"br"), b"no brotli at all") is None


def test_zstd_is_decoded_where_it_is_installed() -> None:
    zstandard = pytest.importorskip("zstandard")
    compressed = zstandard.ZstdCompressor().compress(BODY)
    assert decode_body(encoded_with(b"zstd"), compressed) == BODY
    bomb = zstandard.ZstdCompressor().compress(bytes(10_000_000))
    assert decode_body(encoded_with(b"zstd"), bomb, max_size=100) == bytes(100)
    assert decode_body(encoded_with(b"zstd"), b"no zstd at all") is None


class StandardDecompressor:
    """The shape of Python 3.14's compression.zstd."""

    eof = False

    def decompress(self, body: bytes, max_length: int) -> bytes:
        return zlib.decompressobj().decompress(body, max_length)


@pytest.fixture
def standard_zstd(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    module = ModuleType("compression.zstd")
    module.ZstdDecompressor = StandardDecompressor  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "compression", ModuleType("compression"))
    monkeypatch.setitem(sys.modules, "compression.zstd", module)
    content._library.cache_clear()
    yield
    content._library.cache_clear()


@pytest.mark.usefixtures("standard_zstd")
def test_zstd_of_the_standard_library_comes_first() -> None:
    assert decode_body(encoded_with(b"zstd"), zlib.compress(BODY)) == BODY


@pytest.fixture
def no_libraries(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("brotli", "brotlicffi", "zstandard", "compression.zstd", "backports.zstd"):
        monkeypatch.setitem(sys.modules, name, None)
    content._library.cache_clear()
    yield
    content._library.cache_clear()


@pytest.mark.usefixtures("no_libraries")
@pytest.mark.parametrize("encoding", [b"br", b"zstd"])
def test_an_encoding_whose_library_is_missing_cannot_be_read(encoding: bytes) -> None:
    assert decode_body(encoded_with(encoding), BODY) is None


@pytest.mark.parametrize(
    "encoding", [b"gzip", b"deflate", b"compress", b"gzip;q=1", b"gzip, gzip, gzip, gzip"]
)
def test_what_is_not_what_it_says_cannot_be_read(encoding: bytes) -> None:
    assert decode_body(encoded_with(encoding), BODY) is None


def test_a_cut_body_is_read_as_far_as_it_goes() -> None:
    compressed = gzip.compress(bytes(range(256)) * 100, compresslevel=0)
    start = decode_body(encoded_with(b"gzip"), compressed[: len(compressed) // 2])
    assert start
    assert (bytes(range(256)) * 100).startswith(start)


@pytest.mark.parametrize("compress", [gzip.compress, zlib.compress])
def test_a_bomb_goes_off_up_to_the_limit_only(compress: Compress) -> None:
    encoding = b"gzip" if compress is gzip.compress else b"deflate"
    assert decode_body(encoded_with(encoding), compress(bytes(10_000_000)), max_size=1000) == bytes(1000)
    twice = decode_body(
        encoded_with(encoding, encoding), compress(compress(bytes(10_000_000))), max_size=1000
    )
    assert twice is not None
    assert len(twice) <= 1000


def test_a_plain_body_is_held_to_the_limit_too() -> None:
    assert decode_body([], BODY, max_size=10) == BODY[:10]


@given(
    encoding=st.sampled_from([b"gzip", b"deflate", b"br", b"zstd", b"gzip, br"]) | st.binary(max_size=20),
    body=st.binary(max_size=200) | st.binary(max_size=200).map(gzip.compress),
    max_size=st.integers(1, 100),
)
def test_nothing_raises_and_nothing_grows(encoding: bytes, body: bytes, max_size: int) -> None:
    decoded = decode_body(encoded_with(encoding), body, max_size=max_size)
    assert decoded is None or len(decoded) <= max_size


def read(encoding: bytes, body: bytes, size: int, *, strict: bool) -> tuple[bytes, content.ContentDecoder]:
    decoder = content.ContentDecoder(encoded_with(encoding), strict=strict)
    return b"".join(decoder.feed(body[at : at + size]) for at in range(0, len(body), size)), decoder


def brotli(body: bytes) -> bytes:
    compressed: bytes = pytest.importorskip("brotli").compress(body)
    return compressed


STRICT: list[tuple[bytes, Compress]] = [
    (b"gzip", gzip.compress),
    (b"deflate", zlib.compress),
    (b"deflate", deflate_raw),
    (b"br", brotli),
    (b"gzip, gzip", lambda body: gzip.compress(gzip.compress(body))),
    (b"gzip", lambda body: gzip.compress(body[:100]) + gzip.compress(body[100:])),
]


@pytest.mark.parametrize("size", [1, 7, 1_000_000])
@pytest.mark.parametrize(("encoding", "compress"), STRICT)
def test_a_strict_reader_takes_what_is_whole_and_nothing_else(
    encoding: bytes, compress: Compress, size: int
) -> None:
    body = compress(BODY)
    decoded, decoder = read(encoding, body, size, strict=True)
    assert (decoded, decoder.false, decoder.cut) == (BODY, False, False)
    for missing in (1, 5):
        _, decoder = read(encoding, body[:-missing], size, strict=True)
        assert decoder.cut
        assert not decoder.false
    for more in (b"x", b"\0" * 9, BODY):
        _, decoder = read(encoding, body + more, size, strict=True)
        assert decoder.false
    _, decoder = read(encoding, compress(BODY[:27])[:-1], size, strict=True)
    assert decoder.cut


@pytest.mark.parametrize("encoding", [b"gzip", b"deflate"])
def test_others_read_over_what_comes_after_the_end(encoding: bytes) -> None:
    body = gzip.compress(BODY) if encoding == b"gzip" else zlib.compress(BODY)
    decoded, decoder = read(encoding, body + b"padding", 7, strict=False)
    assert (decoded, decoder.false, decoder.cut) == (BODY, False, False)


def test_nothing_at_all_is_not_cut() -> None:
    assert not read(b"gzip", b"", 1, strict=True)[1].cut
