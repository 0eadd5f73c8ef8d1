"""One reply for all calls of one key: those in flight wait for the first of them, later ones get what was kept.

The calls of a key never hold each other for good: whoever waits keeps its own deadline and its own cancellation, and
goes on by itself when there is nothing to wait for. Which calls share a key is the policies' to say.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING

import anyio

from resilient_llm._loop import LoopBound
from resilient_llm.core.stored_reply import StoredReply
from resilient_llm.errors import AttemptError, DeadlineExceededError, IdempotencyKeyError, RejectedError
from resilient_llm.message import NO_RETRY
from resilient_llm.outcome import SUCCESS, Outcome, Usage, Verdict
from resilient_llm.policies._recording import RecordedStream
from resilient_llm.policies._served import Served, body_of, lasting_headers, served_reply, told_headers
from resilient_llm.telemetry.names import LIMITER_NAME

if TYPE_CHECKING:
    from resilient_llm.call import Call, CallNext
    from resilient_llm.message import Headers, Reply
    from resilient_llm.policies._kept_replies import KeptReplies
    from resilient_llm.telemetry.silent import WaitOutcome

__all__ = ["SharedReplies"]

_SERVED_ATTRIBUTE = "resilient_llm.cache.result"
_NO_TOKENS = Usage(input_tokens=0, output_tokens=0)
_SERVED = replace(SUCCESS, usage=_NO_TOKENS)
"""How a call ends that has cost nothing: that is known, so limits and budgets give back all they had reserved."""


class _End(Enum):
    """Say how a flight ended that brought nothing to share."""

    LOST = "lost"
    """Its leader has left: one of those who wait leads the next flight."""
    ALONE = "alone"
    """Its reply cannot be shared, and neither could another: each goes by itself."""


@dataclass(frozen=True, slots=True)
class _Failure:
    """Hold how a call failed, for others that would fail the same way."""

    error: AttemptError | RejectedError
    exhausted: bool
    reply: StoredReply | None = None


class _Flight:
    """One call that others wait for."""

    __slots__ = ("event", "fingerprint", "key", "result")

    def __init__(self, key: str, fingerprint: bytes) -> None:
        self.key = key
        self.fingerprint = fingerprint
        self.result: StoredReply | _Failure | _End | None = None
        self.event: anyio.Event | None = None  # made by the first who waits

    def end(self, result: StoredReply | _Failure | _End) -> None:
        """Say what came of it; the first word counts."""
        if self.result is None:
            self.result = result
            if self.event is not None:
                self.event.set()

    async def wait(self) -> None:
        """Wait until it ends."""
        if self.event is None:
            self.event = anyio.Event()
        await self.event.wait()


class SharedReplies:
    """Carry out one call of those with the same key, and give its reply to all.

    Replies are `kept` for `ttl` seconds, or not at all; those of more than `max_body` bytes are not shared. With
    `coalesce` a call waits for up to `max_wait` seconds for one in flight. With `share_failures` it fails as that one
    does. With `strict` no two calls of a key are carried out at the same time, and one with another fingerprint is
    refused.
    """

    def __init__(
        self,
        name: str,
        served: Served,
        *,
        kept: KeptReplies | None = None,
        ttl: float = 0.0,
        max_body: int,
        max_wait: float,
        coalesce: bool = True,
        share_failures: bool = True,
        strict: bool = False,
    ) -> None:
        self._name = name
        self._served: Served = served
        self._kept = kept
        self._ttl = ttl
        self._max_body = max_body
        self._max_wait = max_wait
        self._coalesce = coalesce
        self._share_failures = share_failures
        self._strict = strict
        self._flights: dict[str, _Flight] = {}
        self._loop = LoopBound(name, self._flights.clear)

    def __len__(self) -> int:
        """Count the calls in flight that others may wait for."""
        return len(self._flights)

    async def reply(self, call: Call, call_next: CallNext, key: str, fingerprint: bytes = b"") -> Reply:
        """Give a reply: one that is kept, that of a call in flight, or the call's own.

        Raises what `call_next` raises, and `IdempotencyKeyError` where it is `strict`.
        """
        self._loop.bind(call.loop)
        since = call.loop.time()
        while (flight := self._flights.get(key)) is not None:
            if self._strict and fingerprint != flight.fingerprint:
                return await self._lead(call, self._refuse_reuse, _Flight(key, fingerprint))
            if not await self._wait(call, flight, since + self._max_wait):
                if self._strict:
                    msg = f"the first request with this idempotency key is still in flight after {self._max_wait:g} s"
                    raise IdempotencyKeyError(
                        msg, in_flight=True, retry_after=self._max_wait, name=self._name
                    )
                return await self._lead(call, call_next, _Flight(key, fingerprint))
            result = flight.result
            if isinstance(result, StoredReply):
                return await self._serve(call, result, "coalesced", 0.0)
            if isinstance(result, _Failure):
                return await self._fail(call, result)
            if result is _End.ALONE and not self._strict:
                return await self._lead(call, call_next, _Flight(key, fingerprint))
        flight = _Flight(key, fingerprint)
        if self._coalesce:
            self._flights[key] = flight
        return await self._lead(call, call_next, flight)

    async def _refuse_reuse(self, _call: Call) -> Reply:
        raise IdempotencyKeyError("this idempotency key was used for another request", name=self._name)

    async def _wait(self, call: Call, flight: _Flight, until: float) -> bool:
        """Wait for a flight to end; tell whether it has."""
        if flight.result is not None:
            return True
        since = call.loop.time()
        outcome: WaitOutcome = "cancelled"
        try:
            with call.loop.scope(deadline=until):
                await flight.wait()
            outcome = "timeout" if flight.result is None else "acquired"
        finally:
            call.telemetry.waited(call, self._name, since=since, outcome=outcome, unit="requests")
        return flight.result is not None

    async def _lead(self, call: Call, call_next: CallNext, flight: _Flight) -> Reply:
        """Look for a reply that is kept, else carry out the call, and say what came of it."""
        try:
            kept = None if self._kept is None else await self._kept.get(call, flight.key)
            if kept is not None:
                stored, age = kept
                if self._strict and flight.fingerprint != stored.fingerprint:
                    return await self._refuse_reuse(call)
                self._land(flight, stored)
                return await self._serve(call, stored, self._served, age)
            call.on_finish(partial(self._call_ended, flight))
            reply = await call_next(call)
            if not 200 <= reply.status < 300:
                self._land(flight, _End.ALONE)
            elif reply.buffered:
                await self._keep_body(call, reply, flight)
            else:
                self._record(call, reply, flight)
        except BaseException as error:
            self._land(flight, await self._meaning(error, call))
            raise
        return reply

    async def _keep_body(self, call: Call, reply: Reply, flight: _Flight) -> None:
        body = await body_of(reply)
        if body is None or len(body) > self._max_body or not (call.outcome is None or call.outcome.ok):
            self._land(flight, _End.ALONE)
        else:
            await self._keep(flight, call, self._stored(flight, reply.status, reply.headers, body))

    def _record(self, call: Call, reply: Reply, flight: _Flight) -> None:
        status, headers = reply.status, reply.headers

        async def done(body: bytes | None, too_large: bool) -> None:  # noqa: FBT001 - called in one place
            if body is None or call.outcome is None or not call.outcome.ok:
                self._land(flight, _End.ALONE if too_large else _End.LOST)
            else:
                await self._keep(flight, call, self._stored(flight, status, headers, body))

        def abandoned() -> None:
            self._land(flight, _End.LOST)

        reply.stream = RecordedStream(reply.stream, call.loop, done, abandoned, max_size=self._max_body)

    def _stored(self, flight: _Flight, status: int, headers: Headers, body: bytes) -> StoredReply:
        return StoredReply(
            status=status,
            headers=lasting_headers(headers),
            body=body,
            ttl=self._ttl,
            fingerprint=flight.fingerprint,
        )

    async def _keep(self, flight: _Flight, call: Call, stored: StoredReply) -> None:
        """Give the reply to who waits, then to the store; whoever comes meanwhile still finds the flight."""
        flight.end(stored)
        try:
            if self._kept is not None:
                await self._kept.put(call, flight.key, stored)
        finally:
            self._land(flight, stored)

    def _call_ended(self, flight: _Flight, outcome: Outcome) -> None:
        """Hear how the call ended: one that failed after its reply had begun leaves nothing to wait for."""
        if not outcome.ok:
            self._land(flight, _End.LOST)

    def _land(self, flight: _Flight, result: StoredReply | _Failure | _End) -> None:
        flight.end(result)
        if self._flights.get(flight.key) is flight:
            del self._flights[flight.key]

    async def _meaning(self, error: BaseException, call: Call) -> _Failure | _End:
        """Say what a call's failure means for those who wait for it."""
        if not isinstance(error, Exception) or isinstance(error, DeadlineExceededError):
            return _End.LOST
        if isinstance(error, AttemptError) and error.outcome.verdict is Verdict.NEUTRAL:
            return _End.LOST  # it was cancelled, or its deadline passed
        if not self._share_failures or not isinstance(error, AttemptError | RejectedError):
            return _End.ALONE
        reply = error.reply if isinstance(error, AttemptError) else None
        body = None if reply is None or reply.status < 400 else await body_of(reply)
        if reply is not None and body is not None:
            told = StoredReply(status=reply.status, headers=told_headers(reply.headers), body=body)
            return _Failure(error, call.exhausted, told)
        # Where nobody owns the retries it leaves as the library's own exception: each call has its own.
        if isinstance(error, RejectedError) or call.exhausted:
            return _Failure(error, call.exhausted)
        return _End.ALONE

    async def _fail(self, call: Call, failure: _Failure) -> Reply:
        """Fail as the call did that this one has waited for."""
        call.exhausted = failure.exhausted
        self._tell(call, "coalesced")
        error = failure.error
        if isinstance(error, RejectedError):
            raise _copy(error)
        outcome = replace(error.outcome, usage=_NO_TOKENS, ambiguous=False)
        if failure.reply is None:
            raise AttemptError(outcome)
        # The door makes the library's own response of a reply that is returned; one that is raised has to have it.
        reply = served_reply(failure.reply, "coalesced", 0.0)
        if failure.exhausted:
            reply.headers.append(NO_RETRY)
        await call.end(outcome)
        return reply

    async def _serve(self, call: Call, stored: StoredReply, served: Served, age: float) -> Reply:
        self._tell(call, served)
        await call.end(_SERVED)
        return served_reply(stored, served, age)

    def _tell(self, call: Call, served: Served) -> None:
        call.telemetry.event(call, "cache", {LIMITER_NAME: self._name, _SERVED_ATTRIBUTE: served})


def _copy(error: RejectedError) -> RejectedError:
    """Make another of the same: one that is raised in several tasks would gather all their tracebacks."""
    kind = type(error)
    copied = kind.__new__(kind, *error.args)
    copied.__dict__.update(error.__dict__)
    return copied
