"""One access to a pool of leases on a Redis or Valkey server: asks for them, gives them back, and stands in line.

What is done for all pools together, such as renewing, is `_redis_leases`'.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Final

from resilient_llm.core.leases import LeaseAnswer, LeaseLimit
from resilient_llm.errors import StoreUnavailableError
from resilient_llm.stores._redis_commands import Reply, Script, Word
from resilient_llm.stores.protocol_leases import Lease

if TYPE_CHECKING:
    from resilient_llm.stores._redis_leases import RedisLeases

__all__ = ["RedisLeasePool"]

_FAST_POLL: Final = 0.1
"""Seconds after which whoever waits asks again, at most, while nobody can say that a lease is free."""
_PLACE_LASTS: Final = 3.0
"""A place is kept for a process that does not ask again for so many polls."""


class RedisLeasePool:
    """One access to a pool on a server; see `stores.protocol_leases.LeasePool`."""

    def __init__(self, leases: RedisLeases, name: str, place: str, on_free: Callable[[str], None]) -> None:
        self.tag = f"{leases.prefix}{{{name}}}:lease:"
        self._on_free = on_free
        self._leases = leases
        self._runner = leases.runner
        self.place = place
        """Names this access in lines, among those of all processes."""
        self._acquire = Script.load("_clock", "_lease", "lease_acquire")
        self._release = Script.load("_clock", "_lease", "lease_release")
        self._vote = Script.load("_clock", "_lease", "lease_vote")
        self._waiting: dict[str, asyncio.TimerHandle] = {}

    def key(self, key: str) -> str:
        """Give the name of the set of leases of a key."""
        return self.tag + key

    async def acquire(self, limits: Sequence[LeaseLimit], *, wait: bool = False) -> Lease | LeaseAnswer:
        """Ask for a lease, in one round trip.

        What is granted to a caller that has gone, or whose time was up, is given back, and so is what may have been.
        """
        leases = self._leases
        name, now = leases.name(), leases.loop.bind().time()
        place_lasts = _PLACE_LASTS * leases.poll if wait else 0.0
        words = (name, self.place, repr(leases.lasts), repr(place_lasts), leases.time())
        waited = dict(self._waiting)
        try:
            if leases.behind or now < leases.settled:
                await self._come_back(limits)
            reply = await self._runner.run(
                self._acquire,
                self._keys(limits),
                (*words, *(most for _, most in limits)),
                orphan=partial(self._undo, limits, name),
                unknown=lambda _: self._send_release(limits, lease=name, again=True),
            )
        except StoreUnavailableError:
            leases.away()
            if wait:
                for key, _ in limits:
                    self._expect(key, inf)
            raise
        answer = _answer(reply, limits)
        if answer.refused is None:
            for key, _ in limits:
                if self._waiting.get(key) is waited.get(
                    key
                ):  # else there may be a newer place than the grant took
                    self._forget(key)
            lease = Lease(name, limits, answer.held, now)
            leases.hold(lease, self)
            return lease
        if wait:
            self._expect(answer.refused, answer.again)
            leases.listen()
        return answer

    def _undo(self, limits: Sequence[LeaseLimit], name: str, reply: Reply) -> None:
        """Give back what was granted to somebody who has gone, or the place if nobody else needs it."""
        answer = _answer(reply, limits)
        if answer.refused is None:
            # The grant took the place of all who wait here.
            self._send_release(limits, lease=name, again=True)
        elif answer.refused not in self._waiting:
            left = [limit for limit in limits if limit.key == answer.refused]
            self._send_release(left, place=self.place, again=True)

    async def _come_back(self, limits: Sequence[LeaseLimit]) -> None:
        """Find out whether a store that was away is back, and tell it what is held here.

        Raises `StoreUnavailableError`, also while other processes may not have told it yet what they hold.
        """
        leases = self._leases
        if leases.behind and not leases.returning:
            # It changes nothing (XX), and says whether the server answers and can be written to.
            await self._runner.command("ZADD", self.key(limits[0].key), "XX", 0, leases.process)
            await leases.come_back()
        if leases.behind or leases.loop.time() < leases.settled:
            raise self._runner.guard.error("it was away, and is told again what runs")

    def adopt(self, limits: Sequence[LeaseLimit]) -> Lease:
        """Give out a lease without asking; the store hears of it when it is back."""
        now = self._leases.loop.bind().time()
        lease = Lease(self._leases.name(), limits, 0, now)
        lease.known = False
        self._leases.hold(lease, self)
        return lease

    def release(self, lease: Lease) -> None:
        """Give a lease back, in the next batch."""
        self._leases.drop(lease)
        if lease.known:
            self._send_release(lease.limits, lease=lease.id)
        if not self._runner.guard_of(self.tag).closed:
            for key, _ in lease.limits:  # nobody else is going to say that it is free here
                self._on_free(key)

    def leave(self, limits: Iterable[LeaseLimit]) -> None:
        """Give up places, in the next batch."""
        left = [limit for limit in limits if self._forget(limit.key)]
        if left and self._runner.guard.closed:  # else it is forgotten before anybody hears of it
            self._send_release(left, place=self.place, again=True)

    def vote(self, number: float, heard: Callable[[float], None]) -> None:
        """Say what this access takes for the right number of slots, in the next batch."""
        self._runner.send(
            self._vote,
            (self.tag + "votes", self.tag + "voters"),
            (self.place, repr(float(number)), repr(self._leases.lasts), self._leases.time()),
            heard=lambda reply: heard(float(reply)),
        )

    def poke(self, key: str) -> None:
        """Hear that there is a lease of a key, given by its full name."""
        # Also when no place is known: the news may have overtaken the answer that there is one.
        self._on_free(key.removeprefix(self.tag))

    def poke_all(self) -> None:
        """Hear that there may be leases."""
        for key in list(self._waiting):
            self._on_free(key)

    def forget(self) -> None:
        """Wait for nothing."""
        for key in list(self._waiting):
            self._forget(key)

    def _expect(self, key: str, again: float) -> None:
        """See to it that whoever waits asks again, when a lease ends by itself or after a while."""
        self._forget(key)
        poll = self._leases.poll if self._leases.wakeups.heard else min(_FAST_POLL, self._leases.poll)
        loop = asyncio.get_running_loop()
        self._waiting[key] = loop.call_later(min(poll, again + 0.001), self._remind, key)

    def _remind(self, key: str) -> None:
        if key in self._waiting:
            self._expect(key, inf)
            self._on_free(key)

    def _forget(self, key: str) -> bool:
        timer = self._waiting.pop(key, None)
        if timer is not None:
            timer.cancel()
        return timer is not None

    def _send_release(
        self, limits: Sequence[LeaseLimit], *, lease: str = "", place: str = "", again: bool = False
    ) -> None:
        """Take a lease back or give a place up; with `again` whoever waits asks again, since its place may be gone."""

        def heard(reply: Reply) -> None:
            leases.wake(reply)
            if again:
                for key, _ in limits:
                    self._on_free(key)

        leases = self._leases
        channels = f"{leases.prefix}wake:"
        most = (limit.most for limit in limits)
        words: Sequence[Word] = (lease, place, leases.process, channels, leases.time(), *most)
        # A lease has a name of its own, and whose place is lost lines up again: a second time does no harm.
        self._runner.send(
            self._release, self._keys(limits), words, heard=heard, again=words, worth=leases.lasts
        )

    def _keys(self, limits: Sequence[LeaseLimit]) -> list[str]:
        return [
            each
            for key, _ in limits
            for each in (self.tag + key, f"{self.tag}{key}:queue", f"{self.tag}{key}:seen")
        ]


def _answer(reply: Reply, limits: Sequence[LeaseLimit]) -> LeaseAnswer:
    refused, held, again = reply
    if not refused:
        return LeaseAnswer(None, held)
    return LeaseAnswer(limits[int(refused) - 1].key, held, inf if again < 0 else again / 1e6)
