"""What a store's replies and budgets must do, as checks that run against any store.

Each takes a function that makes a store, as another process would: all that it makes see the same. They take real time,
about five seconds in all.
"""

# ruff: noqa: D401, S101 - checks assert, and their docstrings say what must be so

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeAlias
from uuid import uuid4

import anyio
import anyio.lowlevel

from resilient_llm.core.budget import Amount, BudgetLevel, Cap, Decision, Reservation
from resilient_llm.core.period import RollingPeriod
from resilient_llm.policies.ledger import BudgetLedger
from resilient_llm.policies.reply_store import ReplyStore

__all__ = [
    "LEDGER_CHECKS",
    "REPLY_CHECKS",
    "LedgerCheck",
    "MakeLedgerStore",
    "MakeReplyStore",
    "ReplyCheck",
]


class _WithReplies(Protocol):
    @property
    def replies(self) -> ReplyStore: ...


class _WithLedger(Protocol):
    @property
    def ledger(self) -> BudgetLedger: ...


MakeReplyStore: TypeAlias = Callable[[], _WithReplies]
MakeLedgerStore: TypeAlias = Callable[[], _WithLedger]
ReplyCheck: TypeAlias = Callable[[MakeReplyStore], Awaitable[None]]
LedgerCheck: TypeAlias = Callable[[MakeLedgerStore], Awaitable[None]]

_LATE = 10.0
"""Seconds by which an answer may be late, on a busy machine, before a check says that it is wrong."""
_DAY = RollingPeriod("day", 86_400.0, 24)
_MONTH = RollingPeriod("month", 30 * 86_400.0, 30)
_MOMENT = RollingPeriod("moment", 1.0, 4)
_NOTHING = Amount()


def _key() -> str:
    return f"check-{uuid4().hex}"


# Replies


async def gives_what_was_kept(make: MakeReplyStore) -> None:
    """A value is given as it was put, by any store, with the seconds it has left; and nothing where there is none."""
    one, other, key = make().replies, make().replies, _key()
    assert await one.get(key) is None
    value = bytes(range(256)) * 40
    await one.put(key, value, 100.0)
    found = await other.get(key)
    assert found is not None
    assert found[0] == value
    assert 100.0 - _LATE <= found[1] <= 100.0
    await one.put(key, b"", 50.0)
    found = await other.get(key)
    assert found is not None
    assert found[0] == b""
    assert found[1] <= 50.0


async def forgets_in_time(make: MakeReplyStore) -> None:
    """A value is gone after its time, or when it is deleted; one without any time is never there."""
    replies, key = make().replies, _key()
    await replies.put(key, b"short", 0.05)
    await anyio.sleep(0.2)
    assert await replies.get(key) is None
    await replies.put(key, b"long", 100.0)
    await replies.delete(key)
    await replies.delete(key)
    assert await replies.get(key) is None
    await replies.put(key, b"long", 100.0)
    await replies.put(key, b"never", 0.0)
    assert await replies.get(key) is None, "an older value must not outlive what was to take its place"


async def keeps_keys_apart(make: MakeReplyStore) -> None:
    """Keys are whatever text they are."""
    replies, key = make().replies, _key()
    names = [f"{key}{end}" for end in ("", ":", "{", "}", "{a}", "\n", "é")]
    for number, name in enumerate(names):
        await replies.put(name, str(number).encode(), 100.0)
    for number, name in enumerate(names):
        found = await replies.get(name)
        assert found is not None
        assert found[0] == str(number).encode()


REPLY_CHECKS: tuple[ReplyCheck, ...] = (gives_what_was_kept, forgets_in_time, keeps_keys_apart)


# Budgets


