"""What a store's rate limits must do, as checks that run against any store.

Each takes a function that makes a store, as another process would: all that it makes see the same counts. They take
real time, about four seconds in all, and are exact to some milliseconds of the store's answer.
"""

# ruff: noqa: D401, S101 - checks assert, and their docstrings say what must be so

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeAlias, TypeVar
from uuid import uuid4

import anyio

from resilient_llm.core.shared_rate import (
    Change,
    RateCharge,
    RateDecision,
    RateLedger,
    RateLevel,
    TakeMode,
    Verdict,
)
from resilient_llm.stores.protocol import RateStore

__all__ = ["RATE_CHECKS", "MakeRateStore", "RateCheck"]

MakeRateStore: TypeAlias = Callable[[], RateStore]
RateCheck: TypeAlias = Callable[[MakeRateStore], Awaitable[None]]
_Named = TypeVar("_Named", RateCharge, Change)

_LATE = 10.0
"""Seconds by which an answer may be late, on a busy machine, before a check says that it is wrong."""
_TRIES = 5
"""How often something is tried that a busy machine may be too slow for."""


def _account() -> str:
    return f"check-{uuid4().hex}"


def _charge(
    amount: float, *, capacity: float = 10.0, rate: float = 0.1, key: str = "k", own: bool = True
) -> RateCharge:
    return RateCharge(key, capacity, rate, amount, own)


async def _told(
    tell: Callable[[Callable[[Sequence[RateLevel]], None]], None],
) -> Sequence[RateLevel]:
    """Tell a store something, and wait for what it says to that."""
    heard = anyio.Event()
    levels: list[RateLevel] = []

    def hear(said: Sequence[RateLevel]) -> None:
        levels.extend(said)
        heard.set()

    tell(hear)
    with anyio.fail_after(2 * _LATE):
        await heard.wait()
    return levels


def _near(value: float, expected: float, *, rate: float = 0.1, what: str) -> None:
    assert expected - 1e-3 <= value <= expected + rate * _LATE + 1e-3, f"{what}: {value}, expected {expected}"


def _nearly_in(seconds: float, expected: float, *, what: str) -> None:
    assert expected - _LATE - 1e-3 <= seconds <= expected + 1e-3, (
        f"{what}: {seconds} s, expected {expected} s"
    )


async def takes_all_or_nothing(make: MakeRateStore) -> None:
    """One bucket that has too little leaves the others untouched, and is the one that is named."""
    rates, account = make().rates, _account()
    plenty, little = _charge(1, key="plenty"), _charge(6, key="little")
    first = await rates.take(account, [plenty, little])
    assert first.verdict is Verdict.TAKEN
    assert first.wait == 0
    second = await rates.take(account, [plenty, little])
    assert second.verdict is Verdict.REFUSED
    assert second.limiting == 1
    _nearly_in(second.wait, 20, what="6 are needed, 4 remain, 0.1 a second comes")
    _near(second.levels[0].level, 9, what="level of the bucket that has enough")
    _near(second.levels[1].level, 4, what="level of the bucket that has not")


async def several_processes_draw_on_one_bucket(make: MakeRateStore) -> None:
    """However many ask at once, and from wherever, no more is taken than there is."""
    stores, account = [make(), make()], _account()
    taken = 0

    async def one(store: RateStore) -> None:
        nonlocal taken
        decision = await store.rates.take(account, [_charge(1, capacity=20, rate=0.001)])
        taken += decision.verdict is Verdict.TAKEN

    async with anyio.create_task_group() as group:
        for turn in range(64):
            group.start_soon(one, stores[turn % 2])
    assert taken == 20, f"{taken} of 20 were taken by 64 at once"


async def refills_evenly_and_never_overfills(make: MakeRateStore) -> None:
    """What was taken comes back at the bucket's rate, in fractions too, and no more than it holds."""
    rates, account = make().rates, _account()
    charge = _charge(10, rate=20)
    began = anyio.current_time()
    assert (await rates.take(account, [charge])).verdict is Verdict.TAKEN
    await anyio.sleep(0.1)
    middle = await rates.take(account, [charge._replace(amount=0)])
    elapsed = anyio.current_time() - began
    assert 2 - 1e-3 <= middle.levels[0].level <= 20 * elapsed + 1e-3
    await anyio.sleep(0.6)
    full = await rates.take(account, [charge])
    assert full.verdict is Verdict.TAKEN
    assert full.levels[0].level <= 20 * 0.05, "an idle bucket holds no more than its capacity"


async def accounts_and_keys_are_apart(make: MakeRateStore) -> None:
    """What one account or key takes, no other misses."""
    rates, account = make().rates, _account()
    for name in (account, f"{account}.other"):
        for key in ("a", "b", "tenant:requests:a/b@c+d_e"):
            decision = await rates.take(name, [_charge(10, key=key)])
            assert decision.verdict is Verdict.TAKEN, f"{key!r} of {name!r} had been taken from"


