"""The client door: an injected transport under the pipeline, for any HTTP library.

Works on neutral messages only. A library's adapter turns its own requests and responses into these
and back, and says how it wants a synthesised response and a timeout to look.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias
from urllib.parse import urlsplit

from resilient_llm import context
from resilient_llm.attempt_clock import AttemptClock
from resilient_llm.call import Call
from resilient_llm.continued_stream import ContinuedStream
from resilient_llm.errors import (
    AttemptError,
    ConfigurationError,
    DeadlineExceededError,
    RejectedError,
    ResilientLLMError,
)
from resilient_llm.event_stream import EventStream
from resilient_llm.message import NO_RETRY, Headers, Reply, Request, retry_after, without
from resilient_llm.outcome import SUCCESS, Outcome, Scope
from resilient_llm.pipeline import Pipeline
from resilient_llm.policies._recording import RecordedStream
from resilient_llm.policies.deadline import exceeded
from resilient_llm.providers import classify_exception, dialect_for, is_event_stream
from resilient_llm.providers.stream_options import with_usage
from resilient_llm.receiver import Receiver
from resilient_llm.streams import LibraryErrors
from resilient_llm.target import Target

if TYPE_CHECKING:
    from resilient_llm._loop import EventLoop
    from resilient_llm.call import Policy
    from resilient_llm.context import Ambient
    from resilient_llm.message import Transport
    from resilient_llm.telemetry import AttemptTelemetry, Telemetry

__all__ = ["ClientDoor", "OnRejection", "Synthesise"]

OnRejection: TypeAlias = Literal["respond", "raise"]

Synthesise: TypeAlias = Callable[[int, Headers, bytes], Reply]
"""Make a reply of the library's own kind from status, headers and body."""

_MAX_TARGETS = 1024


