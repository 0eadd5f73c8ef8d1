"""What may be sent as a request, whatever sends it: the very same, or nothing.

Whatever could make a server see another request than this one is found here, before any of it is sent. Nothing is
sent from here.
"""

from __future__ import annotations

import string
from collections.abc import AsyncIterable, AsyncIterator
from functools import lru_cache
from typing import NamedTuple

from resilient_llm._kept import LONGEST_NAMES, MOST_NAMES
from resilient_llm.message import Headers, Request, has_controls, lines_of
from resilient_llm.transports.failures import LocalProtocolError
from resilient_llm.transports.httpx_family import _Chain

__all__ = ["DROPPED", "Form", "Upload", "check_head", "length_of", "upload"]

_IN_TOKENS = b"!#$%&'*+-.^_`|~" + (string.digits + string.ascii_letters).encode()
_MAX_DIGITS = 19
_SINGLE = frozenset({b"host", b"content-length", b"transfer-encoding", b"expect"})
DROPPED = frozenset({b"transfer-encoding", b"expect"})
"""Headers that are not sent: how a body is framed is for each connection to say, and it is sent at once."""

_METHODS = frozenset({"DELETE", "GET", "HEAD", "PATCH", "POST", "PUT"})


class Form(NamedTuple):
    """What heads have in common whose headers have the same names."""

    names: tuple[bytes, ...]
    """The names, in lower case."""
    sound: bool
    """Whether these can be sent together."""
    lines: bytes
    """The headers that are sent, to be filled in with their values."""
    dropped: frozenset[int]
    """Which are not."""
    length: int | None
    """Which of them is content-length."""
    encoding: int | None
    """Which of them is transfer-encoding."""


def _form_of(names: tuple[bytes, ...]) -> Form:
    lower = tuple(name.lower() for name in names)
    dropped = frozenset(index for index, name in enumerate(lower) if name in DROPPED)
    return Form(
        lower,
        all(map(_is_token, names)) and all(lower.count(name) < 2 for name in _SINGLE),
        lines_of(name for index, name in enumerate(names) if index not in dropped),
        dropped,
        lower.index(b"content-length") if b"content-length" in lower else None,
        lower.index(b"transfer-encoding") if b"transfer-encoding" in lower else None,
    )


_kept = lru_cache(maxsize=128)(_form_of)


def check_head(request: Request) -> tuple[Form, tuple[bytes, ...]]:
    """Give the form of the headers, and their values; raises `LocalProtocolError` for what cannot be sent."""
    method, headers = request.method, request.headers
    if method not in _METHODS and (not _is_token(method.encode()) or method.upper() == "CONNECT"):
        raise LocalProtocolError(f"method {method!r} cannot be sent")
    names: tuple[bytes, ...]
    values: tuple[bytes, ...]
    names, values = zip(*headers, strict=True) if headers else ((), ())
    # Clients send the same headers again and again, and only what they say differs.
    is_short = len(names) <= MOST_NAMES and len(b"".join(names)) <= LONGEST_NAMES
    form = _kept(names) if is_short else _form_of(names)
    if not form.sound or has_controls(b"".join(values)):
        raise _unsound(headers)
    return form, values


def _unsound(headers: Headers) -> LocalProtocolError:
    """Say which of the headers it is that cannot be sent."""
    seen: set[bytes] = set()
    for raw, value in headers:
        name = raw.lower()
        if not _is_token(raw) or has_controls(value):
            return LocalProtocolError(f"header {raw!r} cannot be sent")
        if name in _SINGLE and name in seen:
            break
        seen.add(name)
    return LocalProtocolError(f"header {raw!r} is there twice")


def _is_token(name: bytes) -> bool:
    return bool(name) and not name.translate(None, _IN_TOKENS)


def length_of(request: Request, form: Form, values: tuple[bytes, ...]) -> int | None:
    """Give the length that a body is said to have; raises `LocalProtocolError` for one framed in two ways.

    `form` and `values` are what `check_head` has given.
    """
    length = None if form.length is None else values[form.length]
    if form.encoding is not None:
        encoding = values[form.encoding]
        if encoding.strip().lower() != b"chunked" or length is not None:
            raise LocalProtocolError(
                "transfer-encoding cannot be sent with another coding, or with content-length"
            )
    if length is None:
        return None
    if (
        not length.isdigit()
        or len(length) > _MAX_DIGITS
        or (request.body is not None and int(length) != len(request.body))
    ):
        raise LocalProtocolError(f"content-length {length!r} is not that of the body")
    return int(length)


class Upload:
    """A body on its way to the network, exactly as long as was said."""

    def __init__(self, request: Request, length: int | None) -> None:
        body = request.template
        if not isinstance(body, AsyncIterable):
            raise TypeError(f"{request!r} has no body: make it with upload(method, url, headers, body)")
        self._chunks: AsyncIterator[bytes] = body.__aiter__()
        self.left = length
        """Bytes that are still to come; `None` where nobody knows."""
        self.error: Exception | None = None
        """What came of reading it, which says nothing of the server."""

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        try:
            return await self._next()
        except StopAsyncIteration:
            raise
        except Exception as error:
            self.error = error
            raise

    async def _next(self) -> bytes:
        try:
            chunk = await self._chunks.__anext__()
        except StopAsyncIteration:
            if self.left:
                raise LocalProtocolError(f"the upload is {self.left} bytes short of its length") from None
            raise
        if self.left is not None:
            self.left -= len(chunk)
            if self.left < 0:
                raise LocalProtocolError("the upload is longer than its content-length")
        return chunk


def upload(method: str, url: str, headers: Headers, body: AsyncIterable[bytes]) -> Request:
    """Make a request whose body can be read once, and is read while it is sent.

    Without a content-length it is sent in chunks. A `Retry` may keep it for a second attempt.
    """

    async def buffer(limit: int) -> Request:
        chunks: list[bytes] = []
        size = 0
        iterator = body.__aiter__()
        async for chunk in iterator:
            chunks.append(chunk)
            size += len(chunk)
            if size > limit:
                return Request(method, url, headers, None, template=_Chain(chunks, iterator))
        return Request(method, url, headers, b"".join(chunks), template=body)

    return Request(method, url, headers, None, template=body, buffer_upload=buffer)
