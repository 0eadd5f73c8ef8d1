"""What is read of a reply while its attempt lasts, and what is left for the caller to read.

Error replies and JSON are read here, up to a bound, so that a cut or false one can be tried again; a stream is
read until it has content. Everything else passes as it comes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import anyio

from resilient_llm.call import outcome_of
from resilient_llm.errors import AttemptError
from resilient_llm.event_stream import EventStream
from resilient_llm.outcome import SUCCESS, Outcome
from resilient_llm.providers import (
    StreamReader,
    classify_exception,
    decode_body,
    dialect_for,
    is_event_stream,
    is_json,
    read_body,
)
from resilient_llm.streams import AttemptStream, Source, read_up_to

if TYPE_CHECKING:
    from resilient_llm.call import Call
    from resilient_llm.message import Reply

__all__ = ["Receiver"]

_MAX_ERROR_BODY = 256 * 1024
_MAX_JSON_BODY = 16 * 1024 * 1024


class Receiver:
    """Receive replies for one pipeline.

    With `reads` off nothing is read that the caller does not read. With `holds` a stream is held back until
    it has content: a policy is there that would try again.
    """

    def __init__(self, *, reads: bool, holds: bool, timed_out: Callable[[str], Exception]) -> None:
        self._reads = reads
        self._holds = holds
        self._timed_out = timed_out

    async def receive(self, reply: Reply, attempt: Call) -> Reply:
        """Give a reply that may be kept, and finish its attempt when that has been read.

        Raises `AttemptError` for one that may not.
        """
        if reply.status >= 400:
            if self._reads:
                raise await self._read_error(reply, attempt)
            return self._relay(reply, attempt, _classify(attempt, reply, b""))
        if not self._reads:
            return self._relay(reply, attempt, SUCCESS)
        if is_event_stream(reply.headers) and not reply.complete:
            return await self._stream(reply, attempt)
        if is_json(reply.headers):
            return await self._read_json(reply, attempt)
        return self._relay(reply, attempt, SUCCESS)

    def _relay(self, reply: Reply, attempt: Call, ended: Outcome) -> Reply:
        if reply.complete:
            attempt.finish(ended)
            return reply
        reply.stream = AttemptStream(
            Source(reply.stream), attempt, ended=ended, meaning=_broken_stream, timed_out=self._timed_out
        )
        return reply

    async def _stream(self, reply: Reply, attempt: Call) -> Reply:
        dialect = dialect_for(attempt.request)
        source = Source(reply.stream)
        stream = EventStream(
            source,
            attempt,
            dialect=dialect,
            reader=StreamReader(dialect, status=reply.status, headers=reply.headers),
            meaning=_broken_stream,
        )
        if self._holds:
            try:
                await stream.hold(reply)
            except AttemptError:
                raise
            except BaseException as error:
                with anyio.CancelScope(shield=True, deadline=anyio.current_time() + 1):
                    await source.aclose()
                if not isinstance(error, Exception):
                    raise
                raise _attempt_error(error) from error
        reply.stream = stream
        return reply

    async def _read_json(self, reply: Reply, attempt: Call) -> Reply:
        body, whole = await self._read(reply, _MAX_JSON_BODY)
        if not whole:  # too large to look at: the caller reads on
            return self._relay(reply, attempt, SUCCESS)
        outcome, answer = read_body(
            dialect_for(attempt.request), reply.status, reply.headers, body, operation=attempt.operation
        )
        attempt.telemetry.answered(id=answer.id, model=answer.model, finish_reasons=answer.finish_reasons)
        if not outcome.ok:
            raise AttemptError(outcome, reply=reply)
        attempt.finish(outcome)
        return reply

    async def _read_error(self, reply: Reply, attempt: Call) -> AttemptError:
        """Read an error reply's body, so that it can be understood and kept, and its connection freed."""
        body, _whole = await self._read(reply, _MAX_ERROR_BODY)
        return AttemptError(_classify(attempt, reply, body), reply=reply)

    async def _read(self, reply: Reply, limit: int) -> tuple[bytes, bool]:
        """Read a body of at most `limit` bytes; the reply then gives it again, and the rest of a longer one."""
        try:
            body, stream = await read_up_to(reply.stream, limit)
        except Exception as error:
            raise _attempt_error(error) from error
        if not reply.complete:
            reply.stream = stream
            reply.buffered = stream.whole
        return body, stream.whole


def _attempt_error(error: Exception) -> AttemptError:
    """Make the error of an attempt from one of its transport; raise any other as it is."""
    outcome = classify_exception(error)
    if outcome is None:
        raise error
    return AttemptError(outcome)


def _classify(attempt: Call, reply: Reply, body: bytes) -> Outcome:
    dialect = dialect_for(attempt.request)
    return dialect.classify(reply.status, reply.headers, decode_body(reply.headers, body))


def _broken_stream(error: BaseException, attempt: Call) -> Outcome:
    return classify_exception(error) or outcome_of(error, attempt)
