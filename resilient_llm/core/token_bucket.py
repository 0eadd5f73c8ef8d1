"""How much of a limit is left, and how long until there is enough of it.

One bucket for one number: so many requests, or tokens, a minute. Several limits taken together are `quota`'s, and who
waits for them `rate_queue`'s; neither enters here.
"""

from __future__ import annotations

from math import inf

__all__ = ["Mark", "TokenBucket"]

_FORGIVEN = 1e-6
"""Seconds of refill that may be missing: clocks and floats are no finer, and a waiter must not wake for nothing."""


_MINUTE = 60.0

_NEVER = -inf  # made once: there are buckets for every key

_INSTANT = 0.1
"""Seconds in which what is taken counts as taken at once: nobody knows in which order it reaches the provider."""


class Mark:
    """Remember how much had been spent at the end of some instant."""

    __slots__ = ("spent", "until")

    def __init__(self, until: float) -> None:
        self.until = until
        self.spent: float | None = None
        """`None` while it is the latest: nothing has been spent since."""


class _Spending:
    """What was taken of a bucket since its first mark, less what was given back, and its latest mark."""

    __slots__ = ("mark", "total")

    def __init__(self, mark: Mark) -> None:
        self.mark = mark
        self.total = 0.0


class TokenBucket:
    """Hold up to `capacity`, refilled by `rate` a second; full at first.

    Whoever takes only what `wait` says is there gets this promise: in any T seconds what is taken, less what is given
    back, is at most `capacity + rate * T`. A debt is a level below 0, which the refill pays off first.

    All methods take `now` in seconds of one clock. One that steps back stands still here until it has caught up:
    nothing is refilled twice, and nothing is taken away.

    Source: the token bucket of Turner, "New directions in communications" (IEEE Communications 24, 1986).
    """

    __slots__ = ("_level", "_paused_until", "_spending", "_updated", "capacity", "rate")

    def __init__(self, capacity: float, rate: float, now: float) -> None:
        if not (0 < capacity < inf and 0 < rate < inf):
            raise ValueError(f"capacity={capacity!r}, rate={rate!r}: allowed are finite numbers above 0")
        self.capacity = capacity
        self.rate = rate
        self._level = capacity
        self._updated = now
        self._paused_until = _NEVER
        self._spending: _Spending | None = None  # for those that are marked: there are buckets for every key

    @property
    def spent(self) -> float:
        """Say what was taken since the first mark, less what was given back; 0 where there is none."""
        return 0.0 if self._spending is None else self._spending.total

    @property
    def lends(self) -> float:
        """Say how much more than it holds may be taken of a full bucket: a minute's worth, or one capacity."""
        return max(self.capacity, _MINUTE * self.rate)

    def level(self, now: float) -> float:
        """Say how much there is."""
        elapsed = now - self._updated
        if elapsed <= 0 or self._level >= self.capacity:
            return self._level
        return min(self.capacity, self._level + elapsed * self.rate)

    def wait(self, amount: float, now: float, ahead: float = 0.0) -> float:
        """Say how many seconds it takes until `amount` is there once `ahead` has been taken by others.

        Nothing is there at once, and more than the capacity when the bucket is full.
        """
        level = self.level(now)
        if amount <= 0 or (amount + ahead <= level and self._paused_until <= now):
            return 0.0
        missing = min(amount, self.capacity) + ahead - level
        wait = max(missing / self.rate, self._paused_until - now)
        return wait if wait > _FORGIVEN else 0.0

    def take_at_once(self, amount: float, now: float) -> bool:
        """Take `amount` if it is there and there is nothing to wait for; never into debt."""
        # Once for each bucket of each call, so without calls of its own.
        level, elapsed = self._level, now - self._updated
        if elapsed > 0 and level < self.capacity:
            level = min(self.capacity, level + elapsed * self.rate)
        at_once = level >= amount and self._paused_until <= now
        if not at_once and (amount > self.capacity or self.wait(amount, now)):
            return False
        self._level = level - amount
        if elapsed > 0:
            self._updated = now
        if self._spending is not None:
            self._spending.total += amount
        return True

    def take(self, amount: float, now: float) -> None:
        """Take `amount`, into debt if need be: that it is there is the caller's to see to."""
        self._set(self.level(now) - amount, now)
        if self._spending is not None:
            self._spending.total += amount

    def give_back(self, amount: float, now: float) -> None:
        """Put back what was taken and not used; what exceeds the capacity is lost."""
        self._set(min(self.capacity, self.level(now) + amount), now)
        if self._spending is not None:
            self._spending.total -= amount

    def charge(self, amount: float, now: float) -> None:
        """Take what was used beyond what was taken for it; never further into debt than one capacity."""
        level = self.level(now)
        self._set(max(level - amount, min(level, -self.capacity)), now)
        if self._spending is not None:
            self._spending.total += amount

    def lower(self, level: float, now: float) -> None:
        """Bring the level down to `level`, by at most as much as `charge` could; a higher one changes nothing."""
        level = max(level, -self.capacity)
        if level < self.level(now):
            self._set(level, now)

    def pause(self, until: float) -> None:
        """Give nothing out before `until`; the refill goes on."""
        self._paused_until = max(self._paused_until, until)

    def mark(self, amount: float, now: float) -> Mark:
        """Remember, right after `amount` was taken, what has been spent by the end of this instant."""
        spending = self._spending
        if spending is None:
            spending = self._spending = _Spending(Mark(now + _INSTANT))
        elif now > spending.mark.until:
            spending.mark.spent = spending.total - amount
            spending.mark = Mark(now + _INSTANT)
        return spending.mark

    def spent_since(self, mark: Mark) -> float:
        """Say how much was taken since a mark, less what was given back."""
        return 0.0 if mark.spent is None else self.spent - mark.spent

    def reset(self, now: float) -> float:
        """Say how many seconds it takes until the bucket is full and gives out."""
        return max((self.capacity - self.level(now)) / self.rate, self._paused_until - now, 0.0)

    def _set(self, level: float, now: float) -> None:
        self._level = level
        if now > self._updated:  # noqa: PLR1730 - max() would cost as much as the rest of taking something
            self._updated = now

    def __repr__(self) -> str:
        return f"<TokenBucket {self._level:g}/{self.capacity:g} +{self.rate:g}/s>"
