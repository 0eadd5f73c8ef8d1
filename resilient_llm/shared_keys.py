"""The keys of policies as strings that mean the same in every process, and are safe inside a store's keys.

Policies and stores both need them. What is kept under a key must not enter here.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from hashlib import blake2b

from resilient_llm.errors import ConfigurationError

__all__ = ["OVERFLOW", "account_name", "shared_key"]

_PLAIN = re.compile(r"[A-Za-z0-9_.@/+-]{1,64}\Z")
_LONG = 10**18


class _Overflow:
    """Stand for all keys that have no state of their own, in words as telemetry does for labels."""

    __slots__ = ("__weakref__",)

    def __repr__(self) -> str:
        return "other"


OVERFLOW: Hashable = _Overflow()
"""The key of what those share for whom there is no room, or whose key cannot be had."""


def shared_key(key: Hashable) -> str:
    """Give a key as a short string without braces, colons or spaces; different keys give different strings.

    Raises `ConfigurationError` for a key that other processes may not write the same way.
    """
    if isinstance(key, str):
        return key if _PLAIN.match(key) else f"~{_digest(key.encode(errors='surrogatepass'))}"
    if key is None:
        return "!none"
    if key is OVERFLOW:
        return "!more"
    if isinstance(key, bool | int):
        return f"!{key}" if abs(key) < _LONG else f"!~{_digest(hex(key).encode())}"
    if isinstance(key, tuple):
        return f"({','.join(map(shared_key, key))})"
    raise ConfigurationError(
        f"key {key!r}: what is shared between processes is kept by str, int, bool, None, or a tuple of these"
    )


def account_name(key: Hashable) -> str:
    """Give a key as a string of one length, of letters and digits only; different keys give different strings.

    Raises what `shared_key` raises.
    """
    return _digest(shared_key(key).encode())


def _digest(key: bytes) -> str:
    return blake2b(key, digest_size=16).hexdigest()
