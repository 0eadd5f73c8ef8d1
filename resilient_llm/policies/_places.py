"""The places that a process keeps in line at a store, one of each tenant in each lane, and who sleeps until its turn.

What is asked of the store when a turn has come, and what becomes of a place that is given up, must not enter here.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import anyio

from resilient_llm.policies._shared_buckets import BucketView

__all__ = ["Places"]


class _Sleeper:
    """One who sleeps: the buckets that it waits for, and what wakes it."""

    __slots__ = ("turn", "views")

    def __init__(self, views: Sequence[BucketView]) -> None:
        self.views = views
        self.turn = anyio.Event()


class Places:
    """Keep one place for each of those who have to be told apart, and let whoever has it sleep."""

    __slots__ = ("_asleep", "_kept")

    def __init__(self) -> None:
        self._kept: set[Hashable] = set()
        self._asleep: dict[BucketView, set[_Sleeper]] = {}

    def __contains__(self, place: Hashable) -> bool:
        return place in self._kept

    def keep(self, place: Hashable) -> bool:
        """Keep a place; `False` when somebody has it."""
        if place in self._kept:
            return False
        self._kept.add(place)
        return True

    def leave(self, place: Hashable) -> None:
        """Leave a place to others."""
        self._kept.discard(place)

    async def sleep(self, views: Sequence[BucketView], seconds: float, time: Callable[[], float]) -> None:
        """Sleep until a turn that comes in so many seconds, or until there is enough for everybody in line.

        Places are counted against what a bucket holds: one that is not in debt has what all who keep places wait for.
        """
        if _have_enough(views, time()):
            return
        sleeper = _Sleeper(views)
        for view in views:
            self._asleep.setdefault(view, set()).add(sleeper)
        try:
            with anyio.move_on_after(seconds):
                await sleeper.turn.wait()
        finally:
            for view in views:
                asleep = self._asleep.get(view)
                if asleep is not None:
                    asleep.discard(sleeper)
                    if not asleep:
                        del self._asleep[view]

    def hear(self, views: Sequence[BucketView], now: float) -> None:
        """Wake those who wait for buckets of which something was heard, if there is enough for them by now."""
        if not self._asleep:
            return
        for view in views:
            for sleeper in self._asleep.get(view, ()):
                if _have_enough(sleeper.views, now):
                    sleeper.turn.set()

    def forget(self) -> None:
        """Start afresh: whoever had a place did so in an event loop that has ended."""
        self._kept.clear()
        self._asleep.clear()


def _have_enough(views: Sequence[BucketView], now: float) -> bool:
    return all(view.level(now) >= 0 and not view.pause_left(now) for view in views)
