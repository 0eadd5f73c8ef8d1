"""Leases on a Redis or Valkey server: given out by script, renewed while they are held, and waited for.

What the scripts keep is `core/leases.py`'s to say; how they get there, `_redis_scripts`'. Asking is each pool's own;
who in this process a lease is for must not enter.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from math import inf
from typing import TYPE_CHECKING, Final
from weakref import WeakValueDictionary

from resilient_llm._loop import LoopBound
from resilient_llm.errors import ConfigurationError, StoreUnavailableError
from resilient_llm.stores._redis_commands import Reply, Script
from resilient_llm.stores._redis_lease_pool import RedisLeasePool
from resilient_llm.stores._redis_runner import Runner
from resilient_llm.stores._redis_wakeups import Wakeups
from resilient_llm.stores.protocol_leases import Lease
from resilient_llm.telemetry.names import STORE_NAME

if TYPE_CHECKING:
    from resilient_llm.telemetry import Telemetry

__all__ = ["RedisLeases"]

logger = logging.getLogger("resilient_llm")

_SETTLES: Final = 6.0
"""Seconds within which all processes have found out that the store is back: more than a guard's longest break."""
_AT_ONCE: Final = 200
"""Leases renewed by one script, so that it keeps the server busy for well under a millisecond."""
_SLOW_POLL: Final = 1.0
"""Seconds after which whoever waits asks again although nobody said that a lease is free."""


