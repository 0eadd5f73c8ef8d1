"""Which headers go on to the other side, both ways (RFC 9110, 7.6.1)."""

from __future__ import annotations

import re

from resilient_llm.message import Headers

__all__ = ["for_client", "for_provider", "request_id"]

_HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authentication-info",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
_NOT_FOR_PROVIDERS = _HOP_BY_HOP | {
    # The keys and cookies of this side: the target's own take their place.
    b"api-key",
    b"authorization",
    b"cookie",
    b"x-api-key",
    b"x-goog-api-key",
    # Written anew for where the request goes.
    b"content-length",
    b"expect",
    b"host",
    # Who calls from where is nobody else's business.
    b"baggage",
    b"forwarded",
    b"origin",
    b"referer",
    b"x-forwarded-for",
    b"x-forwarded-host",
    b"x-forwarded-port",
    b"x-forwarded-proto",
    b"x-real-ip",
    b"x-request-timeout",
}
_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9a-z-]+")
_NOT_IN_VALUES = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_ID = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.")
_MAX_ID = 128


def for_provider(headers: Headers, host: bytes, size: int | None) -> Headers:
    """Give the headers that go to a provider with a body of `size` bytes; `None` is no body at all."""
    named = _named_by_connection(headers)
    kept = [header for header in headers if header[0] not in _NOT_FOR_PROVIDERS and header[0] not in named]
    kept.insert(0, (b"host", host))
    if size is not None:
        kept.append((b"content-length", str(size).encode()))
    kept.append((b"via", b"1.1 resilient-llm"))
    return kept


def for_client(headers: Headers, *, sized: bool) -> Headers:
    """Give the headers of a reply that go to the client, the length among them only if the body is sure to have it."""
    lower = [(name.lower(), value) for name, value in headers]
    named = _named_by_connection(lower)
    return [
        header
        for header in lower
        if header[0] not in _HOP_BY_HOP
        and header[0] not in named
        and (sized or header[0] != b"content-length")
        and _NAME.fullmatch(header[0]) is not None
        and _NOT_IN_VALUES.search(header[1]) is None
    ]


def request_id(headers: Headers) -> str | None:
    """Give the id that the client has for its request, if it is one that can be written anywhere."""
    for name, value in headers:
        if name == b"x-request-id" and 0 < len(value) <= _MAX_ID and _ID.issuperset(value):
            return value.decode()
    return None


def _named_by_connection(headers: Headers) -> frozenset[bytes]:
    values = [value for name, value in headers if name == b"connection"]
    if not values:
        return frozenset()
    return frozenset(token.strip().lower() for token in b",".join(values).split(b","))
