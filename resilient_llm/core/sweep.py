"""Forgetting what is idle in a table of states by key, a little with each use instead of all at once.

What a state is, and when it is idle, must not enter here.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

__all__ = ["FEW", "MANY", "Sweep"]

State = TypeVar("State")

FEW = 64
"""How many keys may be idle for as long as they like."""
MANY = 32
"""How many keys are worth looking at where there is no room for a new one."""


class Sweep(Generic[State]):
    """Go through the keys of `states` in turn, as they were when the turn began, and forget those that are idle."""

    __slots__ = ("_idle", "_left", "_states")

    def __init__(self, states: dict[Hashable, State], idle: Callable[[State, float], bool]) -> None:
        self._states = states
        self._idle = idle
        self._left: list[Hashable] = []

    def look(self, count: int, now: float, kept: Hashable) -> None:
        """Look at the next so many keys; the one that is `kept` is about to be used."""
        states = self._states
        for _ in range(count):
            if not self._left:
                if not states:
                    return
                self._left = list(states)
            key = self._left.pop()
            if key != kept and key in states and self._idle(states[key], now):
                del states[key]

    def clear(self) -> None:
        """Begin anew, with a table that was emptied."""
        self._left.clear()
