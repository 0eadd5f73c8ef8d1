"""The places that a process keeps in line at a store, one of each tenant in each lane, and who sleeps until its turn.

What is asked of the store when a turn has come, and what becomes of a place that is given up, must not enter here.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager

import anyio

from resilient_llm._loop import EventLoop
from resilient_llm.policies._shared_buckets import BucketView

__all__ = ["Places"]


class _Sleeper:
    """One who sleeps: what is held for it of which bucket, and what wakes it."""

    __slots__ = ("_loop", "held", "turn")

    def __init__(self, held: Sequence[tuple[BucketView, float]]) -> None:
        self._loop = EventLoop.current()
        self.held = held
        self.turn = anyio.Event()

    def wake(self) -> None:
        self._loop.tell(self.turn.set)


class _Line:
    """Those of this process who wait for one bucket, in the order in which they came, and all that is held for them."""

    __slots__ = ("held", "sleepers")

    def __init__(self) -> None:
        self.sleepers: dict[_Sleeper, float] = {}
        self.held = 0.0


class Places:
    """Keep one place for each of those who have to be told apart, and let whoever has it sleep.

    What is held for them, and for those of other processes, counts against the level of a bucket. Others may all come
    first, so one sleeps until there is enough even then, or its turn comes.
    """

    __slots__ = ("_kept", "_lines")

    def __init__(self) -> None:
        self._kept: set[Hashable] = set()
        self._lines: dict[BucketView, _Line] = {}

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

    @contextmanager
    def line_up(self, views: Sequence[BucketView], held: Sequence[float]) -> Iterator[anyio.Event]:
        """Stand in line for what is `held` of each bucket; the event is set when so much is there."""
        # Where nothing is held, its turn does not depend on it: a tenant whose own limit is dry waits for that alone.
        sleeper = _Sleeper([(view, amount) for view, amount in zip(views, held, strict=True) if amount])
        for view, amount in sleeper.held:
            line = self._lines.setdefault(view, _Line())
            line.sleepers[sleeper] = amount
            line.held += amount
        try:
            yield sleeper.turn
        finally:
            self._get_up(sleeper)

    def _get_up(self, sleeper: _Sleeper) -> None:
        for view, amount in sleeper.held:
            line = self._lines.get(view)
            if line is None or line.sleepers.pop(sleeper, None) is None:
                continue  # forgotten: another event loop
            line.held -= amount
            if not line.sleepers:
                del self._lines[view]

    def rise(self, views: Sequence[BucketView], now: float) -> None:
        """Wake those, the first first, for whom there is enough by now in buckets that may have risen."""
        for view in views:
            line = self._lines.get(view)
            if line is None or not _gives(view, now):
                continue
            behind = view.level(now) + line.held
            for sleeper, amount in line.sleepers.items():
                behind -= amount
                if behind < 0:
                    break
                if all(self._is_enough(each, held, now) for each, held in sleeper.held if each is not view):
                    sleeper.wake()

    def _is_enough(self, view: BucketView, amount: float, now: float) -> bool:
        """Tell whether there would be enough for one if it were the first of this process."""
        return _gives(view, now) and view.level(now) + self._lines[view].held >= amount

    def forget(self) -> None:
        """Start afresh: whoever had a place did so in an event loop that has ended."""
        self._kept.clear()
        self._lines.clear()


def _gives(view: BucketView, now: float) -> bool:
    return not view.pause_left(now)
