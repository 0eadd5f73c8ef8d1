"""The part of the conformance suite that is about leases: what any store of slots must do, for those who write one.

Run every check against a function that makes your store, as another process would: all that it makes see the same
leases. `resilient_llm.testing.stores` shows how. The checks take real time, about two seconds in all.
"""

# ruff: noqa: D401, S101 - checks assert, and their docstrings say what must be so

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias
from uuid import uuid4

import anyio
import anyio.lowlevel

from resilient_llm.core.leases import LeaseAnswer, LeaseLimit
from resilient_llm.stores.protocol_leases import Lease, LeasePool, LeaseStore

__all__ = ["LEASE_CHECKS", "LeaseCheck", "MakeLeaseStore"]

MakeLeaseStore: TypeAlias = Callable[[], LeaseStore]
LeaseCheck: TypeAlias = Callable[[MakeLeaseStore], Awaitable[None]]

_SOON = 0.5
"""Seconds within which who is first in line hears of a lease: before it would have asked again anyway."""
_AT_LAST = 20.0


class _Access:
    """One process's access to a pool, and what it was told."""

    def __init__(self, store: LeaseStore, name: str) -> None:
        self.told: list[str] = []
        self.pool: LeasePool = store.leases.pool(name, self.told.append)

    async def granted(self, *limits: LeaseLimit, wait: bool = False) -> Lease:
        got = await self.pool.acquire(limits, wait=wait)
        assert isinstance(got, Lease), f"refused by {got}: there should have been a lease"
        return got

    async def refused(self, *limits: LeaseLimit, wait: bool = False) -> LeaseAnswer:
        got = await self.pool.acquire(limits, wait=wait)
        assert isinstance(got, LeaseAnswer), "a lease was given out beyond a limit, or before those in line"
        return got


def _name() -> str:
    return f"check-{uuid4().hex}"


async def _becomes(true: Callable[[], Awaitable[bool]], what: str, *, within: float = _AT_LAST) -> None:
    # In turns of the event loop: a busy machine is no fault of the store's.
    for _ in range(round(within / 0.01)):
        if await true():
            return
        await anyio.sleep(0.01)
    raise AssertionError(f"not within {within:g} s: {what}")


async def _granted_at_last(access: _Access, limits: Sequence[LeaseLimit], *, wait: bool = False) -> Lease:
    """Wait for what was sent without being awaited, by asking again."""
    got: list[Lease] = []

    async def granted() -> bool:
        answer = await access.pool.acquire(limits, wait=wait)
        if isinstance(answer, Lease):
            got.append(answer)
        return bool(got)

    await _becomes(granted, "a lease that was given back is given out again")
    return got[0]


async def gives_out_no_more_than_there_are(make: MakeLeaseStore) -> None:
    """However many ask at once, from however many processes: never more leases are out than the limit says."""
    name, limit = _name(), LeaseLimit("k", 3)
    accesses = [_Access(make(), name) for _ in range(3)]
    out = most = granted = 0

    async def hammer(access: _Access, seed: int) -> None:
        nonlocal out, most, granted
        rng = random.Random(seed)
        for _ in range(25):
            got = await access.pool.acquire([limit])
            if isinstance(got, Lease):
                out += 1
                granted += 1
                most = max(most, out)
                await anyio.sleep(rng.random() * 0.003)
                out -= 1
                access.pool.release(got)
            await anyio.sleep(rng.random() * 0.003)

    async with anyio.create_task_group() as tasks:
        for seed in range(12):
            tasks.start_soon(hammer, accesses[seed % 3], seed)
    assert most <= 3, f"{most} leases were out at the same time, of 3"
    assert granted >= 20, f"only {granted} of 300 requests were granted"
    for each in accesses:
        await _granted_at_last(each, [limit])


async def asks_all_keys_or_none(make: MakeLeaseStore) -> None:
    """A request that one key refuses takes nothing of the others, and the answer names it."""
    access = _Access(make(), _name())
    one, two = LeaseLimit("one", 1), LeaseLimit("two", 2)
    first = await access.granted(one, two)
    assert first.held == 1
    assert (await access.refused(one, two)).refused == "one"
    assert (await access.granted(two)).held == 2
    answer = await access.refused(LeaseLimit("other", 1), two)
    assert (answer.refused, answer.held) == ("two", 2)
    access.pool.release(first)
    await _granted_at_last(access, [LeaseLimit("other", 1), two])


async def keeps_pools_apart(make: MakeLeaseStore) -> None:
    """Leases of one pool count for no other, and those of one are the same in every process."""
    store, name = make(), _name()
    limit = LeaseLimit("k", 1)
    await _Access(store, name).granted(limit)
    await _Access(store, _name()).granted(limit)
    await _Access(make(), name).refused(limit)