class RedisLeases:
    """Keep leases by script; see `stores.protocol_leases.Leases`.

    A lease that is not renewed ends after `lasts` seconds; one that is held is renewed after a quarter of that and
    before half of it, so that there is time for a second try, in one script for up to 200 of a pool. `process` names
    this process, and its channel; `clock`, where there is one, is sent along in place of the server's time.
    """

    def __init__(
        self,
        runner: Runner,
        prefix: str,
        process: str,
        *,
        lasts: float = 15.0,
        clock: Callable[[], float] | None = None,
    ) -> None:
        if not isinstance(lasts, int | float) or isinstance(lasts, bool) or not 0.1 <= lasts <= 3600:
            raise ConfigurationError(f"lease={lasts!r}: allowed are seconds from 0.1 to 3600")
        self.lost = 0
        """Leases that were given to somebody else because they were renewed too late."""
        self.runner = runner
        self.lasts = float(lasts)
        self.process = process
        self.prefix = prefix
        self.poll = min(_SLOW_POLL, self.lasts / 5)
        self._clock = clock
        self._renew = Script.load("_clock", "_lease", "lease_renew")
        self._serial = 0
        self._places: WeakValueDictionary[str, RedisLeasePool] = WeakValueDictionary()
        self._held: dict[Lease, RedisLeasePool] = {}  # the one renewed longest ago first
        self._ticking = False
        self.behind = False
        """Whether the store was away, and does not know yet what is held here."""
        self.settled = -inf
        """When all processes will have told a store that was away what they hold."""
        self._probed = -inf
        self.returning = False
        """Whether a store that was away is being told what is held."""
        self.closed = False
        self.wakeups = Wakeups(runner, self.wake, self._wake_all, delay=self.poll)
        """What other processes say."""
        self.loop = LoopBound(runner.guard.name, self._reset)

    def pool(self, name: str, on_free: Callable[[str], None]) -> RedisLeasePool:
        """Make an access to a pool, whose keys share a hash tag."""
        place = self.name()
        made = self._places[place] = RedisLeasePool(self, name, place, on_free)
        return made

    def observe(self, telemetry: Telemetry) -> None:
        """Report the gauge `store.leases_lost`."""
        telemetry.observe(
            "store.leases_lost", self._observe_lost, "1", "Slots whose lease was renewed too late", merge=max
        )

    def _observe_lost(self) -> Iterable[tuple[float, Mapping[str, str]]]:
        yield self.lost, {STORE_NAME: self.runner.guard.name}

    def name(self) -> str:
        """Make a name that nothing else has, in any process."""
        self._serial += 1
        return f"{self.process}.{self._serial}"

    def time(self) -> str:
        """Give the time to send along, or nothing where it is the server's."""
        return "" if self._clock is None else repr(self._clock())

    def hold(self, lease: Lease, pool: RedisLeasePool) -> None:
        """See to it that a lease is renewed from now on."""
        self._held[lease] = pool
        if not self._ticking:
            self._ticking = True
            self.runner.every(self.lasts / 8, self._tick)
        if lease.known:
            return
        if self.runner.guard.closed:
            self._send(pool, [lease], lease.renewed)
        else:
            self.behind = True

    def drop(self, lease: Lease) -> None:
        """Renew a lease no more."""
        self._held.pop(lease, None)

    def wake(self, words: Iterable[bytes | str]) -> None:
        """Tell pools of this process that there is a lease for them; each is given as its place and the key."""
        for each in words:
            place, _, key = (each if isinstance(each, str) else each.decode()).partition(" ")
            pool = self._places.get(place)
            if pool is not None:
                pool.poke(key)

    def _wake_all(self) -> None:
        for pool in list(self._places.values()):
            pool.poke_all()

    def listen(self) -> None:
        """Hear what other processes say, from the first time somebody has to wait."""
        if not self.closed:
            self.wakeups.start(f"{self.prefix}wake:{self.process}")

    def end(self) -> None:
        """Have all who wait ask again, as the store has been closed, and renew nothing any more."""
        self.closed = True
        self._wake_all()

    async def aclose(self) -> None:
        """Hear of nothing any more; what is still held ends by itself, since whoever holds it may still run."""
        self.closed = True
        if self.loop.loop is not None:
            self.loop.bind()  # a listener of a loop that has ended is gone with it
        await self.wakeups.stop()

    def after_fork(self, process: str) -> None:
        """Go on, in the child, as another process, which holds nothing; who waits in the parent does not wait here."""
        self.wakeups.after_fork()
        self.process = process
        pools = list(self._places.values())
        self._places.clear()
        for pool in pools:
            pool.place = self.name()
            self._places[pool.place] = pool
        self._reset()

    def _reset(self) -> None:
        """Start afresh in another event loop: nobody is left who could release or wait."""
        self._held.clear()
        self._ticking = self.behind = self.returning = False
        self._probed = self.settled = -inf
        self.wakeups.forget()
        for pool in list(self._places.values()):
            pool.forget()

    def _tick(self) -> bool:
        """Renew what was not for a while."""
        if self.closed or not self._held:
            self._ticking = False
            return False
        now = asyncio.get_running_loop().time()
        if self.runner.guard.closed:
            self._renew_since(now - self.lasts / 4, now)
        else:
            self.behind = True
            if now - self._probed > self.lasts:  # one is enough to find out that the store is back
                self._probed = now
                lease, pool = next(iter(self._held.items()))
                self._send(pool, [lease], now)
        return True

    async def come_back(self) -> None:
        """Tell a store that was away what is held by now, before it is asked for more.

        Raises `StoreUnavailableError` while it is still away.
        """
        now = self.loop.time()
        missing = False
        new: frozenset[Lease] = frozenset()
        self.returning = True
        try:
            for pool, leases in self._due(inf):
                new = frozenset(lease for lease in leases if not lease.known)
                keys, names, owners = self._renewed(pool, leases, now)
                reply = await self.runner.run(self._renew, keys, (repr(self.lasts), self.time(), *names))
                missing = missing or bool(reply)
                self._hear_missing(pool, {owners[index - 1] for index in reply}, new)
        except StoreUnavailableError:
            for lease in new:
                lease.known = False
            raise
        finally:
            self.returning = False
        self.behind = False
        self._settle(missing=missing)

    def away(self) -> None:
        """Hear that the store has not answered."""
        if not self.runner.guard.closed:
            self.behind = True

    def _settle(self, *, missing: bool) -> None:
        """Leave others the time to tell a store that is back what they hold, where it cannot know."""
        if missing or self.runner.guard.on_error != "closed":
            self.settled = asyncio.get_running_loop().time() + _SETTLES

    def _renew_since(self, since: float, now: float) -> None:
        for pool, leases in self._due(since):
            self._send(pool, leases, now)

    def _due(self, since: float) -> Iterable[tuple[RedisLeasePool, Sequence[Lease]]]:
        """Give the leases that were not renewed since then, some of one pool at a time."""
        due: dict[RedisLeasePool, list[Lease]] = {}
        for lease, pool in self._held.items():
            if lease.renewed > since:
                break
            due.setdefault(pool, []).append(lease)
        return [
            (pool, leases[at : at + _AT_ONCE])
            for pool, leases in due.items()
            for at in range(0, len(leases), _AT_ONCE)
        ]

    def _renewed(
        self, pool: RedisLeasePool, leases: Sequence[Lease], now: float
    ) -> tuple[list[str], list[str], list[Lease]]:
        """Note that leases are renewed, and give the key, the name and the lease of each that is to be."""
        named = [(pool.key(key), lease.id, lease) for lease in leases for key, _ in lease.limits]
        for lease in leases:
            if lease in self._held:
                self._held[lease] = self._held.pop(lease)  # to the end of the line
            lease.renewed = now
            lease.known = True
        keys, names, owners = zip(*named, strict=True)
        return list(keys), list(names), list(owners)

    def _send(self, pool: RedisLeasePool, leases: Sequence[Lease], now: float) -> None:
        new = frozenset(lease for lease in leases if not lease.known)
        keys, names, owners = self._renewed(pool, leases, now)

        def heard(reply: Reply) -> None:
            self._probed = -inf
            self._hear_missing(pool, {owners[index - 1] for index in reply}, new)
            if self.behind and self.runner.guard.closed:  # an answer: tell the store all the rest
                self.behind = False
                self._settle(missing=bool(reply))
                self._renew_since(inf, asyncio.get_running_loop().time())

        self.runner.send(self._renew, keys, (repr(self.lasts), self.time(), *names), heard=heard)

    def _hear_missing(self, pool: RedisLeasePool, leases: Iterable[Lease], new: Container[Lease]) -> None:
        """Hear of leases that the store did not have, and has again; it should not have had those that are `new`."""
        for lease in leases:
            if lease not in self._held:  # released meanwhile, on another connection
                pool.release(lease)
            elif lease not in new:
                self.lost += 1
                lease.lost = True
                logger.warning("a lease of %s was renewed too late, and is held beside the limit", pool.tag)
