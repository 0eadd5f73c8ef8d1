"""How many processes share a store: each says now and then that it is alive, while it is used.

What is done with the number must not enter here.
"""

from __future__ import annotations

from typing import Final

from resilient_llm.stores._redis_scripts import Reply, Script, ScriptRunner

__all__ = ["Presence"]

_EVERY: Final = 2.0
_LASTS: Final = 10.0
"""Seconds: a process that was silent for so long counts no longer."""


class Presence:
    """Say that process `id` is alive, every 2 seconds while the store is used, and hear how many are."""

    def __init__(self, runner: ScriptRunner, key: str, id: str) -> None:  # noqa: A002 - it is one
        self.processes = 1
        self._runner = runner
        self._key = key
        self._id = id
        self._script = Script.load("presence")
        self._started = False

    def start(self) -> None:
        """Begin; said with the next batch that goes anyway, from then on."""
        if not self._started:
            self._started = True
            self._runner.while_used(_EVERY, self._beat)

    def leave(self) -> None:
        """Say that this process counts no longer."""
        if self._started:
            self._started = False
            self._runner.send(self._script, (self._key,), (self._id, repr(_LASTS), "0"))

    def _beat(self) -> None:
        self._runner.send(self._script, (self._key,), (self._id, repr(_LASTS), "1"), heard=self._hear)

    def _hear(self, reply: Reply) -> None:
        self.processes = max(1, int(reply))
