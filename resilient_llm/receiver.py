"""What is read of a reply while its attempt lasts, and what is left for the caller to read.

Error replies and JSON are read here, up to a bound, so that a cut or false one can be tried again; a stream is
read until it has content. Everything else passes as it comes.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TYPE_CHECKING

import anyio

from resilient_llm.call import outcome_of
from resilient_llm.errors import AttemptError
from resilient_llm.event_stream import EventStream
from resilient_llm.message import without
from resilient_llm.outcome import SUCCESS, Outcome, Verdict
from resilient_llm.providers import (
    EVENT_STREAM,
    MODEL_OPERATIONS,
    classify_exception,
    decode_body,
    dialect_for,
    is_json,
    media_type,
    read_body,
)
from resilient_llm.source import abandon
from resilient_llm.streams import AttemptStream, BufferedStream, LibraryErrors, read_up_to

if TYPE_CHECKING:
    from resilient_llm.attempt_clock import AttemptClock
    from resilient_llm.call import Call
    from resilient_llm.message import Reply, Request
    from resilient_llm.profile import Profile
    from resilient_llm.providers import Framing

__all__ = ["Receiver"]

_MAX_ERROR_BODY = 1024 * 1024
_MAX_JSON_BODY = 16 * 1024 * 1024
_ERROR_BODY_TIME = 5.0
"""Seconds to wait for the body of an error, whose status says the most of it."""

_ANYTHING = "request"
"""The operation of requests nobody knows: an `error` in their reply may be what they asked for, of a job, say."""

_CONDITIONAL = ("GET", "HEAD")
_EMPTY = (204, 205)
_NO_JSON = frozenset({_ANYTHING, "speech"})
_STREAMED = {"events": True, None: False}
_FIELDS = (b"data:", b"event:", b"id:", b"retry:", b":")
_MEDIA = (b"audio/", b"image/", b"video/")
_BOM = b"\xef\xbb\xbf"


class Receiver:
    """Receive replies for one pipeline.

    With `reads` off nothing is read that the caller does not read. With `holds_streams` a stream is held back until
    it has content: a policy is there that would try again. Without `redirects` a 3xx is a failure of the attempt:
    nobody is there who would follow it.
    """

    def __init__(self, *, reads: bool, holds_streams: bool, redirects: bool, errors: LibraryErrors) -> None:
        self._reads = reads
        self._holds_streams = holds_streams
        self._redirects = redirects
        self._errors = errors

    def receive(self, reply: Reply, attempt: Call, clock: AttemptClock | None) -> Awaitable[Reply]:
        """Give a reply that may be kept, and finish its attempt when that has been read.

        Raises `AttemptError` for one that may not.
        """
        if self._reads and 200 <= reply.status < 300:
            return self._receive_answer(reply, attempt, clock)
        return self._receive_other(reply, attempt, clock)

    async def _receive_other(self, reply: Reply, attempt: Call, clock: AttemptClock | None) -> Reply:
        """Receive an error, what is neither error nor answer, and all that is not to be read here."""
        if not self._redirects and _is_redirect(reply.status, attempt.request.method):
            await abandon(reply.stream, None)
            raise AttemptError(
                Outcome(verdict=Verdict.FAILURE, error_type="redirected", status=reply.status, retryable=True)
            )
        if not self._reads:
            ended = SUCCESS if reply.status < 400 else _classify(attempt, reply, b"")
            return self._relay(reply, attempt, clock, ended)
        if reply.status >= 400:
            raise await self._read_error(reply, attempt)
        return self._relay(reply, attempt, clock)

    async def _receive_answer(self, reply: Reply, attempt: Call, clock: AttemptClock | None) -> Reply:
        """Receive a 2xx by what it says it is, and by what it is where a stream was asked for."""
        request, profile = attempt.request, attempt.profile
        if request.method == "HEAD" or (reply.status in _EMPTY and not _is_of_model(request, profile)):
            return self._relay(reply, attempt, clock)
        kind, framing = media_type(reply.headers), _framing(request, profile)
        streams = kind == EVENT_STREAM
        if clock is not None:
            clock.replied(streams=streams and framing is not None)
        if not streams and not reply.complete and profile.stream:
            if framing == "array" and is_json(kind):
                return await self._stream(reply, attempt, clock, framing)
            beginning, _whole = await self._read(reply, 0)
            streams = beginning.removeprefix(_BOM).startswith(_FIELDS)
        if streams and not reply.complete and framing is not None:
            return await self._stream(reply, attempt, clock, "events" if framing == "events" else "unknown")
        # What is not said to be sound or a picture must be JSON, or is a page of some proxy's instead of an answer.
        if not streams and (
            request.method != "POST"
            or profile.operation in _NO_JSON  # a stored thing, say, that may well hold an error
            or (kind.startswith(_MEDIA) and not is_json(kind))
        ):
            return self._relay(reply, attempt, clock)
        stream = reply.stream
        body = stream.body(_MAX_JSON_BODY) if isinstance(stream, BufferedStream) else None
        if body is not None:
            reply.buffered = True
        else:
            body, whole = await self._read(reply, _MAX_JSON_BODY)
            if not whole:  # too large to look at: the caller reads on
                return self._relay(reply, attempt, clock)
        if profile.operation == _ANYTHING:
            attempt.finish(SUCCESS)
        else:
            _understand(reply, body, attempt, profile.operation, framing)
        return reply

    def _relay(
        self, reply: Reply, attempt: Call, clock: AttemptClock | None, ended: Outcome = SUCCESS
    ) -> Reply:
        if reply.complete:
            attempt.finish(ended)
            return reply
        reply.stream = AttemptStream(
            reply.stream, attempt, ended=ended, clock=clock, meaning=_broken_stream, errors=self._errors
        )
        return reply

    async def _stream(
        self, reply: Reply, attempt: Call, clock: AttemptClock | None, framing: Framing
    ) -> Reply:
        stream = EventStream(reply, attempt, clock=clock, errors=self._errors, framing=framing)
        # What may not be repeated, or cannot be understood, need not be held back: it would not be tried again.
        # Without a policy that would, whoever is above may, if it hears in time that there is no content.
        waits = self._holds_streams or (clock is not None and clock.expects_content)
        repeats = waits and attempt.profile.repeat_safe and stream.dialect.marks_end
        if attempt.streaming.until_complete or repeats:
            await stream.hold(reply)
        return reply

    async def _read_error(self, reply: Reply, attempt: Call) -> AttemptError:
        """Read an error reply's body, so that it can be understood and kept, and its connection freed.

        A body that does not come, or not whole, leaves the status and the headers, which mean as much.
        """
        body = b""
        try:
            with anyio.fail_after(_ERROR_BODY_TIME):
                body, whole = await self._read(reply, _MAX_ERROR_BODY)
                if not whole:  # what says so much is no error for anybody to read: the rest is cut off
                    await abandon(reply.stream, None)
                    _replace_body(reply, [body])
        except (AttemptError, TimeoutError):
            _replace_body(reply, [])
        return AttemptError(_classify(attempt, reply, body), reply=reply)

    async def _read(self, reply: Reply, limit: int) -> tuple[bytes, bool]:
        """Read a body of at most `limit` bytes; the reply then gives it again, and the rest of a longer one."""
        try:
            body, stream = await read_up_to(reply.stream, limit)
        except Exception as error:
            outcome = classify_exception(error)
            if outcome is None:
                raise
            raise AttemptError(outcome) from error
        whole = stream.whole
        if not reply.complete:
            reply.stream = stream
            reply.buffered = whole
        return body, whole


def _understand(reply: Reply, body: bytes, attempt: Call, operation: str, framing: Framing | None) -> None:
    """Finish an attempt with what its whole reply means; raises `AttemptError` if that is no answer."""
    outcome, answer = read_body(
        dialect_for(attempt.request),
        reply.status,
        reply.headers,
        body,
        operation=operation,
        streamed=_STREAMED.get(framing),
    )
    if not outcome.ok:
        raise AttemptError(outcome, reply=reply)
    attempt.answered(id=answer.id, model=answer.model, finish_reasons=answer.finish_reasons)
    attempt.finish(outcome)


def _is_redirect(status: int, method: str) -> bool:
    """Tell whether a reply sends its client elsewhere; one that has what was asked for already is an answer."""
    return 300 <= status < 400 and not (status == 304 and method in _CONDITIONAL)


def _is_of_model(request: Request, profile: Profile) -> bool:
    """Tell whether a model is asked, for an answer whose shape is known."""
    return (
        request.method == "POST" and profile.operation in MODEL_OPERATIONS and dialect_for(request).marks_end
    )


def _framing(request: Request, profile: Profile) -> Framing | None:
    """Say in what the stream is written that was asked for; `None` where none was."""
    if not _is_of_model(request, profile):
        return "unknown"
    if profile.stream:
        return dialect_for(request).framing(request)
    return None if request.json else "unknown"  # what is asked with a body that is not read here


def _replace_body(reply: Reply, chunks: list[bytes]) -> None:
    reply.headers = without(reply.headers, b"content-length")
    reply.stream = BufferedStream(chunks)
    reply.buffered = True


def _classify(attempt: Call, reply: Reply, body: bytes) -> Outcome:
    dialect = dialect_for(attempt.request)
    return dialect.classify(reply.status, reply.headers, decode_body(reply.headers, body))


def _broken_stream(error: BaseException, attempt: Call) -> Outcome:
    return classify_exception(error) or outcome_of(error, attempt)