async def keeps_places_in_line(make: MakeRateStore) -> None:
    """Who waits keeps a place: newcomers wait behind it, and it takes what it waited for."""
    first, second = make().rates, make().rates
    charge = _charge(1, capacity=1, rate=1)
    for _ in range(_TRIES):
        account, began = _account(), anyio.current_time()
        await first.take(account, [charge])
        held = await first.take(account, [charge], most_wait=2, mode="h")
        if held.verdict is Verdict.TAKEN and anyio.current_time() - began > 1:
            continue
        assert held.verdict is Verdict.HELD
        assert list(held.held) == [1.0]
        assert 0 < held.again <= 1
        behind = await second.take(account, [charge])
        assert behind.verdict is Verdict.REFUSED
        late = anyio.current_time() - began
        assert behind.wait > held.again + 0.9 - late, "a newcomer would not wait for who came before"
        await anyio.sleep(held.again)
        newcomer = await second.take(account, [charge])
        if anyio.current_time() - began < held.again + 0.9:
            break  # else a place may have been forgotten
    assert newcomer.verdict is Verdict.REFUSED, "a newcomer took what is kept"
    place = charge._replace(held=held.held[0], turn=held.turn(0))
    mine = await first.take(account, [place], most_wait=2, mode="h")
    assert mine.verdict is Verdict.TAKEN, "what was waited for was not there"


async def refuses_a_place_that_is_too_far_off(make: MakeRateStore) -> None:
    """A wait that is longer than allowed changes nothing."""
    rates, account = make().rates, _account()
    await rates.take(account, [_charge(10)])
    refused = await rates.take(account, [_charge(5)], most_wait=10, mode="h")
    assert refused.verdict is Verdict.REFUSED
    assert not any(refused.held)
    again = await rates.take(account, [_charge(5)])
    _nearly_in(again.wait, 50, what="the wait after a refusal")


async def frees_a_place_that_is_given_up(make: MakeRateStore) -> None:
    """Who waits no longer frees the place at once."""
    rates, account = make().rates, _account()
    charge = _charge(10)
    await rates.take(account, [charge])
    held = await rates.take(account, [charge], most_wait=600, mode="h")
    change = Change(charge.key, charge.capacity, charge.rate, freed=held.held[0], turn=held.turn(0))
    (level,) = await _told(lambda hear: rates.settle(account, [change], hear))
    _near(level.level, 0, what="level after the place was given up")


async def holds_nothing_of_others_while_a_tenant_is_dry(make: MakeRateStore) -> None:
    """Whose own bucket is dry keeps a place there only, not in the bucket that others draw on."""
    rates, account = make().rates, _account()
    own = _charge(8, key="own")
    shared = _charge(8, key="shared", own=False)
    await rates.take(account, [own, shared])
    held = await rates.take(account, [own, shared], most_wait=600, mode="h")
    assert held.verdict is Verdict.HELD
    assert list(held.held) == [8.0, 0.0]
    _near(held.levels[1].level, 2, what="level of the shared bucket")


async def settles_what_was_used(make: MakeRateStore) -> None:
    """What is given back can be taken again, up to the capacity; a charge makes a debt, of one capacity at most."""
    rates, account = make().rates, _account()
    charge = _charge(9)
    await rates.take(account, [charge])
    change = Change(charge.key, charge.capacity, charge.rate)
    (level,) = await _told(lambda hear: rates.settle(account, [change._replace(back=5.0)], hear))
    _near(level.level, 6, what="level after 5 were given back")
    (level,) = await _told(lambda hear: rates.settle(account, [change._replace(back=50.0)], hear))
    _near(level.level, 10, what="level after too much was given back")
    (level,) = await _told(lambda hear: rates.settle(account, [change._replace(back=-15.0)], hear))
    _near(level.level, -5, what="level after 15 were charged")
    (level,) = await _told(lambda hear: rates.settle(account, [change._replace(back=-900.0)], hear))
    _near(level.level, -10, what="level after far too much was charged")
    refused = await rates.take(account, [_charge(1)])
    _nearly_in(refused.wait, 110, what="the wait in debt")


async def goes_into_debt_when_told_to(make: MakeRateStore) -> None:
    """A dry run takes at once, says how long it would have waited, and stops at the longest wait allowed."""
    rates, account = make().rates, _account()
    await rates.take(account, [_charge(10)])
    taken = await rates.take(account, [_charge(5)], most_wait=60, mode="d")
    assert taken.verdict is Verdict.TAKEN
    _nearly_in(taken.wait, 50, what="the wait that was not waited")
    assert (await rates.take(account, [_charge(5)], most_wait=60, mode="d")).verdict is Verdict.REFUSED


async def lends_when_full(make: MakeRateStore) -> None:
    """More than a bucket holds is taken when it is full, and leaves a debt."""
    rates, account = make().rates, _account()
    taken = await rates.take(account, [_charge(15)])
    assert taken.verdict is Verdict.TAKEN
    _near(taken.levels[0].level, -5, what="level after more than the capacity was taken")
    refused = await rates.take(account, [_charge(15)])
    _nearly_in(refused.wait, 150, what="the wait until it is full")


