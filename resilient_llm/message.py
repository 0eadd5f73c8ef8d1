"""The neutral messages that travel through a pipeline.

Tiny on purpose: an HTTP library's own objects cost more to make than all policies together, so
they ride along untouched as `native`. No parsing of bodies beyond JSON, and no policy, in here.
"""

from __future__ import annotations

import math
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Protocol, TypeAlias

from resilient_llm.core.json_parse import parse_json

if TYPE_CHECKING:
    from resilient_llm.providers import Dialect

__all__ = [
    "DIGESTS",
    "NO_RETRY",
    "ByteStream",
    "Headers",
    "JSONObject",
    "Offer",
    "Reply",
    "Request",
    "Transport",
    "has_controls",
    "header",
    "lines_of",
    "retry_after",
    "without",
]

Headers: TypeAlias = list[tuple[bytes, bytes]]
JSONObject: TypeAlias = Mapping[str, object]
Offer: TypeAlias = Callable[[bytes], bytes | None]
"""Is shown what comes for somebody who waits, and gives what it leaves for them; `None` if they need not wake up."""

DIGESTS = frozenset({b"content-digest", b"content-md5", b"digest"})
"""Headers that say what bytes a body has, and so no longer hold when it has others."""

NO_RETRY = (b"x-should-retry", b"false")
"""Keeps SDKs from trying again what nobody should."""

_CONTROLS = bytes({*range(32), 127} - {9})

_USERINFO = re.compile(r"(?<=://)[^/@]*@")


class ByteStream(Protocol):
    """Bytes of a body as they come, and a way to stop them."""

    def __aiter__(self) -> AsyncIterator[bytes]: ...

    async def aclose(self) -> None:
        """Stop, and let go of the connection."""
        ...


def header(headers: Headers, name: bytes) -> bytes | None:
    """Give the first value of the header `name` (lower case), or `None`."""
    size = len(name)
    for key, value in headers:
        if len(key) == size and (key == name or key.lower() == name):
            return value
    return None


def without(headers: Headers, *names: bytes) -> Headers:
    """Give the headers but for those with one of these names (lower case)."""
    return [one for one in headers if one[0].lower() not in names]


def has_controls(value: bytes) -> bool:
    """Tell whether there is in a header's value what may be in none (RFC 9110, 5.5): a control other than a tab."""
    return len(value.translate(None, _CONTROLS)) < len(value)  # in a quarter of the time that a regex takes


def lines_of(names: Iterable[bytes]) -> bytes:
    """Give the lines of headers of these names, to be filled in with a tuple of their values."""
    return b"".join([b"%b: %%b\r\n" % name.replace(b"%", b"%%") for name in names])


def retry_after(seconds: float | None) -> Headers:
    """Make the header that says when to come back; none where that is not known, or never.

    RFC 9110 knows whole seconds only: rounded up, and at least one, or callers would come back too early.
    """
    if seconds is None or not math.isfinite(seconds):
        return []
    return [(b"retry-after", str(max(1, math.ceil(seconds))).encode())]


class Request:
    """Hold one outgoing request: method, URL, raw headers and a body.

    `body` is the whole body when it is at hand and may be sent any number of times, and `None` when
    it is an upload that can be read once; then `buffer_upload` (from the transport's adapter) may
    turn it into bytes. Treat a request as immutable: `replace` makes a changed copy.
    """

    __slots__ = (
        "_json",
        "body",
        "buffer_upload",
        "dialect",
        "headers",
        "method",
        "native",
        "original",
        "template",
        "url",
    )

    def __init__(
        self,
        method: str,
        url: str,
        headers: Headers,
        body: bytes | None = b"",
        *,
        native: object = None,
        template: object = None,
        buffer_upload: Callable[[int], Awaitable[Request]] | None = None,
    ) -> None:
        self.method = method
        self.url = url
        self.headers = headers
        self.body = body
        self.native = native
        """The library's own request that this one stands for, byte for byte; `None` once changed."""
        self.template = native if template is None else template
        """The library's own request this one came from: where extensions and timeouts are."""
        self.buffer_upload = buffer_upload
        self.original: Request | None = None
        """The one with a native request that this one is a changed copy of, where it is one."""
        self.dialect: Dialect | None = None
        """What it is written in, for `dialect_for` to find once."""
        self._json: JSONObject | None = None

    @property
    def replayable(self) -> bool:
        """Tell whether the same body can be sent a second time."""
        return self.body is not None

    @property
    def json(self) -> JSONObject:
        """Give the body as a JSON object, parsed once; empty when it is none."""
        if self._json is None:
            parsed: object = None
            if self.body and self.body[:1] in b"{ \t\r\n":
                try:
                    parsed = parse_json(self.body)
                except (ValueError, RecursionError):
                    parsed = None
            self._json = parsed if isinstance(parsed, dict) else {}
        return self._json

    def header(self, name: bytes) -> bytes | None:
        """Give the first value of the header `name` (lower case), or `None`."""
        return header(self.headers, name)

    def replace(
        self, *, url: str | None = None, headers: Headers | None = None, body: bytes | None = None
    ) -> Request:
        """Make a copy that differs; it no longer stands for a native request."""
        # Made without __init__, which would cost half as much again: most calls are changed on their way.
        changed = object.__new__(Request)
        changed.method = self.method
        changed.url = self.url if url is None else url
        changed.headers = self.headers if headers is None else headers
        changed.body = self.body if body is None else body
        changed.native = None
        changed.template = self.template
        changed.buffer_upload = self.buffer_upload
        changed.original = self.original if self.native is None else self
        changed.dialect = self.dialect if url is None and headers is None else None
        changed._json = self._json if body is None else None
        return changed

    def with_body(self, body: bytes, *, dropped: Collection[bytes] = ()) -> Request:
        """Make a copy with another body, without what headers said of the old one, and those `dropped` (lower case)."""
        headers = without(self.headers, b"content-length", *DIGESTS, *dropped)
        headers.append((b"content-length", str(len(body)).encode()))
        return self.replace(headers=headers, body=body)

    def __repr__(self) -> str:
        shown = _USERINFO.sub("", self.url.partition("?")[0])  # a query may hold a key, too
        return f"<Request {self.method} {shown}>"


class Reply:
    """Hold one incoming reply: status, raw headers and an async byte stream.

    `native` is the library's own response. `complete` says that it was whole when it arrived and that
    nobody is going to read `stream` to its end; `buffered` that it holds no connection.
    """

    __slots__ = ("buffered", "complete", "headers", "native", "status", "stream")

    def __init__(
        self,
        status: int,
        headers: Headers,
        stream: ByteStream,
        native: object = None,
        complete: bool = False,  # noqa: FBT001, FBT002 - made for every call, where naming it costs
    ) -> None:
        self.status = status
        self.headers = headers
        self.stream = stream
        self.native = native
        self.complete = complete
        self.buffered = complete

    def header(self, name: bytes) -> bytes | None:
        """Give the first value of the header `name` (lower case), or `None`."""
        return header(self.headers, name)

    def __repr__(self) -> str:
        return f"<Reply {self.status}>"


Transport: TypeAlias = Callable[[Request], Awaitable[Reply]]