async def tells_the_first_in_line(make: MakeLeaseStore) -> None:
    """A lease that is given back is for who has waited longest, who hears of it; newcomers do not get it."""
    name, limit = _name(), LeaseLimit("k", 1)
    holder, first, second, newcomer = (_Access(make(), name) for _ in range(4))
    for access in (first, second):  # those who wait can be told from now on
        await access.granted(limit._replace(key="warm", most=2))
        await access.refused(LeaseLimit("none", 0), wait=True)
    await anyio.sleep(0.2)
    for access in (first, second):
        access.pool.leave([LeaseLimit("none", 0)])
    lease = await holder.granted(limit)
    await first.refused(limit, wait=True)
    await second.refused(limit, wait=True)
    holder.pool.release(lease)

    async def told() -> bool:
        return "k" in first.told

    await _becomes(told, "the first in line hears of a lease", within=_SOON)
    await newcomer.refused(limit)
    await second.refused(limit, wait=True)
    lease = await first.granted(limit, wait=True)
    first.pool.release(lease)

    async def told_second() -> bool:
        return "k" in second.told

    await _becomes(told_second, "the next in line hears of a lease", within=_SOON)
    await first.refused(limit, wait=True)
    await second.granted(limit, wait=True)


async def serves_as_many_as_are_free(make: MakeLeaseStore) -> None:
    """With one in line and two leases free, a newcomer gets one of them."""
    name = _name()
    holder, waits, newcomer = (_Access(make(), name) for _ in range(3))
    leases = [await holder.granted(LeaseLimit("k", 2)) for _ in range(2)]
    await waits.refused(LeaseLimit("k", 2), wait=True)
    for lease in leases:
        holder.pool.release(lease)
    await _granted_at_last(newcomer, [LeaseLimit("k", 2)])
    await newcomer.refused(LeaseLimit("k", 2))
    await waits.granted(LeaseLimit("k", 2), wait=True)


async def gives_up_a_place(make: MakeLeaseStore) -> None:
    """Who leaves the line is in nobody's way, and the next hears of what was kept for it."""
    name, limit = _name(), LeaseLimit("k", 1)
    holder, first, second = (_Access(make(), name) for _ in range(3))
    lease = await holder.granted(limit)
    await first.refused(limit, wait=True)
    await second.refused(limit, wait=True)
    holder.pool.release(lease)
    first.pool.leave([limit, LeaseLimit("never waited", 1)])
    await _granted_at_last(second, [limit], wait=True)


async def leaves_nothing_of_the_cancelled(make: MakeLeaseStore) -> None:
    """Who is cancelled while it asks holds no lease, and stands in no line."""
    name, limit = _name(), LeaseLimit("k", 2)
    access = _Access(make(), name)
    await access.granted(LeaseLimit("warm", 1))
    leases: list[Lease] = []

    async def ask(scope: anyio.CancelScope) -> None:
        with scope:
            got = await access.pool.acquire([limit], wait=True)
            if isinstance(got, Lease):
                leases.append(got)

    for turns in range(12):
        scopes = [anyio.CancelScope() for _ in range(4)]
        async with anyio.create_task_group() as tasks:
            for scope in scopes:
                tasks.start_soon(ask, scope)
            for _ in range(turns):
                await anyio.lowlevel.checkpoint()
            if turns % 2:
                await anyio.sleep(0.0005 * turns)
            for scope in scopes:
                scope.cancel()
        while leases:
            access.pool.release(leases.pop())
        access.pool.leave([limit])
    held = [await _granted_at_last(_Access(make(), name), [limit]) for _ in range(2)]
    assert len(held) == 2
    await access.refused(limit)


async def counts_what_was_let_in_without_it(make: MakeLeaseStore) -> None:
    """A lease that was given out without asking counts, beside the limit if need be."""
    name, limit = _name(), LeaseLimit("k", 1)
    access, other = _Access(make(), name), _Access(make(), name)
    asked = await access.granted(limit)
    adopted = access.pool.adopt([limit])
    # A store may tell of it when it next hears from the process.
    await access.granted(LeaseLimit("another", 1))

    async def held(count: int) -> bool:
        return (await other.refused(limit)).held == count

    await _becomes(lambda: held(2), "both count")
    access.pool.release(asked)
    await _becomes(lambda: held(1), "what was let in counts alone")
    access.pool.release(adopted)
    await _granted_at_last(other, [limit])


async def tells_the_mean_of_votes(make: MakeLeaseStore) -> None:
    """All who vote hear the mean of everybody's last vote."""
    name = _name()
    heard: list[float] = []
    first, second = _Access(make(), name), _Access(make(), name)
    first.pool.vote(10, heard.append)

    async def says(expected: float) -> None:
        async def said() -> bool:
            return bool(heard) and abs(heard[-1] - expected) < 1e-9

        await _becomes(said, f"the mean is {expected}, not {heard[-1:]}")

    await says(10)
    second.pool.vote(20.5, heard.append)
    await says(15.25)
    first.pool.vote(30.5, heard.append)
    await says(25.5)


LEASE_CHECKS: tuple[LeaseCheck, ...] = (
    gives_out_no_more_than_there_are,
    asks_all_keys_or_none,
    keeps_pools_apart,
    tells_the_first_in_line,
    serves_as_many_as_are_free,
    gives_up_a_place,
    leaves_nothing_of_the_cancelled,
    counts_what_was_let_in_without_it,
    tells_the_mean_of_votes,
)
