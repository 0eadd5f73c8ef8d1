"""What becomes of a request's headers on their way to a target.

Credentials of the caller stay behind, and headers that somebody else gives are replaced. What is given in their place
must not be decided in here.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Literal, TypeAlias

from resilient_llm.message import DIGESTS

if TYPE_CHECKING:
    from resilient_llm.message import Headers

__all__ = ["HeaderRules"]

_Fate: TypeAlias = Literal["kept", "left", "host", "size"]

_SECRETS = frozenset(
    {
        b"api-key",
        b"authentication",
        b"authorization",
        b"cookie",
        b"cookie2",
        b"ocp-apim-subscription-key",
        b"openai-organization",
        b"openai-project",
        b"proxy-authorization",
        b"x-amz-content-sha256",
        b"x-amz-date",
        b"x-api-key",
        b"x-goog-api-key",
        b"x-goog-user-project",
        b"x-key",
        b"x-token",
    }
)
# Gateways' own names for them: cf-aig-authorization, helicone-auth, x-litellm-api-key, x-amz-security-token ...
_SECRET_ENDINGS = (
    b"-access-key",
    b"-access-token",
    b"-api-key",
    b"-api-token",
    b"-auth",
    b"-auth-token",
    b"-authorization",
    b"-client-secret",
    b"-secret-key",
    b"-security-token",
    b"-session-token",
    b"-subscription-key",
    b"_api_key",
)

_MOST_NAMES = 256
_LONGEST_NAME = 64
"""Of those that are kept: callers may call their headers anything."""


class HeaderRules:
    """Say of a header by its name whether it is kept, left behind, or rewritten; worked out once for each name.

    `host` is the target's own, if it has any. Those `replaced` (lower case) are given by somebody else. With `strip`
    credentials are left behind; with `resized` the body is another than the caller's.
    """

    __slots__ = ("_fates", "_host", "_kept", "_replaced", "_resized", "_strip")

    def __init__(
        self, host: bytes | None, replaced: Collection[bytes], *, strip: bool, resized: bool
    ) -> None:
        self._host = host
        self._replaced = frozenset(replaced)
        self._strip = strip
        self._resized = resized
        self._fates: dict[bytes, _Fate] = {}
        self._kept: set[bytes] = set()

    def apply(self, headers: Headers, size: int | None) -> Headers:
        """Give the headers that go to the target, in their order; `size` is that of the body where it is another."""
        kept = self._kept
        written: Headers = []
        for header in headers:
            name = header[0]
            if name in kept:  # as nearly all are
                written.append(header)
                continue
            fate = self._fates.get(name) or self._decide(name)
            if fate == "kept":
                written.append(header)
            elif fate == "host" and self._host is not None:
                written.append((name, self._host))
            elif fate == "size":
                written.append((name, str(size).encode()))
        return written

    @property
    def known(self) -> int:
        """Say for how many names it is known what becomes of them."""
        return len(self._fates)

    def _decide(self, name: bytes) -> _Fate:
        fate = self._fate(name.lower())
        if len(self._fates) < _MOST_NAMES and len(name) <= _LONGEST_NAME:
            self._fates[name] = fate
            if fate == "kept":
                self._kept.add(name)
        return fate

    def _fate(self, name: bytes) -> _Fate:
        if name == b"host" and name not in self._replaced:
            return "kept" if self._host is None else "host"
        if self._resized and name == b"content-length":
            return "size"
        if self._resized and name in DIGESTS:
            return "left"  # of another body
        return "left" if name in self._replaced or (self._strip and _is_secret(name)) else "kept"


def _is_secret(name: bytes) -> bool:
    """Tell whether a header (lower case) is one that credentials come in."""
    return name in _SECRETS or name.endswith(_SECRET_ENDINGS)
