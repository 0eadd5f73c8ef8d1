"""The store of one process: exact, in memory, and never out of order.

It decides what any other store must; what is kept here ends with the process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import RLock

from resilient_llm._loop import EventLoop
from resilient_llm.core.shared_rate import Change, RateCharge, RateDecision, RateLedger, RateLevel, TakeMode
from resilient_llm.stores._memory_circuits import MemoryCircuits
from resilient_llm.stores._memory_leases import MemoryLeases
from resilient_llm.stores._memory_values import MemoryBudgets, MemoryReplies
from resilient_llm.stores.guard import StoreGuard
from resilient_llm.stores.protocol import HearLevels

__all__ = ["MemoryRates", "MemoryStore"]


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
        self._lock = RLock()  # a call may end in a thread that has outlived its event loop, or in a finaliser
        self._last = 0.0

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
        with self._lock:
            return self.ledger.take(named, self._now(), most_wait=most_wait, mode=mode)

    def settle(self, account: str, changes: Sequence[Change], heard: HearLevels | None = None) -> None:
        """Give back, charge, or free what was held: at once."""
        named = [change._replace(key=f"{account}:{change.key}") for change in changes]
        with self._lock:
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

    def _now(self) -> float:
        """Give the event loop's time, or the last one known where there is no event loop any more."""
        with suppress(RuntimeError):
            self._last = EventLoop.current().time()
        return self._last


def _tell(heard: Callable[[Sequence[RateLevel]], None] | None, levels: Sequence[RateLevel]) -> None:
    if heard is not None:
        heard(levels)
