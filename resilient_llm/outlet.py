"""The short way of events to their caller: past whoever waits for them, who is woken only for what is special.

To wake a task up costs more than all that is done with an event. What an event is, and what the end of a stream means,
is not known here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

from resilient_llm.event_buffer import AFTER_END

if TYPE_CHECKING:
    from resilient_llm.attempt_clock import AttemptClock
    from resilient_llm.call import Call
    from resilient_llm.event_buffer import EventBuffer
    from resilient_llm.source import Source

__all__ = ["Outlet", "Shortcut"]


class Outlet(Protocol):
    """Where to put bytes on their way to the caller without waiting for anything."""

    def is_ready(self) -> bool:
        """Tell whether some can be put there now."""
        ...

    def put(self, data: bytes) -> None:
        """Send some, after all that was sent before."""
        ...


class Shortcut:
    """Put events into an outlet as they come, from the first content on, until one is the last by what it says.

    For a `Source`: `offer` is what it shows first to, and `take` what takes the rest.
    """

    __slots__ = ("_attempt", "_buffer", "_clock", "_is_over", "_outlet", "_source", "_taken")

    def __init__(
        self, outlet: Outlet, buffer: EventBuffer, source: Source, attempt: Call, clock: AttemptClock | None
    ) -> None:
        self._outlet = outlet
        self._buffer = buffer
        self._source = source
        self._attempt = attempt
        self._clock = clock
        self._is_over = False
        self._taken: bytes | Literal[True] = b""

    def offer(self, chunk: bytes) -> bytes | None:
        """Put events where they go; gives what is left for who waits, nothing of it where that is in `take`."""
        attempt, buffer, clock = self._attempt, self._buffer, self._clock
        if attempt.first_chunk is None or not self._outlet.is_ready():
            return chunk
        taken = buffer.take(chunk)
        if buffer.reader.complete:
            if not self._is_over:
                self._is_over = True
                self._source.last_until(min(attempt.deadline, attempt.loop.time() + AFTER_END))
        elif clock is not None and buffer.content:
            now = attempt.loop.time()
            clock.heard(now)
            self._source.last_until(min(attempt.deadline, clock.until(now)))
        if taken is True or buffer.stop is not None:
            self._taken = taken
            return b""
        if taken:
            self._outlet.put(taken)
        return None

    def take(self, chunk: bytes) -> bytes | Literal[True]:
        """Take what was left by `offer`, or has become of it there, which nothing comes after."""
        return self._taken or self._buffer.take(chunk)
