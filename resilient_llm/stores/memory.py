"""The store of one process: exact, in memory, and never out of order.

It decides what any other store must; what is kept here ends with the process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from math import inf, nextafter
from threading import RLock

from resilient_llm._loop import EventLoop
from resilient_llm.core.shared_rate import Change, RateCharge, RateDecision, RateLedger, RateLevel, TakeMode
from resilient_llm.stores._memory_circuits import MemoryCircuits
from resilient_llm.stores._memory_leases import MemoryLeases
from resilient_llm.stores._memory_values import MemoryBudgets, MemoryReplies
from resilient_llm.stores.guard import StoreGuard
from resilient_llm.stores.protocol import HearLevels

__all__ = ["MemoryRates", "MemoryStore"]

_INSTANT = 1e-3
"""Seconds by which the time told may be ahead of the clock: by much less, however many decide in one instant."""


class MemoryStore:
    """Keep what policies share in this process's memory: several pipelines may, on one event loop.

    Time is the event loop's, so that it also works in virtual time; on asyncio and trio.
    """

    processes = 1

    def __init__(self, *, name: str = "memory") -> None:
        self.guard = StoreGuard(name, "closed")
        self.rates = MemoryRates()
        self.circuits = MemoryCircuits()
        self.replies = MemoryReplies()
        self.ledger = MemoryBudgets()
        self.leases = MemoryLeases()

    async def aclose(self) -> None:
        """Do nothing: there is nothing to close."""


class MemoryRates:
    """Keep rate limits in memory; see `stores.protocol.Rates`."""

    def __init__(self) -> None:
        self.ledger = RateLedger()
        self._places: dict[EventLoop, dict[tuple[str, float], Change]] = {}  # with what gives each up
        self._lock = RLock()  # a call may end in a thread that has outlived its event loop, or in a finaliser
        self._last = self._told = 0.0

    async def take(
        self,
        account: str,
        charges: Sequence[RateCharge],
        *,
        most_wait: float = 0.0,
        mode: TakeMode = "n",
        undone: HearLevels | None = None,  # noqa: ARG002 - nothing ever has to be
    ) -> RateDecision:
        """Take all that a call needs, or nothing; without ever yielding to another task."""
        named = [charge._replace(key=f"{account}:{charge.key}") for charge in charges]
        loop = EventLoop.current()
        with self._lock:
            now = self._now()
            self._forget_ended(loop, now)
            self._leave((charge.key, charge.turn) for charge in named if charge.held)
            decision = self.ledger.take(named, now, most_wait=most_wait, mode=mode)
            for index, (charge, held) in enumerate(zip(named, decision.held, strict=True)):
                if held:
                    turn = decision.turn(index)
                    left = Change(*charge[:3], freed=held, turn=turn)
                    self._places.setdefault(loop, {})[charge.key, turn] = left
            return decision

    def settle(self, account: str, changes: Sequence[Change], heard: HearLevels | None = None) -> None:
        """Give back, charge, or free what was held: at once."""
        named = [change._replace(key=f"{account}:{change.key}") for change in changes]
        with self._lock:
            self._leave((change.key, change.turn) for change in named if change.freed)
            levels = self.ledger.settle(named, self._now())
        _tell(heard, levels)

    def lower(
        self,
        account: str,
        charges: Sequence[RateCharge],
        pauses: Sequence[float],
        heard: HearLevels | None = None,
    ) -> None:
        """Lower the levels of buckets, and pause them: at once."""
        named = [charge._replace(key=f"{account}:{charge.key}") for charge in charges]
        with self._lock:
            levels = self.ledger.lower(named, pauses, self._now())
        _tell(heard, levels)

    def _leave(self, places: Iterable[tuple[str, float]]) -> None:
        """Forget places to which somebody has come back, or which were given up."""
        for place in places:
            for kept in self._places.values():
                kept.pop(place, None)

    def _forget_ended(self, running: EventLoop, now: float) -> None:
        """Give up the places of those who wait in event loops that have ended."""
        for loop in [each for each in self._places if each is not running and each.has_ended()]:
            self.ledger.settle(list(self._places.pop(loop).values()), now)

    def _now(self) -> float:
        """Give the event loop's time, or the last one known where there is no event loop any more.

        Never the same twice: by it whoever hears of two decisions knows which was the later one.
        """
        with suppress(RuntimeError):
            self._last = EventLoop.current().time()
        told = self._told
        self._told = nextafter(told, inf) if 0 <= told - self._last < _INSTANT else self._last
        return self._told


def _tell(heard: Callable[[Sequence[RateLevel]], None] | None, levels: Sequence[RateLevel]) -> None:
    if heard is not None:
        heard(levels)
