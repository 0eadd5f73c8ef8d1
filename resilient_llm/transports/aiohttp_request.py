"""A neutral request as aiohttp wants it: the very same, or refused.

Nothing is sent from here.
"""

from __future__ import annotations

import re
from functools import lru_cache

import aiohttp
from yarl import URL

from resilient_llm._kept import LONGEST_URL
from resilient_llm.message import Request
from resilient_llm.transports import failures
from resilient_llm.transports.request_head import DROPPED

__all__ = ["LocalProtocolError", "headers_of", "url_of"]

_URL = re.compile(r"[!-~]+")


class LocalProtocolError(aiohttp.ClientError, failures.LocalProtocolError):
    """A request that cannot be sent as it is."""


def url_of(url: str) -> URL:
    """Give a URL whose path is sent as it stands; raises what aiohttp raises for one that is none."""
    return _kept(url) if len(url) <= LONGEST_URL else _read(url)


def _read(url: str) -> URL:
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


_kept = lru_cache(maxsize=256)(_read)


def headers_of(request: Request) -> list[tuple[str, str]]:
    """Give the headers to send, in their order, of a request that has passed `check_head`.

    Raises `LocalProtocolError` for a value that is not UTF-8.
    """
    headers: list[tuple[str, str]] = []
    spelled: dict[bytes, str] = {}
    for raw, value in request.headers:
        name = raw.lower()
        # aiohttp would take the last of two that are spelled differently.
        shown = spelled.setdefault(name, raw.decode())
        if name in DROPPED:
            continue
        try:
            headers.append((shown, value.decode()))
        except UnicodeDecodeError:  # aiohttp writes UTF-8, and nothing else
            raise LocalProtocolError(f"header {raw!r} cannot be sent: its value is not UTF-8") from None
    return headers
