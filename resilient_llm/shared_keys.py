"""The keys of policies as strings that mean the same in every process, and are safe inside a store's keys.

Policies and stores both need them. What is kept under a key must not enter here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Hashable
from enum import Enum
from hashlib import blake2b
from uuid import UUID

from resilient_llm.errors import ConfigurationError

__all__ = ["OVERFLOW", "SHAREABLE", "account_name", "is_shareable", "shared_key"]

SHAREABLE = "str, int, float, bool, bytes, UUID, members of an Enum, None, and tuples of these"
"""What keys are that all processes write the same way, for people."""

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

    What is equal to a str, an int or bytes is written like these: whole floats, and members of an Enum that are one of
    them. Any other member goes by the name of its class and its own. Raises `ConfigurationError` for a key that other
    processes may not write the same way.
    """
    if isinstance(key, str):
        plain = _PLAIN.match(key)  # and what it found is of no subclass
        return plain[0] if plain else f"~{_digest(key.encode(errors='surrogatepass'))}"
    if key is None:
        return "!none"
    if key is OVERFLOW:
        return "!more"
    if isinstance(key, tuple):
        return f"({','.join(map(shared_key, key))})"
    return _of_number(key) if isinstance(key, int | float) else _of_name(key)


def _of_number(key: float) -> str:
    if isinstance(key, bool):
        return f"!{key}"
    if isinstance(key, float):
        if math.isnan(key):  # not even equal to itself
            raise _refusal(key)
        if not key.is_integer():
            return f"!{float.__repr__(key)}"
        key = int(key)
    return f"!{int.__repr__(key)}" if abs(key) < _LONG else f"!~{_digest(hex(key).encode())}"


def _of_name(key: Hashable) -> str:
    if isinstance(key, bytes):
        return f"!bytes~{_digest(key)}"
    if isinstance(key, UUID):
        return f"!uuid~{key.hex}"
    if isinstance(key, Enum) and key.name:  # flags that are combined may have no name
        return f"!enum~{_digest(f'{type(key).__qualname__}.{key.name}'.encode())}"
    raise _refusal(key)


def _refusal(key: Hashable) -> ConfigurationError:
    return ConfigurationError(f"key {key!r}: what is shared between processes is kept by {SHAREABLE}")


def is_shareable(key: Hashable) -> bool:
    """Tell whether `shared_key` has a string for a key."""
    try:
        shared_key(key)
    except ConfigurationError:
        return False
    return True


def account_name(key: Hashable) -> str:
    """Give a key as a string of one length, of letters and digits only; different keys give different strings.

    Raises what `shared_key` raises.
    """
    return _digest(shared_key(key).encode())


def _digest(key: bytes) -> str:
    return blake2b(key, digest_size=16).hexdigest()
