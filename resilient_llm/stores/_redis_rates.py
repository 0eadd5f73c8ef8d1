"""Rate limits on a Redis or Valkey server: numbers packed into a script's arguments, and unpacked from its reply.

What the scripts decide is `core/shared_rate.py`'s to say; how they get there, `_redis_scripts`'.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import lru_cache, partial

from resilient_llm.core.shared_rate import Change, RateCharge, RateDecision, RateLevel, TakeMode, Verdict
from resilient_llm.stores._redis_commands import Reply, Request, Script, Word
from resilient_llm.stores._redis_runner import Runner
from resilient_llm.stores.protocol import HearLevels

__all__ = ["RedisRates"]

_MODES: dict[TakeMode, bytes] = {"n": b"n", "h": b"h", "d": b"d"}
_VERDICTS = (Verdict.REFUSED, Verdict.TAKEN, Verdict.HELD)


@lru_cache(maxsize=64)
def _doubles(count: int) -> struct.Struct:
    return struct.Struct(f"<{count}d")


class RedisRates:
    """Decide about rate limits by script; see `stores.protocol.Rates`.

    `clock`, where there is one, is sent along in place of the server's time.
    """

    def __init__(self, runner: Runner, prefix: str, *, clock: Callable[[], float] | None = None) -> None:
        self._runner = runner
        self._prefix = prefix
        self._clock = clock
        self._take = Script.load("_rate_bucket", "rate_take")
        self._settle = Script.load("_rate_bucket", "rate_settle")
        self._lower = Script.load("_rate_bucket", "rate_lower")
        self._kept: dict[tuple[Word, ...], tuple[Request, Sequence[Change]]] = {}

    async def take(
        self,
        account: str,
        charges: Sequence[RateCharge],
        *,
        most_wait: float = 0.0,
        mode: TakeMode = "n",
        undone: HearLevels | None = None,
    ) -> RateDecision:
        """Take all that a call needs, or nothing, in one round trip.

        What is granted to a caller that has gone, or whose time was up, is given back, and a place is given up that it
        came back for in vain; `undone` hears of either.
        """
        numbers: list[float] = [most_wait]
        for _, capacity, rate, amount, own, held, turn in charges:
            numbers += (capacity, rate, amount, held, turn, 1.0 if own else 0.0)
        reply = await self._runner.run(
            self._take,
            self._keys(account, charges),
            (_doubles(len(numbers)).pack(*numbers), _MODES[mode], *self._time()),
            orphan=partial(self._undo, account, charges, undone),
            never=partial(self._leave, account, charges, undone)
            if any(each.held for each in charges)
            else None,
        )
        return _decision(reply, len(charges))

    def settle(self, account: str, changes: Sequence[Change], heard: HearLevels | None = None) -> None:
        """Give back, charge, or free what was held, in the next batch; while there is none, all in one."""
        if self._runner.guard.closed:
            self._kept.clear()
            self._tell(self._settle, account, changes, _numbers(changes), heard)
            return
        named = tuple(self._keys(account, changes))
        request, before = self._kept.get(named, (None, ()))
        if request is None or request.sent:
            request = self._tell(self._settle, account, changes, _numbers(changes), heard)
        else:
            changes = [
                change._replace(
                    back=change.back + old.back,
                    freed=change.freed + old.freed,
                    turn=max(change.turn, old.turn),
                )
                for change, old in zip(changes, before, strict=True)
            ]
            request.words = (len(named), *named, *self._packed(_numbers(changes)))
            if heard is not None:
                request.heard = _hears(heard)
        self._kept[named] = (request, changes)

    def lower(
        self,
        account: str,
        charges: Sequence[RateCharge],
        pauses: Sequence[float],
        heard: HearLevels | None = None,
    ) -> None:
        """Lower the levels of buckets and pause them, in the next batch."""
        numbers: list[float] = []
        for charge, pause in zip(charges, pauses, strict=True):
            numbers += (charge.capacity, charge.rate, charge.amount, pause)
        self._tell(self._lower, account, charges, numbers, heard)

    def _tell(
        self,
        script: Script,
        account: str,
        named: Sequence[RateCharge] | Sequence[Change],
        numbers: Sequence[float],
        heard: HearLevels | None,
    ) -> Request:
        return self._runner.send(
            script,
            self._keys(account, named),
            self._packed(numbers),
            heard=None if heard is None else _hears(heard),
        )

    def _packed(self, numbers: Sequence[float]) -> tuple[Word, ...]:
        return (_doubles(len(numbers)).pack(*numbers), *self._time())

    def _keys(self, account: str, named: Sequence[RateCharge] | Sequence[Change]) -> list[Word]:
        tag = f"{self._prefix}{{{account}}}:rate:"
        return [tag + each.key for each in named]

    def _time(self) -> tuple[Word, ...]:
        return () if self._clock is None else (repr(self._clock()),)

    def _undo(
        self, account: str, charges: Sequence[RateCharge], undone: HearLevels | None, reply: Reply
    ) -> None:
        decision = _decision(reply, len(charges))
        taken = decision.verdict is Verdict.TAKEN
        if decision.verdict is not Verdict.REFUSED:
            self.settle(
                account,
                [
                    Change(*charge[:3], charge.amount if taken else 0.0, held, decision.turn(index))
                    for index, (charge, held) in enumerate(zip(charges, decision.held, strict=True))
                ],
                undone,
            )

    def _leave(self, account: str, charges: Sequence[RateCharge], undone: HearLevels | None) -> None:
        changes = [Change(*each[:3], freed=each.held, turn=each.turn) for each in charges]
        self.settle(account, changes, undone)


def _decision(reply: Reply, count: int) -> RateDecision:
    numbers = _doubles(3 + 5 * count).unpack(reply)
    return RateDecision(
        _VERDICTS[int(numbers[0])],
        numbers[1],
        numbers[2],
        list(map(RateLevel, numbers[3::5], numbers[4::5], numbers[5::5])),
        numbers[6::5],
        numbers[7::5],
    )


def _numbers(changes: Sequence[Change]) -> list[float]:
    return [number for change in changes for number in change[1:]]


def _hears(heard: HearLevels) -> Callable[[Reply], None]:
    return lambda reply: heard(_levels(reply))


def _levels(reply: Reply) -> list[RateLevel]:
    numbers = _doubles(len(reply) // 8).unpack(reply)
    return list(map(RateLevel, numbers[::3], numbers[1::3], numbers[2::3]))
