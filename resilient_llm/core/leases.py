"""Slots that several processes share, as values and as a table: leases that end by themselves, and places in line.

`LeaseTable` is what every store's leases must be indistinguishable from: the scripts for Redis in `stores/lua` keep the
same table on the server, and tests compare the two. Who waits in a process, and what a slot is for, must not enter.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

__all__ = ["LeaseAnswer", "LeaseLimit", "LeaseTable", "Woken"]

_FEW = 64


class LeaseLimit(NamedTuple):
    """Say that at most `most` leases of `key` are given out at a time."""

    key: str
    most: int


class LeaseAnswer(NamedTuple):
    """What became of a request for a lease.

    `refused` is the key whose leases are all out, or kept for those who have waited longer; `None`: it is granted.
    `held` counts the leases out of that key, or of the last one asked for, the new one included. `again` is in
    how many seconds one of them ends if nobody renews it.
    """

    refused: str | None
    held: int
    again: float = inf


class Woken(NamedTuple):
    """Say that a lease of `key` is free for whoever waits at `place`."""

    place: str
    key: str


class _Scope:
    __slots__ = ("ends", "places")

    def __init__(self) -> None:
        self.ends: dict[str, float] = {}
        self.places: dict[str, float] = {}  # first come first, and until when each is kept


class LeaseTable:
    """Keep the leases that are out, by key. Times are in seconds of one clock.

    A lease ends when it is released, or `lasts` seconds after it was given out or renewed, and not a moment before;
    one that has ended is taken away only when somebody needs it, so that a holder who is late in renewing it may
    still have it. One that was taken away and is renewed is out again, beside the limit: its holder goes on, and the
    next is granted when there are fewer than `most` again.

    Who is refused may keep a place in line, for `place_lasts` seconds at a time. A free lease is for the first in
    line, a second one for the second; newcomers get what is left. A place is given up when its lease is granted:
    whoever has more to wait for lines up again, behind the others.
    """

    def __init__(self) -> None:
        self._scopes: dict[str, _Scope] = {}
        self._votes: dict[str, dict[str, tuple[float, float]]] = {}
        self._unswept: list[str] = []

    def __len__(self) -> int:
        return len(self._scopes)

    def acquire(
        self,
        lease: str,
        limits: Sequence[LeaseLimit],
        now: float,
        *,
        lasts: float = inf,
        place: str = "",
        place_lasts: float = 0.0,
    ) -> LeaseAnswer:
        """Give out a lease of all the keys, or of none; refused by one, keep a place in its line if asked to."""
        held = 0
        for index, (key, most) in enumerate(limits):
            scope = self._scopes.setdefault(key, _Scope())
            ahead = _rank(_places(scope, now), place)
            held = len(scope.ends)
            if held + ahead >= most:
                _drop_ended(scope, now)
                held = len(scope.ends)
            if held + ahead >= most:
                return self._refuse(limits[: index + 1], held, place, place_lasts, now)
        for key, _ in limits:
            scope = self._scopes[key]
            scope.ends[lease] = now + lasts
            scope.places.pop(place, None)
        self._sweep(now)
        return LeaseAnswer(None, held + 1)

    def release(
        self, limits: Sequence[LeaseLimit], now: float, *, lease: str = "", place: str = ""
    ) -> list[Woken]:
        """Take back a lease, give up a place, or both, and say who can have a lease now."""
        woken: list[Woken] = []
        for key, most in limits:
            scope = self._scopes.get(key)
            if scope is None:
                continue
            scope.ends.pop(lease, None)
            scope.places.pop(place, None)
            if _places(scope, now):
                if len(scope.ends) >= most:
                    _drop_ended(scope, now)
                free = max(0, most - len(scope.ends))
                woken += [Woken(first, key) for first, _ in zip(scope.places, range(free), strict=False)]
            elif not scope.ends:
                del self._scopes[key]
        return woken

    def renew(
        self, leases: Sequence[tuple[str, str]], now: float, *, lasts: float = inf
    ) -> list[tuple[str, str]]:
        """Renew leases, each given as its key and its name; give those that had been taken away."""
        lost: list[tuple[str, str]] = []
        for key, lease in leases:
            ends = self._scopes.setdefault(key, _Scope()).ends
            if lease not in ends:
                lost.append((key, lease))
            ends[lease] = now + lasts
        return lost

    def vote(
        self, key: str, voter: str, number: float | None, now: float, *, lasts: float = inf
    ) -> float | None:
        """Note a number that `voter` is for, and give the mean of all that count; `None` when none does."""
        votes = self._votes.setdefault(key, {})
        if number is None:
            votes.pop(voter, None)
        else:
            votes[voter] = (number, now + lasts)
        for gone in [each for each, (_, until) in votes.items() if until <= now]:
            del votes[gone]
        if not votes:
            del self._votes[key]
            return None
        return sum(each for each, _ in votes.values()) / len(votes)

    def places(self, key: str) -> list[str]:
        """Name the places in line for a key, first come first."""
        scope = self._scopes.get(key)
        return [] if scope is None else list(scope.places)

    def held(self, key: str) -> int:
        """Count the leases of a key that are out, those included that have ended and nobody needed yet."""
        scope = self._scopes.get(key)
        return 0 if scope is None else len(scope.ends)

    def _refuse(
        self, limits: Sequence[LeaseLimit], held: int, place: str, place_lasts: float, now: float
    ) -> LeaseAnswer:
        key = limits[-1].key
        scope = self._scopes[key]
        if place_lasts > 0:
            for passed, _ in limits[:-1]:  # what is kept for it there stays so
                if place in self._scopes[passed].places:
                    self._scopes[passed].places[place] = now + place_lasts
            scope.places[place] = now + place_lasts
        again = min(scope.ends.values(), default=inf) - now
        for each, _ in limits:
            if not self._scopes[each].ends and not self._scopes[each].places:
                del self._scopes[each]
        return LeaseAnswer(key, held, again)

    def _sweep(self, now: float) -> None:
        """Look at the next key, all of them in turn, and forget it when nobody has anything to do with it."""
        if len(self._scopes) <= _FEW:
            return
        if not self._unswept:
            self._unswept = list(self._scopes)
        key = self._unswept.pop()
        scope = self._scopes.get(key)
        if scope is not None:
            _drop_ended(scope, now)
            if not scope.ends and not _places(scope, now):
                del self._scopes[key]


def _places(scope: _Scope, now: float) -> dict[str, float]:
    for gone in [place for place, until in scope.places.items() if until <= now]:
        del scope.places[gone]
    return scope.places


def _rank(places: dict[str, float], place: str) -> int:
    for rank, each in enumerate(places):
        if each == place:
            return rank
    return len(places)


def _drop_ended(scope: _Scope, now: float) -> None:
    for lease in [lease for lease, end in scope.ends.items() if end <= now]:
        del scope.ends[lease]
