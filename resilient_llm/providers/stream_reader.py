"""Read a stream of server-sent events beside its way to the caller, and say how it ended.

Takes the bytes as they come and never raises. Clocks, and what to do about any of it, are the shell's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from resilient_llm.core.json_array import JSONArrayParser
from resilient_llm.core.sse import DEFAULT_MAX_EVENT_SIZE, Event, EventTooLargeError, SSEParser
from resilient_llm.message import Headers, header
from resilient_llm.outcome import CANCELLED, SUCCESS, Outcome, Verdict
from resilient_llm.providers.answer import Answer, EventKind
from resilient_llm.providers.content import ContentDecoder
from resilient_llm.providers.event_reader import EventReader, fault, parse_data

if TYPE_CHECKING:
    from resilient_llm.providers.base import Dialect

__all__ = ["StreamReader"]

_MAX_REST = 1 << 20


class StreamReader:
    """Say what the events of one stream are, and what its end means.

    `feed` it the bytes as they come, then `close` it at the clean end of the stream or call `interrupted` when
    it ends in any other way; either gives the outcome. `status` and `headers` are the reply's; with `keep_text`
    `answer.text` is what was said. A stream with a content encoding is decoded for reading, and offsets are
    then those of what it decodes to.

    A clean end is a success if the dialect's proof of completeness is there (see each dialect); a terminal
    marker without an answer proves nothing. Otherwise it is a FAILURE of type "empty_stream" if no event came,
    else "truncated". A dialect that marks no end needs no proof. An event larger than `max_event_size` bytes
    ends reading with "event_too_large", which is not worth repeating: the model would say the same. A reply in one
    piece in place of a stream is a success only if no stream was `expected`, and else an "unexpected_body". With
    `array` the stream is not one of events but a JSON array, and each object in it is read as one.

    Raises ValueError if `max_event_size` is below 1.
    """

    __slots__ = (
        "_decoder",
        "_ended",
        "_events",
        "_expected",
        "_parser",
        "_rest",
        "_status",
        "_unread",
        "besides",
        "boundary",
        "encoded",
        "saved_by_tail",
    )

    def __init__(
        self,
        dialect: Dialect,
        *,
        status: int = 200,
        headers: Headers | None = None,
        max_event_size: int = DEFAULT_MAX_EVENT_SIZE,
        keep_text: bool = False,
        expected: bool = False,
        array: bool = False,
    ) -> None:
        headers = headers or []
        decoder = None if header(headers, b"content-encoding") is None else ContentDecoder(headers)
        self.encoded = decoder is not None and not decoder.identity
        """Whether the stream has a content encoding, so that no event can be put into it."""
        self._decoder = decoder if self.encoded else None
        self._parser: SSEParser | JSONArrayParser
        self._parser = (JSONArrayParser if array else SSEParser)(max_event_size=max_event_size)
        self.boundary = 0
        """The offset up to which events are whole; see `SSEParser.boundary`."""
        self.besides: list[bytes] = []
        """What else there was in the last read, or at the end; see `SSEParser.besides`."""
        self._events = EventReader(dialect, status, headers, keep_text=keep_text)
        self._status = status
        self._expected = expected
        self.saved_by_tail = False
        """Whether the answer is whole only thanks to a last event that lacks its blank line."""
        self._rest = bytearray()  # what came after the last event
        self._unread = not dialect.marks_end  # whether a clean end is all the proof there can be
        self._ended: Outcome | None = None

    @property
    def answer(self) -> Answer:
        """Give what has been learnt so far."""
        return self._events.answer

    @property
    def has_content(self) -> bool:
        """Tell whether something the model made has come: the commit point.

        Each event of that kind restarts the clock between them.
        """
        return self._events.has_content

    @property
    def complete(self) -> bool:
        """Tell whether the answer is whole, whatever happens to the connection now."""
        return self._events.complete

    @property
    def failure(self) -> Outcome | None:
        """Give what the stream itself said of its failure; what comes after that is no part of an answer."""
        return self._events.failure

    @property
    def unreadable(self) -> bool:
        """Tell whether no events are read any more: the stream has ended, or one was too large; or see `blind`."""
        return self._ended is not None or self.blind

    @property
    def blind(self) -> bool:
        """Tell whether the stream cannot be read: its encoding is unknown, or not what it is said to be.

        There are no events then, every byte may be content, and a clean end is a success.
        """
        return self._decoder is not None and self._decoder.blind

    @property
    def malformed(self) -> int:
        """Count the events that were not what the dialect's are written in."""
        return self._events.malformed

    @property
    def keepalives(self) -> int:
        """Count pings: comments, empty events, comments written as data."""
        return self._events.keepalives + self._parser.comments

    @property
    def offset(self) -> int:
        """Give how many bytes have been read."""
        return self._parser.offset

    def feed(self, data: bytes) -> list[tuple[EventKind, Event]]:
        """Take the next bytes and give the events they complete, each with its kind."""
        if self._decoder is not None:
            data = self._decode(self._decoder, data)
        if not data or self._ended is not None:
            return []
        parser = self._parser
        try:
            events = parser.feed(data)
        except EventTooLargeError as error:
            return self._give_up(error)
        finally:
            self.boundary = parser.boundary
            self.besides = parser.besides
        if not events:
            self._rest += data[: _MAX_REST - len(self._rest)]
            return []
        if self._rest or events[-1].end != parser.offset:
            self._rest.clear()
            self._rest += data[len(data) - parser.offset + events[-1].end :]
        read = self._events.read
        if len(events) == 1:  # as mostly
            event = events[0]
            return [(read(event), event)]
        return [(read(event), event) for event in events]

    def close(self) -> Outcome:
        """Take the clean end of the stream and say what it means."""
        if self._ended is None:
            events = self._events
            before = events.complete or events.answer.finished
            tail = self._parser.close()
            self.besides = [*self._parser.besides, *(event.data.encode() for event in tail)]
            for event in tail:
                events.read_tail(event)
                self.saved_by_tail = not before and not self._unread
            self._ended = self._conclude(SUCCESS if self._whole() else self._fail(self._lack()))
        return self._ended

    def interrupted(self, outcome: Outcome) -> Outcome:
        """Take any other end, which by itself means `outcome`, and say what it means after all that came.

        That is a success if the answer was whole: for good, or as far as the caller wanted to read who left
        after the last reason to finish. What the stream said of its own failure comes before `outcome`.
        """
        if self._ended is None:
            events = self._events
            left = outcome == CANCELLED and events.answer.finished
            whole = events.complete or self._read_rest() or left
            self._ended = self._conclude(SUCCESS if whole else outcome)
        return self._ended

    def _decode(self, decoder: ContentDecoder, data: bytes) -> bytes:
        decoded = decoder.feed(data)
        if decoder.blind and data:
            events = self._events
            if decoder.false and not events.has_content and events.failure is None:
                events.failure = self._fail("unexpected_body")
            events.has_content = True
        return decoded

    def _give_up(self, error: EventTooLargeError) -> list[tuple[EventKind, Event]]:
        events = self._events
        kinds = [(events.read(event), event) for event in error.events]
        if not events.complete and events.failure is None:
            events.failure = self._fail("event_too_large", retryable=False)
        self._ended = self._conclude(SUCCESS)
        return kinds

    def _whole(self) -> bool:
        """Tell whether the answer is whole, now that the stream has ended properly."""
        events = self._events
        if events.complete or self._read_rest():
            return True
        if self.blind:
            return events.has_content
        if events.cut:
            return False
        return self.offset > 0 if self._unread else events.answer.finished

    def _lack(self) -> str:
        return "truncated" if self._events.messages or self._events.cut else "empty_stream"

    def _read_rest(self) -> bool:
        """Read what came after the last event, and tell whether it was a whole reply instead of a stream."""
        if not self._rest:
            return False
        events = self._events
        lines = [line for line in bytes(self._rest).splitlines() if not line.startswith(b":")]
        whole = events.read_whole(parse_data(b"\n".join(lines).decode("utf-8", "replace").strip()))
        if whole and self._expected and events.failure is None:  # an SDK would see nothing in it
            events.failure = self._fail("unexpected_body")
        return whole

    def _fail(self, error_type: str, *, retryable: bool = True) -> Outcome:
        return fault(error_type, self._status, retryable=retryable)

    def _conclude(self, outcome: Outcome) -> Outcome:
        """Complete an outcome with what the stream said of itself, and with what it used."""
        outcome = self.failure or outcome
        answer = self.answer
        final = outcome.ok or answer.finished or self._events.accounted
        usage = answer.usage if final and answer.output_tokens is not None else answer.estimate()
        if outcome is SUCCESS:  # nearly always, and `replace` is slow
            return Outcome(verdict=Verdict.SUCCESS, usage=usage)
        ambiguous = outcome.ambiguous or (self.has_content and outcome.verdict is Verdict.FAILURE)
        return replace(outcome, usage=usage, ambiguous=ambiguous)
