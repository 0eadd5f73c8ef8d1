"""Whose key a request has.

Keys are known by their hashes only. What a tenant may do is the configuration's and the policies' to say.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from base64 import b64decode
from collections.abc import Collection, Mapping

from resilient_llm.message import Headers

__all__ = ["MIN_KEY", "TenantKeys", "basic_pairs", "keys_in", "same_secret"]

_KEY_HEADERS = frozenset({b"api-key", b"x-api-key", b"x-goog-api-key"})
_MAX_KEY = 4096
_BASIC = re.compile(rb"\bBasic +((?:[A-Za-z0-9+/_-]{4})*(?:[A-Za-z0-9+/_-]{2,3})?)", re.IGNORECASE)

MIN_KEY = 16
"""Characters that a key has at least; what is shorter can be guessed."""


class TenantKeys:
    """Find the tenant that a key belongs to.

    What is looked up is a MAC (keyed BLAKE2b) of the key's SHA-256 under a secret of this process: how long a
    look-up takes tells nothing about keys, since nobody outside can choose, or know, what is compared. A key that was
    right before is known by a MAC of its own.
    """

    def __init__(self, hashes: Mapping[bytes, str]) -> None:
        self._keyed = hashlib.blake2b(key=secrets.token_bytes(32), digest_size=32)
        self._tenants = {self._mac(digest): tenant for digest, tenant in hashes.items()}
        self._known: dict[bytes, str] = {}
        """By the MACs of keys themselves; there are as many as right ones at most."""

    def __len__(self) -> int:
        return len(self._tenants)

    def tenant_of(self, keys: Collection[bytes]) -> str | None:
        """Give the tenant of a request by the keys it shows; `None` without, with one nobody has, and with several."""
        if len(keys) != 1:
            return None
        [key] = keys
        shown = self._mac(key)
        tenant = self._known.get(shown)
        if tenant is None:
            tenant = self._tenants.get(self._mac(hashlib.sha256(key).digest()))
            if tenant is not None:
                self._known[shown] = tenant
        return tenant

    def has(self, key: bytes) -> bool:
        """Tell whether a key is some tenant's."""
        return bool(self._tenants) and self._mac(hashlib.sha256(key).digest()) in self._tenants

    def _mac(self, what: bytes) -> bytes:
        mac = self._keyed.copy()
        mac.update(what)
        return mac.digest()


def keys_in(headers: Headers) -> set[bytes]:
    """Give the keys that a request shows, wherever SDKs put them: as a bearer, or in a header of their own."""
    keys: set[bytes] = set()
    for name, value in headers:
        if name == b"authorization":
            scheme, _, key = value.partition(b" ")
            if scheme.lower() == b"bearer":
                keys.add(key.strip()[:_MAX_KEY])
        elif name in _KEY_HEADERS:
            keys.add(value.strip()[:_MAX_KEY])
    keys.discard(b"")
    return keys


def basic_pairs(text: bytes) -> list[bytes]:
    """Give what stands in base64 behind each `Basic` of a text: a user's name, and a password or key (RFC 7617)."""
    return [
        b64decode(found + b"==", b"-_" if b"-" in found or b"_" in found else None)
        for found in _BASIC.findall(text)
    ]


def same_secret(keys: set[bytes], expected: str) -> bool:
    """Tell, in a time that says nothing, whether the one key that is shown is the expected one."""
    shown = next(iter(keys)) if len(keys) == 1 else b""
    found = hashlib.sha256(shown).digest()
    return hmac.compare_digest(found, hashlib.sha256(expected.encode()).digest())
