"""The client door: an injected transport under the pipeline, for any HTTP library.

Works on neutral messages only. A library's adapter turns its own requests and responses into these
and back, and says how it wants a synthesised response and a timeout to look.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias
from urllib.parse import urlsplit

import anyio

from resilient_llm import context
from resilient_llm.call import Call, Target, outcome_of
from resilient_llm.errors import (
    AttemptError,
    ConfigurationError,
    DeadlineExceededError,
    RejectedError,
    ResilientLLMError,
)
from resilient_llm.message import Headers, Reply, Request
from resilient_llm.outcome import Outcome, Verdict
from resilient_llm.pipeline import Pipeline
from resilient_llm.providers import classify_exception, dialect_for
from resilient_llm.receiver import Receiver

if TYPE_CHECKING:
    from resilient_llm.call import Policy
    from resilient_llm.message import Transport
    from resilient_llm.telemetry import AttemptTelemetry, Telemetry

__all__ = ["ClientDoor", "OnRejection", "Synthesise"]

OnRejection: TypeAlias = Literal["respond", "raise"]

Synthesise: TypeAlias = Callable[[int, Headers, bytes], Reply]
"""Make a reply of the library's own kind from status, headers and body."""

_MAX_TARGETS = 1024
_NO_RETRY = (b"x-should-retry", b"false")


class ClientDoor:
    """Send requests through policies to a transport.

    With `on_rejection="respond"` a local refusal, and a passed deadline, come back as a well-formed
    response in the provider's own error format, because SDKs retry whatever a transport raises;
    `"raise"` gives the exception.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        synthesise: Synthesise,
        timed_out: Callable[[str], Exception],
        policies: Sequence[Policy] = (),
        on_rejection: OnRejection = "respond",
        name: str = "client",
        telemetry: Telemetry | None = None,
    ) -> None:
        if on_rejection not in ("respond", "raise"):
            msg = f"on_rejection must be 'respond' or 'raise', not {on_rejection!r}"
            raise ConfigurationError(msg)
        self._transport = transport
        self._synthesise = synthesise
        self._timed_out = timed_out
        self._on_rejection = on_rejection
        self._targets: dict[str, Target] = {}
        self.pipeline = Pipeline(policies, self._send, door="client", name=name, telemetry=telemetry)
        self._receiver = Receiver(
            reads=bool(self.pipeline.policies), holds=self.pipeline.replays, timed_out=timed_out
        )

    async def handle(self, request: Request) -> Reply:
        """Carry a request through the pipeline.

        Raises what the transport raises when no policy owns the retries, and `RejectedError` or
        `DeadlineExceededError` with `on_rejection="raise"`.
        """
        pipeline = self.pipeline
        loop = pipeline.loop()
        inherited = context.current.get()
        telemetry = pipeline.telemetry.begin()
        call = Call(
            request,
            read=dialect_for(request).profile,
            target=self._target(request.url),
            loop=loop,
            telemetry=telemetry,
            started=anyio.current_time(),
            tenant=inherited.tenant,
            deadline=inherited.effective_deadline(),
            priority=inherited.priority,
        )
        telemetry.start(call)
        telemetry.attach()
        try:
            return await pipeline.handle(call)
        except BaseException as error:
            call.finish(outcome_of(error, call))
            if call.unsettled:
                await call.settle()
            if not isinstance(error, ResilientLLMError):
                raise
            failure = error
        finally:
            telemetry.detach()
        # Outside the except block, so that a native exception is raised just as the transport raised it.
        return self._translate(call, failure)

    def _translate(self, call: Call, failure: ResilientLLMError) -> Reply:
        """Turn what the pipeline raised into what the library above expects."""
        if isinstance(failure, AttemptError):
            return self._failed(call, failure)
        if self._on_rejection == "respond" and isinstance(failure, RejectedError | DeadlineExceededError):
            return self._refused(call, failure)
        raise failure

    async def _send(self, attempt: Call) -> Reply:
        """Make one attempt: the innermost step of the pipeline."""
        recorder = attempt.telemetry.attempt(attempt)
        clocks = attempt.clocks
        if clocks is None:
            return await self._exchange(attempt, recorder, None)
        started = attempt.started = attempt.loop.time()
        to_headers = min(clocks.headers, clocks.first_content)
        with anyio.CancelScope(deadline=started + to_headers) as scope:
            return await self._exchange(attempt, recorder, scope)
        late = (
            "headers_timeout" if scope.deadline < started + clocks.first_content else "first_content_timeout"
        )
        raise AttemptError(Outcome(verdict=Verdict.FAILURE, error_type=late, retryable=True, ambiguous=True))

    async def _exchange(
        self, attempt: Call, recorder: AttemptTelemetry, scope: anyio.CancelScope | None
    ) -> Reply:
        recorder.attach()
        attempt.mark_sent()
        try:
            reply = await self._transport(recorder.inject(attempt.request))
        except Exception as error:
            outcome = classify_exception(error)
            if outcome is None:
                raise
            raise AttemptError(outcome) from error
        finally:
            recorder.detach()
        recorder.replied(reply.status)
        if scope is not None and attempt.clocks is not None:
            scope.deadline = attempt.started + attempt.clocks.first_content
        return await self._receiver.receive(reply, attempt)

    def _failed(self, call: Call, error: AttemptError) -> Reply:
        reply = error.reply
        if reply is not None and not (self.pipeline.replays and _says_nothing(reply, error.outcome)):
            if self.pipeline.replays:
                reply.headers = [*(h for h in reply.headers if h[0].lower() != _NO_RETRY[0]), _NO_RETRY]
            return reply
        if not self.pipeline.replays:
            if error.__cause__ is None:
                raise error
            raise error.__cause__
        status = 504 if error.outcome.timed_out else 502
        message = (
            f"no usable answer from the provider after {call.attempts} attempts: {error.outcome.error_type}"
        )
        return self._synthesised(call, status, message, error.outcome.error_type or "bad_gateway", None)

    def _refused(self, call: Call, error: RejectedError | DeadlineExceededError) -> Reply:
        if isinstance(error, DeadlineExceededError):
            return self._synthesised(call, 504, str(error), "deadline_exceeded", None)
        return self._synthesised(call, error.status, str(error), error.reason, error.retry_after)

    def _synthesised(
        self, call: Call, status: int, message: str, code: str, retry_after: float | None
    ) -> Reply:
        body = dialect_for(call.request).error_body(status, message, code=code)
        headers: Headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            _NO_RETRY,
        ]
        if retry_after is not None and math.isfinite(retry_after):
            # RFC 9110: whole seconds; rounded up, and at least one, or callers would come back too early.
            headers.append((b"retry-after", str(max(1, math.ceil(retry_after))).encode()))
        return self._synthesise(status, headers, body)

    def _target(self, url: str) -> Target:
        end = url.find("/", 8)
        origin = url if end < 0 else url[:end]
        target = self._targets.get(origin)
        if target is None:
            if len(self._targets) >= _MAX_TARGETS:
                self._targets.clear()
            parts = urlsplit(origin)
            host = parts.hostname or ""
            port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
            name = host if parts.port is None else f"{host}:{port}"
            target = self._targets[origin] = Target(name=name, address=host, port=port)
        return target


def _says_nothing(reply: Reply, outcome: Outcome) -> bool:
    """Tell whether a failed reply looks like a success: cut off, empty, or not what was asked for."""
    return reply.status < 400 and (outcome.status is None or outcome.status < 400)
