"""Rate limits that several processes draw on, as values and as arithmetic.

`RateLedger` is what every store's rate limits must be indistinguishable from: the scripts for Redis in `stores/lua` do
the same sums on the server, and the conformance suite compares the two. Who waits, and for how long, must not enter.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from math import inf
from typing import Literal, NamedTuple, TypeAlias

__all__ = ["Change", "RateCharge", "RateDecision", "RateLedger", "RateLevel", "TakeMode", "Verdict"]

TakeMode: TypeAlias = Literal["n", "h", "d"]
"""What becomes of a call that has to wait: nothing, it keeps a place in line (hold), or it takes at once (debt)."""

_FORGIVEN = 1e-6
_GRACE = 1.0
_FEW = 64
_BROKEN = 60.0
"""Seconds by which no clock that works steps back: one that was wrong by more is not waited for."""


class Verdict(IntEnum):
    """Say what was decided."""

    REFUSED = 0
    TAKEN = 1
    HELD = 2


class RateCharge(NamedTuple):
    """What a call needs of one bucket: `amount`, of one that holds `capacity` and refills by `rate` a second.

    `own` says that only calls of one tenant draw on it. `held` is what the last decision held for this very call, and
    `turn` what that said of its turn: one place is told from another by it.
    """

    key: str
    capacity: float
    rate: float
    amount: float
    own: bool = False
    held: float = 0.0
    turn: float = 0.0


class RateLevel(NamedTuple):
    """Where one bucket stands: `level` is what newcomers find, less than 0 in debt; `pause` is in seconds.

    `at` is when, on the store's clock: answers may come in another order than they were given in.
    """

    level: float
    pause: float = 0.0
    at: float = 0.0


class RateDecision(NamedTuple):
    """What became of a call's charges: all of them taken, or none.

    `wait` is in seconds, until all could be taken if nobody else came; `again` the seconds after which to ask again,
    when a place is held. For each charge there are its level, the seconds it alone takes, and what is held of it.
    """

    verdict: Verdict
    wait: float
    again: float
    levels: Sequence[RateLevel]
    waits: Sequence[float]
    held: Sequence[float]

    @property
    def limiting(self) -> int:
        """Give the charge that takes longest."""
        return max(range(len(self.waits)), key=self.waits.__getitem__)

    def turn(self, index: int) -> float:
        """Say when the turn comes of who keeps a place there, on the store's clock."""
        return self.levels[index].at + self.again


class Change(NamedTuple):
    """What is changed of one bucket afterwards.

    `back` is given back, or below 0 charged; `freed` of what was held for a `turn` is held no longer.
    """

    key: str
    capacity: float
    rate: float
    back: float = 0.0
    freed: float = 0.0
    turn: float = 0.0


class _Bucket:
    __slots__ = ("full_at", "held", "held_until", "missing", "older", "older_until", "paused", "updated")

    def __init__(self, now: float) -> None:
        self.missing = 0.0
        self.updated = now
        self.held = 0.0
        self.held_until = -inf
        self.older = 0.0
        self.older_until = -inf
        self.paused = -inf
        self.full_at = now

    @property
    def line(self) -> float:
        """Give all that is held."""
        return self.held + self.older

    def hold(self, amount: float, turn: float) -> None:
        """Hold so much until a turn has passed: where it is, its time alone says, and `free` finds it there."""
        until = turn + _GRACE
        if until <= self.older_until:
            self.older += amount
        else:
            self.held += amount
            self.held_until = max(self.held_until, until)

    def free(self, amount: float, turn: float) -> None:
        """Hold so much less of what was held for a turn."""
        if turn + _GRACE <= self.older_until:
            self.older = max(0.0, self.older - amount)
        else:
            self.held = max(0.0, self.held - amount)

    def forget(self, now: float) -> None:
        """Forget the older places when the time of all of them is over; those held for longer are the older then."""
        if self.older_until < now and self.held_until > -inf:
            self.older, self.older_until = self.held, self.held_until
            self.held, self.held_until = 0.0, -inf
        if self.older_until < now:
            self.older = 0.0


