"""Several limits as one decision: all of them give, or none does.

What a call needs of every bucket it draws on, and what becomes of it when the call ends. Whose buckets these are, and
who waits for them, must not enter here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from resilient_llm.core.token_bucket import Mark, TokenBucket

__all__ = ["Delay", "LimitLevel", "Quota", "Reservation"]

_NO_MARKS: Mapping[int, Mark] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitLevel:
    """Say where one limit stands.

    `scope` is what it is a limit of (tenant, model, account ...), `dimension` what it counts: `requests` and `tokens`
    per minute, or `burst`, requests per second. `limit` is what its bucket holds, and `remaining` what is left of it,
    less than 0 in debt. `reset` is in seconds, until it is full again; `window` is what it takes to fill an empty one.
    """

    scope: str
    dimension: str
    limit: float
    remaining: float
    reset: float
    window: float

    @property
    def name(self) -> str:
        """Give its name, for people: requests of tenant, tokens of account ..."""
        return f"{self.dimension} of {self.scope}"


class Delay(NamedTuple):
    """How many seconds a call has to wait, and for which of its charges longest."""

    seconds: float
    charge: int


class Quota:
    """Keep the buckets of one key: of one tenant, one model, or the whole account."""

    __slots__ = ("buckets", "outstanding")

    def __init__(self, buckets: Sequence[TokenBucket]) -> None:
        self.buckets = tuple(buckets)
        self.outstanding = 0
        """How many reservations are waited for or yet to be settled."""

    def idle(self, now: float) -> bool:
        """Tell whether it could be made anew and nobody would notice: full, and nothing is outstanding."""
        return not self.outstanding and all(bucket.reset(now) <= 0 for bucket in self.buckets)


class Reservation:
    """Take an amount from each of several buckets, all or none, and settle later what was really used.

    `charges` are pairs of a bucket and an amount; the first `own` of them are from buckets that only calls of the
    same tenant draw on. More than a bucket's capacity is taken when it is full, and leaves a debt: what its bucket
    lends bounds it, and `oversized` says so.
    """

    __slots__ = ("_marked", "charges", "marks", "own", "quotas", "taken_at")

    def __init__(
        self,
        charges: Sequence[tuple[TokenBucket, float]],
        own: int = 0,
        quotas: Sequence[Quota] = (),
        marked: Sequence[int] = (),
    ) -> None:
        self.charges = charges
        self.own = own
        self.taken_at = 0.0
        self.marks: Mapping[int, Mark] = _NO_MARKS
        """For each of the charges that are `marked`, by its index, what had been spent of its bucket by then."""
        self._marked = marked
        self.quotas = quotas

    def oversized(self, *, borrow: bool = False) -> int | None:
        """Find a charge that its bucket never has enough for, nor lends with `borrow`; `None` when there is none."""
        for index, (bucket, amount) in enumerate(self.charges):
            if amount > bucket.capacity + (bucket.lends if borrow else 0.0):
                return index
        return None

    @property
    def shared(self) -> Sequence[tuple[TokenBucket, float]]:
        """Give the charges to buckets that other tenants draw on, too."""
        return self.charges[self.own :]

    @property
    def amounts(self) -> list[float]:
        """Give what it takes of each bucket."""
        return [amount for _, amount in self.charges]

    def wait(self, now: float) -> float:
        """Say how many seconds it takes until every bucket has enough."""
        return max((bucket.wait(amount, now) for bucket, amount in self.charges), default=0.0)

    def delay(self, now: float, ahead: Sequence[float] = ()) -> Delay:
        """Say which bucket takes longest to have enough, once `ahead` has been taken of each by others."""
        longest = Delay(0.0, 0)
        for index, (bucket, amount) in enumerate(self.charges):
            seconds = bucket.wait(amount, now, ahead[index] if ahead else 0.0)
            if seconds > longest.seconds:
                longest = Delay(seconds, index)
        return longest

    def take_at_once(self, now: float) -> bool:
        """Take everything if it is there and there is nothing to wait for, else nothing; never into debt."""
        for index, (bucket, amount) in enumerate(self.charges):
            if not bucket.take_at_once(amount, now):
                for taken, returned in self.charges[:index]:
                    taken.give_back(returned, now)
                return False
        self._open(now)
        return True

    def take(self, now: float) -> None:
        """Take everything, whether it is there or not."""
        for bucket, amount in self.charges:
            bucket.take(amount, now)
        self._open(now)

    def hold(self) -> None:
        """Keep the quotas from being forgotten while it is waited for, until `release`."""
        for quota in self.quotas:
            quota.outstanding += 1

    def release(self) -> None:
        """Undo `hold`."""
        for quota in self.quotas:
            quota.outstanding -= 1

    def cancel(self, now: float) -> None:
        """Give everything back: what it was for was never done."""
        for bucket, amount in self.charges:
            bucket.give_back(amount, now)
        self.keep()

    def keep(self) -> None:
        """Let everything be used as it was taken."""
        for quota in self.quotas:
            quota.outstanding -= 1

    def settle(self, actual: Sequence[float], now: float) -> None:
        """Replace the amounts by the `actual` ones: give back what was too much, charge what was too little."""
        for (bucket, amount), used in zip(self.charges, actual, strict=True):
            if used < amount:
                bucket.give_back(amount - used, now)
            elif used > amount:
                bucket.charge(used - amount, now)
        self.keep()

    def _open(self, now: float) -> None:
        for quota in self.quotas:
            quota.outstanding += 1
        self.taken_at = now
        if self._marked:
            charges, marks = self.charges, {}
            for index in self._marked:
                bucket, amount = charges[index]
                marks[index] = bucket.mark(amount, now)
            self.marks = marks
