"""A neutral request as it goes over an HTTP/1.1 connection: where to, and in what bytes.

Nothing is connected or sent from here.
"""

from __future__ import annotations

import base64
import re
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import unquote_to_bytes

from resilient_llm._kept import LONGEST_URL
from resilient_llm.message import Request
from resilient_llm.transports.failures import InvalidURLError, UnsupportedProtocolError
from resilient_llm.transports.request_head import DROPPED, check_head, length_of

__all__ = ["Origin", "Place", "place_of", "written"]

_VISIBLE = re.compile(r"[!-~]+")
_PARTS = re.compile(
    r"""(?P<scheme>[^:/?#]*)(?P<colon>:?)//
    (?:(?P<user>[^/?#]*)@)?
    (?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.\-_~%!$&'()*+,;=]*)
    (?::(?P<port>[0-9]{0,5}))?
    (?P<target>(?:[/?][^#]*)?)
    (?:\#.*)?""",
    re.VERBOSE,
)
_USERINFO = re.compile(r"(?<=//)[^/]*@")
_PORTS = {"http": 80, "https": 443}
_BODILESS = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})
"""Methods by which no body is expected, so that one of no length need not be announced (RFC 9110, 8.6)."""


class Origin(NamedTuple):
    """Whom a connection is to."""

    tls: bool
    host: str
    port: int


class Place(NamedTuple):
    """What a URL says: whom to ask, and for what; `authority` is the `host` to send."""

    origin: Origin
    target: bytes
    authority: bytes
    credentials: bytes | None


def place_of(url: str) -> Place:
    """Read a URL, whose path and query are sent as they stand.

    Raises `InvalidURLError`, and `UnsupportedProtocolError` for another scheme than `http` and `https`.
    """
    return _kept(url) if len(url) <= LONGEST_URL else _take_apart(url)


def _take_apart(url: str) -> Place:
    shown = url.partition("?")[0].encode("ascii", "backslashreplace").decode()  # a query may hold a key
    shown = _USERINFO.sub("", shown, 1)
    if not _VISIBLE.fullmatch(url):
        raise InvalidURLError(f"{shown}: must be percent-encoded")
    found = _PARTS.fullmatch(url)
    scheme = (found["scheme"] if found is not None else url.partition(":")[0]).lower()
    if scheme not in _PORTS:
        raise UnsupportedProtocolError(f"{shown}: is neither http nor https")
    if found is None or not found["colon"]:
        raise InvalidURLError(f"{shown}: is no URL")
    host, target, user = found["host"], found["target"], found["user"]
    standard = _PORTS[scheme]
    port = int(found["port"] or standard)
    if not 0 < port < 65_536:
        raise InvalidURLError(f"{shown}: has no port that can be connected to")
    name = host.strip("[]").rstrip(".").lower()
    if not name:
        raise InvalidURLError(f"{shown}: has no host")
    shown_host = f"[{name}]" if host.startswith("[") else name
    return Place(
        Origin(scheme == "https", name, port),
        (target if target.startswith("/") else "/" + target).encode(),
        (shown_host if port == standard else f"{shown_host}:{port}").encode(),
        None if user is None else _basic(user),
    )


_kept = lru_cache(maxsize=256)(_take_apart)


def _basic(user: str) -> bytes:
    """Give the value of `authorization` for the credentials in a URL (RFC 7617)."""
    name, _, password = user.partition(":")
    return b"Basic " + base64.b64encode(unquote_to_bytes(name) + b":" + unquote_to_bytes(password))


def written(request: Request, place: Place) -> tuple[bytes, int | None]:
    """Write a request's head, with the host and the framing of its body where they are not among the headers.

    Gives the length that the body is said to have, too. Raises `LocalProtocolError` for what cannot be sent.
    """
    names = check_head(request)
    length = length_of(request, names)
    method, body = request.method.upper(), request.body
    lines = [b"%b %b HTTP/1.1" % (method.encode(), place.target)]
    if b"host" not in names:
        lines.append(b"Host: %b" % place.authority)
    if place.credentials is not None and b"authorization" not in names:
        lines.append(b"Authorization: %b" % place.credentials)
    if DROPPED.isdisjoint(names):
        lines += map(b": ".join, request.headers)
    else:
        lines += [
            b": ".join(header)
            for name, header in zip(names, request.headers, strict=True)
            if name not in DROPPED
        ]
    if body is None and length is None:
        lines.append(b"Transfer-Encoding: chunked")
    elif body is not None and length is None and (body or method not in _BODILESS):
        lines.append(b"Content-Length: %d" % len(body))
    lines += (b"", b"")
    return b"\r\n".join(lines), length