class RateLedger:
    """Keep the buckets that charges name. Times are in seconds of one clock.

    In any T seconds what is taken of a bucket, less what is given back, is at most `capacity + rate * T`. A bucket
    holds what is *missing* from it, so that one which nobody drew on for long needs no state. What is *held* for
    those who wait their turn counts against newcomers only, and is taken, if it is there, when they come back for it:
    a place in line can be given up, or be forgotten, and the promise is kept. Places are forgotten by generation, a
    second after the last turn of all in it: those of processes that have died go with theirs, and no living one does.
    Who comes back for a place before its turn, and in vain, keeps its turn.
    """

    def __init__(self) -> None:
        self._buckets: dict[str, _Bucket] = {}
        self._unswept: list[str] = []

    def __len__(self) -> int:
        return len(self._buckets)

    def take(
        self, charges: Sequence[RateCharge], now: float, *, most_wait: float = 0.0, mode: TakeMode = "n"
    ) -> RateDecision:
        """Take all that a call needs, or nothing; then it may keep a place in line, if the wait is short enough."""
        buckets = [self._read(charge.key, charge.rate, now) for charge in charges]
        for charge, bucket in zip(charges, buckets, strict=True):
            if charge.held:
                bucket.free(charge.held, charge.turn)
        # Whoever kept a place waits for nobody behind, a newcomer for all who did.
        waits = [
            _wait(charge, bucket, 0.0 if charge.held else bucket.line, now)
            for charge, bucket in zip(charges, buckets, strict=True)
        ]
        again = wait = max(waits, default=0.0)
        kept = [0.0] * len(charges)
        verdict = Verdict.REFUSED
        if wait == 0 or (mode == "d" and wait <= most_wait):
            verdict = Verdict.TAKEN
        elif mode == "h" and wait <= most_wait:
            verdict = Verdict.HELD
            kept, again = _place(charges, buckets, waits, now)
        levels: list[RateLevel] = []
        for charge, bucket, keep in zip(charges, buckets, kept, strict=True):
            if verdict is Verdict.TAKEN:
                bucket.missing += charge.amount
            elif keep:
                bucket.hold(keep, bucket.updated + again)
            if verdict is not Verdict.REFUSED or charge.held:
                self._write(charge.key, charge.rate, bucket, now)
            levels.append(_level(charge.capacity, bucket, now))
        return RateDecision(verdict, wait, again, levels, waits, kept)

    def settle(self, changes: Sequence[Change], now: float) -> list[RateLevel]:
        """Give back, charge and free; what exceeds a capacity is lost, and no debt grows beyond one capacity."""
        levels: list[RateLevel] = []
        for key, capacity, rate, back, freed, turn in changes:
            bucket = self._read(key, rate, now)
            if back >= 0:
                bucket.missing = max(0.0, bucket.missing - back)
            else:
                bucket.missing = min(bucket.missing - back, max(bucket.missing, 2 * capacity))
            if freed:
                bucket.free(freed, turn)
            self._write(key, rate, bucket, now)
            levels.append(_level(capacity, bucket, now))
        return levels

    def lower(self, charges: Sequence[RateCharge], pauses: Sequence[float], now: float) -> list[RateLevel]:
        """Lower the level of each bucket to `amount`, and let it give nothing for so many seconds."""
        levels: list[RateLevel] = []
        for charge, pause in zip(charges, pauses, strict=True):
            bucket = self._read(charge.key, charge.rate, now)
            bucket.missing = max(bucket.missing, min(charge.capacity - charge.amount, 2 * charge.capacity))
            if pause > 0:
                bucket.paused = max(bucket.paused, now + pause)
            self._write(charge.key, charge.rate, bucket, now)
            levels.append(_level(charge.capacity, bucket, now))
        return levels

    def _read(self, key: str, rate: float, now: float) -> _Bucket:
        """Give a bucket as it is now; nothing is kept of that before `_write`."""
        kept = self._buckets.get(key)
        bucket = _Bucket(now)
        if kept is not None:
            broken = kept.updated > now + _BROKEN
            updated = now if broken else kept.updated
            bucket.missing = max(0.0, kept.missing - max(0.0, now - updated) * rate)
            bucket.updated = max(now, updated)
            if not broken:  # else nobody knows when the turn of whose place is over
                bucket.held, bucket.held_until = kept.held, kept.held_until
                bucket.older, bucket.older_until = kept.older, kept.older_until
                bucket.forget(now)
            bucket.paused = kept.paused
        return bucket

    def _write(self, key: str, rate: float, bucket: _Bucket, now: float) -> None:
        idle = max(bucket.missing / rate, bucket.paused - now)
        if bucket.held > 0:
            idle = max(idle, bucket.held_until - now)
        if bucket.older > 0:
            idle = max(idle, bucket.older_until - now)
        bucket.full_at = now + idle
        if idle <= 0:
            self._buckets.pop(key, None)
        else:
            self._buckets[key] = bucket
        if len(self._buckets) > _FEW:
            self._sweep(now)

    def _sweep(self, now: float) -> None:
        """Look at the next key, all of them in turn; one that nobody drew on for long is full again, and forgotten."""
        if not self._unswept:
            self._unswept = list(self._buckets)
        key = self._unswept.pop()
        bucket = self._buckets.get(key)
        if bucket is not None and bucket.full_at <= now:
            del self._buckets[key]


def _level(capacity: float, bucket: _Bucket, now: float) -> RateLevel:
    return RateLevel(capacity - bucket.missing - bucket.line, max(0.0, bucket.paused - now), bucket.updated)


def _place(
    charges: Sequence[RateCharge], buckets: Sequence[_Bucket], waits: Sequence[float], now: float
) -> tuple[list[float], float]:
    """Say what to hold of each bucket for who keeps a place, and the seconds until its turn.

    While its tenant's own buckets are dry, nobody else's are held back for it.
    """
    own_dry = any(charge.own and seconds for charge, seconds in zip(charges, waits, strict=True))
    kept, again = [0.0] * len(charges), 0.0
    for index, (charge, bucket, seconds) in enumerate(zip(charges, buckets, waits, strict=True)):
        waits_here = seconds > 0 or charge.held > 0 if charge.own else seconds > 0 and not own_dry
        if waits_here:
            kept[index] = charge.amount
            again = max(again, seconds)
            if charge.held:
                # Not before those whose turn is earlier, nor later than if it came only now.
                newcomer = _wait(charge, bucket, bucket.line, now)
                again = max(again, min(charge.turn - bucket.updated, newcomer))
    return kept, again


def _wait(charge: RateCharge, bucket: _Bucket, ahead: float, now: float) -> float:
    """Say how many seconds a charge takes after what is held for those `ahead` of it."""
    if charge.amount <= 0:
        return 0.0
    level = charge.capacity - bucket.missing
    seconds = 0.0
    if charge.amount + ahead > level:
        seconds = (min(charge.amount, charge.capacity) + ahead - level) / charge.rate
    seconds = max(seconds, bucket.paused - now)
    return seconds if seconds > _FORGIVEN else 0.0
