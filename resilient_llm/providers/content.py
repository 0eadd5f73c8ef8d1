"""Decode a copy of a body to look inside it, whole or as it comes.

For reading only: what is forwarded are the bytes as they came, so nothing here re-encodes, raises, or
produces more than it was allowed to.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Mapping
from enum import Enum
from functools import lru_cache
from importlib import import_module
from types import ModuleType
from typing import Protocol

from resilient_llm.message import Headers, header

__all__ = ["MAX_DECODED", "ContentDecoder", "decode_body"]

MAX_DECODED = 1 << 20
"""How many bytes of a decoded body are worth looking at, by default."""

MAX_DECODED_READ = 16 << 20
"""How many bytes one read of a compressed stream may become, by default."""

_CONTENT_ENCODING = b"content-encoding"
_MAX_ENCODINGS = 3


def decode_body(headers: Headers, body: bytes, *, max_size: int = MAX_DECODED) -> bytes | None:
    """Undo the content encodings of `body` as its headers name them.

    Gives at most `max_size` bytes, and what there is of a body that was cut off. `None` when the bytes are
    not what the headers say, or an encoding is unknown or its library is not installed: brotli or brotlicffi
    (1.2 on, older ones cannot be bounded) for `br`; Python 3.14, zstandard or backports.zstd for `zstd`.
    """
    if header(headers, _CONTENT_ENCODING) is None:  # as most are that a client asks for
        return body[:max_size]
    try:
        for step in _steps(headers):
            body = step.decode(body, max_size)
    except Exception:  # noqa: BLE001 - each library has errors of its own, and none of them may surface
        return None
    return body[:max_size]


class ContentDecoder:
    """Undo the content encodings of a stream, read by read.

    `max_size` bounds what one read may become. `blind` is set, for good, when the stream cannot be read, for
    any reason that makes `decode_body` give `None` or because a read became too large; `false` is set besides
    when the bytes are not what the headers say, which nobody else could read either. With `strict` they are not
    where something comes after the end of an encoding, either.
    """

    __slots__ = ("_fed", "_max_size", "_steps", "_strict", "blind", "false")

    def __init__(self, headers: Headers, *, max_size: int = MAX_DECODED_READ, strict: bool = False) -> None:
        self._max_size = max_size
        self._strict = strict
        self._fed = False
        self._steps: list[_Step] = []
        self.blind = False
        self.false = False
        try:
            self._steps = _steps(headers)
        except Exception:  # noqa: BLE001 - as in decode_body
            self.blind = True

    @property
    def identity(self) -> bool:
        """Tell whether there is nothing to undo."""
        return not self._steps and not self.blind

    @property
    def cut(self) -> bool:
        """Tell whether what has come is no whole body, as far as its encodings can tell; nothing at all is whole."""
        return self._fed and not self.blind and any(step.state is _State.WITHIN for step in self._steps)

    def feed(self, data: bytes) -> bytes:
        """Give what the next bytes decode to, as far as that is known by now; nothing once `blind`."""
        if self.blind:
            return b""
        self._fed = self._fed or bool(data)
        try:
            for step in self._steps:
                data = step.decode(data, self._max_size + 1)
                if len(data) > self._max_size:
                    self.blind = True
                    break
                if self._strict and step.state is _State.BEYOND:
                    self.blind = self.false = True
                    break
        except Exception:  # noqa: BLE001 - as in decode_body
            self.blind = self.false = True
        return b"" if self.blind else data


class _State(Enum):
    """Say where in an encoding what has come ends."""

    WITHIN = "within"
    """Before its end: more has to come."""
    END = "end"
    """At its end, or nobody can tell."""
    BEYOND = "beyond"
    """After it, with something that is no part of it."""


class _Step(Protocol):
    """Undo one encoding."""

    @property
    def state(self) -> _State:
        """Tell where what has come ends, if nothing of it was more than was asked for."""
        ...

    def decode(self, data: bytes, max_size: int) -> bytes:
        """Give what `data` decodes to; at most `max_size` bytes of it, after which nothing is right any more."""
        ...


class _Gzip:
    def __init__(self) -> None:
        self._member: zlib._Decompress | None = zlib.decompressobj(zlib.MAX_WBITS | 16)
        self._padding = False

    @property
    def state(self) -> _State:
        if self._padding:
            return _State.BEYOND
        return _State.END if self._member is None else _State.WITHIN

    def decode(self, data: bytes, max_size: int) -> bytes:
        decoded = b""
        while data and not self._padding and len(decoded) < max_size:
            if self._member is None:  # after a member comes another, or something that is none
                self._padding = not data.startswith(b"\x1f")
                self._member = zlib.decompressobj(zlib.MAX_WBITS | 16)
                continue
            decoded += self._member.decompress(data, max_size - len(decoded))
            data = self._member.unused_data
            if self._member.eof:
                self._member = None
        return decoded


class _Deflate:
    def __init__(self) -> None:
        self._decompressor = zlib.decompressobj()
        self._head: bytes | None = b""
        self._padding = False

    @property
    def state(self) -> _State:
        if self._padding or self._decompressor.unused_data:
            return _State.BEYOND
        return _State.END if self._decompressor.eof else _State.WITHIN

    def decode(self, data: bytes, max_size: int) -> bytes:
        if self._decompressor.eof:
            self._padding = self._padding or bool(data)
            return b""
        if self._head is None:
            return self._decompressor.decompress(data, max_size)
        data = self._head + data
        if len(data) < 2:  # zlib's header, which some servers leave out, as the name of the encoding suggests
            self._head = data
            return b""
        self._head = None
        try:
            return self._decompressor.decompress(data, max_size)
        except zlib.error:
            self._decompressor = zlib.decompressobj(-zlib.MAX_WBITS)
            return self._decompressor.decompress(data, max_size)


class _Brotli:
    def __init__(self) -> None:
        self._decompressor = _library("brotli", "brotlicffi").Decompressor()

    @property
    def state(self) -> _State:  # what comes after the end is an error of its own
        return _State.END if self._decompressor.is_finished() else _State.WITHIN

    def decode(self, data: bytes, max_size: int) -> bytes:
        decoded = b""
        # It gives about as much as it is asked for, and keeps the rest to itself.
        while part := self._decompressor.process(data, output_buffer_limit=max_size):
            decoded += part
            if len(decoded) >= max_size:
                break
            data = b""
        return decoded[:max_size]


class _StandardZstd:
    def __init__(self, library: ModuleType) -> None:
        self._library = library
        self._frame = library.ZstdDecompressor()

    @property
    def state(self) -> _State:  # what comes after a frame is another one, or an error
        return _State.END if self._frame.eof else _State.WITHIN

    def decode(self, data: bytes, max_size: int) -> bytes:
        decoded = b""
        while data and len(decoded) < max_size:
            if self._frame.eof:
                self._frame = self._library.ZstdDecompressor()
            decoded += self._frame.decompress(data, max_length=max_size - len(decoded))
            data = self._frame.unused_data if self._frame.eof else b""
        return decoded


class _Zstandard:
    def __init__(self, library: ModuleType) -> None:
        self._decoded = bytearray()
        self._max_size = 0
        # Its other ways to decode read by read have no limit at all.
        self._writer = library.ZstdDecompressor().stream_writer(self, closefd=False)

    @property
    def state(self) -> _State:  # it does not tell
        return _State.END

    def decode(self, data: bytes, max_size: int) -> bytes:
        self._decoded.clear()
        self._max_size = max_size
        with contextlib.suppress(_FullError):
            self._writer.write(data)
        return bytes(self._decoded[:max_size])

    def write(self, data: bytes) -> int:
        """Take a part of what is decoded."""
        self._decoded += data
        if len(self._decoded) >= self._max_size:
            raise _FullError
        return len(data)


class _FullError(Exception):
    """Nobody wants to see more."""


def _zstd() -> _Step:
    library = _library("compression.zstd", "zstandard", "backports.zstd")
    return _Zstandard(library) if library.__name__ == "zstandard" else _StandardZstd(library)


@lru_cache
def _library(*names: str) -> ModuleType:
    for name in names:
        try:
            return import_module(name)
        except ImportError:
            continue
    raise ImportError(names)


_STEPS: Mapping[bytes, Callable[[], _Step]] = {
    b"gzip": _Gzip,
    b"x-gzip": _Gzip,
    b"deflate": _Deflate,
    b"br": _Brotli,
    b"zstd": _zstd,
}


def _steps(headers: Headers) -> list[_Step]:
    """Give what undoes the encodings, in the order in which that is done."""
    if header(headers, _CONTENT_ENCODING) is None:
        return []
    values = [value for name, value in headers if name.lower() == _CONTENT_ENCODING]
    encodings = [token.strip().lower() for token in b",".join(values).split(b",")]
    encodings = [encoding for encoding in encodings if encoding not in (b"", b"identity")]
    if len(encodings) > _MAX_ENCODINGS:
        raise ValueError(encodings)
    return [_STEPS[encoding]() for encoding in reversed(encodings)]
