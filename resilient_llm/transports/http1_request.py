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
from resilient_llm.transports.request_head import check_head, length_of

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
    form, values = check_head(request)
    length = length_of(request, form, values)
    names, method, body = form.names, request.method.upper(), request.body
    more = b""
    if b"host" not in names:
        more = b"Host: %b\r\n" % place.authority
    if place.credentials is not None and b"authorization" not in names:
        more += b"Authorization: %b\r\n" % place.credentials
    if form.dropped:
        values = tuple(value for index, value in enumerate(values) if index not in form.dropped)
    framing = b""
    if length is None:
        if body is None:
            framing = b"Transfer-Encoding: chunked\r\n"
        elif body or method not in _BODILESS:
            framing = b"Content-Length: %d\r\n" % len(body)
    head = (method.encode(), place.target, more, form.lines % values, framing)
    return b"%b %b HTTP/1.1\r\n%b%b%b\r\n" % head, length
