"""Circuits on a Redis or Valkey server: records swapped by version, and changes asked for a few times a second.

Asked for, rather than published: one index of changes by version answers every question in one short script, whether
messages were missed, the connection was lost, the process slept or has just begun; publishing needs all of that beside
it, a connection of its own in each process, and a task that reads it. What a record means must not enter here.
"""

from __future__ import annotations

import asyncio
import math
import struct
from collections.abc import Callable, Sequence
from typing import Final

from resilient_llm.core.circuit_state import CircuitSnapshot, CircuitState, Reason
from resilient_llm.stores._redis_commands import Reply, Script, Word
from resilient_llm.stores._redis_runner import Runner
from resilient_llm.stores.protocol_circuits import Agreed, HearAgreed, HearChange

__all__ = ["RedisCircuits"]

_EVERY: Final = 0.25
"""Seconds between two questions for changes while a breaker is in use."""
_FRESH: Final = 1.0
_IDLE: Final = 10.0
"""Seconds without a call after which nobody asks any more."""
_MISSING: Final = 1.0
"""Seconds after which an answer is not waited for any longer."""
_MOST: Final = 1_000
"""Changes in one reply; there may be more, which are asked for at once."""

_HEAD = struct.Struct("<6d")
_PROBE = struct.Struct("<2d")
_AGREED = struct.Struct("<3d")
_VERSION = struct.Struct("<d")

# What these numbers mean is known to all processes: add at the end, and never take one out.
_STATES: Final = (CircuitState.CLOSED, CircuitState.HALF_OPEN, CircuitState.OPEN, CircuitState.ISOLATED)
_REASONS: Final[tuple[Reason, ...]] = (
    "initial",
    "failure_ratio",
    "consecutive_failures",
    "slow_call_ratio",
    "break_elapsed",
    "probe_failed",
    "probe_timeout",
    "probe_succeeded",
    "isolated",
    "closed_manually",
)


class RedisCircuits:
    """Keep circuits by script; see `stores.protocol_circuits.Circuits`.

    `clock`, where there is one, is sent along in place of the server's time.
    """

    def __init__(self, runner: Runner, prefix: str, *, clock: Callable[[], float] | None = None) -> None:
        self._runner = runner
        self._prefix = prefix
        self._clock = clock

    def join(self, group: str, hear: HearChange) -> _Member:
        """Take part in a group."""
        tag = f"{self._prefix}{{{group}}}:circuit:"
        return _Member(self._runner, (f"{tag}records", f"{tag}versions"), self._clock, hear)


class _Member:
    """Take part in a group; see `stores.protocol_circuits.CircuitGroup`."""

    def __init__(
        self,
        runner: Runner,
        keys: Sequence[Word],
        clock: Callable[[], float] | None,
        hear: HearChange,
    ) -> None:
        self._runner = runner
        self._keys = keys
        self._clock = clock
        self._hear = hear
        self._swap = Script.load("_clock", "_circuit", "circuit_swap")
        self._read = Script.load("_clock", "_circuit", "circuit_read")
        self.made = 0
        self._version = 0
        self._now = -math.inf
        self._used = -math.inf
        self._heard = -math.inf
        self._asked = -math.inf  # when the question was put that is not answered yet
        self._ticking = False

    def fresh(self, now: float) -> bool:
        """Tell whether all was heard that is older than a second."""
        self._used = now
        if not self._ticking:
            self._ticking = True
            self._ask(now)
            self._runner.every(_EVERY, self._tick)
        return now - self._heard <= _FRESH

    async def refresh(self) -> None:
        """Hear what has changed, in one round trip."""
        reply = await self._runner.run(self._read, self._keys, self._question(), orphan=self._hear_changes)
        self._hear_changes(reply)

    async def swap(self, key: str, expected: int, snapshot: CircuitSnapshot, late: HearAgreed) -> Agreed:
        """Compare and set, in one round trip."""
        return _agreed(
            await self._runner.run(
                self._swap,
                self._keys,
                self._offer(key, expected, snapshot),
                orphan=lambda reply: late(_agreed(reply)),
            )
        )

    def swap_soon(self, key: str, expected: int, snapshot: CircuitSnapshot, heard: HearAgreed) -> None:
        """Compare and set, in the next batch."""
        self._runner.send(
            self._swap,
            self._keys,
            self._offer(key, expected, snapshot),
            heard=lambda reply: heard(_agreed(reply)),
        )

    def _tick(self) -> bool:
        now = asyncio.get_running_loop().time()
        if now - self._used > _IDLE:
            self._ticking = False
            return False
        # While the store is given up on one question is kept for it; when it is not, one without an answer is lost.
        if self._asked == -math.inf or (self._runner.guard.closed and now - self._asked > _MISSING):
            self._ask(now)
        return True

    def _ask(self, now: float) -> None:
        self._asked = now
        self._runner.send(self._read, self._keys, self._question(), heard=self._hear_changes)

    def _question(self) -> tuple[Word, ...]:
        return (str(self.made), str(self._version), str(_MOST), *self._time())

    def _offer(self, key: str, expected: int, snapshot: CircuitSnapshot) -> tuple[Word, ...]:
        return (key, str(expected), _packed(snapshot), *self._time())

    def _time(self) -> tuple[Word, ...]:
        return () if self._clock is None else (repr(self._clock()),)

    def _hear_changes(self, reply: Reply) -> None:
        now = self._heard = asyncio.get_running_loop().time()
        self._asked = -math.inf
        made = int(reply[0])
        if made != self.made:
            self.made, self._version = made, 0
        for name, record in zip(reply[1::2], reply[2::2], strict=True):
            version = int(_VERSION.unpack_from(record)[0])
            self._version = max(self._version, version)
            self._hear(name.decode(), Agreed(made, version, _unpacked(record, _VERSION.size)))
        if len(reply) > 2 * _MOST:
            self._ask(now)
        self._hear(None, None)


def _packed(snapshot: CircuitSnapshot) -> bytes:
    head = _HEAD.pack(
        snapshot.generation,
        _STATES.index(snapshot.state),
        _REASONS.index(snapshot.reason),
        snapshot.wait,
        snapshot.next_break,
        snapshot.successes,
    )
    return head + b"".join(_PROBE.pack(generation, left) for generation, left in snapshot.probes.items())


def _unpacked(record: bytes, at: int) -> CircuitSnapshot:
    generation, state, reason, wait, next_break, successes = _HEAD.unpack_from(record, at)
    return CircuitSnapshot(
        generation=int(generation),
        state=_STATES[int(state)],
        reason=_REASONS[int(reason)],
        wait=wait,
        next_break=next_break,
        successes=int(successes),
        probes={int(probe): left for probe, left in _PROBE.iter_unpack(record[at + _HEAD.size :])},
    )


def _agreed(reply: Reply) -> Agreed:
    accepted, made, version = _AGREED.unpack_from(reply)
    return Agreed(int(made), int(version), _unpacked(reply, _AGREED.size), accepted=accepted == 1)
