"""What a client sends, read and checked before anything is done for it.

One reader of the server's `receive`, bounded in size and time. What a request is for, and who it is from, is decided
elsewhere.
"""

from __future__ import annotations

import math
import re
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING
from urllib.parse import unquote_to_bytes

import anyio
from starlette.types import Message, Receive

from resilient_llm.message import Headers
from resilient_llm.providers import ContentDecoder
from resilient_llm.sidecar.refusal import RefusedError

if TYPE_CHECKING:
    from resilient_llm.sidecar.disconnect import Connection

__all__ = ["ClientBody", "ClientGoneError", "read_body", "safe_path", "safe_query"]

_PATH = re.compile(rb"/(?:[A-Za-z0-9._~!$&'()*+,;=:@/-]|%[0-9A-Fa-f]{2})*")
_QUERY = re.compile(rb"(?:[A-Za-z0-9._~!$&'()*+,;=:@/?\[\]|-]|%[0-9A-Fa-f]{2})*")
_BEFORE_A_MODEL = re.compile(rb"/(?:[^/]+/)*?models?/")
_SLASH = re.compile(rb"%2[Ff]")
_NOT_IN_A_SEGMENT = re.compile(rb"[\x00-\x1f\x7f/\\]")
_ENCODINGS = frozenset({b"gzip", b"x-gzip", b"deflate", b"br", b"zstd", b"identity", b""})


class ClientGoneError(Exception):
    """The client left while it sent its request."""


async def read_body(
    receive: Receive,
    headers: Headers,
    first: Mapping[bytes, bytes],
    *,
    max_size: int,
    patience: float,
    at_most: float = math.inf,
    connection: Connection | None = None,
) -> bytes:
    """Read all of a body, and undo its encoding; `first` has the first value of each of the headers.

    Raises `RefusedError`: 413 for more than `max_size` bytes, as they come or decoded, 408 when the next part does not
    come in `patience` seconds, or the last in `at_most`, 415 for an unknown encoding, 400 for a wrong one; and
    `ClientGoneError`.
    """
    _check_length(first, max_size)
    decoder = _decoder(headers, max_size) if b"content-encoding" in first else None
    chunks: list[bytes] = []
    size = 0
    more = True
    last = 0.0
    while more:
        if connection is not None and connection.has_whole_body():
            message = await receive()
        else:
            last = last or anyio.current_time() + at_most
            message = await _in_time(receive, min(patience, last - anyio.current_time()))
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        chunk: bytes = message.get("body", b"")
        more = message.get("more_body", False)
        if decoder is not None and chunk:
            chunk = decoder.feed(chunk)
            if decoder.false:
                raise _wrongly_encoded()
            if decoder.blind:
                raise _too_large(max_size)
        size += len(chunk)
        if size > max_size:
            raise _too_large(max_size)
        chunks.append(chunk)
    if decoder is not None and decoder.cut:
        raise _wrongly_encoded()
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


class ClientBody:
    """Give a body as it comes, undecoded, to whoever passes it on; it can be read once.

    Raises `RefusedError`: 413 for one that is said to have more than `max_size` bytes, or has, 408 when the next part
    does not come in `patience` seconds; and `ClientGoneError`.
    """

    def __init__(
        self, receive: Receive, first: Mapping[bytes, bytes], *, max_size: int, patience: float
    ) -> None:
        _check_length(first, max_size)
        self._receive = receive
        self._max_size = max_size
        self._patience = patience
        self._size = 0
        self.complete = False
        """Whether all of it was read."""

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        if self.complete:
            raise StopAsyncIteration
        message = await _in_time(self._receive, self._patience)
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        self.complete = not message.get("more_body", False)
        part: bytes = message.get("body", b"")
        self._size += len(part)
        if self._size > self._max_size:
            raise _too_large(self._max_size)
        return part


def _check_length(first: Mapping[bytes, bytes], max_size: int) -> None:
    declared = first.get(b"content-length")
    if declared is not None and declared.isdigit() and int(declared[:20]) > max_size:
        raise _too_large(max_size)


async def _in_time(receive: Receive, patience: float) -> Message:
    with anyio.move_on_after(patience):
        return await receive()
    raise RefusedError(408, "request_timeout", "The body of the request did not come in time.", _CLOSE)


def safe_path(raw: bytes) -> str:
    """Give a path of plain segments; raises `RefusedError` for any that could be taken for another.

    SDKs write the slash in the name of a model as `%2F`, which is a slash there: whoever takes it for one gets plain
    segments too, so it goes on as it is.
    """
    path = raw
    before = _BEFORE_A_MODEL.match(raw)
    if before is not None:
        path = before[0] + _SLASH.sub(b"/", raw[before.end() :])
    segments = path.split(b"/")[1:]
    if _PATH.fullmatch(raw) is None or any(_is_trick(segment) for segment in segments[:-1]):
        raise _bad_path()
    if segments[-1] and _is_trick(segments[-1]):
        raise _bad_path()
    return raw.decode("ascii")


def safe_query(raw: bytes) -> str:
    """Give a query; raises `RefusedError` for what is none."""
    if not raw:
        return ""
    if _QUERY.fullmatch(raw) is None:
        raise RefusedError(400, "invalid_query", "The query of the request has characters that no URL has.")
    return raw.decode("ascii")


def _is_trick(segment: bytes) -> bool:
    decoded = segment
    for _ in range(3):  # %252e: some decode twice
        if decoded.partition(b";")[0] in (b"", b".", b"..") or _NOT_IN_A_SEGMENT.search(decoded):
            return True  # "..;a" is ".." to some
        again = unquote_to_bytes(decoded)
        if again == decoded:
            return any(octet >= 0xF5 or octet in (0xC0, 0xC1) for octet in decoded)  # %c0%ae: "." to some
        decoded = again
    return True


def _decoder(headers: Headers, max_size: int) -> ContentDecoder | None:
    values = [value for name, value in headers if name == b"content-encoding"]
    tokens = [token.strip().lower() for token in b",".join(values).split(b",")]
    unsupported = RefusedError(
        415,
        "unsupported_encoding",
        "This content-encoding is not supported.",
        [(b"accept-encoding", b"gzip, deflate")],
    )
    if not _ENCODINGS.issuperset(tokens):
        raise unsupported
    decoder = ContentDecoder(headers, max_size=max_size, strict=True)
    if decoder.blind:
        raise unsupported
    return None if decoder.identity else decoder


_CLOSE: Headers = [(b"connection", b"close")]


def _too_large(max_size: int) -> RefusedError:
    return RefusedError(
        413, "request_too_large", f"The body of the request has more than {max_size} bytes.", _CLOSE
    )


def _wrongly_encoded() -> RefusedError:
    return RefusedError(400, "invalid_encoding", "The body is not what its content-encoding says.")


def _bad_path() -> RefusedError:
    return RefusedError(400, "invalid_path", "The path of the request is not one that can be passed on.")
