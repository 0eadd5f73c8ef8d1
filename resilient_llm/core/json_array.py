"""Framing of a JSON array that comes bit by bit: bytes in, its objects out, and where in the stream each one lies.

Gemini writes a stream this way where server-sent events were not asked for. What an object says must not enter here,
nor is JSON checked: whoever parses an object finds out.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NoReturn

from resilient_llm.core.sse import DEFAULT_MAX_EVENT_SIZE, Event, EventTooLargeError

__all__ = ["JSONArrayParser"]

# What matters outside strings, and inside one. UTF-8 has none of these bytes in its longer characters.
_MARK = re.compile(rb'["{}\[\]]')
_QUOTE = re.compile(rb'["\\]')

_OPENING = b"{["
_BETWEEN = b" \t\r\n,[]"


class JSONArrayParser:
    """Cut a JSON array into its objects, each given as an `Event`; an object alone is given as well.

    `max_event_size` bounds the bytes of an object, with what stands before it, and so the memory held. Neither the
    objects nor the error depend on how the bytes are chunked, and the time is linear in their number. Raises
    `ValueError` when `max_event_size` is below 1.
    """

    __slots__ = (
        "_depth",
        "_escaped",
        "_held",
        "_in_array",
        "_in_string",
        "_object",
        "_too_large",
        "besides",
        "boundary",
        "comments",
        "max_event_size",
        "offset",
    )

    def __init__(self, *, max_event_size: int = DEFAULT_MAX_EVENT_SIZE) -> None:
        if max_event_size < 1:
            raise ValueError(f"max_event_size must be a number of bytes, at least 1, not {max_event_size!r}")
        self.max_event_size = max_event_size
        self.comments = 0
        """There are none in JSON."""
        self.besides: list[bytes] = []
        """What stood between the objects of the last read, and is none."""
        self.offset = 0
        """How many bytes have been fed."""
        self.boundary = 0
        """The offset after the last whole object."""
        self._held = bytearray()  # what came after that
        self._object = 0  # where in that the object begins
        self._depth = 0
        self._in_array = False
        self._in_string = False
        self._escaped = False
        self._too_large = False

    def feed(self, data: bytes) -> list[Event]:
        """Take the next bytes and give the objects they complete.

        Raises `EventTooLargeError`, then and on every later call.
        """
        if self._too_large:
            raise EventTooLargeError(self.max_event_size)
        self.besides = []
        events: list[Event] = []
        held = self._held
        at = len(held)
        held += data
        self.offset += len(data)
        while True:
            if self._escaped:  # whatever it is
                if at >= len(held):
                    break
                at += 1
                self._escaped = False
            found = (_QUOTE if self._in_string else _MARK).search(held, at)
            if found is None:
                break
            at = found.end()
            if self._read(found[0]):
                if at > self.max_event_size:
                    self._fail(events)
                events.append(self._make_event(at))
                at = 0
            elif self._depth == 1 and found[0] == b"{":
                self._object = at - 1
        if len(held) > self.max_event_size:
            self._fail(events)
        return events

    def close(self) -> list[Event]:
        """Take the clean end of the stream; where that is no end of the array, an event is given that breaks off."""
        if self._too_large:
            raise EventTooLargeError(self.max_event_size)
        self.besides = [bytes(self._held)]
        if not (self._depth or self._in_array):
            return []
        self._depth, self._in_array = 0, False
        return [Event("message", "{", None, None, self.boundary, self.offset, complete=False)]

    def _read(self, mark: bytes) -> bool:
        """Take a character that matters; tell whether it ends an object."""
        if mark == b'"':
            self._in_string = not self._in_string
        elif mark == b"\\":
            self._escaped = True
        elif not self._depth and mark in b"[]":
            self._in_array = mark == b"["
        elif mark in _OPENING:
            self._depth += 1
        elif self._depth:
            self._depth -= 1
            return not self._depth
        return False

    def _make_event(self, size: int) -> Event:
        data = bytes(self._held[self._object : size])
        if self._object > 1 and (before := self._held[: self._object].strip(_BETWEEN)):
            self.besides.append(bytes(before))
        start, self.boundary = self.boundary, self.boundary + size
        del self._held[:size]
        self._object = 0
        try:
            text, valid = data.decode(), True
        except UnicodeDecodeError:
            text, valid = data.decode("utf-8", "replace"), False
        return Event("message", text, None, None, start, self.boundary, valid=valid)

    def _fail(self, events: Sequence[Event]) -> NoReturn:
        self._too_large = True
        raise EventTooLargeError(self.max_event_size, events)
