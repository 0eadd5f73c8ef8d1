"""Budgets on a Redis or Valkey server: reserved, settled and refunded by script, on the server's clock.

What the scripts decide is `core/budget.py`'s to say; what calls cost, and who may spend it, the policy's.
"""

from __future__ import annotations

import math
import secrets
import struct
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, NamedTuple

from resilient_llm.core.budget import Amount, BudgetLevel, Cap, Decision, Reservation
from resilient_llm.core.period import Period, RollingPeriod
from resilient_llm.errors import StoreUnavailableError
from resilient_llm.shared_keys import account_name
from resilient_llm.stores._memory_values import LEASE, MemoryBudgets
from resilient_llm.stores._redis_commands import Reply, Script, Word
from resilient_llm.stores._redis_runner import Runner

__all__ = ["RedisLedger"]

_AMOUNT: Final = struct.Struct("<2d")
_FOUR: Final = struct.Struct("<4d")
_HEAD: Final = struct.Struct("<5d")
_MOST_HEARD: Final = 10_000
_NOTHING: Final = Amount()


@dataclass(slots=True, eq=False)
class _Note:
    """Where a reservation is kept: by `member` on the server, and `own` in this process, while that had no answer.

    It is `known` when the server has said that it keeps it.
    """

    keys: Sequence[Word]
    periods: Sequence[Period]
    member: bytes = b""
    own: Reservation | None = None
    known: bool = False


class _Wanted(NamedTuple):
    """What somebody asks for."""

    key: Hashable
    amount: Amount
    caps: Sequence[Cap]
    now: float
    enforce: bool


