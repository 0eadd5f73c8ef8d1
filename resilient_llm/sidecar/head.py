"""What the head of a request has to be: no longer than allowed, and nothing that others may read in another way.

httptools, the parser, lets pass more than that. What the request asks for is not looked at, but for a change of the
protocol, to which nobody is bound (RFC 9110, 7.8).
"""

from __future__ import annotations

import re

from resilient_llm.message import Headers

__all__ = ["HeadTooLargeError", "MalformedHeadError", "check_head", "without_upgrade"]

_HOST = re.compile(rb"[A-Za-z0-9._~%!$&'()*+,;=:\[\]-]*")


class HeadTooLargeError(ValueError):
    """A head of more bytes than are allowed."""


class MalformedHeadError(ValueError):
    """A head that could be taken for another; the sentence that it has is fixed."""


def check_head(version: str, url: bytes, headers: Headers, max_size: int) -> bool:
    """Tell whether the client waits for a word before it sends the body (RFC 9110, 10.1.1).

    Names of `headers` are in lower case. Raises `HeadTooLargeError` for more than `max_size` bytes, and
    `MalformedHeadError`.
    """
    known = dict(headers)
    parts = [*known, *known.values()]
    hosts = 1 if b"host" in known else 0
    if len(known) < len(headers):
        parts = [part for header in headers for part in header]
        hosts = len([name for name, _value in headers if name == b"host"])
    if len(url) + len(b"".join(parts)) + 4 * len(headers) > max_size:
        raise HeadTooLargeError
    if version not in ("1.1", "1.0"):
        raise MalformedHeadError("a version that is not spoken here")
    if hosts > 1 or (not hosts and version == "1.1") or not _HOST.fullmatch(known.get(b"host", b"")):
        raise MalformedHeadError("no host, or two, or one that is none")  # RFC 9112, 3.2
    if b"transfer-encoding" in known:  # RFC 9112, 6.1
        codings = {value.lower() for name, value in headers if name == b"transfer-encoding"}
        if version == "1.0" or codings != {b"chunked"}:
            raise MalformedHeadError("a transfer coding that is not known here")
    return b"expect" in known and (b"expect", b"100-continue") in [(n, v.lower()) for n, v in headers]


def without_upgrade(method: bytes, url: bytes, version: str, headers: Headers) -> bytes:
    """Write a head anew that asks for no other protocol, and is otherwise what was read."""
    kept = [header for header in headers if header[0] != b"upgrade"]
    lines = b"".join(b"%b: %b\r\n" % header for header in kept)
    return b"%b %b HTTP/%b\r\n%b\r\n" % (method, url, version.encode(), lines)
