"""Read the events of one stream: what each is, and what it tells of the answer.

Knows no bytes and no end of a stream. What an event says in its dialect is the dialect's to read; here is what
holds for all of them: errors, keep-alives, what is malformed, the terminal marker, and how to read most events
without parsing them.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from resilient_llm.core.sse import Event
from resilient_llm.message import Headers, JSONObject
from resilient_llm.outcome import Outcome, Verdict
from resilient_llm.providers.answer import Answer, EventKind, written
from resilient_llm.providers.problem import reports_error
from resilient_llm.providers.shape import Shape, learn

if TYPE_CHECKING:
    from resilient_llm.providers.base import Dialect

__all__ = ["MALFORMED", "EventReader", "classify_error", "fault", "parse_data"]

MALFORMED = object()
"""What data that is not JSON parses to."""

# Asked for with each event; through its class it costs eight times a global on 3.11.
_CONTENT = EventKind.CONTENT
_DONE = "[DONE]"
_raw_decode = json.JSONDecoder().raw_decode
_BRACKETS = ("{", "[")
_MAX_LESSONS = 8
"""How many shapes to try in one stream, in which perhaps no event is like another."""


class EventReader:
    """Say what each event of a stream is.

    `status` and `headers` are those of the reply. With `keep_text` the answer's text is kept, and every event
    is parsed.
    """

    __slots__ = (
        "_answer",
        "_dialect",
        "_headers",
        "_lesson",
        "_lessons",
        "_shape",
        "_status",
        "_unsettled",
        "accounted",
        "complete",
        "cut",
        "failure",
        "has_content",
        "keepalives",
        "malformed",
        "messages",
    )

    def __init__(self, dialect: Dialect, status: int, headers: Headers, *, keep_text: bool) -> None:
        self.failure: Outcome | None = None
        """What the first error meant."""
        self.has_content = False
        self.complete = False
        """Whether the terminal marker came, and an answer before it."""
        self.malformed = 0
        self.keepalives = 0
        self.messages = 0
        """How many events were neither keep-alives nor the terminal marker."""
        self.cut = False
        """Whether the last event was one that breaks off."""
        self.accounted = False
        """Whether an error said what had been used."""
        self._dialect = dialect
        self._status = status
        self._headers = headers
        self._answer = Answer(keep_text=keep_text)
        self._shape: Shape | None = None
        self._lessons = 0 if keep_text else _MAX_LESSONS
        self._lesson: tuple[str, str, int] | None = None  # what `learn` is to be asked about the last event
        self._unsettled: str | None = None  # the last event that was recognised and not parsed

    @property
    def answer(self) -> Answer:
        """Give what has been learnt so far."""
        self._settle()
        return self._answer

    def read(self, event: Event) -> EventKind:
        """Say what an event is, by its likeness to an earlier one if possible."""
        if self._lesson is not None:  # not when it came: somebody waits for the first event of all
            self._shape = learn(*self._lesson, self._shape) or self._shape
            self._lesson = None
        shape = self._shape
        if shape is not None and event.event == shape.event and event.valid:
            characters = shape.match(event.data)
            if characters:
                self._answer.characters += characters
                if shape.settles:
                    self._unsettled = event.data
                return _CONTENT
        data = event.data
        if self.complete:
            return EventKind.META
        if event.event == "ping" or data.startswith(":") or not data.strip():
            self.keepalives += 1
            return EventKind.META
        return self._stop() if data.startswith(_DONE) else self._read_message(event)

    def read_tail(self, event: Event) -> None:
        """Read an event that lacks its blank line: the last words of a careless server, or of a dying one."""
        data = event.data.strip()
        if _DONE.startswith(data):
            if data == _DONE:
                self._stop()
        elif parse_data(data) is not MALFORMED or data.startswith(":"):
            self.read(event)
        elif self._dialect.marks_end or data.startswith(_BRACKETS):
            self.cut = not self.complete
        else:
            self.read(event)

    def read_whole(self, body: object) -> bool:
        """Read what stands where events should: tell whether it is a reply that is none of a stream.

        It may also be an error: Gemini ends a stream that it gives up with a bare object.
        """
        if reports_error(body):
            self.report(body, "")
            return False
        if not isinstance(body, dict) or self.messages:
            return False
        self._dialect.read_body(body, self._answer)
        if self._answer.problem is not None:
            self.report({"error": self._answer.problem}, "")
        return True

    def report(self, body: object, data: str) -> EventKind:
        """Take an error; the first one counts."""
        if self.failure is None:
            self.failure = classify_error(self._dialect, self._status, self._headers, body, data)
        self._stop_learning()
        if isinstance(body, dict):  # there may be usage in it
            before = self._answer.output_tokens
            self._dialect.read_event("error", body, self._answer)
            self.accounted = self._answer.output_tokens != before
        return EventKind.ERROR

    def _read_message(self, event: Event) -> EventKind:
        self.messages += 1
        data = event.data
        body = parse_data(data)
        if event.event == "error" or reports_error(body) or (isinstance(body, dict) and body.get("error")):
            return self.report(body, data)
        if isinstance(body, dict):
            return self._read_object(event, body)
        return self._read_other(data, body)

    def _read_object(self, event: Event, body: JSONObject) -> EventKind:
        self._settle()
        answer = self._answer
        before = answer.characters
        kind = self._dialect.read_event(event.event, body, answer)
        if not event.valid and self._dialect.marks_end and kind is EventKind.CONTENT:
            self.malformed += 1
            return EventKind.MALFORMED
        if answer.problem is not None:
            return self.report({"error": answer.problem}, event.data)
        if kind is EventKind.END:
            return self._stop()
        if kind is EventKind.CONTENT:
            self.has_content = True
            if self._lessons:
                self._lessons -= 1
                self._lesson = (event.event, event.data, answer.characters - before)
        return kind

    def _read_other(self, data: str, body: object) -> EventKind:
        """Read what is no JSON object: nothing that a known dialect has events of, but who knows the others."""
        if body is MALFORMED and (self._dialect.marks_end or data.startswith(_BRACKETS)):
            self.malformed += 1
            return EventKind.MALFORMED
        if self._dialect.marks_end:
            return EventKind.META
        self.has_content = True
        return EventKind.CONTENT

    def _stop(self) -> EventKind:
        """Take a terminal marker. One without an answer is the end all the same: no SDK reads on after it."""
        self._stop_learning()
        answered = self.has_content or bool(self._answer.finish_reasons)
        self.complete = answered and self.failure is None
        if not answered and self.failure is None and self._dialect.marks_end:
            self.failure = fault("truncated" if self.messages else "empty_stream", self._status)
        return EventKind.END

    def _stop_learning(self) -> None:
        self._settle()
        self._shape = None
        self._lessons = 0
        self._lesson = None

    def _settle(self) -> None:
        """Parse the last event that was only recognised, for the numbers in it."""
        data = self._unsettled
        if data is not None and self._shape is not None:
            self._unsettled = None
            characters = self._answer.characters
            self._dialect.read_event(self._shape.event, json.loads(data), self._answer)
            self._answer.characters = characters


def classify_error(dialect: Dialect, status: int, headers: Headers, body: object, data: str = "") -> Outcome:
    """Say what a parsed body means that is an error, be it by its shape, its type or where it stands.

    `data` is what an error that is no JSON says.
    """
    inner = (body.get("error") or body) if isinstance(body, dict) else data
    for shape in (None if body is MALFORMED else body, {"error": inner or data}):
        outcome = dialect.classify(status, headers, written(shape).encode())
        if not outcome.ok:
            return outcome
    return dialect.classify(status, headers, b'{"error": "error"}')


def fault(error_type: str, status: int, *, retryable: bool = True) -> Outcome:
    """Say that a reply is none, although its status says so: it may have been made, and billed."""
    return Outcome(
        verdict=Verdict.FAILURE, error_type=error_type, status=status, retryable=retryable, ambiguous=True
    )


def parse_data(data: str) -> object:
    """Parse the data of an event; `MALFORMED` if it is not JSON."""
    parsed: object
    try:
        if data.startswith("{"):  # without what `json.loads` does for space at both ends
            parsed, end = _raw_decode(data)
            if end == len(data):
                return parsed
        parsed = json.loads(data)
    except (ValueError, RecursionError):
        return MALFORMED
    return parsed
