"""Which of several credentials a call uses, and which of them are left alone for a while.

A pool knows no secrets: credentials are numbers here, each with its caps and what it may be used for.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, MutableMapping, Sequence
from enum import Enum
from typing import NamedTuple, Protocol

from resilient_llm.core.token_bucket import TokenBucket

__all__ = ["CredentialHealth", "CredentialPool", "CredentialState", "CredentialUse", "Terms"]

_MINUTE = 60.0
_BUSIEST = (math.inf, (math.inf, 0))
_SOON = 1.0
"""Seconds until a credential that is in full use may be free: nobody knows when calls end."""


class Terms(Protocol):
    """Say what a credential may be used for, and how much at once."""

    @property
    def purposes(self) -> Collection[str]:
        """Give what it is kept for; empty when it is for anything."""
        ...

    @property
    def max_concurrent(self) -> int | None:
        """Give how many calls may use it at once."""
        ...

    @property
    def requests_per_minute(self) -> float | None:
        """Give how many calls may begin with it in a minute."""
        ...


class CredentialState(Enum):
    """Say whether a credential may be used."""

    LIVING = "living"
    RESTING = "resting"
    """It was throttled, and is left alone until its limit lets it be used again."""
    SET_ASIDE = "set_aside"
    """The provider refused it; it is left alone until some time has passed."""
    HALF_OPEN = "half_open"
    """That time has passed: one call at a time may try it."""


class CredentialHealth(NamedTuple):
    """Say how one credential is."""

    state: CredentialState
    in_flight: int
    back_in: float
    """Seconds until it is used again; 0 unless it is set aside or rests."""


class CredentialUse:
    """What is known of one credential, in all the pools that it is in."""

    __slots__ = (
        "bucket",
        "dead_since",
        "failures",
        "in_flight",
        "is_uncapped",
        "most",
        "probing",
        "purposes",
        "returns",
        "used",
    )

    def __init__(self, terms: Terms) -> None:
        self.purposes = frozenset(terms.purposes)
        self.most = terms.max_concurrent
        self.bucket: TokenBucket | None = None
        if terms.requests_per_minute is not None:
            rate = terms.requests_per_minute / _MINUTE
            self.bucket = TokenBucket(max(1.0, terms.requests_per_minute), rate, -math.inf)
        self.is_uncapped = self.most is None and self.bucket is None
        self.in_flight = 0
        self.used = (-math.inf, 0)  # when a call took it last, and the number of that call
        self.failures = 0  # times in a row that it was set aside; 0 while it lives
        self.dead_since = -math.inf
        self.returns = -math.inf
        self.probing = False

    def serves(self, purpose: str | None) -> bool:
        """Tell whether it may be used for that."""
        return not self.purposes or purpose in self.purposes

    def is_free(self, now: float) -> bool:
        """Tell whether it may be used now: not full, not refused, and within its cap per minute."""
        if self.most is not None and self.in_flight >= self.most:
            return False
        if self.failures and self.refused_for(now) > 0:
            return False
        return self.bucket is None or self.bucket.wait(1.0, now) <= 0

    @property
    def is_full(self) -> bool:
        """Tell whether as many calls use it as may."""
        return self.most is not None and self.in_flight >= self.most

    def refused_for(self, now: float) -> float:
        """Give the seconds until it may be tried again after its provider has refused it."""
        return max(self.returns - now, _SOON if self.probing else 0.0) if self.failures else 0.0

    def rationed_for(self, now: float) -> float:
        """Give the seconds until its cap per minute lets it be used."""
        return 0.0 if self.bucket is None else self.bucket.wait(1.0, now)


class CredentialPool:
    """Give each call the least busy living credential that serves its purpose and is under its caps.

    Busy is what has many calls in flight for its `max_concurrent`; one without counts as the largest of the pool. Of
    equals the one that was used longest ago is taken, so that calls one after the other spread too. A minute's worth
    of `requests_per_minute` may go at once, and comes back evenly, as with any `RateLimit`.

    One that is refused by its provider is set aside for `first` seconds, twice as long each time in a row up to
    `longest`, or for as long as the provider says, if that is not longer. Then one call at a time may try it: it
    lives again once the provider has accepted it. One that is throttled rests, in this pool only.

    What is known of a credential is kept in `known`, by its terms: pools with the same mapping share it.

    All methods take `now` in seconds of one clock; credentials are numbers from 0, in the order given.
    """

    __slots__ = ("_first", "_largest", "_longest", "_members", "_rests", "_taken")

    def __init__(
        self,
        credentials: Sequence[Terms],
        *,
        first: float = 60.0,
        longest: float = 900.0,
        known: MutableMapping[Terms, CredentialUse] | None = None,
    ) -> None:
        if not 0 < first <= longest < math.inf:
            raise ValueError(
                f"first={first!r}, longest={longest!r}: allowed are seconds above 0, the longest last"
            )
        if known is None:
            self._members = [CredentialUse(terms) for terms in credentials]
        else:
            self._members = [known.setdefault(terms, CredentialUse(terms)) for terms in credentials]
        self._rests = [-math.inf] * len(self._members)
        self._largest = max((member.most for member in self._members if member.most is not None), default=1)
        self._first = first
        self._longest = longest
        self._taken = 0

    def take(self, now: float, purpose: str | None) -> int | None:
        """Take a credential for a call, to be released when it ends; `None` when none may be had now."""
        best, least = None, _BUSIEST
        for index, member in enumerate(self._members):
            if not self._may_have(index, member, now, purpose):
                continue
            busy = (member.in_flight / (member.most or self._largest), member.used)
            if busy < least:
                best, least = index, busy
        if best is not None:
            member = self._members[best]
            member.in_flight += 1
            self._taken += 1
            member.used = (now, self._taken)
            if member.failures:
                member.probing = True
            if member.bucket is not None:
                member.bucket.take(1.0, now)
        return best

    def release(self, index: int, *, taken: float = math.inf, ok: bool | None = None) -> None:
        """Give back a credential that a call took at `taken`, by the same clock.

        `ok` says whether the provider accepted it, whatever it then answered; `None` when it did not come to that.
        What began before the credential was set aside says nothing about it any more.
        """
        member = self._members[index]
        if member.in_flight:
            member.in_flight -= 1
        if member.failures and taken > member.dead_since:
            member.probing = False
            if ok:
                member.failures = 0

    def set_aside(
        self, index: int, now: float, retry_after: float | None, *, taken: float = math.inf
    ) -> None:
        """Leave a credential alone that its provider has refused to a call that took it at `taken`.

        `retry_after` is the provider's word, in seconds. Several calls that are refused together count as one.
        """
        member = self._members[index]
        told = min(retry_after, self._longest) if retry_after is not None and retry_after > 0 else 0.0
        if taken <= member.dead_since or (member.failures and now < member.returns):
            member.returns = max(member.returns, now + told)
            return
        pause = told or min(self._longest, self._first * 2.0 ** min(member.failures, 64))
        member.failures += 1
        member.dead_since = now
        member.returns = now + pause
        member.probing = False

    def rest(self, index: int, now: float, seconds: float) -> None:
        """Leave a credential alone that was throttled; the longest of several rests counts."""
        self._rests[index] = max(self._rests[index], now + seconds)

    def resting(self, now: float) -> float:
        """Give the seconds that all credentials rest which are not set aside; 0 when one of them does not."""
        rests = (self._rests[index] - now for index in self._unrefused(now))
        return max(0.0, min(rests, default=0.0))

    def is_usable(self, now: float) -> bool:
        """Tell whether any credential may be used, now or as soon as calls in flight have ended."""
        return any(self._rests[index] <= now for index in self._unrefused(now))

    def _unrefused(self, now: float) -> Iterator[int]:
        return (index for index, member in enumerate(self._members) if member.refused_for(now) <= 0)

    def is_ready(self, now: float, purpose: str | None) -> bool:
        """Tell whether a call may have a credential now."""
        for index, member in enumerate(self._members):  # noqa: SIM110 - a generator costs as much again
            if self._may_have(index, member, now, purpose):
                return True
        return False

    def _may_have(self, index: int, member: CredentialUse, now: float, purpose: str | None) -> bool:
        if (member.purposes and purpose not in member.purposes) or self._rests[index] > now:
            return False
        # Most have no caps, and live.
        return (member.is_uncapped and not member.failures) or member.is_free(now)

    def _limited_for(self, index: int, now: float) -> float:
        """Give the seconds until its limits, the provider's and its own, let a credential be used."""
        return max(0.0, self._rests[index] - now, self._members[index].rationed_for(now))

    def wait(self, now: float, purpose: str | None, *, patience: float) -> float:
        """Give the seconds that a call would wait for a credential, as if no other call used them.

        One that was refused is waited for as long as `patience` at most; infinity when there is no other.
        """
        waits = (
            max(refused, self._limited_for(index, now))
            for index, member in enumerate(self._members)
            if member.serves(purpose) and (refused := member.refused_for(now)) <= patience
        )
        return min(waits, default=math.inf)

    def free_in(self, now: float, purpose: str | None) -> float:
        """Give the seconds until a limit lets a call have a credential, whatever calls in flight do; at least."""
        waits = (
            self._limited_for(index, now)
            for index in self._unrefused(now)
            if self._members[index].serves(purpose) and not self._members[index].is_full
        )
        return min(waits, default=math.inf)

    def available_in(self, now: float, purpose: str | None) -> float:
        """Give the seconds until a call may have a credential, as things stand; 0 is now.

        A second where it is for calls in flight to end, infinity when none serves the purpose.
        """
        waits = (
            max(member.refused_for(now), self._limited_for(index, now), _SOON if member.is_full else 0.0)
            for index, member in enumerate(self._members)
            if member.serves(purpose)
        )
        return min(waits, default=math.inf)

    def restore(self, index: int) -> None:
        """Let a credential live again at once, as when it has been replaced by a new one."""
        member = self._members[index]
        member.failures = 0
        member.probing = False
        self._rests[index] = -math.inf

    def __len__(self) -> int:
        return len(self._members)

    def health(self, now: float) -> tuple[CredentialHealth, ...]:
        """Say how each credential is."""
        return tuple(self._health(index, now) for index in range(len(self._members)))

    def _health(self, index: int, now: float) -> CredentialHealth:
        member, rests = self._members[index], max(0.0, self._rests[index] - now)
        back_in = max(rests, member.returns - now) if member.failures else rests
        if member.failures:
            state = CredentialState.SET_ASIDE if now < member.returns else CredentialState.HALF_OPEN
        else:
            state = CredentialState.RESTING if rests else CredentialState.LIVING
        return CredentialHealth(state, member.in_flight, back_in)
