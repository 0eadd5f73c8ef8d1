"""Replies and budgets of one process, as any store keeps them.

What is cached, and what is spent, must not enter here.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from resilient_llm._loop import LoopBound
from resilient_llm.core.budget import Account, Amount, BudgetLevel, Cap, Decision, Reservation
from resilient_llm.core.ttl_cache import TTLCache
from resilient_llm.shared_keys import account_name

__all__ = ["LEASE", "MemoryBudgets", "MemoryReplies"]

LEASE = 900.0
"""Seconds after which what was reserved for a call comes back, if nobody has said what became of it."""

_MAX_SIZE = 64 * 1024 * 1024
_SWEEP = 4


class MemoryReplies:
    """Keep replies in memory, in at most `max_size` bytes; see `policies.reply_store.ReplyStore`."""

    def __init__(self, *, max_size: int = _MAX_SIZE) -> None:
        self._cache = TTLCache(max_size)
        self._loop = LoopBound("replies", self._cache.clear)

    async def get(self, key: str) -> tuple[bytes, float] | None:
        """Give the value and the seconds until it expires; `None` without one."""
        return self._cache.get(key, self._loop.bind().time())

    async def put(self, key: str, value: bytes, ttl: float) -> None:
        """Keep a value for `ttl` seconds, unless it is larger than the whole store."""
        self._cache.put(key, value, self._loop.bind().time(), ttl)

    async def delete(self, key: str) -> None:
        """Forget a value, if there is one."""
        self._loop.bind()
        self._cache.delete(key)


class MemoryBudgets:
    """Keep budgets in memory, on the event loop's clock; see `policies.ledger.BudgetLedger`.

    What was reserved for a call comes back after `lease` seconds, as it does where processes may be killed.
    """

    def __init__(self, *, lease: float = LEASE) -> None:
        self.lease = lease
        self._accounts: dict[str, Account] = {}
        self._leases: list[tuple[float, int, Reservation, Sequence[Cap]]] = []
        self._count = 0
        self._loop = LoopBound("budgets", self._reset)

    def _reset(self) -> None:
        self._accounts.clear()
        self._leases.clear()

    async def reserve(
        self, key: Hashable, amount: Amount, caps: Sequence[Cap], now: float, *, enforce: bool = True
    ) -> Decision:
        """Set `amount` aside if it fits under all caps, or nothing; without `enforce`, whether it fits or not."""
        return self.reserve_at_once(key, amount, caps, now, enforce=enforce)

    def reserve_at_once(
        self, key: Hashable, amount: Amount, caps: Sequence[Cap], now: float, *, enforce: bool = True
    ) -> Decision:
        """Do as `reserve` does."""
        self._loop.bind()
        self._expire(now)
        for name in [each for each, _ in zip(self._accounts, range(_SWEEP), strict=False)]:
            account = self._accounts.pop(name)
            if not account.idle(now):
                self._accounts[name] = account
        decision = self._account(key, caps).reserve(key, amount, caps, now, enforce=enforce)
        if decision.reservation is not None:
            self._count += 1
            heappush(self._leases, (now + self.lease, self._count, decision.reservation, caps))
        return decision

    def settle(self, reservation: Reservation, spent: Amount, now: float, *, estimated: bool) -> None:
        """Put what a call has cost in the place of what was reserved for it; a second time does nothing."""
        self._expire(now)
        account, reservation.note = reservation.note, None
        if isinstance(account, Account):
            account.settle(reservation.amount, spent, now, estimated=estimated)
        elif isinstance(account, _Lapsed):
            late = self._account(reservation.key, account.caps)
            late.outstanding += 1
            late.settle(Amount(), spent, now, estimated=estimated)

    def refund(self, reservation: Reservation, now: float) -> None:
        """Give back what was reserved for a call that has cost nothing; a second time does nothing."""
        self._expire(now)
        account, reservation.note = reservation.note, None
        if isinstance(account, Account):
            account.refund(reservation.amount)

    async def levels(self, key: Hashable, caps: Sequence[Cap], now: float) -> tuple[BudgetLevel, ...]:
        """Say how the caps of a key stand."""
        self._loop.bind()
        self._expire(now)
        return self._account(key, caps).levels(caps, now)

    def _account(self, key: Hashable, caps: Sequence[Cap]) -> Account:
        name = account_name(key)
        account = self._accounts.get(name)
        if account is None:
            account = self._accounts[name] = Account(cap.period for cap in caps)
        return account

    def _expire(self, now: float) -> None:
        """Give back what nobody came back for."""
        while self._leases and self._leases[0][0] <= now:
            _, _, reservation, caps = heappop(self._leases)
            if isinstance(reservation.note, Account):
                reservation.note.refund(reservation.amount)
                reservation.note = _Lapsed(caps)


class _Lapsed(NamedTuple):
    """Note that what was reserved has come back, and what was reserved of."""

    caps: Sequence[Cap]