class RedisLedger:
    """Keep budgets on a server; see `policies.ledger.BudgetLedger`.

    What is reserved for a call comes back after `lease` seconds, for its process may have been killed; a call that
    takes longer is charged all the same when it ends. Rolling periods go by the server's clock, or by `clock` where
    there is one; the calendar's by that of the `Budget`.

    Without the server a reservation is made as `on_store_error` says: of this process's share of what was left when
    the server was heard last, without any limit, or not at all; the server hears of what was spent when it is back.
    """

    def __init__(
        self,
        runner: Runner,
        prefix: str,
        *,
        processes: Callable[[], int],
        clock: Callable[[], float] | None = None,
        lease: float = LEASE,
    ) -> None:
        self.guard = runner.guard
        self.lease = lease
        self._runner = runner
        self._prefix = prefix
        self._processes = processes
        self._clock = clock
        self._reserve = Script.load("_clock", "_budget", "budget_reserve")
        self._settle = Script.load("_clock", "_budget", "budget_settle")
        self._id = secrets.token_bytes(8)
        self._count = 0
        self._heard: OrderedDict[str, dict[str, float]] = OrderedDict()
        self._own: MemoryBudgets | None = None

    def after_fork(self) -> None:
        """Go on, in the child, with names for reservations that are not the parent's."""
        self._id = secrets.token_bytes(8)

    async def reserve(
        self, key: Hashable, amount: Amount, caps: Sequence[Cap], now: float, *, enforce: bool = True
    ) -> Decision:
        """Set `amount` aside if it fits under all caps, or nothing; without `enforce`, whether it fits or not.

        Raises `StoreUnavailableError` where that is what is wanted while there is no answer.
        """
        name = account_name(key)
        self._count += 1
        ident = self._id + self._count.to_bytes(8, "big")
        periods = _periods(caps)
        note = _Note(self._keys(name, periods), periods, ident + _AMOUNT.pack(*amount))
        try:
            reply = await self._ask(note, caps, name=ident, amount=amount, enforce=enforce)
        except StoreUnavailableError:
            self.guard.unguarded += 1
            if self.guard.on_error == "closed" and enforce:
                raise
            return self._reserve_alone(note, name, _Wanted(key, amount, caps, now, enforce))
        self._own = None
        note.known = True
        levels, (reserved, refused, wait) = _levels(caps, reply)
        self._hear(name, levels)
        each = _FOUR.iter_unpack(reply[_HEAD.size :])
        return Decision(
            reservation=Reservation(key, amount, note) if reserved else None,
            levels=levels,
            refused=levels[int(refused) - 1] if refused else None,
            retry_after=wait if refused and wait >= 0 else None,
            crossed=tuple(level for level, (*_, due) in zip(levels, each, strict=True) if due),
        )

    def settle(self, reservation: Reservation, spent: Amount, now: float, *, estimated: bool) -> None:
        """Put what a call has cost in the place of what was reserved for it; a second time does nothing."""
        note, reservation.note = reservation.note, None
        if isinstance(note, _Note):
            if note.own is not None and self._own is not None:
                self._own.settle(note.own, spent, now, estimated=estimated)
            if note.member or spent != _NOTHING:
                self._tell(note, spent, estimated=estimated)

    def refund(self, reservation: Reservation, now: float) -> None:
        """Give back what was reserved for a call that has cost nothing; a second time does nothing."""
        self.settle(reservation, _NOTHING, now, estimated=False)

    async def levels(self, key: Hashable, caps: Sequence[Cap], now: float) -> tuple[BudgetLevel, ...]:  # noqa: ARG002 - the server's is
        """Say how the caps of a key stand.

        Raises `StoreUnavailableError` while there is no answer.
        """
        periods = _periods(caps)
        note = _Note(self._keys(account_name(key), periods), periods)
        return _levels(caps, await self._ask(note, caps))[0]

    async def _ask(
        self,
        note: _Note,
        caps: Sequence[Cap],
        *,
        name: bytes = b"",
        amount: Amount = _NOTHING,
        enforce: bool = True,
    ) -> Reply:
        return await self._runner.run(
            self._reserve,
            note.keys,
            (
                name,
                _FOUR.pack(*amount, self.lease, 1.0 if enforce else 0.0),
                _places(note.periods),
                b"".join(
                    _FOUR.pack(
                        1.0 if cap.unit == "usd" else 2.0,
                        note.periods.index(cap.period) + 1,
                        cap.limit,
                        cap.warn_ratio,
                    )
                    for cap in caps
                ),
                "\n".join(cap.name for cap in caps),
                *self._time(),
            ),
            orphan=partial(self._undo, note),
            unknown=lambda _: self._give_back(note),
        )

    def _undo(self, note: _Note, reply: Reply) -> None:
        """Give back what was reserved for a caller that has gone."""
        if _HEAD.unpack_from(reply)[0]:
            self._give_back(note)

    def _give_back(self, note: _Note) -> None:
        if note.member:
            self._tell(note, _NOTHING, estimated=False)

    def _tell(self, note: _Note, spent: Amount, *, estimated: bool) -> None:
        def words(again: float) -> Sequence[Word]:
            amounts = _FOUR.pack(*spent, 1.0 if estimated else 0.0, again)
            return note.member, amounts, _places(note.periods), *self._time()

        # What has been told before is not reserved any more; of what may never have been nobody could tell.
        again = words(1.0) if note.known or spent == _NOTHING else None
        self._runner.send(self._settle, note.keys, words(0.0), again=again, worth=self.lease)

    def _reserve_alone(self, note: _Note, name: str, wanted: _Wanted) -> Decision:
        """Decide without the server, which may have made the reservation all the same: it is told what it has cost."""
        reservation = Reservation(wanted.key, wanted.amount, note)
        if self.guard.on_error != "local":
            return Decision(reservation=reservation, levels=())
        if self._own is None:
            self._own = MemoryBudgets(lease=self.lease)
        left, processes = self._heard.get(name, {}), max(1, self._processes())
        shares = [
            cap._replace(limit=max(0.0, left.get(cap.name, cap.limit)) / processes, warn_ratio=math.inf)
            for cap in wanted.caps
        ]
        decision = self._own.reserve_at_once(
            wanted.key, wanted.amount, shares, wanted.now, enforce=wanted.enforce
        )
        note.own = decision.reservation
        return replace(decision, reservation=None if note.own is None else reservation, crossed=())

    def _hear(self, name: str, levels: Sequence[BudgetLevel]) -> None:
        self._heard[name] = {level.name: level.remaining for level in levels}
        self._heard.move_to_end(name)
        if len(self._heard) > _MOST_HEARD:
            self._heard.popitem(last=False)

    def _keys(self, name: str, periods: Sequence[Period]) -> list[Word]:
        tag = f"{self._prefix}{{{name}}}:budget:"
        return [f"{tag}reserved", f"{tag}account", *(f"{tag}{_named(period)}" for period in periods)]

    def _time(self) -> tuple[Word, ...]:
        return () if self._clock is None else (repr(self._clock()),)


def _periods(caps: Sequence[Cap]) -> Sequence[Period]:
    return list(dict.fromkeys(cap.period for cap in caps))


def _named(period: Period) -> str:
    if isinstance(period, RollingPeriod):
        return f"{period.name}:{period.duration:g}:{period.slices}"
    return f"{period.name}:calendar"


def _places(periods: Sequence[Period]) -> bytes:
    """Say where in its periods the server is, or, where a calendar says that, where this process is."""
    places = []
    for period in periods:
        if isinstance(period, RollingPeriod):
            places.append(_FOUR.pack(period.slices + 1, period.duration / period.slices, 0.0, 0.0))
        else:
            at = period.at(0.0)
            places.append(_FOUR.pack(1.0, 0.0, at.slice, at.ends_in))
    return b"".join(places)


def _levels(caps: Sequence[Cap], reply: Reply) -> tuple[tuple[BudgetLevel, ...], tuple[float, float, float]]:
    reserved, refused, wait, usd, tokens = _HEAD.unpack_from(reply)
    held = Amount(usd, tokens)
    each = _FOUR.iter_unpack(reply[_HEAD.size :])
    levels = tuple(
        BudgetLevel(cap.name, cap.limit, spent, held.of(cap.unit), estimated, resets)
        for cap, (spent, estimated, resets, _) in zip(caps, each, strict=True)
    )
    return levels, (reserved, refused, wait)
