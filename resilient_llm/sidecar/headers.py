"""Which headers go on to the other side, both ways (RFC 9110, 7.6.1)."""

from __future__ import annotations

import re
from collections.abc import Mapping

from resilient_llm.message import Headers

__all__ = ["first_of", "for_client", "for_provider", "request_id"]

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
_HOP_BY_HOP_AND_LENGTH = _HOP_BY_HOP | {b"content-length"}
_VIA = (b"via", b"1.1 resilient-llm")
_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9a-z-]+")
_NOT_IN_VALUES = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_ID = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.")
_MAX_ID = 128


def first_of(headers: Headers) -> Mapping[bytes, bytes]:
    """Give the first value of each header of a request, whose names are in lower case.

    Most of what could be asked of a request's headers is in none of them; this tells without going through all.
    """
    return dict(reversed(headers))


def for_provider(headers: Headers, host: bytes, size: int | None) -> Headers:
    """Give the headers that go to a provider with a body of `size` bytes; `None` is no body at all."""
    kept = [(b"host", host), *_without(headers, _NOT_FOR_PROVIDERS)]
    if size is not None:
        kept.append((b"content-length", b"%d" % size))
    kept.append(_VIA)
    return kept


def for_client(headers: Headers, *, sized: bool) -> Headers:
    """Give the headers of a reply that go to the client, the length among them only if the body is sure to have it."""
    lower = [(name.lower(), value) for name, value in headers]
    kept = _without(lower, _HOP_BY_HOP if sized else _HOP_BY_HOP_AND_LENGTH)
    return kept if _are_sound(kept) else [header for header in kept if _are_sound([header])]


def _without(headers: Headers, dropped: frozenset[bytes]) -> Headers:
    """Give the headers, but for those `dropped` and whatever `connection`, which is one of them, names."""
    kept = [header for header in headers if header[0] not in dropped]
    if len(kept) < len(headers):
        named = b",".join([value for name, value in headers if name == b"connection"])
        if named:
            tokens = {token.strip().lower() for token in named.split(b",")}
            kept = [header for header in kept if header[0] not in tokens]
    return kept


def _are_sound(headers: Headers) -> bool:
    """Tell whether these may be written: looked at together, since hardly ever one is not."""
    names = [name for name, _value in headers]
    if b"" in names or _NAME.fullmatch(b"".join(names)) is None:
        return False
    return _NOT_IN_VALUES.search(b"".join([value for _name, value in headers])) is None


def request_id(first: Mapping[bytes, bytes]) -> str | None:
    """Give the id that the client has for its request, if it is one that can be written anywhere."""
    value = first.get(b"x-request-id", b"")
    return value.decode() if 0 < len(value) <= _MAX_ID and _ID.issuperset(value) else None
