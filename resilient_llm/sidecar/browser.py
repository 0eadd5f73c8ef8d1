"""Pages in browsers, which may ask only from origins that are allowed (the CORS protocol).

Nothing is allowed unless the configuration says so. Programs have no origin, and nothing here is about them, but that
where anybody on this machine may ask they call it by a name of its own.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Mapping
from functools import lru_cache

from resilient_llm.message import Headers
from resilient_llm.sidecar.refusal import RefusedError

__all__ = ["Browser", "check_is_from_here", "is_this_machine"]

_FROM_ELSEWHERE = frozenset({b"cross-site", b"same-site"})


class Browser:
    """Say what a page of the origin among `headers`, if there is one, may do; of each the first value is given."""

    def __init__(self, headers: Mapping[bytes, bytes], allowed: Collection[str]) -> None:
        self._headers = headers
        self._origin = headers.get(b"origin")
        self._allowed = self._origin is not None and self._origin.decode("latin-1") in allowed

    def check(self) -> None:
        """Raise `RefusedError` for a page that may not ask: one in a browser on this machine reaches loopback, too."""
        if self._origin is not None and not self._allowed:
            raise _refused()

    def headers(self) -> Headers:
        """Give the headers that let the page read a response."""
        if self._origin is None or not self._allowed:
            return []
        return [(b"access-control-allow-origin", self._origin), (b"vary", b"origin")]

    def preflight(self, methods: bytes) -> Headers:
        """Give the headers that answer OPTIONS, be it a browser's question or anybody's."""
        answer: Headers = [(b"allow", methods)]
        if b"access-control-request-method" not in self._headers:
            return answer
        if not self._allowed:
            raise _refused()
        answer += [(b"access-control-allow-methods", b"GET, POST"), (b"access-control-max-age", b"600")]
        asked = self._headers.get(b"access-control-request-headers")
        if asked is not None and asked.translate(None, b"-, _").isalnum():
            answer.append((b"access-control-allow-headers", asked))
        return answer


def check_is_from_here(headers: Mapping[bytes, bytes]) -> None:
    """Raise `RefusedError` for what a page from elsewhere may have brought about without showing its origin.

    Its host's name may have come to mean this machine (DNS rebinding), and images and links have no origin.
    """
    host = headers.get(b"host")  # which every browser gives
    if host and not is_this_machine(host):
        message = "Without tenants this answers to names of this machine only, such as localhost."
        raise RefusedError(403, "host_not_allowed", message)
    if headers.get(b"sec-fetch-site") in _FROM_ELSEWHERE and b"origin" not in headers:
        raise _refused()


@lru_cache(maxsize=16)
def is_this_machine(host: bytes) -> bool:
    """Tell whether a `host` header names this machine for itself: by an address of loopback, or as localhost."""
    given = host.lower().decode("latin-1")
    name = given if given.endswith("]") else given.rpartition(":")[0] or given
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return False


def _refused() -> RefusedError:
    return RefusedError(403, "origin_not_allowed", "Pages of this origin may not ask here.")
