"""What an application hears of its calls as they run, with or without OpenTelemetry's SDK.

A listener is told what the recorders are told, in the same words. It decides nothing, and whatever it raises stays
in here.
"""

# ruff: noqa: A002 - `id` is called so

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from resilient_llm.telemetry.safety import quiet, report
from resilient_llm.telemetry.silent import AttemptTelemetry, CallTelemetry, Routing, WaitOutcome

if TYPE_CHECKING:
    from opentelemetry.util.types import AttributeValue

    from resilient_llm.call import Call
    from resilient_llm.errors import RejectedError

__all__ = ["CallListener", "ListenedCall"]


class CallListener:
    """Hear what happens to one call; a subclass overrides what it wants to know.

    Methods are called while the call waits for them, in its event loop (or, at the end of a call, on the thread that
    ends it there): they must be quick, and keep neither the call nor its request, which holds the prompt. For the end
    of a call or an attempt, register with its `on_finish`. What a listener raises is logged, once for each kind.
    """

    detailed = True
    """Whether `routed` is worth calling: what it is told takes microseconds to work out."""

    def start(self, call: Call) -> None:
        """Hear that a call began, before anything else."""

    def attempt(self, attempt: Call) -> None:
        """Hear that an attempt is sent."""

    def waited(
        self, call: Call, limiter: str, *, since: float, outcome: WaitOutcome, unit: str, depth: int
    ) -> None:
        """Hear that a wait for a limiter, by a call or an attempt, is over."""

    def backoff(
        self,
        call: Call,
        *,
        since: float,
        planned: float,
        source: str,
        next_attempt: int,
        budget: float | None,
    ) -> None:
        """Hear that a backoff is over."""

    def step(self, call: Call, name: str, *, since: float) -> None:
        """Hear that the call spent time on something else."""

    def routed(self, routing: Routing) -> None:
        """Hear which target an attempt goes to, and why."""

    def rejected(self, call: Call, error: RejectedError, *, dry_run: bool) -> None:
        """Hear that a call or attempt was refused on this side, or in a dry run would have been."""

    def retry_suppressed(self, call: Call, why: str) -> None:
        """Hear that a failure that could be retried was not."""

    def breaker_changed(self, call: Call, name: str, from_: str, to: str, reason: str) -> None:
        """Hear that a circuit changed its state."""

    def event(self, call: Call, name: str, attributes: Mapping[str, AttributeValue] | None) -> None:
        """Hear of anything else; `name` is without the library's prefix."""


class ListenedCall(CallTelemetry):
    """Tell a listener what a recorder, which may be the silent one, is told."""

    __slots__ = ("_recorder", "listener")

    def __init__(self, recorder: CallTelemetry, listener: CallListener) -> None:
        self._recorder = recorder
        self.listener = listener

    @property
    def recording(self) -> bool:
        """Tell whether either wants to know in detail."""
        return self.listener.detailed or self._recorder.recording

    @quiet
    def start(self, call: Call) -> None:
        """Pass on that a call began."""
        self._recorder.start(call)
        self.listener.start(call)

    def attach(self) -> None:
        """Make the call current."""
        self._recorder.attach()

    def detach(self) -> None:
        """Undo `attach`."""
        self._recorder.detach()

    def attempt(self, attempt: Call) -> AttemptTelemetry:
        """Pass on that an attempt is sent."""
        recorder = self._recorder.attempt(attempt)
        try:
            self.listener.attempt(attempt)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is not the call's
            report("CallListener.attempt", error)
        return recorder

    def answered(self, *, id: str | None, model: str | None, finish_reasons: Sequence[str]) -> None:
        """Leave to the recorder what a reply says of itself."""
        self._recorder.answered(id=id, model=model, finish_reasons=finish_reasons)

    @quiet
    def waited(
        self, call: Call, limiter: str, *, since: float, outcome: WaitOutcome, unit: str, depth: int = 0
    ) -> None:
        """Pass on a wait."""
        self._recorder.waited(call, limiter, since=since, outcome=outcome, unit=unit, depth=depth)
        self.listener.waited(call, limiter, since=since, outcome=outcome, unit=unit, depth=depth)

    @quiet
    def backoff(
        self,
        call: Call,
        *,
        since: float,
        planned: float,
        source: str,
        next_attempt: int,
        budget: float | None,
    ) -> None:
        """Pass on a backoff."""
        for heard in (self._recorder, self.listener):
            heard.backoff(
                call, since=since, planned=planned, source=source, next_attempt=next_attempt, budget=budget
            )

    @quiet
    def step(self, call: Call, name: str, *, since: float) -> None:
        """Pass on what else the call spent time on."""
        self._recorder.step(call, name, since=since)
        self.listener.step(call, name, since=since)

    @quiet
    def rejected(self, call: Call, error: RejectedError, *, dry_run: bool = False) -> None:
        """Pass on a refusal."""
        self._recorder.rejected(call, error, dry_run=dry_run)
        self.listener.rejected(call, error, dry_run=dry_run)

    @quiet
    def routed(self, routing: Routing) -> None:
        """Pass on a decision, to whoever wants to know in detail."""
        if self._recorder.recording:
            self._recorder.routed(routing)
        if self.listener.detailed:
            self.listener.routed(routing)

    @quiet
    def retry_suppressed(self, call: Call, why: str) -> None:
        """Pass on that a failure was not retried."""
        self._recorder.retry_suppressed(call, why)
        self.listener.retry_suppressed(call, why)

    @quiet
    def breaker_changed(self, call: Call, name: str, from_: str, to: str, reason: str) -> None:
        """Pass on a circuit's change of state."""
        self._recorder.breaker_changed(call, name, from_, to, reason)
        self.listener.breaker_changed(call, name, from_, to, reason)

    @quiet
    def event(self, call: Call, name: str, attributes: Mapping[str, AttributeValue] | None = None) -> None:
        """Pass on anything else."""
        self._recorder.event(call, name, attributes)
        self.listener.event(call, name, attributes)