class _Process:
    """Use a ledger for one key, as one process would."""

    def __init__(self, make: MakeLedgerStore, key: str, caps: Sequence[Cap]) -> None:
        self.ledger = make().ledger
        self.key = key
        self.caps = caps

    async def reserve(self, usd: float = 0.0, tokens: float = 0.0, *, enforce: bool = True) -> Decision:
        return await self.ledger.reserve(
            ("check", self.key), Amount(usd, tokens), self.caps, anyio.current_time(), enforce=enforce
        )

    async def reserved(self, usd: float = 0.0, tokens: float = 0.0) -> Reservation:
        reservation = (await self.reserve(usd, tokens)).reservation
        assert reservation is not None, "it was refused"
        return reservation

    async def settle(
        self, reservation: Reservation, usd: float = 0.0, tokens: float = 0.0, *, estimated: bool = False
    ) -> None:
        waiting = self.ledger.settle(
            reservation, Amount(usd, tokens), anyio.current_time(), estimated=estimated
        )
        if waiting is not None:
            await waiting

    async def refund(self, reservation: Reservation) -> None:
        waiting = self.ledger.refund(reservation, anyio.current_time())
        if waiting is not None:
            await waiting

    async def levels(self) -> tuple[BudgetLevel, ...]:
        return await self.ledger.levels(("check", self.key), self.caps, anyio.current_time())

    async def until(self, condition: Callable[[BudgetLevel], bool], *, what: str) -> BudgetLevel:
        """Wait until the first cap is so: what is settled is told to the store soon."""
        level = (await self.levels())[0]
        with anyio.move_on_after(_LATE):
            while not condition(level):
                await anyio.sleep(0.02)
                level = (await self.levels())[0]
        assert condition(level), f"{what}: {level}"
        return level


def _processes(make: MakeLedgerStore, *caps: Cap) -> tuple[_Process, _Process]:
    key = _key()
    return _Process(make, key, caps), _Process(make, key, caps)


def _usd(limit: float, period: RollingPeriod = _DAY, warn_ratio: float = math.inf) -> Cap:
    return Cap("usd", period, limit, warn_ratio)


async def reserves_for_all(make: MakeLedgerStore) -> None:
    """What one has reserved is not there for another, and it is told how the caps stand."""
    one, other = _processes(make, _usd(10.0), Cap("tokens", _MONTH, 1000.0))
    assert [level.name for level in await one.levels()] == ["usd_per_day", "tokens_per_month"]
    first = await one.reserve(6.0, 100.0)
    assert first.reservation is not None
    assert first.levels[0].remaining == 10.0, "levels are those before"
    refused = await other.reserve(5.0, 100.0)
    assert refused.reservation is None
    assert refused.refused is not None
    assert refused.refused.name == "usd_per_day"
    assert refused.refused.reserved == 6.0
    assert refused.retry_after is not None
    assert refused.levels[1].reserved == 100.0
    assert (await other.reserve(4.0)).reservation is not None, "it fits exactly"
    too_large = await other.reserve(11.0)
    assert too_large.reservation is None
    assert too_large.retry_after is None, "it never fits"


async def settles_and_refunds(make: MakeLedgerStore) -> None:
    """What a call has cost takes the place of what was reserved for it, once; a refund leaves nothing."""
    one, other = _processes(make, _usd(10.0), Cap("tokens", _DAY, 1000.0))
    first, second = await one.reserved(6.0, 60.0), await other.reserved(4.0, 40.0)
    await one.settle(first, 1.5, 15.0)
    await one.settle(first, 1.5, 15.0)
    level = await other.until(lambda level: level.spent > 0, what="settled")
    assert (level.spent, level.reserved, level.estimated) == (1.5, 4.0, 0.0)
    await other.refund(second)
    await other.settle(second, 100.0)
    level = await one.until(lambda level: level.reserved == 0, what="refunded")
    assert (level.spent, level.reserved) == (1.5, 0.0)
    third = await one.reserved(1.0)
    await one.settle(third, 12.0, 5.0, estimated=True)
    level = await other.until(lambda level: level.spent > 10, what="settled for more")
    assert (level.spent, level.estimated, level.remaining) == (13.5, 12.0, -3.5)
    assert (await other.levels())[1].spent == 20.0
    assert (await other.reserve(0.0)).reservation is None, "all is spent"
    assert 0 < level.resets_in <= _DAY.duration + _DAY.duration / _DAY.slices


