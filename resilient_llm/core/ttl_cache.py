"""Values that are forgotten when their time is over, or when there is no room for them.

It knows bytes and keys. What they mean, and where else they could be kept, must not enter here.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from typing import NamedTuple

__all__ = ["ENTRY_OVERHEAD", "TTLCache"]

ENTRY_OVERHEAD = 400
"""Bytes an entry counts besides its key and its value: about what Python's own objects around them take."""

_FEW = 64


class _Entry(NamedTuple):
    value: bytes
    expires: float
    size: int


class TTLCache:
    """Keep values until they expire, in at most `max_size` bytes; those used longest ago make room for others.

    What has expired goes first. A value that is too large by itself is not kept, and neither is then the one it was to
    take the place of. All operations take O(log n), amortised. A time earlier than the last one counts as that one.

    Raises `ValueError` for a `max_size` below 1.
    """

    __slots__ = ("_entries", "_expiries", "_max_size", "_now", "_size")

    def __init__(self, max_size: int) -> None:
        if max_size < 1:
            raise ValueError(f"max_size={max_size!r}: must be at least 1")
        self._max_size = max_size
        self._entries: OrderedDict[str, _Entry] = OrderedDict()  # used longest ago first
        self._expiries: list[
            tuple[float, str]
        ] = []  # a heap; an entry that was replaced leaves its old one in it
        self._size = 0
        self._now = float("-inf")

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def size(self) -> int:
        """Give the bytes in use."""
        return self._size

    def get(self, key: str, now: float) -> tuple[bytes, float] | None:
        """Give the value and the seconds until it expires; `None` without one."""
        self._expire(now)
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        return entry.value, entry.expires - self._now

    def put(self, key: str, value: bytes, now: float, ttl: float) -> bool:
        """Keep a value for `ttl` seconds, in place of any other; tell whether it is kept."""
        self._expire(now)
        self.delete(key)
        size = len(key) + len(value) + ENTRY_OVERHEAD
        if size > self._max_size or not ttl > 0:
            return False
        while self._size + size > self._max_size:
            _, forgotten = self._entries.popitem(last=False)
            self._size -= forgotten.size
        expires = self._now + ttl
        self._entries[key] = _Entry(value, expires, size)
        self._size += size
        heapq.heappush(self._expiries, (expires, key))
        if len(self._expiries) > 2 * len(self._entries) + _FEW:
            self._expiries = [(entry.expires, key) for key, entry in self._entries.items()]
            heapq.heapify(self._expiries)
        return True

    def delete(self, key: str) -> bool:
        """Forget a value; tell whether there was one."""
        entry = self._entries.pop(key, None)
        if entry is None:
            return False
        self._size -= entry.size
        return True

    def clear(self) -> None:
        """Forget everything, the time too."""
        self._entries.clear()
        self._expiries.clear()
        self._size = 0
        self._now = float("-inf")

    def _expire(self, now: float) -> None:
        self._now = max(self._now, now)
        expiries, entries = self._expiries, self._entries
        while expiries and expiries[0][0] <= self._now:
            expires, key = heapq.heappop(expiries)
            entry = entries.get(key)
            if entry is not None and entry.expires == expires:
                self.delete(key)
