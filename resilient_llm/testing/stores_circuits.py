"""What a store's circuits must do, as checks that run against any store.

Each takes a function that makes a store, as another process would: all that it makes see the same circuits. They take
real time, about three seconds in all.
"""

# ruff: noqa: D401, S101 - checks assert, and their docstrings say what must be so

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TypeAlias
from uuid import uuid4

import anyio

from resilient_llm.core.circuit_state import CircuitSnapshot, CircuitState
from resilient_llm.stores.protocol_circuits import Agreed, CircuitGroup, CircuitStore

__all__ = ["CIRCUIT_CHECKS", "CircuitCheck", "MakeCircuitStore"]

MakeCircuitStore: TypeAlias = Callable[[], CircuitStore]
CircuitCheck: TypeAlias = Callable[[MakeCircuitStore], Awaitable[None]]

_LATE = 10.0
"""Seconds by which an answer may be late, on a busy machine, before a check says that it is wrong."""
_OPEN = CircuitSnapshot(
    generation=1,
    state=CircuitState.OPEN,
    reason="failure_ratio",
    wait=15.0,
    next_break=22.5,
    successes=0,
    probes={},
)


class _Member:
    """Take part in a group, and remember what was heard."""

    def __init__(self, make: MakeCircuitStore, group: str) -> None:
        self.heard: dict[str, Agreed] = {}
        self.rounds = 0
        self.group: CircuitGroup = make().circuits.join(group, self._hear)

    def _hear(self, key: str | None, agreed: Agreed | None) -> None:
        if key is None or agreed is None:
            self.rounds += 1
        else:
            self.heard[key] = agreed

    async def swap(self, key: str, expected: int, snapshot: CircuitSnapshot) -> Agreed:
        return await self.group.swap(key, expected, snapshot, lambda _agreed: None)


def _group() -> str:
    return f"check-{uuid4().hex}"


def _same(snapshot: CircuitSnapshot, expected: CircuitSnapshot, *, age: float = 0.0) -> None:
    """Compare, with times that may have passed since."""
    assert replace(snapshot, wait=0.0, probes={}) == replace(expected, wait=0.0, probes={})
    left = {0: snapshot.wait, **snapshot.probes}
    wanted = {0: expected.wait, **expected.probes}
    assert left.keys() == wanted.keys(), f"probes {set(snapshot.probes)}, expected {set(expected.probes)}"
    for name, seconds in wanted.items():
        least, most = seconds - age - _LATE, seconds - age
        if name == 0:
            least, most = max(0.0, least), max(0.0, most)
        assert least <= left[name] <= most + 1e-3, f"{left[name]} s left, expected {most} s"


async def takes_the_first_record(make: MakeCircuitStore) -> None:
    """A circuit that the store does not know takes any record, which is then given to all who ask."""
    group = _group()
    one, other = _Member(make, group), _Member(make, group)
    agreed = await one.swap("k", 12345, _OPEN)
    assert agreed.accepted
    await other.group.refresh()
    assert other.heard["k"].version == agreed.version
    _same(other.heard["k"].snapshot, _OPEN)


async def compares_before_it_sets(make: MakeCircuitStore) -> None:
    """A record made from one that has changed since is not taken, and the one there is is given instead."""
    group = _group()
    one, other = _Member(make, group), _Member(make, group)
    first = await one.swap("k", 0, _OPEN)
    half_open = replace(
        _OPEN, generation=3, state=CircuitState.HALF_OPEN, reason="break_elapsed", wait=0.0, probes={3: 60.0}
    )
    second = await other.swap("k", first.version, half_open)
    assert second.accepted
    assert second.version > first.version, "versions rise"
    late = await one.swap("k", first.version, replace(_OPEN, generation=2))
    assert not late.accepted
    assert late.version == second.version
    _same(late.snapshot, half_open)
    assert (await one.swap("k", late.version, replace(_OPEN, generation=4))).accepted


async def lets_one_of_many_win(make: MakeCircuitStore) -> None:
    """Of many who offer at the same time one is taken, and all others hear which."""
    group = _group()
    members = [_Member(make, group) for _ in range(4)]
    agreed: list[Agreed] = []

    async def offer(member: _Member, successes: int) -> None:
        agreed.append(await member.swap("k", 0, replace(_OPEN, successes=successes)))

    first = await members[0].swap("k", 0, _OPEN)
    async with anyio.create_task_group() as tasks:
        for number, member in enumerate(members * 4):
            tasks.start_soon(offer, member, number)
    assert not any(each.accepted for each in agreed)
    agreed.clear()

    async def answer(member: _Member, successes: int) -> None:
        agreed.append(await member.swap("k", first.version, replace(_OPEN, successes=successes)))

    async with anyio.create_task_group() as tasks:
        for number, member in enumerate(members * 4):
            tasks.start_soon(answer, member, number)
    winners = [each for each in agreed if each.accepted]
    assert len(winners) == 1, f"{len(winners)} were taken"
    assert {each.version for each in agreed} == {winners[0].version}


async def counts_time(make: MakeCircuitStore) -> None:
    """Times are seconds left by the store's clock: a break never below 0, a lease below 0 once it is over."""
    group = _group()
    one, other = _Member(make, group), _Member(make, group)
    half_open = replace(
        _OPEN, generation=3, state=CircuitState.HALF_OPEN, reason="break_elapsed", wait=0.1, probes={3: 0.2}
    )
    await one.swap("k", 0, half_open)
    await anyio.sleep(0.5)
    await other.group.refresh()
    snapshot = other.heard["k"].snapshot
    assert snapshot.wait == 0.0
    assert snapshot.probes[3] < 0.0, f"{snapshot.probes[3]} s left of a lease that is over"


async def tells_of_changes_while_used(make: MakeCircuitStore) -> None:
    """Who uses a group hears within a second what others change, and what there was before."""
    group = _group()
    one, other = _Member(make, group), _Member(make, group)
    await one.swap("before", 0, _OPEN)
    other.group.fresh(anyio.current_time())
    await other.group.refresh()
    assert other.heard["before"].snapshot.state is CircuitState.OPEN
    assert other.group.fresh(anyio.current_time())
    heard = anyio.Event()
    one.group.swap_soon("after", 0, _OPEN, lambda _agreed: heard.set())
    with anyio.fail_after(2 * _LATE):
        await heard.wait()
    # In turns of the event loop: a busy machine is no fault of the store's.
    for _ in range(100):
        if "after" in other.heard:
            break
        await anyio.sleep(0.02)
    assert "after" in other.heard, "not heard of within a second"
    assert other.group.made == other.heard["after"].made
    assert other.rounds, "the end of a round was not told"


async def keeps_groups_apart(make: MakeCircuitStore) -> None:
    """Circuits of the same key in different groups have nothing to do with each other; nor have other keys."""
    one, other = _Member(make, _group()), _Member(make, _group())
    first = await one.swap("k", 0, _OPEN)
    assert (await one.swap("l", first.version, replace(_OPEN, generation=7))).accepted
    await other.group.refresh()
    assert other.heard == {}


CIRCUIT_CHECKS: tuple[CircuitCheck, ...] = (
    takes_the_first_record,
    compares_before_it_sets,
    lets_one_of_many_win,
    counts_time,
    tells_of_changes_while_used,
    keeps_groups_apart,
)
