"""What one key has spent in a period, what is set aside for its calls in flight, and whether another one fits.

Pure arithmetic on amounts and slices of time. Whose budget it is, what a call costs, and when it is over must not
enter here.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from resilient_llm.core.period import Period, Position

__all__ = ["Account", "Amount", "BudgetLevel", "Cap", "Decision", "Reservation", "Unit"]

Unit: TypeAlias = Literal["usd", "tokens"]

_ROUNDING = 1e-9  # of a cap: what sums of floats may be off by
_FIELDS = 5  # of a slice: its number, US dollars, tokens, and how much of either is estimated
_IN_FLIGHT = 1.0  # a guess at the seconds until calls in flight have ended


class Amount(NamedTuple):
    """So many US dollars and tokens."""

    usd: float = 0.0
    tokens: float = 0.0

    def of(self, unit: Unit) -> float:
        """Give the part in this unit."""
        return self.usd if unit == "usd" else self.tokens


_NOTHING = Amount()


def _plus(one: Amount, other: Amount) -> Amount:
    return Amount(one.usd + other.usd, one.tokens + other.tokens)


class Cap(NamedTuple):
    """Say how much may be spent of what in which period; `limit` may be infinite, which only counts."""

    unit: Unit
    period: Period
    limit: float
    warn_ratio: float = math.inf
    """Of the limit: once so much is spent, the next call is warned of."""

    @property
    def name(self) -> str:
        """Give its name, which is that of the option it comes from: usd_per_day."""
        return f"{self.unit}_per_{self.period.name}"


class BudgetLevel(NamedTuple):
    """Say how a cap stands.

    `spent` counts in the period, `estimated` of it is not known but estimated, `reserved` is set aside for calls in
    flight. `resets_in` is in seconds: until all that is spent counts no more.
    """

    name: str
    limit: float
    spent: float
    reserved: float
    estimated: float
    resets_in: float

    @property
    def remaining(self) -> float:
        """Give what may still be spent; less than 0 where calls took more than had been expected."""
        return self.limit - self.spent - self.reserved


@dataclass(slots=True, eq=False)
class Reservation:
    """What was set aside for one call, until it is settled or refunded; `note` is the ledger's own."""

    key: Hashable
    amount: Amount
    note: object = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Say whether a call fits, and how its caps stood before.

    Without a `reservation` it was refused; `refused` is the cap that takes longest to have room for it, which it has
    in `retry_after` seconds as things stand, or `None` where the cap is too small for it. `crossed` are the caps
    of which it is the first call to find so much spent that a warning is due; `overflow` says that its key shares
    an account with others, for there are too many.
    """

    reservation: Reservation | None
    levels: tuple[BudgetLevel, ...]
    refused: BudgetLevel | None = None
    retry_after: float | None = None
    crossed: tuple[BudgetLevel, ...] = ()
    overflow: bool = False


class _Spending:
    """Total what was spent in the slices of a period that count."""

    __slots__ = ("_slices", "estimated", "spent")

    def __init__(self) -> None:
        self._slices = array("d")
        self.spent = _NOTHING
        self.estimated = _NOTHING

    def __bool__(self) -> bool:
        return bool(self._slices)

    def expire(self, at: Position) -> None:
        """Forget the slices that no longer count."""
        slices, gone = self._slices, 0
        while gone < len(slices) and slices[gone] <= at.slice - at.kept:
            gone += _FIELDS
        if gone:
            del slices[:gone]
            # Summed anew, so that no rounding adds up.
            self.spent = Amount(math.fsum(slices[1::_FIELDS]), math.fsum(slices[2::_FIELDS]))
            self.estimated = Amount(math.fsum(slices[3::_FIELDS]), math.fsum(slices[4::_FIELDS]))

    def add(self, at: Position, amount: Amount, *, estimated: bool) -> None:
        """Count what has just been spent; on a clock that went backwards, as of the latest slice."""
        self.expire(at)
        slices = self._slices
        if not slices or slices[-_FIELDS] < at.slice:
            slices.extend((at.slice, 0.0, 0.0, 0.0, 0.0))
        slices[-4] += amount.usd
        slices[-3] += amount.tokens
        self.spent = _plus(self.spent, amount)
        if estimated:
            slices[-2] += amount.usd
            slices[-1] += amount.tokens
            self.estimated = _plus(self.estimated, amount)

    def counting(self, at: Position, unit: Unit) -> float:
        """Give what counts of what is spent, and change nothing: for other threads."""
        field = 1 if unit == "usd" else 2
        slices = self._slices[:]
        numbered = zip(slices[::_FIELDS], slices[field::_FIELDS], strict=True)
        return math.fsum(spent for number, spent in numbered if number > at.slice - at.kept)

    def frees_in(self, at: Position, unit: Unit, excess: float) -> float:
        """Give the seconds until so much of what is spent no longer counts; infinity when there is not so much."""
        field = 1 if unit == "usd" else 2
        for start in range(0, len(self._slices), _FIELDS):
            excess -= self._slices[start + field]
            if excess <= 0:
                return self._ends_in(at, start)
        return math.inf

    def resets_in(self, at: Position) -> float:
        """Give the seconds until nothing of it counts."""
        return self._ends_in(at, -_FIELDS) if self._slices else 0.0

    def _ends_in(self, at: Position, start: int) -> float:
        later = self._slices[start] + at.kept - 1 - at.slice
        return at.ends_in + later * at.width if later > 0 else at.ends_in


class Account:
    """Keep what one key has spent and reserved.

    What a call may cost is reserved before it is sent, and counts in full until its real cost takes its place; so
    calls at the same time never spend more together than their estimates leave room for. Times are seconds of one
    monotonic clock. Memory is a few hundred bytes, and 40 more for each slice of time in which something was spent.
    """

    __slots__ = ("_crossed", "_spendings", "outstanding", "reserved")

    def __init__(self, periods: Iterable[Period] = ()) -> None:
        self._spendings = {period: _Spending() for period in periods}
        self._crossed: frozenset[str] = frozenset()
        self.reserved = _NOTHING
        self.outstanding = 0
        """How many reservations are neither settled nor refunded."""

    def _expired(self, caps: Iterable[Cap], now: float) -> list[tuple[Cap, Position, _Spending]]:
        positions = {cap.period: cap.period.at(now) for cap in caps}
        for period, at in positions.items():
            self._spendings.setdefault(period, _Spending()).expire(at)
        return [(cap, positions[cap.period], self._spendings[cap.period]) for cap in caps]

    def reserve(
        self, key: Hashable, amount: Amount, caps: Sequence[Cap], now: float, *, enforce: bool = True
    ) -> Decision:
        """Set `amount` aside if it fits under all caps, or nothing; without `enforce`, whether it fits or not."""
        levels, crossed = [], set[str]()
        refused: BudgetLevel | None = None
        longest = 0.0
        for cap, at, spending in self._expired(caps, now):
            level = self._level(cap, at, spending)
            levels.append(level)
            if cap.limit < math.inf and level.spent >= cap.limit * cap.warn_ratio:
                crossed.add(level.name)
            wanted = amount.of(cap.unit)
            # Who reserves nothing passes until all is spent.
            if wanted - level.remaining > cap.limit * _ROUNDING or (not wanted and level.remaining <= 0):
                wait = self._room_in(cap, at, spending, amount)
                if refused is None or wait > longest:
                    refused, longest = level, wait
        reservation = None
        if refused is None or not enforce:
            reservation = Reservation(key, amount, self)
            self.outstanding += 1
            self.reserved = _plus(self.reserved, amount)
        news, self._crossed = crossed - self._crossed, frozenset(crossed)
        return Decision(
            reservation=reservation,
            levels=tuple(levels),
            refused=refused,
            retry_after=None if refused is None or longest == math.inf else longest,
            crossed=tuple(level for level in levels if level.name in news),
        )

    def settle(self, amount: Amount, spent: Amount, now: float, *, estimated: bool = False) -> None:
        """Put what a call has really cost in the place of the `amount` that was reserved for it."""
        self._release(amount)
        if spent.usd or spent.tokens:
            for period, spending in self._spendings.items():
                spending.add(period.at(now), spent, estimated=estimated)

    def refund(self, amount: Amount) -> None:
        """Give back what was reserved for a call that has cost nothing."""
        self._release(amount)

    def _release(self, amount: Amount) -> None:
        self.outstanding -= 1
        usd, tokens = self.reserved.usd - amount.usd, self.reserved.tokens - amount.tokens
        # With nothing outstanding it is 0, whatever rounding has made of it.
        self.reserved = Amount(max(0.0, usd), max(0.0, tokens)) if self.outstanding else _NOTHING

    def levels(self, caps: Sequence[Cap], now: float) -> tuple[BudgetLevel, ...]:
        """Say how the caps stand."""
        return tuple(self._level(*each) for each in self._expired(caps, now))

    def remaining(self, cap: Cap, now: float) -> float:
        """Give what may still be spent of a cap, and change nothing: for other threads."""
        spending = self._spendings.get(cap.period)
        spent = 0.0 if spending is None else spending.counting(cap.period.at(now), cap.unit)
        return cap.limit - spent - self.reserved.of(cap.unit)

    def succeed(self, now: float) -> Account:
        """Give the account that goes on from here: what is reserved counts as spent, and this one is none any more."""
        successor = Account()
        successor._spendings, self._spendings = self._spendings, {}
        successor._crossed = self._crossed
        if self.outstanding:
            successor.outstanding = 1
            successor.settle(Amount(), self.reserved, now, estimated=True)
        return successor

    def idle(self, now: float) -> bool:
        """Tell whether a new account would answer the same."""
        for period, spending in self._spendings.items():
            spending.expire(period.at(now))
        return not self.outstanding and not any(self._spendings.values())

    def _level(self, cap: Cap, at: Position, spending: _Spending) -> BudgetLevel:
        return BudgetLevel(
            cap.name,
            cap.limit,
            spending.spent.of(cap.unit),
            self.reserved.of(cap.unit),
            spending.estimated.of(cap.unit),
            spending.resets_in(at),
        )

    def _room_in(self, cap: Cap, at: Position, spending: _Spending, amount: Amount) -> float:
        """Give the seconds until there is room for an amount if nobody else comes; infinity when there never is."""
        wanted = amount.of(cap.unit)
        if wanted > cap.limit * (1 + _ROUNDING):
            return math.inf
        excess = (
            spending.spent.of(cap.unit) + self.reserved.of(cap.unit) + wanted - cap.limit * (1 + _ROUNDING)
        )
        wait = spending.frees_in(at, cap.unit, excess)
        return _IN_FLIGHT if wait == math.inf else wait
