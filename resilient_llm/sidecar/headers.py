"""Which headers go on to the other side, both ways: of the connection none (RFC 9110, 7.6.1).

To clients the sidecar is the origin: what a provider says of its own as one, to browsers above all, does not hold here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from resilient_llm.message import Headers, has_controls
from resilient_llm.sidecar.auth import MIN_KEY

if TYPE_CHECKING:
    from resilient_llm.sidecar.masked import Secrets

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
    # Another method or path, for servers that go by them, than the one that was looked at.
    b"x-http-method",
    b"x-http-method-override",
    b"x-method-override",
    b"x-original-url",
    b"x-rewrite-url",
}
_NOT_FOR_CLIENTS = _HOP_BY_HOP | {
    # With another sidecar's, or a provider's, a client would have two to look for.
    b"x-resilient-llm-request-id",
    # Of an origin: who may read its answers, how it is to be reached, what browsers keep of it and tell about it.
    b"accept-ch",
    b"alt-svc",
    b"clear-site-data",
    b"expect-ct",
    b"nel",
    b"public-key-pins",
    b"report-to",
    b"reporting-endpoints",
    b"service-worker-allowed",
    b"set-cookie",
    b"set-cookie2",
    b"strict-transport-security",
    b"timing-allow-origin",
    # Clients show their keys to this side; what the provider wants is no business of theirs.
    b"authentication-info",
    b"www-authenticate",
    # Web servers in front of this one would open a file, or ask themselves for another path.
    b"x-accel-redirect",
    b"x-sendfile",
}
_CORS = b"access-control-"
"""What such headers begin with: they are `browser`'s to write."""
_NOR_LENGTH = _NOT_FOR_CLIENTS | {b"content-length"}
_VIA = (b"via", b"1.1 resilient-llm")
_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9a-z-]+")
_ID = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.")
_MAX_ID = 128


def first_of(headers: Headers) -> Mapping[bytes, bytes]:
    """Give the first value of each header of a request, whose names are in lower case.

    Most of what could be asked of a request's headers is in none of them; this tells without going through all.
    """
    return dict(reversed(headers))


def for_provider(headers: Headers, first: Mapping[bytes, bytes], host: bytes, size: int | None) -> Headers:
    """Give the headers that go to a provider with a body of `size` bytes; `None` is no body at all.

    `first` has the first value of each of the client's.
    """
    kept = [header for header in headers if header[0] not in _NOT_FOR_PROVIDERS]
    if b"connection" in first:
        kept = _without_named(kept, [value for name, value in headers if name == b"connection"])
    written = [_VIA] if size is None else [(b"content-length", b"%d" % size), _VIA]
    return [(b"host", host), *kept, *written]


def for_client(headers: Headers, *, sized: bool, secrets: Secrets) -> Headers:
    """Give the headers of a reply that go to the client, `secrets` in their values masked; none whose name has one.

    The length is among them only if the body is sure to have it.
    """
    if not headers:
        return []
    names, values = zip(*headers, strict=True)
    passed, connection = _passed(names, sized, secrets)
    kept = [(name, values[index]) for name, index in passed]
    if connection:
        kept = _without_named(kept, [values[index] for index in connection])
    together = b" ".join([value for _name, value in kept])  # hardly ever is there anything to find
    if has_controls(together):
        kept = [header for header in kept if not has_controls(header[1])]
    if secrets.are_in(together):
        kept = [(name, secrets.masked(value)) for name, value in kept]
    return kept


@lru_cache(maxsize=128)
def _passed(
    names: tuple[bytes, ...],
    sized: bool,  # noqa: FBT001 - a cache counts by position
    secrets: Secrets,
) -> tuple[Sequence[tuple[bytes, int]], Sequence[int]]:
    """Say which headers of these names go to the client, and which name some that do not.

    A provider's replies have the same names again and again.
    """
    lower = [name.lower() for name in names]
    dropped = _NOT_FOR_CLIENTS if sized else _NOR_LENGTH
    passed = [
        (name, index)
        for index, name in enumerate(lower)
        if name not in dropped
        and not name.startswith(_CORS)
        and _NAME.fullmatch(name)
        and not secrets.are_in_name(name, least=MIN_KEY)
    ]
    return passed, [index for index, name in enumerate(lower) if name == b"connection"]


def _without_named(headers: Headers, connection: Sequence[bytes]) -> Headers:
    """Give the headers, but for those that belong to one connection by the word of whoever sent them."""
    named = b",".join(connection)
    if not named:
        return headers
    tokens = {token.strip().lower() for token in named.split(b",")}
    return [header for header in headers if header[0] not in tokens]


def request_id(first: Mapping[bytes, bytes]) -> str | None:
    """Give the id that the client has for its request, if it is one that can be written anywhere."""
    value = first.get(b"x-request-id")
    if value is None:
        return None
    return value.decode() if 0 < len(value) <= _MAX_ID and _ID.issuperset(value) else None