async def takes_what_does_not_fit_when_it_is_not_enforced(make: MakeLedgerStore) -> None:
    """Without `enforce` it is reserved all the same, and told that it did not fit."""
    one, _ = _processes(make, _usd(1.0))
    decision = await one.reserve(3.0, enforce=False)
    assert decision.refused is not None
    assert decision.reservation is not None
    assert (await one.levels())[0].reserved == 3.0


async def forgets_what_was_spent_long_ago(make: MakeLedgerStore) -> None:
    """What is spent counts for a period, and at most one of its slices longer."""
    for _ in range(5):  # a busy machine may take longer than the moment it is kept for
        one, other = _processes(make, _usd(10.0, _MOMENT))
        began = anyio.current_time()

        def gone(began: float = began) -> bool:
            return anyio.current_time() - began > _MOMENT.duration

        await one.settle(await one.reserved(10.0), 10.0)
        await one.until(lambda level, gone=gone: level.spent == 10.0 or gone(), what="settled")  # type: ignore[misc]
        refused = await other.reserve(1.0)
        if not gone():
            break
    assert refused.reservation is None
    assert refused.retry_after is not None
    assert 0.0 < refused.retry_after <= 1.25
    await anyio.sleep(refused.retry_after + 0.01)
    assert (await other.reserve(10.0)).reservation is not None, "it was said to have room by now"


async def warns_once(make: MakeLedgerStore) -> None:
    """Of those who find so much spent that a warning is due, only the first is told."""
    one, other = _processes(make, _usd(10.0, warn_ratio=0.5))
    await one.settle(await one.reserved(6.0), 6.0)
    await one.until(lambda level: level.spent == 6.0, what="settled")
    warned = [len((await process.reserve(0.1)).crossed) for process in (other, one, other)]
    assert warned == [1, 0, 0]


async def lets_no_more_through_than_fits(make: MakeLedgerStore) -> None:
    """Of many who ask at the same time so many get it as it is enough for."""
    one, other = _processes(make, _usd(10.0))
    decisions: list[Decision] = []

    async def ask(process: _Process) -> None:
        decisions.append(await process.reserve(1.0))

    async with anyio.create_task_group() as tasks:
        for process in (one, other) * 10:
            tasks.start_soon(ask, process)
    assert sum(decision.reservation is not None for decision in decisions) == 10


async def leaves_nothing_for_who_has_gone(make: MakeLedgerStore) -> None:
    """A reservation that is cancelled while it is made leaves nothing reserved."""
    one, other = _processes(make, _usd(10.0))
    made: list[Decision] = []

    async def ask() -> None:
        made.append(await one.reserve(1.0))

    for steps in range(6):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            for _ in range(steps):
                await anyio.lowlevel.checkpoint()
            tasks.cancel_scope.cancel()
    await other.until(lambda level: level.reserved == len(made), what=f"{len(made)} were made")


async def keeps_accounts_apart(make: MakeLedgerStore) -> None:
    """Keys are text, numbers, nothing, or tuples of these; no two are the same account."""
    ledger, caps, mark = make().ledger, (_usd(1.0),), _key()
    for key in ("1", 1, None, "None", ("a", "b"), ("ab",), "a", ("a", ("b",)), "{a}"):
        decision = await ledger.reserve((mark, key), Amount(1.0), caps, anyio.current_time())
        assert decision.reservation is not None, f"{key!r} is another's account"


LEDGER_CHECKS: tuple[LedgerCheck, ...] = (
    reserves_for_all,
    settles_and_refunds,
    takes_what_does_not_fit_when_it_is_not_enforced,
    forgets_what_was_spent_long_ago,
    warns_once,
    lets_no_more_through_than_fits,
    leaves_nothing_for_who_has_gone,
    keeps_accounts_apart,
)
