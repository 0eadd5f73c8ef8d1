"""The span of an attempt, from sending the request to the last byte of the reply."""

from __future__ import annotations

from typing import TYPE_CHECKING

from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind, Status, StatusCode

from resilient_llm.telemetry.attributes import attempt_begun, attempt_ended
from resilient_llm.telemetry.current import Attachment, with_trace_context
from resilient_llm.telemetry.safety import quiet
from resilient_llm.telemetry.silent import AttemptTelemetry
from resilient_llm.telemetry.words import ATTEMPT_ERRORS, attempt_outcome

if TYPE_CHECKING:
    from opentelemetry.context import Context

    from resilient_llm.call import Call
    from resilient_llm.message import Request
    from resilient_llm.outcome import Outcome
    from resilient_llm.telemetry.recorder import CallRecorder

__all__ = ["AttemptRecorder"]

_FIRST_ERROR = 400


class AttemptRecorder(AttemptTelemetry):
    """Record one attempt of the call that `call` records."""

    __slots__ = ("_attachment", "_attempt", "_call", "_context", "_since", "_span", "_status")

    def __init__(self, call: CallRecorder, attempt: Call) -> None:
        self._call = call
        self._attempt = attempt
        self._since = call.clock.now()
        self._span: Span = trace.INVALID_SPAN
        self._context: Context | None = None
        self._attachment: Attachment | None = None
        self._status: int | None = None

    @quiet
    def start(self) -> None:
        """Open the span."""
        call, attempt = self._call, self._attempt
        if call.tracer is None or call.context is None:
            return
        profile = attempt.profile
        self._span = call.tracer.start_span(
            f"attempt {profile.provider}/{profile.model or attempt.target.name}",
            context=call.context,
            kind=SpanKind.CLIENT,
            attributes=attempt_begun(attempt),
            start_time=call.clock.ns(self._since),
        )
        self._context = trace.set_span_in_context(self._span)

    def attach(self) -> None:
        """Make the attempt's span current."""
        if self._context is not None:
            self._attachment = Attachment(self._context)

    def detach(self) -> None:
        """Undo `attach`."""
        if self._attachment is not None:
            self._attachment.detach()
            self._attachment = None

    def inject(self, request: Request) -> Request:
        """Give the request with this attempt's trace context in a copy of its headers."""
        if self._context is None or not self._call.propagate:
            return request
        return with_trace_context(request, self._context)

    def replied(self, status: int) -> None:
        """Keep the status of the reply."""
        self._status = status

    @quiet
    def end(self, outcome: Outcome) -> None:
        """Close the span and measure the attempt."""
        call, attempt = self._call, self._attempt
        ended = call.clock.now()
        call.attempt_ended(attempt, ended)
        self._close(outcome, ended)
        if call.metrics is not None:
            call.metrics.attempt_ended(
                attempt,
                outcome,
                status=outcome.status if self._status is None else self._status,
                seconds=ended - self._since,
                context=self._context,
            )

    @quiet
    def _close(self, outcome: Outcome, ended: float) -> None:
        call, span = self._call, self._span
        try:
            first_chunk = self._first_chunk()
            if first_chunk is not None:
                if self._attempt.committed:
                    call.committed(first_chunk)
                first_chunk -= self._since
            if span.is_recording():
                span.set_attributes(attempt_ended(outcome, self._status, first_chunk))
                if attempt_outcome(outcome) in ATTEMPT_ERRORS:
                    span.set_status(Status(StatusCode.ERROR))
        finally:
            span.end(call.clock.ns(ended))

    def _first_chunk(self) -> float | None:
        """Give the time at which a streamed answer began; the body of an error is none."""
        answered = self._status is not None and self._status < _FIRST_ERROR
        return self._attempt.first_chunk if answered and self._attempt.profile.stream else None
