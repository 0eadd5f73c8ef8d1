"""Where budgets are kept: in this process, or wherever an application puts another `BudgetLedger`.

A ledger keeps accounts. What calls cost, and who may spend what, its `Budget` says.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Hashable, Sequence
from dataclasses import replace
from itertools import islice
from typing import Protocol

import anyio

from resilient_llm._loop import LoopBound
from resilient_llm._options import at_least
from resilient_llm.core.budget import Account, Amount, BudgetLevel, Cap, Decision, Reservation
from resilient_llm.core.sweep import FEW, MANY, Sweep
from resilient_llm.shared_keys import OVERFLOW

__all__ = ["BudgetLedger", "MemoryLedger"]

_MAX_REPORTED = 10_000  # keys that a gauge looks at


class BudgetLedger(Protocol):
    """Keep what keys have spent, and what is set aside for their calls in flight.

    `now` is on the clock of `anyio.current_time()`; a ledger that is shared by processes goes by its own. A `reserve`
    that is cancelled, or fails, leaves nothing reserved. `settle` and `refund` may be called at the end of any call,
    cancelled ones too: what they give back to await is awaited, shielded, for a few seconds at most.
    """

    async def reserve(
        self, key: Hashable, amount: Amount, caps: Sequence[Cap], now: float, *, enforce: bool = True
    ) -> Decision:
        """Set `amount` aside if it fits under all caps, or nothing; without `enforce`, whether it fits or not."""
        ...

    def settle(
        self, reservation: Reservation, spent: Amount, now: float, *, estimated: bool
    ) -> Awaitable[None] | None:
        """Put what a call has cost in the place of what was reserved for it; once."""
        ...

    def refund(self, reservation: Reservation, now: float) -> Awaitable[None] | None:
        """Give back what was reserved for a call that has cost nothing; once."""
        ...

    async def levels(self, key: Hashable, caps: Sequence[Cap], now: float) -> tuple[BudgetLevel, ...]:
        """Say how the caps of a key stand."""
        ...


class MemoryLedger:
    """Keep budgets in this process, exactly, for at most `max_keys` keys.

    Keys that have nothing reserved, and nothing spent that still counts, are forgotten; while `max_keys` are in use,
    further ones share one account, and so one cap. A ledger lives as long as its object: an event loop that takes
    over from one that has ended finds what was spent, and what was still reserved then counts as spent.
    """

    def __init__(self, *, max_keys: int = 10_000) -> None:
        at_least(1, max_keys=max_keys)
        self._max_keys = max_keys
        self._accounts: dict[Hashable, tuple[Account, Sequence[Cap]]] = {}
        """Each with the caps that were last asked for, which may be another key's every time."""
        self._sweep = Sweep(self._accounts, lambda kept, now: kept[0].idle(now))
        self._latest = -math.inf
        self._ahead = 0.0
        """What this ledger's time is ahead of the event loop's, since another loop took over."""
        self._taken_over = False
        self._loop = LoopBound("budget ledger", self._take_over)

    def __len__(self) -> int:
        return len(self._accounts)

    async def reserve(
        self, key: Hashable, amount: Amount, caps: Sequence[Cap], now: float, *, enforce: bool = True
    ) -> Decision:
        """Set `amount` aside if it fits under all caps, or nothing; without `enforce`, whether it fits or not."""
        self._loop.bind()
        now = self._time(now)
        kept_for = self._kept_for(key, now)
        account, _ = self._accounts[kept_for] = self._accounts.get(kept_for, (Account(), caps))[0], caps
        decision = account.reserve(key, amount, caps, now, enforce=enforce)
        return replace(decision, overflow=True) if kept_for is OVERFLOW else decision

    def settle(self, reservation: Reservation, spent: Amount, now: float, *, estimated: bool) -> None:
        """Put what a call has cost in the place of what was reserved for it; a second time does nothing."""
        account = _taken(reservation)
        if account is not None:
            account.settle(reservation.amount, spent, self._time(now), estimated=estimated)

    def refund(self, reservation: Reservation, now: float) -> None:  # noqa: ARG002 - it is given back whenever it is
        """Give back what was reserved for a call that has cost nothing; a second time does nothing."""
        account = _taken(reservation)
        if account is not None:
            account.refund(reservation.amount)

    async def levels(self, key: Hashable, caps: Sequence[Cap], now: float) -> tuple[BudgetLevel, ...]:
        """Say how the caps of a key stand."""
        self._loop.bind()
        kept_for = key if key in self._accounts or len(self._accounts) < self._max_keys else OVERFLOW
        account = self._accounts[kept_for][0] if kept_for in self._accounts else Account()
        return account.levels(caps, self._time(now))

    def lowest(self) -> dict[str, float]:
        """Say what remains of each cap, by its name, of the key that has least of it; from any thread."""
        now = self._readable_time()
        lowest = dict[str, float]()
        for account, caps in islice(list(self._accounts.values()), _MAX_REPORTED):
            for cap in caps:
                if cap.limit < math.inf:
                    remaining = account.remaining(cap, now)
                    lowest[cap.name] = min(remaining, lowest.get(cap.name, math.inf))
        return lowest

    def _kept_for(self, key: Hashable, now: float) -> Hashable:
        """Give the key of the account for a key: its own, or the one that those share for whom there is no room."""
        if len(self._accounts) > FEW:
            self._sweep.look(1, now, key)
        if key not in self._accounts and len(self._accounts) >= self._max_keys:
            self._sweep.look(MANY, now, key)
            if len(self._accounts) >= self._max_keys:
                return OVERFLOW
        return key

    def _time(self, now: float) -> float:
        """Give the time of this ledger, which never goes back."""
        if self._taken_over:
            self._taken_over = False
            # Trio's clock begins anywhere with every run; that of asyncio goes on, unless it is a virtual one.
            if now < self._latest or self._loop.bind().time is anyio.current_time:
                self._ahead = self._latest - now
        self._latest = max(self._latest, now + self._ahead)
        return self._latest

    def _readable_time(self) -> float:
        """Give the time, or in a thread where trio's cannot be read, the last there was."""
        loop = self._loop.loop
        try:
            return self._latest if loop is None else max(self._latest, loop.time() + self._ahead)
        except RuntimeError:
            return self._latest

    def _take_over(self) -> None:
        """Go on with another event loop: its clock may have begun anywhere, and the old one's calls are no more."""
        self._taken_over = True
        for key, (account, caps) in self._accounts.items():
            self._accounts[key] = account.succeed(self._latest), caps


def _taken(reservation: Reservation) -> Account | None:
    """Give the account that something is reserved of, the first time it is asked for."""
    account, reservation.note = reservation.note, None
    return account if isinstance(account, Account) else None