class ClientDoor:
    """Send requests through policies to a transport.

    With `on_rejection="respond"` a local refusal, and a passed deadline, come back as a well-formed
    response in the provider's own error format, because SDKs retry whatever a transport raises;
    `"raise"` gives the exception. A redirect passes to the library above, which may follow it; where none would,
    `redirects="fail"` makes it a failed attempt.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        synthesise: Synthesise,
        errors: LibraryErrors,
        policies: Sequence[Policy] = (),
        on_rejection: OnRejection = "respond",
        redirects: Literal["pass", "fail"] = "pass",
        name: str = "client",
        telemetry: Telemetry | None = None,
    ) -> None:
        if on_rejection not in ("respond", "raise"):
            msg = f"on_rejection={on_rejection!r}: allowed are 'respond' and 'raise'"
            raise ConfigurationError(msg)
        self._transport = transport
        self._synthesise = synthesise
        self._errors = errors
        self._on_rejection = on_rejection
        self._targets: dict[str, Target] = {}
        self.pipeline = Pipeline(policies, self._send, door="client", name=name, telemetry=telemetry)
        self._receiver = Receiver(
            reads=bool(self.pipeline.policies),
            holds_streams=self.pipeline.holds_streams,
            redirects=redirects == "pass",
            errors=errors,
        )

    async def handle(self, request: Request) -> Reply:
        """Carry a request through the pipeline.

        Raises what the transport raises when no policy owns the retries, and `RejectedError` or
        `DeadlineExceededError` with `on_rejection="raise"`.
        """
        return await self.carry(self.begin(request))

    def begin(
        self, request: Request, loop: EventLoop | None = None, inherited: Ambient | None = None
    ) -> Call:
        """Make the call of a request, for `carry` to be given at once.

        `loop` is the running one and `inherited` what the call inherits, where the caller knows them.
        """
        pipeline = self.pipeline
        loop = pipeline.loop(loop)
        if inherited is None:
            inherited = context.current.get()
        telemetry = pipeline.telemetry.begin()
        call = Call(  # by position: a class called with names is given a dict of them, which costs half as much again
            request,
            dialect_for(request).profile,
            self._target(request.url),
            loop,
            telemetry,
            loop.time(),
            inherited.tenant,
            inherited.effective_deadline(),
            inherited.priority,
        )
        call.sent = False
        if inherited.purpose is not None:
            call.purpose = inherited.purpose
        telemetry.start(call)
        return call

    async def carry(self, call: Call) -> Reply:
        """Carry a call through the pipeline; raises what `handle` does.

        A call that has a `scope` is cancelled by its deadline; `too_late` has the answer to that.
        """
        telemetry = call.telemetry
        telemetry.attach()
        try:
            reply = await self.pipeline.handle(call)
            if not isinstance(reply, Reply) or reply.native is None:
                reply = await self._made_native(call, reply)
            return _resumable(call, reply)
        except BaseException as error:
            await call.fail(error)
            if not isinstance(error, ResilientLLMError):
                raise
            failure = error
        finally:
            telemetry.detach()
        # Outside the except block, so that a native exception is raised just as the transport raised it.
        try:
            return self._translate(call, failure)
        finally:
            del failure  # or its traceback and this frame would hold each other, and the request

    def too_late(self, call: Call) -> Reply:
        """Give the response to a call whose scope its deadline has cancelled."""
        return self._refused(call, exceeded(call))

    async def _made_native(self, call: Call, reply: Reply) -> Reply:
        """Make a reply of the library's own kind of one that a policy has made, and end the call with it."""
        if not isinstance(reply, Reply):
            msg = f"a policy of pipeline {self.pipeline.name!r} returned {reply!r} where a Reply is expected"
            raise TypeError(msg)
        body = b"".join([chunk async for chunk in reply.stream])
        await reply.stream.aclose()
        made = self._synthesise(reply.status, reply.headers, body)
        dialect = dialect_for(call.request)
        await call.end(SUCCESS if reply.status < 400 else dialect.classify(reply.status, reply.headers, body))
        return made

    def _translate(self, call: Call, failure: ResilientLLMError) -> Reply:
        """Turn what the pipeline raised into what the library above expects."""
        if isinstance(failure, AttemptError):
            return self._failed(call, failure)
        if self._on_rejection == "respond" and isinstance(failure, RejectedError | DeadlineExceededError):
            return self._refused(call, failure)
        raise failure

    def _send(self, attempt: Call) -> Awaitable[Reply]:
        """Make one attempt: the innermost step of the pipeline."""
        recorder = attempt.telemetry.attempt(attempt)
        attempt.started = attempt.loop.time()  # what it has waited for inside the pipeline is no latency
        if attempt.clocks is None:
            return self._exchange(attempt, recorder, None)
        return self._exchange_in_time(attempt, recorder, AttemptClock(attempt, attempt.clocks))

    async def _exchange_in_time(
        self, attempt: Call, recorder: AttemptTelemetry, clock: AttemptClock
    ) -> Reply:
        with clock:
            return await self._exchange(attempt, recorder, clock)
        raise AttemptError(attempt.outcome or clock.expired())

    async def _exchange(self, attempt: Call, recorder: AttemptTelemetry, clock: AttemptClock | None) -> Reply:
        recorder.attach()
        attempt.mark_sent()
        request = with_usage(attempt.request) if attempt.streaming.include_usage else attempt.request
        try:
            reply = await self._transport(recorder.inject(request))
        except Exception as error:
            outcome = classify_exception(error)
            if outcome is None:
                raise
            raise AttemptError(outcome) from error
        finally:
            recorder.detach()
        recorder.replied(reply.status)
        return await self._receiver.receive(reply, attempt, clock)

    def _failed(self, call: Call, error: AttemptError) -> Reply:
        reply, outcome, replays = error.reply, error.outcome, self.pipeline.replays
        if reply is not None and not (replays and _says_nothing(reply, outcome)):
            if replays:
                reply.headers = [*without(reply.headers, NO_RETRY[0]), NO_RETRY]
                # What its body says; SDKs go by the status, and would see no error.
                meant = None if outcome.answered or is_event_stream(reply.headers) else outcome.status
                if reply.status < 400 and meant is not None:
                    reply.status = meant
            return reply
        message = f"no usable answer from the provider after {call.attempts} attempts: {outcome.error_type}"
        if not replays:
            if error.__cause__ is not None:
                raise error.__cause__
            if outcome.timed_out:
                raise self._errors.timed_out(message)
        status = 504 if outcome.timed_out else 503 if outcome.scope is Scope.LOCAL else 502
        reply = self._synthesised(call, status, message, outcome.error_type or "bad_gateway", None)
        if not replays:
            reply.headers = [header for header in reply.headers if header != NO_RETRY]
        return reply

    def _refused(self, call: Call, error: RejectedError | DeadlineExceededError) -> Reply:
        if isinstance(error, DeadlineExceededError):
            return self._synthesised(call, 504, str(error), "deadline_exceeded", None)
        return self._synthesised(call, error.status, error.told, error.reason, error.retry_after)

    def _synthesised(self, call: Call, status: int, message: str, code: str, wait: float | None) -> Reply:
        body = dialect_for(call.request).error_body(status, message, code=code)
        headers: Headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            NO_RETRY,
            *retry_after(wait),
        ]
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
            target = self._targets[origin] = Target(name=name or "unknown", address=host, port=port)
        return target


def _resumable(call: Call, reply: Reply) -> Reply:
    holder: Reply | RecordedStream = reply
    while isinstance(holder.stream, RecordedStream):  # what is kept of a reply is what its caller gets
        holder = holder.stream
    if isinstance(holder.stream, EventStream) and holder.stream.resumes:
        holder.stream = ContinuedStream(call, holder.stream)
    return reply


def _says_nothing(reply: Reply, outcome: Outcome) -> bool:
    """Tell whether a failed reply looks like a success: cut off, empty, or not what was asked for."""
    return reply.status < 400 and (outcome.status is None or outcome.status < 400)
