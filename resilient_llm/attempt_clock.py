"""Until when an attempt may go on, whatever it waits for next, and what it means when it does not.

Knows the clocks of `AttemptTimeout` and which of them runs. What happens to an attempt that is late is decided
by whoever reads its reply.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Self

import anyio

from resilient_llm.outcome import Outcome, Verdict

if TYPE_CHECKING:
    from types import TracebackType

    from resilient_llm.attempt_options import Clocks
    from resilient_llm.call import Call

__all__ = ["AttemptClock"]


class AttemptClock:
    """Keep one attempt's clocks: first that of its headers, then of its first content, then of each gap.

    While the attempt is on its way, `with clock:` cancels what is awaited in it when the clock that runs has
    run out; afterwards only the seconds count that somebody has waited. A request that does not ask for a stream
    has one clock for its whole reply.
    """

    __slots__ = ("_clocks", "_heard", "_make_scope", "_running", "_scope", "_started", "_until", "_waited")

    def __init__(self, attempt: Call, clocks: Clocks) -> None:
        self._clocks = clocks
        self._make_scope = attempt.loop.scope
        self._started = started = attempt.started
        self._heard = started
        self._waited = 0.0
        self._scope: anyio.CancelScope | None = None
        if not attempt.profile.stream:
            self._run("whole_reply", started + clocks.whole_reply)
        elif clocks.headers < clocks.first_content:
            self._run("headers", started + clocks.headers)
        else:
            self._run("first_content", started + clocks.first_content)

    def __enter__(self) -> Self:
        self._scope = self._make_scope(deadline=self._until)
        self._scope.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        scope, self._scope = self._scope, None
        assert scope is not None  # noqa: S101 - made when this was entered
        return bool(scope.__exit__(kind, error, traceback))

    def replied(self, *, streams: bool) -> None:
        """Take the head of the reply, and whether it is one of a stream."""
        if streams or self._running == "headers":
            self._run("first_content", self._started + self._clocks.first_content)

    def heard(self, now: float) -> None:
        """Take a piece of content."""
        self._heard = now
        self._waited = 0.0
        self._run("content_gap", now + self._clocks.content_gap)

    def until(self, now: float) -> float:
        """Say when a wait that begins now has taken too long."""
        if self._running == "content_gap":
            return now + self._clocks.content_gap - self._waited
        return self._until

    @property
    def expects_content(self) -> bool:
        """Tell whether there is a time by which content must come."""
        return self._running == "first_content" and self._until < math.inf

    @property
    def limit(self) -> float:
        """Say when the reply must have been read, whatever it is; infinity where no clock is for all of it."""
        return self._until if self._running == "whole_reply" else math.inf

    def waited(self, since: float, now: float) -> None:
        """Take the end of a wait."""
        self._waited += now - max(since, self._heard)

    @property
    def late(self) -> bool:
        """Tell whether it is this clock that has cancelled what it watches, and not somebody else."""
        return self._scope is not None and self._scope.cancel_called

    def expired(self) -> Outcome:
        """Say what it means that the clock has run out."""
        kind = "timeout" if self._running == "whole_reply" else f"{self._running}_timeout"
        return Outcome(verdict=Verdict.FAILURE, error_type=kind, retryable=True, ambiguous=True)

    def _run(self, clock: str, until: float) -> None:
        self._running = clock
        self._until = until
        if self._scope is not None:
            self._scope.deadline = until
