"""How many processes share a store: each says now and then that it is alive, while it is used.

What is done with the number must not enter here.
"""

from __future__ import annotations

import asyncio
import math
from typing import Final

from resilient_llm.stores._redis_commands import Reply, Script
from resilient_llm.stores._redis_runner import Runner

__all__ = ["Presence"]

_EVERY: Final = 2.0
_SOON: Final = 0.25
"""Seconds after which the first is said again: the others of those that began together have been counted by then."""
_LASTS: Final = 10.0
"""Seconds: a process that was silent for so long counts no longer."""


class Presence:
    """Say that process `id` is alive, every 2 seconds while the store is used, and hear how many are.

    A server that begins anew counts 1, 2, 3 in order of arrival. So a number that falls is believed when it has been
    heard for as long as a silent process counts.
    """

    def __init__(self, runner: Runner, key: str, id: str) -> None:  # noqa: A002 - it is one
        self.processes = 1
        self._runner = runner
        self._key = key
        self._id = id
        self._script = Script.load("presence")
        self._started = False
        self._due = -math.inf
        self._heard_at = -math.inf
        self._fewer_since = math.inf
        self._fewer = 0

    def start(self) -> None:
        """Begin; said with the next batch that goes anyway, from then on."""
        if not self._started:
            self._started = True
            self._runner.while_used(_SOON, self._beat)

    def after_fork(self, id: str) -> None:  # noqa: A002 - it is one
        """Count, in the child, as another process."""
        self._id = id
        self._due = self._heard_at = -math.inf

    def leave(self) -> None:
        """Say that this process counts no longer."""
        if self._started:
            self._started = False
            self._runner.send(self._script, (self._key,), (self._id, repr(_LASTS), "0"))

    def _beat(self) -> None:
        now = asyncio.get_running_loop().time()
        if now < self._due:
            return
        new = now - self._heard_at > _LASTS
        self._due = now + (_SOON if new else _EVERY)
        self.say()

    def say(self) -> None:
        """Say it with the next batch."""
        self._runner.send(self._script, (self._key,), (self._id, repr(_LASTS), "1"), heard=self._hear)

    def _hear(self, reply: Reply) -> None:
        now, count = asyncio.get_running_loop().time(), max(1, int(reply))
        silent = now - self._heard_at > 2 * _EVERY
        self._heard_at = now
        if count >= self.processes:
            self.processes = count
            self._fewer_since = math.inf
            return
        if silent or self._fewer_since == math.inf:
            self._fewer_since, self._fewer = now, 0
            self._due = min(self._due, now + _SOON)
        self._fewer = max(self._fewer, count)
        if now - self._fewer_since >= _LASTS:
            self.processes = self._fewer
            self._fewer_since = math.inf
