"""Several limits as one decision: all of them give, or none does.

What a call needs of every bucket it draws on, and what becomes of it when the call ends. Whose buckets these are, and
who waits for them, must not enter here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from resilient_llm.core.token_bucket import Mark, TokenBucket

__all__ = ["LimitLevel", "Quota", "Reservation"]


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

    __slots__ = ("_marked", "_quotas", "charges", "marks", "own", "taken_at")

    def __init__(
        self,
        charges: Sequence[tuple[TokenBucket, float]],
        *,
        own: int = 0,
        quotas: Sequence[Quota] = (),
        marked: bool = False,
    ) -> None:
        self.charges = charges
        self.own = own
        self.taken_at = 0.0
        self.marks: Sequence[Mark] = ()
        """For each charge, what had been spent of its bucket by then; only if it is `marked`."""
        self._marked = marked
        self._quotas = quotas

    def oversized(self, *, borrow: bool = False) -> int | None:
        """Find a charge that its bucket never has enough for, nor lends with `borrow`; `None` when there is none."""
        for index, (bucket, amount) in enumerate(self.charges):
            if amount > bucket.capacity + (bucket.lends if borrow else 0.0):
                return index
        return None

    def wait(self, now: float) -> float:
        """Say how many seconds it takes until every bucket has enough."""
        return max((bucket.wait(amount, now) for bucket, amount in self.charges), default=0.0)

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
        for quota in self._quotas:
            quota.outstanding += 1

    def release(self) -> None:
        """Undo `hold`."""
        for quota in self._quotas:
            quota.outstanding -= 1

    def cancel(self, now: float) -> None:
        """Give everything back: what it was for was never done."""
        for bucket, amount in self.charges:
            bucket.give_back(amount, now)
        self.keep()

    def keep(self) -> None:
        """Let everything be used as it was taken."""
        self.release()

    def settle(self, actual: Sequence[float], now: float) -> None:
        """Replace the amounts by the `actual` ones: give back what was too much, charge what was too little."""
        for (bucket, amount), used in zip(self.charges, actual, strict=True):
            if used < amount:
                bucket.give_back(amount - used, now)
            elif used > amount:
                bucket.charge(used - amount, now)
        self.keep()

    def _open(self, now: float) -> None:
        self.hold()
        self.taken_at = now
        if self._marked:
            self.marks = [bucket.mark(amount, now) for bucket, amount in self.charges]
