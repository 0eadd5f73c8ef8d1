"""A streamed reply on its way to the caller: held back until it has content, watched to its end.

Here is when to read on and what an end means for the attempt. A failure after the caller has seen content is told in
the stream, in the caller's dialect, and is never an end.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Collection
from dataclasses import replace
from typing import TYPE_CHECKING

import anyio

from resilient_llm.call import outcome_of
from resilient_llm.errors import AttemptError
from resilient_llm.event_buffer import AFTER_END, EventBuffer
from resilient_llm.message import without
from resilient_llm.outcome import CANCELLED, DEADLINE_EXCEEDED, SUCCESS, Outcome
from resilient_llm.outlet import Shortcut
from resilient_llm.providers import (
    UNKNOWN,
    EventKind,
    StreamReader,
    classify_exception,
    decode_body,
    dialect_for,
)
from resilient_llm.providers.stream_options import asks_for_usage
from resilient_llm.source import ReadTimedOutError, Source
from resilient_llm.streams import BufferedStream

if TYPE_CHECKING:
    from resilient_llm.attempt_clock import AttemptClock
    from resilient_llm.call import Call
    from resilient_llm.message import Reply
    from resilient_llm.outlet import Outlet
    from resilient_llm.providers import Dialect, Framing
    from resilient_llm.streams import LibraryErrors

__all__ = ["EventStream"]


class EventStream:
    """Relay the events of one attempt and finish it when they end, however they end.

    Whole events are passed on, so that an error can be told between two of them, and nothing after an error.
    Where none could be put in, because the stream has a content encoding or nobody knows the dialect, bytes pass
    as they come and a failure is the library's own exception. Where the call's `streaming` can resume, a failure
    that could be told is an `AttemptError` instead.

    A last event that lacks its blank line, without which an SDK leaves it out, gets it if the answer is whole by it.

    Takes the reply's stream, and its content-length, which would be wrong with an event more.
    """

    __slots__ = (
        "_buffer",
        "_clock",
        "_errors",
        "_held",
        "_over",
        "_over_by",
        "_reader",
        "_shortcut",
        "_source",
        "_tells",
        "attempt",
        "dialect",
        "resumes",
    )

    def __init__(
        self,
        reply: Reply,
        attempt: Call,
        *,
        clock: AttemptClock | None,
        errors: LibraryErrors,
        framing: Framing = "unknown",
    ) -> None:
        streaming = attempt.streaming
        self.attempt = attempt
        # What a stream of a known provider's looks like is known of its known operations.
        self.dialect: Dialect = UNKNOWN if attempt.operation == "request" else dialect_for(attempt.request)
        self._source = Source(reply.stream, attempt.loop)
        self._clock = clock
        self._errors = errors
        self._reader = StreamReader(
            self.dialect,
            status=reply.status,
            headers=reply.headers,
            max_event_size=streaming.max_event_size,
            keep_text=streaming.resume is not None,
            expected=framing == "events",
            array=framing == "array",
        )
        self._tells = self.dialect.marks_end and framing != "array" and not self._reader.encoded
        self.resumes = self._tells and streaming.resume is not None
        """Whether a failure is raised, for somebody to go on from."""
        self._buffer = EventBuffer(
            self._reader,
            whole_events=self._tells,
            skipped=_skipped(attempt),
            stop_before_error=self.resumes,
            masked=(attempt.parent or attempt).masked,
        )
        self._held = False  # whether there may be something in the buffer that could have been passed on
        self._over = False
        self._over_by = math.inf
        self._shortcut: Shortcut | None = None
        if self._tells:
            reply.headers = without(reply.headers, b"content-length")
        reply.stream = self

    # Before the commit point

    async def hold(self, reply: Reply) -> None:
        """Read as far as the call wants it before anything is passed on, so that what fails can be tried again.

        Raises `AttemptError`, with the reply where the provider said in the stream what is wrong.
        """
        reader = self._reader
        self._held = True
        try:
            enough = await self._source.read(self._hold)
        except BaseException as error:
            outcome = reader.interrupted(self._meaning(error))
            if outcome.ok and isinstance(error, Exception):
                return
            self.attempt.finish(outcome)
            if classify_exception(error) is None:
                raise
            raise AttemptError(outcome) from error
        if not enough:
            outcome = reader.close()
        elif reader.failure is None:
            return
        else:
            outcome = reader.interrupted(reader.failure)
        if outcome.ok:
            return  # for __anext__ to find: it ends at once, after what is held
        await self._source.give_up()
        if reader.failure is None or self._buffer.unreadable:
            raise AttemptError(outcome)
        self._quote(reply)
        raise AttemptError(outcome, reply=reply)

    def _hold(self, chunk: bytes) -> bool:
        buffer, streaming = self._buffer, self.attempt.streaming
        buffer.keep(chunk)
        if buffer.content:
            self._hear_content(self.attempt.loop.time())
            if not streaming.until_complete:
                return True
        reader = self._reader
        if reader.failure is not None or reader.complete or len(buffer) > streaming.hold_max:
            return True
        return reader.has_content and not streaming.until_complete

    def _quote(self, reply: Reply) -> None:
        """Make a reply of what was read: the provider's own words for what is wrong."""
        body = self._buffer.quote()
        if self._reader.encoded:
            body = decode_body(reply.headers, body) or b""
            reply.headers = without(reply.headers, b"content-encoding")
        reply.headers = without(reply.headers, b"content-length")
        reply.stream = BufferedStream([body])
        reply.buffered = True

    # After it

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        if self._over:
            raise StopAsyncIteration
        buffer = self._buffer
        ready = b""
        if self._held:
            self._held = False
            ready = buffer.ready()
        if not ready and buffer.stop is None:
            attempt, clock, shortcut = self.attempt, self._clock, self._shortcut
            began = 0.0 if clock is None else attempt.loop.time()
            until = self._may_last_until(began)
            try:
                if shortcut is None:
                    taken = await self._source.read(buffer.take, until)
                else:
                    taken = await self._source.read(shortcut.take, until, shortcut.offer)
            except BaseException as error:  # noqa: BLE001 - told or raised again
                return await self._interrupted(error)
            if taken is None:
                return await self._ended()
            if clock is not None:
                now = attempt.loop.time()
                if buffer.content:
                    self._hear_content(now)
                clock.waited(began, now)
            elif buffer.content and attempt.first_chunk is None:
                self._hear_content(attempt.loop.time())
            ready = b"" if taken is True else taken
        return ready if buffer.stop is None else await self._stopped(ready)

    def _may_last_until(self, began: float) -> float:
        """Give the time by which the read that has begun must be over."""
        attempt, clock = self.attempt, self._clock
        until = attempt.deadline if clock is None else min(attempt.deadline, clock.until(began))
        if not self._reader.complete:
            return until
        self._over_by = min(self._over_by, attempt.loop.time() + AFTER_END)
        return min(until, self._over_by)

    def put_into(self, outlet: Outlet) -> None:
        """Have events go there as they come while somebody waits for the next, who gets what comes after them."""
        self._shortcut = Shortcut(outlet, self._buffer, self._source, self.attempt, self._clock)

    async def aclose(self) -> None:
        """Close the reply; before its end this abandons the call."""
        self._over = True
        try:
            await self._source.aclose()
        finally:
            await self._end(self._reader.interrupted(CANCELLED))

    @property
    def whole_events(self) -> bool:
        """Tell whether events are passed on whole, and an error as the last of them."""
        return self._tells

    @property
    def leaks(self) -> bool:
        """Tell whether something was said that is to be masked, and cannot be, since the stream is encoded."""
        return self._buffer.leaks

    @property
    def text(self) -> str | None:
        """Give what the model has said so far, where failures are raised.

        `None` if that is not all it has made, or if it has said why it says no more.
        """
        answer = self._reader.answer
        return None if answer.finish_reasons else answer.text

    def tell(self, outcome: Outcome) -> bytes:
        """Write the failure as the provider would."""
        status = 504 if outcome.timed_out else 502
        why = outcome.error_type or "unknown"
        return self.dialect.error_event(
            self.attempt.request,
            status,
            f"the stream broke before it was complete: {why}",
            code=why,
            sequence=self._reader.answer.sequence,
        )

    def _hear_content(self, now: float) -> None:
        attempt = self.attempt
        if self._clock is not None:
            self._clock.heard(now)
        if attempt.first_chunk is None:
            attempt.first_chunk = now
            attempt.first_content = now - attempt.started

    def _meaning(self, error: BaseException) -> Outcome:
        clock = self._clock
        if isinstance(error, ReadTimedOutError):
            if clock is None or self.attempt.deadline <= self.attempt.loop.time():
                return DEADLINE_EXCEEDED
            return clock.expired()
        if clock is not None and clock.late:
            return clock.expired()
        return classify_exception(error) or outcome_of(error, self.attempt)

    # How it ends

    async def _ended(self) -> bytes:
        """Pass on what is left after a proper end, and tell the caller if that was not all."""
        reader = self._reader
        outcome = reader.close()
        if not self.dialect.marks_end:  # an error in it is one of whoever speaks that protocol
            outcome = replace(SUCCESS, usage=outcome.usage)
        await self._end(outcome)
        said = reader.failure is not None and not self.resumes
        if not outcome.ok and not said:
            # An event that was cut off is dropped: the caller could not read it, nor what follows it.
            await self._source.give_up()
            return self._fail(outcome, self._errors.broken("the stream ended before it was complete"))
        rest = self._buffer.rest()
        if rest:
            if outcome.ok and self._tells and reader.saved_by_tail:
                return rest + (b"\n" if rest.endswith(b"\n") else b"\n\n")
            return rest
        raise StopAsyncIteration

    async def _interrupted(self, error: BaseException) -> bytes:
        """Tell the caller of an end that was none, in the stream if possible."""
        try:
            if self._over or isinstance(error, anyio.BusyResourceError):
                raise error  # another task has closed the stream, or is reading it
            if (
                self._shortcut is not None
                and self._buffer.stop is not None
                and isinstance(error, ReadTimedOutError)
            ):
                taken = self._shortcut.take(b"")  # it is late, but had failed by its own account just before
                return await self._stopped(b"" if taken is True else taken)
            outcome = self._reader.interrupted(self._meaning(error))
            await self._end(outcome)
            if not isinstance(error, Exception):
                raise error
            if outcome.ok or self._reader.failure is not None:
                raise StopAsyncIteration
            if isinstance(error, ReadTimedOutError):
                error = self._errors.timed_out(f"the stream was given up: {outcome.error_type}")
            return self._fail(outcome, error)
        finally:
            del error  # or its traceback and this frame would hold each other, and the request

    async def _stopped(self, ready: bytes) -> bytes:
        """End a stream that says itself that it has failed, or that cannot be read on."""
        raises = self.resumes or self._buffer.unreadable
        if ready and raises:
            return ready  # what came before that
        outcome = self._reader.interrupted(self._reader.failure or CANCELLED)
        try:
            await self._source.give_up()
        finally:
            await self._end(outcome)
        return self._fail(outcome, None) if raises else ready  # with the error as its last event

    def _fail(self, outcome: Outcome, error: Exception | None) -> bytes:
        if self.resumes:
            raise AttemptError(outcome) from error
        if self._tells or error is None:
            return self.tell(outcome)
        raise error

    async def _end(self, outcome: Outcome) -> None:
        self._over = True
        attempt = self.attempt
        if not (attempt.finished or attempt.superseded):
            answer = self._reader.answer
            attempt.answered(id=answer.id, model=answer.model, finish_reasons=answer.finish_reasons)
        await attempt.end(outcome)

    def __del__(self) -> None:
        # The last resort for a stream nobody closed: give back what it held, in the call's own loop.
        attempt = self.attempt
        if not attempt.finished:
            outcome = self._reader.interrupted(CANCELLED)
            attempt.loop.post(lambda: attempt.finish_alone(outcome))


def _skipped(attempt: Call) -> Collection[EventKind]:
    """Give the kinds of events that are left out."""
    streaming = attempt.streaming
    skipped = (EventKind.MALFORMED,) if streaming.skip_malformed else ()
    if streaming.include_usage and not asks_for_usage(attempt.request):
        return (*skipped, EventKind.USAGE)
    return skipped
