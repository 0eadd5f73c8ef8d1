"""What becomes of stores in the child of a fork: they go on under names of their own, without the parent's connections.

What a store has to name anew it says itself.
"""

from __future__ import annotations

import os
from typing import Final, Protocol
from weakref import WeakSet

__all__ = ["Forking", "set_aside", "tell_of_forks"]


class Forking(Protocol):
    """Has names that no other process may use."""

    def after_fork(self) -> None:
        """Hear, in the child, that this is another process now."""
        ...


_told: Final[WeakSet[Forking]] = WeakSet()
_inherited: Final[list[object]] = []


def tell_of_forks(each: Forking) -> None:
    """Call `after_fork` in every child, as long as there is such an object."""
    _told.add(each)


def set_aside(*inherited: object) -> None:
    """Keep what is the parent's from being closed: that would take its sockets out of the selector both share."""
    _inherited.extend(inherited)


def _after_fork() -> None:
    for each in list(_told):
        each.after_fork()


if hasattr(os, "register_at_fork"):  # there is none on Windows
    os.register_at_fork(after_in_child=_after_fork)
