"""The span of a call, and those of its waits and backoffs.

What is over gets its span when it is over, so that none is open while nobody looks after it, and a call that
did not wait has none. How the span of an attempt comes about is the next room's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from opentelemetry import context as otel
from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer

from resilient_llm.telemetry import names
from resilient_llm.telemetry.attempt import AttemptRecorder
from resilient_llm.telemetry.attributes import Attributes, call_begun, call_ended, gen_ai_ended, routed
from resilient_llm.telemetry.clock import Clock
from resilient_llm.telemetry.current import Attachment
from resilient_llm.telemetry.safety import quiet
from resilient_llm.telemetry.silent import AttemptTelemetry, CallTelemetry, Routing, WaitOutcome
from resilient_llm.telemetry.words import CALL_ERRORS, call_outcome

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.util.types import AttributeValue

    from resilient_llm.call import Call
    from resilient_llm.errors import RejectedError
    from resilient_llm.outcome import Outcome
    from resilient_llm.telemetry.metrics import Metrics

__all__ = ["CallRecorder"]

_SHORTEST = 0.001
"""What took less time than this has no span."""


class CallRecorder(CallTelemetry):
    """Record one call: with `tracer` its spans, with `metrics` its measurements."""

    __slots__ = (
        "_answer",
        "_attachment",
        "_ended",
        "_first_chunk",
        "_gen_ai",
        "_record_tenant",
        "_span",
        "clock",
        "context",
        "metrics",
        "propagate",
        "tracer",
    )

    clock: Clock

    def __init__(
        self, tracer: Tracer | None, metrics: Metrics | None, *, propagate: bool, record_tenant: bool
    ) -> None:
        self.tracer = tracer
        self.metrics = metrics
        self.propagate = propagate
        self.context: Context | None = None
        """What the spans of the call are made in; `None` when the call has no span."""
        self._record_tenant = record_tenant
        self._span: Span = trace.INVALID_SPAN
        self._attachment: Attachment | None = None
        self._gen_ai = True
        self._first_chunk: float | None = None
        self._ended: float | None = None
        self._answer: Mapping[str, AttributeValue | None] = {}

    @property
    def recording(self) -> bool:
        """Tell whether anybody keeps what is added to the call's span."""
        return self._span.is_recording()

    @quiet
    def start(self, call: Call) -> None:
        """Open the call's span, or for an inbound call adopt the server's."""
        self.clock = Clock(call.loop)
        above = trace.get_current_span()
        if call.inbound:
            self._adopt(above, call.tenant)
            return
        self._gen_ai = not _is_said_by(above)
        call.on_finish(partial(self._end, call))
        if self.tracer is None:
            return
        name, kind, attributes = names.NESTED_CALL, SpanKind.INTERNAL, dict[str, "AttributeValue"]()
        if self._gen_ai:
            profile = call.profile
            name, kind = f"{profile.operation} {profile.model or call.target.name}", SpanKind.CLIENT
            attributes = call_begun(call)
        if self._record_tenant and call.tenant is not None:
            attributes[names.TENANT] = call.tenant
        self._span = self.tracer.start_span(
            name,
            kind=kind,
            attributes=attributes,
            start_time=self.clock.ns(call.started),
        )
        self.context = trace.set_span_in_context(self._span)

    def _adopt(self, span: Span, tenant: str | None) -> None:
        if self.tracer is None:
            return
        self._span, self.context = span, otel.get_current()
        if self._record_tenant and tenant is not None and span.is_recording():
            span.set_attribute(names.TENANT, tenant)

    def attach(self) -> None:
        """Make the call's span current, for spans that policies and transports open themselves."""
        if self.context is not None:
            self._attachment = Attachment(self.context)

    def detach(self) -> None:
        """Undo `attach`."""
        if self._attachment is not None:
            self._attachment.detach()
            self._attachment = None

    @quiet
    def _end(self, call: Call, outcome: Outcome) -> None:
        ended = self.clock.now() if self._ended is None else self._ended
        first_chunk = None if self._first_chunk is None else self._first_chunk - call.started
        self._close(call, outcome, ended, first_chunk)
        if self.metrics is not None:
            self.metrics.call_ended(
                call,
                outcome,
                seconds=ended - call.started,
                first_chunk=first_chunk,
                gen_ai=self._gen_ai,
                context=self.context,
            )

    @quiet
    def _close(self, call: Call, outcome: Outcome, ended: float, first_chunk: float | None) -> None:
        span = self._span
        try:
            if span.is_recording():
                attributes = call_ended(call, outcome)
                if self._gen_ai:
                    attributes.update(gen_ai_ended(outcome, self._answer, first_chunk))
                span.set_attributes(attributes)
                if call_outcome(call, outcome) in CALL_ERRORS:
                    span.set_status(Status(StatusCode.ERROR))
        finally:
            span.end(self.clock.ns(ended))

    def attempt(self, attempt: Call) -> AttemptTelemetry:
        """Open an attempt's span; it closes when the attempt finishes."""
        recorder = AttemptRecorder(self, attempt)
        recorder.start()
        attempt.on_finish(recorder.end)
        return recorder

    def attempt_ended(self, attempt: Call, at: float) -> None:
        """Hear when an attempt ended, and in that very instant the call that has adopted it."""
        if attempt.adopter is not None:
            self._ended = at

    def committed(self, at: float) -> None:
        """Hear when a streamed reply began; from then on nothing can be done over unseen."""
        self._first_chunk = at
        if self.recording:
            self._span.add_event(f"{names.SCOPE}.{names.COMMIT}", timestamp=self.clock.ns(at))

    def answered(self, *, id: str | None, model: str | None, finish_reasons: Sequence[str]) -> None:  # noqa: A002
        """Keep what a reply says of itself."""
        self._answer = {
            names.RESPONSE_ID: id,
            names.RESPONSE_MODEL: model,
            names.FINISH_REASONS: finish_reasons,
        }

    @quiet
    def waited(
        self, call: Call, limiter: str, *, since: float, outcome: WaitOutcome, unit: str, depth: int = 0
    ) -> None:
        """Record a wait that has just ended."""
        super().waited(call, limiter, since=since, outcome=outcome, unit=unit, depth=depth)
        if self.metrics is not None:
            self.metrics.waited(call, limiter, outcome, seconds=self.clock.now() - since)
        if self.recording:
            attributes: Attributes = {
                names.LIMITER_NAME: limiter,
                names.WAIT_OUTCOME: outcome,
                names.WAIT_QUEUE_DEPTH: depth,
                names.LIMIT_UNIT: unit,
            }
            self._record(f"wait {limiter}", since, attributes)

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
        """Record a backoff that has just ended."""
        super().backoff(
            call, since=since, planned=planned, source=source, next_attempt=next_attempt, budget=budget
        )
        if not self.recording:
            return
        attributes: Attributes = {
            names.BACKOFF_PLANNED: planned,
            names.BACKOFF_SOURCE: source,
            names.BACKOFF_NEXT_ATTEMPT: next_attempt,
        }
        if budget is not None:
            attributes[names.RETRY_BUDGET_REMAINING] = budget
        self._record("backoff", since, attributes)

    @quiet
    def step(self, call: Call, name: str, *, since: float) -> None:  # noqa: ARG002 - it is this call
        """Record what else the call spent time on."""
        if self.recording:
            self._record(name, since, {})

    @quiet
    def routed(self, routing: Routing) -> None:
        """Record a decision; it takes no time to speak of, and says what nothing else does."""
        if self.recording:
            self._record("route", self.clock.now(), routed(routing), always=True)

    def _record(self, name: str, since: float, attributes: Attributes, *, always: bool = False) -> None:
        clock = self.clock
        now = clock.now()
        if self.tracer is None or (now - since < _SHORTEST and not always):
            return
        span = self.tracer.start_span(
            name,
            context=self.context,
            attributes=attributes,
            start_time=clock.ns(since),
        )
        span.end(clock.ns(now))

    @quiet
    def rejected(self, call: Call, error: RejectedError, *, dry_run: bool = False) -> None:
        """Count a refusal, and note it on the call's span."""
        if self.metrics is not None:
            self.metrics.rejected(call, error, dry_run=dry_run)
        attributes: Attributes = {names.REASON: error.reason}
        if error.name is not None:
            attributes[names.LIMITER_NAME] = error.name
        if dry_run:
            attributes[names.DRY_RUN] = True
        self.event(call, names.REJECTED, attributes)

    @quiet
    def retry_suppressed(self, call: Call, why: str) -> None:
        """Note that a failure that could be retried was not."""
        self.event(call, names.RETRY_SUPPRESSED, {names.REASON: why})

    @quiet
    def breaker_changed(self, call: Call, name: str, from_: str, to: str, reason: str) -> None:
        """Count a circuit's change of state, and note it on the call's span."""
        if self.metrics is not None:
            self.metrics.transition(name, from_, to, reason)
        attributes = {
            names.BREAKER_NAME: name,
            names.BREAKER_FROM: from_,
            names.BREAKER_TO: to,
            names.BREAKER_REASON: reason,
        }
        self.event(call, names.BREAKER_STATE_CHANGE, attributes)

    @quiet
    def event(
        self,
        call: Call,  # noqa: ARG002 - it is this call
        name: str,
        attributes: Mapping[str, AttributeValue] | None = None,
    ) -> None:
        """Add an event to the call's span."""
        if self.recording:
            at = self.clock.ns(self.clock.now())
            self._span.add_event(f"{names.SCOPE}.{name}", attributes, timestamp=at)


def _is_said_by(above: Span) -> bool:
    """Tell whether an SDK's own instrumentation says already what is asked, and measures it.

    A call of ours below another of ours, made by one of its policies, is a call of its own.
    """
    if names.OPERATION not in (getattr(above, "attributes", None) or ()):
        return False
    scope = getattr(above, "instrumentation_scope", None)
    return getattr(scope, "name", None) != names.SCOPE