async def lowers_and_pauses(make: MakeRateStore) -> None:
    """A level is lowered and never raised; a pause gives nothing out, and ends."""
    rates, account = make().rates, _account()
    (level,) = await _told(lambda hear: rates.lower(account, [_charge(4)], [0.0], hear))
    _near(level.level, 4, what="a lowered level")
    began = anyio.current_time()
    (level,) = await _told(lambda hear: rates.lower(account, [_charge(9)], [0.5], hear))
    _near(level.level, 4, what="a level lowered to more than it was")
    assert 0 < level.pause <= 0.5
    refused = await rates.take(account, [_charge(1)])
    in_time = anyio.current_time() - began < 0.5
    assert refused.verdict is Verdict.REFUSED or not in_time, "taken in a pause"
    await anyio.sleep(refused.wait + 0.005)
    assert (await rates.take(account, [_charge(1)])).verdict is Verdict.TAKEN, "refused after the pause"


async def leaves_nothing_when_cancelled(make: MakeRateStore) -> None:
    """A caller that goes away at any moment has taken nothing once the store has caught up."""
    rates, account = make().rates, _account()
    charge = _charge(1, capacity=100, rate=0.001)
    kept = 0
    for turn in range(40):
        with anyio.move_on_after(turn * 2e-5):
            kept += (await rates.take(account, [charge])).verdict is Verdict.TAKEN
    level = -1.0
    for _ in range(1_000):
        level = (await rates.take(account, [charge._replace(amount=0)])).levels[0].level
        if abs(level - (100 - kept)) < 0.1:
            return
        await anyio.sleep(0.02)
    raise AssertionError(f"{100 - level} are taken after {kept} were kept of 40")


async def decides_as_the_reference_does(make: MakeRateStore) -> None:
    """Whatever is done in whatever order, verdicts and levels are those of `RateLedger`."""
    rng = random.Random(7)
    rates, account = make().rates, _account()
    ledger = RateLedger()
    keys = ("a", "b", "c")
    # So slow that what is refilled between the two answers is nothing.
    sizes = {key: (float(10 * (index + 1)), 1e-6) for index, key in enumerate(keys)}
    held: dict[str, float] = {}
    turns: dict[str, tuple[float, float]] = {}  # on the store's clock, and on the reference's
    for step in range(150):
        chosen = [key for key in keys if rng.random() < 0.7] or ["a"]
        amounts = {key: float(rng.randrange(0, 8)) for key in chosen}
        modes: tuple[TakeMode, ...] = ("n", "n", "h", "d")
        mode = rng.choice(modes)
        most_wait = rng.choice((0.0, 3e6, 9e6))
        charges = [
            RateCharge(key, *sizes[key], amounts[key], key == "a", held.get(key, 0.0)) for key in chosen
        ]
        if rng.random() < 0.6:
            asked = _with_turns(charges, turns, 0)
            theirs = await rates.take(account, asked, most_wait=most_wait, mode=mode)
            asked = _with_turns(charges, turns, 1)
            ours = ledger.take(asked, 0.0, most_wait=most_wait, mode=mode)
            _alike(theirs, ours, step)
            held |= dict(zip(chosen, ours.held, strict=True))
            turns |= {key: (theirs.turn(at), ours.turn(at)) for at, key in enumerate(chosen)}
        else:
            changes = [
                Change(key, *sizes[key], rng.choice((-1.0, 1.0)) * amounts[key], held.pop(key, 0.0))
                for key in chosen
            ]
            told = _with_turns(changes, turns, 0)
            said = await _told(lambda hear, told=told: rates.settle(account, told, hear))  # type: ignore[misc]
            for mine, other in zip(ledger.settle(_with_turns(changes, turns, 1), 0.0), said, strict=True):
                assert abs(mine.level - other.level) < 1e-3, f"step {step}: {other}, expected {mine}"


def _with_turns(
    named: Sequence[_Named], turns: Mapping[str, tuple[float, float]], whose: int
) -> list[_Named]:
    return [each._replace(turn=turns.get(each.key, (0.0, 0.0))[whose]) for each in named]


def _alike(theirs: RateDecision, ours: RateDecision, step: int) -> None:
    assert theirs.verdict is ours.verdict, f"step {step}: {theirs}, expected {ours}"
    assert list(theirs.held) == list(ours.held), f"step {step}: {theirs}, expected {ours}"
    for mine, other in zip(ours.levels, theirs.levels, strict=True):
        assert abs(mine.level - other.level) < 1e-3, f"step {step}: {theirs}, expected {ours}"
    for a, b in zip(ours.waits, theirs.waits, strict=True):
        assert abs(a - b) < 100 + 1e-3 * a, f"step {step}: {theirs}, expected {ours}"


RATE_CHECKS: tuple[RateCheck, ...] = (
    takes_all_or_nothing,
    several_processes_draw_on_one_bucket,
    refills_evenly_and_never_overfills,
    accounts_and_keys_are_apart,
    keeps_places_in_line,
    refuses_a_place_that_is_too_far_off,
    frees_a_place_that_is_given_up,
    holds_nothing_of_others_while_a_tenant_is_dry,
    settles_what_was_used,
    goes_into_debt_when_told_to,
    lends_when_full,
    lowers_and_pauses,
    leaves_nothing_when_cancelled,
    decides_as_the_reference_does,
)
