"""A streamed reply on its way to the caller: held back until it has content, watched to its end.

Bytes pass as they came, event by event; what they mean the provider's reader says beside them. A failure
after the caller has seen content is told in the stream, in the caller's dialect, and is never an end.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

from resilient_llm.errors import AttemptError
from resilient_llm.outcome import CANCELLED, DEADLINE_EXCEEDED, Outcome, Verdict
from resilient_llm.providers import EventKind
from resilient_llm.streams import BufferedStream, ReadTimedOutError

if TYPE_CHECKING:
    from resilient_llm.call import Call
    from resilient_llm.message import Reply
    from resilient_llm.providers import Dialect, StreamReader
    from resilient_llm.streams import Source

__all__ = ["EventStream"]

_MAX_HELD = 1024 * 1024


class EventStream:
    """Relay the events of one attempt and finish it when they end, however they end.

    Whole events are passed on, so that an error can be told between two of them; a stream with a content
    encoding passes as it comes, and a failure of it is raised.
    """

    __slots__ = (
        "_attempt",
        "_buffer",
        "_dialect",
        "_meaning",
        "_over",
        "_reader",
        "_released",
        "_source",
        "_waited",
    )

    def __init__(
        self,
        source: Source,
        attempt: Call,
        *,
        dialect: Dialect,
        reader: StreamReader,
        meaning: Callable[[BaseException, Call], Outcome],
    ) -> None:
        self._source = source
        self._attempt = attempt
        self._dialect = dialect
        self._reader = reader
        self._meaning = meaning
        self._buffer = bytearray()  # read from the network and not passed on yet
        self._released = 0  # how many bytes have been passed on: an offset in the stream
        self._waited = 0.0  # seconds somebody has waited since the last content
        self._over = False

    async def hold(self, reply: Reply) -> None:
        """Read until there is content, so that whatever fails before it can be tried again unseen.

        Raises `AttemptError`, with the reply where the provider said in the stream what is wrong.
        """
        reader = self._reader
        while not (reader.has_content or reader.complete or len(self._buffer) > _MAX_HELD):
            chunk = await self._source.read()
            if chunk is None:
                outcome = reader.close()
                if outcome.ok:
                    return  # for __anext__ to find: it ends at once, after what is held
                raise AttemptError(outcome)
            self._take(chunk)
            if reader.failure is not None:
                await self._source.aclose()
                reply.stream = BufferedStream([bytes(self._buffer)])
                reply.buffered = True
                raise AttemptError(reader.interrupted(reader.failure), reply=reply)

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        if self._over:
            raise StopAsyncIteration
        while not (ready := self._ready()):
            began = self._attempt.loop.time()
            try:
                chunk = await self._source.read(self._until(began))
            except ReadTimedOutError:
                return await self._broken(self._expired(), None)
            except Exception as error:  # noqa: BLE001 - what it means is asked; it is told or raised below
                return await self._broken(self._meaning(error, self._attempt), error)
            except BaseException as error:
                await self._end(self._reader.interrupted(self._meaning(error, self._attempt)))
                raise
            self._waited += self._attempt.loop.time() - began
            if chunk is None:
                return await self._ended()
            self._take(chunk)
        return ready

    async def aclose(self) -> None:
        """Close the reply; before its end this abandons the call."""
        self._over = True
        try:
            await self._source.aclose()
        finally:
            await self._end(self._reader.interrupted(CANCELLED))

    def _take(self, chunk: bytes) -> None:
        attempt, reader = self._attempt, self._reader
        self._buffer += chunk
        had_content = reader.has_content
        for kind, _event in reader.feed(chunk):
            if kind is EventKind.CONTENT:
                self._waited = 0.0
        if reader.has_content and not had_content:
            attempt.first_chunk = now = attempt.loop.time()
            attempt.first_content = now - attempt.started

    def _ready(self) -> bytes:
        """Give what may be passed on: whole events, or everything where nothing could be put between them."""
        reader = self._reader
        whole = len(self._buffer) if reader.encoded or reader.blind else reader.boundary - self._released
        if not whole:
            return b""
        ready = bytes(self._buffer[:whole])
        del self._buffer[:whole]
        self._released += whole
        return ready

    def _until(self, now: float) -> float:
        """Say when a read that begins now has taken too long."""
        attempt = self._attempt
        clocks = attempt.clocks
        if clocks is None:
            return attempt.deadline
        if self._reader.has_content:
            return min(attempt.deadline, now + clocks.content_gap - self._waited)
        return min(attempt.deadline, attempt.started + clocks.first_content)

    def _expired(self) -> Outcome:
        if self._attempt.deadline <= self._attempt.loop.time():
            return DEADLINE_EXCEEDED
        late = "content_gap_timeout" if self._reader.has_content else "first_content_timeout"
        return Outcome(verdict=Verdict.FAILURE, error_type=late, retryable=True, ambiguous=True)

    async def _ended(self) -> bytes:
        """Pass on what is left, and tell the caller if it was not all."""
        outcome = self._reader.close()
        rest = bytes(self._buffer)
        self._buffer.clear()
        if outcome.ok or self._reader.failure is not None or self._reader.encoded:
            await self._end(outcome)  # well, or the stream has said itself that it is not
            if not rest:
                raise StopAsyncIteration
            return rest
        # An event that was cut off is dropped: the caller could not read it, nor what follows it.
        await self._end(outcome)
        return self._told(outcome)

    async def _broken(self, outcome: Outcome, error: Exception | None) -> bytes:
        outcome = self._reader.interrupted(outcome)
        said = self._reader.failure is not None
        await self._end(outcome)
        if outcome.ok or said:
            raise StopAsyncIteration
        if self._reader.encoded and error is not None:
            raise error
        return self._told(outcome)

    async def _end(self, outcome: Outcome) -> None:
        self._over = True
        answer = self._reader.answer
        self._attempt.telemetry.answered(
            id=answer.id, model=answer.model, finish_reasons=answer.finish_reasons
        )
        await self._attempt.end(outcome)

    def _told(self, outcome: Outcome) -> bytes:
        """Write the failure as the provider would."""
        status = 504 if outcome.timed_out else 502
        why = outcome.error_type or "unknown"
        return self._dialect.error_event(
            self._attempt.request,
            status,
            f"the stream broke before it was complete: {why}",
            code=why,
            sequence=self._reader.answer.sequence,
        )

    def __del__(self) -> None:
        # The last resort for a stream nobody closed: give back what it held, in the call's own loop.
        attempt = self._attempt
        if not attempt.finished:
            outcome = self._reader.interrupted(CANCELLED)
            attempt.loop.post(lambda: attempt.finish(outcome))
