"""Which of many windows of time are open, asked again and again as time goes on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, Protocol, TypeVar

__all__ = ["Calendar"]


class Window(Protocol):
    """Something that holds from `start` on and before `end`."""

    @property
    def start(self) -> float: ...
    @property
    def end(self) -> float: ...


W = TypeVar("W", bound=Window)


class Calendar(Generic[W]):
    """Keep windows, and give those that are open at a time; times may only grow.

    Costs what opens and closes, not how many windows there are: thousands of short outages are cheap.
    """

    def __init__(self, windows: Iterable[W]) -> None:
        # The next to open is at the end, and of those that open together the first that was given.
        self._to_come = sorted(windows, key=lambda window: window.start)[::-1]
        self._open: list[W] = []

    def at(self, now: float) -> list[W]:
        """Give the windows that are open now, in the order in which they opened."""
        while self._to_come and self._to_come[-1].start <= now:
            self._open.append(self._to_come.pop())
        if self._open:
            self._open = [window for window in self._open if now < window.end]
        return self._open
