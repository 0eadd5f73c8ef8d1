"""What a configuration is made of, kept when the configuration changes and they do not.

A circuit that is open, slots that are taken and money that is spent must survive a reload that is about something
else. Nothing is made here, only kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

__all__ = ["Parts"]

Part = TypeVar("Part")


class Parts:
    """Hold parts by name, and take those of a `previous` configuration whose options are the same."""

    def __init__(self, previous: Parts | None = None) -> None:
        self._parts: dict[str, tuple[object, object]] = {}
        self._previous = {} if previous is None else previous._parts

    def keep(self, name: str, options: object, make: Callable[[], Part]) -> Part:
        """Give the part of this name: the one there was, if its options are equal, else a new one."""
        known = self._parts.get(name) or self._previous.get(name)
        if known is None or known[0] != options:
            known = (options, make())
        self._parts[name] = known
        return cast("Part", known[1])

    def done(self) -> None:
        """Let go of the previous configuration: everything that was wanted of it has been taken."""
        self._previous = {}

    def left_out(self, successor: Parts | None) -> list[object]:
        """Give the parts that a successor has not taken over."""
        kept = () if successor is None else [part for _, part in successor._parts.values()]
        return [part for _, part in self._parts.values() if not any(part is other for other in kept)]
