"""The keys of accounts as strings that mean the same in every process."""

from __future__ import annotations

from collections.abc import Hashable
from hashlib import blake2b

from resilient_llm.errors import ConfigurationError

__all__ = ["account_name"]


def account_name(key: Hashable) -> str:
    """Give a short string for a key, safe inside a store's keys; different keys give different strings.

    Raises `ConfigurationError` for a key that other processes may not write the same way.
    """
    return blake2b(_spelled(key).encode(errors="surrogatepass"), digest_size=16).hexdigest()


def _spelled(key: Hashable) -> str:
    if key is None or isinstance(key, bool | int):
        return f"{key!s};"
    if isinstance(key, str):
        return f"{len(key)}:{key!s};"
    if isinstance(key, tuple):
        return f"({''.join(map(_spelled, key))})"
    raise ConfigurationError(
        f"key {key!r}: what is shared between processes is kept by str, int, bool, None, or a tuple of these"
    )
