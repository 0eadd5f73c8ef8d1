"""A neutral request as aiohttp wants it: the very same, or refused.

Whatever could make a server see another request than this one is found here, before any of it is sent. Nothing is
sent from here.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterable, AsyncIterator
from functools import lru_cache

import aiohttp
from yarl import URL

from resilient_llm.message import Headers, Request
from resilient_llm.transports.httpx_family import _Chain

__all__ = [
    "DROPPED",
    "LocalProtocolError",
    "Upload",
    "check_head",
    "headers_of",
    "length_of",
    "upload",
    "url_of",
]

_URL = re.compile(r"[!-~]+")
_TOKEN = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_FORBIDDEN = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_SINGLE = frozenset({b"host", b"content-length", b"transfer-encoding", b"expect"})
DROPPED = frozenset({b"transfer-encoding", b"expect"})
"""Headers that are not sent: how a body is framed is for each connection to say, and it is sent at once."""

_METHODS = frozenset({"DELETE", "GET", "HEAD", "PATCH", "POST", "PUT"})


class LocalProtocolError(aiohttp.ClientError, ValueError):
    """A request that cannot be sent as it is."""


@lru_cache(maxsize=256)
def url_of(url: str) -> URL:
    """Give a URL whose path is sent as it stands; raises what aiohttp raises for one that is none."""
    shown = url.partition("?")[0].encode("ascii", "backslashreplace").decode()  # a query may hold a key
    if not _URL.fullmatch(url):
        raise aiohttp.InvalidURL(shown, "must be percent-encoded")
    try:
        made = URL(url, encoded=True)
        placed = bool(made.raw_host and made.port)
    except ValueError as error:
        raise aiohttp.InvalidURL(shown, str(error)) from None
    if made.scheme not in ("http", "https"):
        raise aiohttp.NonHttpUrlClientError(shown)
    if not placed:
        raise aiohttp.InvalidURL(shown, "has no host")
    return made


def check_head(request: Request) -> None:
    """Raise `LocalProtocolError` for a method or headers that cannot be sent."""
    method = request.method
    if method not in _METHODS and (not _TOKEN.fullmatch(method.encode()) or method.upper() == "CONNECT"):
        raise LocalProtocolError(f"method {method!r} cannot be sent")
    names = [name.lower() for name, _value in request.headers]
    values = b"".join([value for _name, value in request.headers])
    # Looked at together, since hardly ever one cannot be sent; then which one it is, is worth a second look.
    sound = b"" not in names and (not names or _TOKEN.fullmatch(b"".join(names)))
    if sound and values.isascii() and not _FORBIDDEN.search(values) and len(set(names)) == len(names):
        return
    seen: set[bytes] = set()
    for raw, value in request.headers:
        if not _TOKEN.fullmatch(raw) or _FORBIDDEN.search(value):
            raise LocalProtocolError(f"header {raw!r} cannot be sent")
        name = raw.lower()
        if name in _SINGLE and name in seen:
            raise LocalProtocolError(f"header {raw!r} is there twice")
        seen.add(name)
        if name in DROPPED:
            continue
        try:
            value.decode()
        except UnicodeDecodeError:  # aiohttp writes UTF-8, and nothing else
            raise LocalProtocolError(f"header {raw!r} cannot be sent: its value is not UTF-8") from None


def headers_of(request: Request) -> list[tuple[str, str]]:
    """Give the headers to send, in their order, of a request that has passed `check_head`."""
    headers: list[tuple[str, str]] = []
    spelled: dict[bytes, str] = {}
    for raw, value in request.headers:
        name = raw.lower()
        # aiohttp would take the last of two that are spelled differently.
        shown = spelled.setdefault(name, raw.decode())
        if name not in DROPPED:
            headers.append((shown, value.decode()))
    return headers


def length_of(request: Request) -> int | None:
    """Give the length that an upload is said to have; raises `LocalProtocolError` for a body framed in two ways."""
    length, encoding = request.header(b"content-length"), request.header(b"transfer-encoding")
    if encoding is not None and (encoding.strip().lower() != b"chunked" or length is not None):
        raise LocalProtocolError(
            "transfer-encoding cannot be sent with another coding, or with content-length"
        )
    if length is None:
        return None
    if not length.isdigit() or (request.body is not None and int(length) != len(request.body)):
        raise LocalProtocolError(f"content-length {length!r} is not that of the body")
    return int(length)


class Upload:
    """A body on its way to the network, exactly as long as was said."""

    def __init__(self, request: Request, length: int | None) -> None:
        body = request.template
        if not isinstance(body, AsyncIterable):
            raise TypeError(f"{request!r} has no body: make it with upload(method, url, headers, body)")
        self._chunks: AsyncIterator[bytes] = body.__aiter__()
        self._left = length
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
            if self._left:
                raise LocalProtocolError(f"the upload is {self._left} bytes short of its length") from None
            raise
        if self._left is not None:
            self._left -= len(chunk)
            if self._left < 0:
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
