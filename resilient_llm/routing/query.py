"""What becomes of a request's query at a target: whose credentials stay behind, and which version is asked for.

Whatever else is in it goes on byte for byte. Where the request goes is decided elsewhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import quote, unquote_plus

if TYPE_CHECKING:
    from resilient_llm.routing.address import Address

__all__ = ["AMBIGUOUS", "CREDENTIALS", "GOOGLES", "query_at"]

CREDENTIALS = frozenset({"access_token", "api-key", "api_key", "apikey", "subscription-key"})
"""What a credential is called, and nothing else is."""
GOOGLES = frozenset({"key"})
"""What it is called at Google besides."""
AMBIGUOUS = frozenset({"auth", "sig", "signature", "token"})
"""What is a credential to some, and to others such a thing as where the next page begins."""

_SIGNATURES = ("x-amz-", "x-goog-signature", "x-goog-credential")
_VERSION = "api-version"


def query_at(query: str, address: Address, *, strip: bool, api_version: str | None) -> str:
    """Give the caller's query with Azure's version as it should be, and with `strip` without secrets."""
    parts = query.split("&") if query else []
    if strip:
        parts = [part for part in parts if not _is_secret(part, address.secrets)]
    if address.as_asked:
        if not address.versioned or any(_name(part) == _VERSION for part in parts):
            api_version = None
    elif not address.versioned or api_version is not None:
        parts = [part for part in parts if _name(part) != _VERSION]
    if api_version is not None:
        parts.append(f"{_VERSION}={quote(api_version, safe='')}")
    return "&".join(parts)


def _is_secret(part: str, secrets: frozenset[str]) -> bool:
    name = _name(part)
    return name in secrets or name.startswith(_SIGNATURES)


def _name(part: str) -> str:
    return unquote_plus(part.partition("=")[0]).lower()
