"""How long what comes from outside may be for what was found out about it to be kept.

Caches are bounded by how much they keep, and callers may call a model anything: without this a thousand names of a
megabyte each would be kept.
"""

from __future__ import annotations

from typing import Final

__all__ = ["LONGEST_MODEL", "LONGEST_NAMES", "LONGEST_URL", "MOST_NAMES"]

LONGEST_MODEL: Final = 256
"""Characters of a model's name."""

LONGEST_URL: Final = 1024
"""Characters of a URL without its query."""

LONGEST_NAMES: Final = 2048
"""Bytes of the names of all headers of a message."""

MOST_NAMES: Final = 64
"""How many headers that may be."""
