"""Framing of server-sent events: bytes in, events out, and where in the stream each one lies.

Follows the event stream grammar of the WHATWG HTML standard (section 9.2) and knows nothing of any
provider. What an event means, and the bytes on their way to the caller, must not enter here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

__all__ = ["DEFAULT_MAX_EVENT_SIZE", "Event", "EventTooLargeError", "SSEParser", "encode", "in_one_line"]

DEFAULT_MAX_EVENT_SIZE = 64 * 1024 * 1024
"""More than a picture takes, which comes in one event, or two. Held is only as much as there is of an event."""

_BOM = b"\xef\xbb\xbf"
_CR = ord("\r")
_MAX_RETRY_DIGITS = 18

# A block as nearly all of them are, where no line ends in CR: a type perhaps, one line of data, the blank line.
_PLAIN_BLOCK = re.compile(rb"(?:event: ?+(.*+)\n)?+data: ?+(.*+)\n\n")

_NEXT_LINE = re.compile(rb"(?:\r\n|\r|\n)data:? ?")
_DATA_LINES = re.compile(rb"(?:^|(?<=[\r\n]))data:[^\r\n]*(?:(?:\r\n|\r|\n)data:[^\r\n]*)+")


class Event(NamedTuple):
    """Hold one event of a stream.

    A named tuple and not a frozen dataclass, because one is made for every token that passes and the
    dataclass takes three times as long to make.
    """

    event: str
    """The event type; "message" when the block names none."""
    data: str
    """The data lines joined by line feeds; may be empty."""
    id: str | None
    """The last event id in force, from this block or an earlier one; `None` if there has been none."""
    retry: int | None
    """The reconnection time in milliseconds that this block sets, if it sets one."""
    start: int
    """The offset in the stream of the first byte of the block."""
    end: int
    """The offset after the block's blank line, as far as it had been read: see `SSEParser.boundary`."""
    complete: bool = True
    """Whether the blank line came; without it the event may have been cut."""
    valid: bool = True
    """Whether the data was UTF-8; what was not is replaced in it."""


class EventTooLargeError(ValueError):
    """An event is larger than `max_event_size` bytes.

    `events` are those that the same read completed before it.
    """

    def __init__(self, max_event_size: int, events: Sequence[Event] = ()) -> None:
        super().__init__(f"server-sent event larger than max_event_size={max_event_size} bytes")
        self.max_event_size = max_event_size
        self.events = tuple(events)


class SSEParser:
    """Cut a stream of bytes into events.

    `max_event_size` bounds the bytes of one block up to its blank line, and with them the memory held.
    Neither the events nor the error depend on how the bytes are chunked, and the time is linear in
    their number, one at a time or many at once. Raises `ValueError` when `max_event_size` is below 1.
    """

    __slots__ = (
        "_after_cr",
        "_data",
        "_event",
        "_finished",
        "_id",
        "_line",
        "_retry",
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
        """How many comment lines have been read: what servers send to keep a connection alive."""
        self.besides: list[bytes] = []
        """The lines of the last read that hold something else than data, or the type of an event that has data."""
        self.offset = 0
        """How many bytes have been fed."""
        self.boundary = 0
        """The offset before which every byte belongs to a finished block, or to none.

        Where the stream may be cut, or an event put in, and stay well formed: after each blank line
        and after comments between blocks. A block is finished by the CR of its blank line, without
        waiting for what comes next; should that be the LF of the same line end, `boundary` moves past
        it too. The last `end` of that earlier read is then one byte short of it.
        """
        self._line = bytearray()  # the unfinished line
        self._after_cr = False
        self._data: bytes | bytearray | None = None
        self._event = b""
        self._id: str | None = None
        self._retry: int | None = None
        self._finished = False
        self._too_large = False

    def feed(self, data: bytes) -> list[Event]:
        """Take the next bytes of the stream and give the events they complete.

        Raises `EventTooLargeError`, then and on every later call, since the framing is lost, and
        `RuntimeError` after `close`.
        """
        if self._finished:
            self._refuse()
        if self.besides:
            self.besides = []
        events: list[Event] = []
        if self.boundary == self.offset and _CR not in data:
            data = self._read_plain(data, events)
        if data:
            self._read(data, events)
            if self.offset - self.boundary > self.max_event_size:
                self._fail(events)
        return events

    def _read_plain(self, data: bytes, events: list[Event]) -> bytes:
        """Read blocks while they are plain, so that no lines need be told apart; give the rest."""
        offset, last_id, size = self.offset, self._id, len(data)
        at = 0
        while at < size:
            block = _PLAIN_BLOCK.match(data, at)
            if block is None:
                break
            end = block.end()
            if end - at > self.max_event_size:
                break
            name, value = block.groups()
            try:
                event, text = name.decode() if name else "message", value.decode()
            except UnicodeDecodeError:
                break
            # As `Event(...)`, without the Python function that a named tuple puts in between.
            fields = (event, text, last_id, None, offset + at, offset + end, True, True)
            events.append(tuple.__new__(Event, fields))
            at = end
        if at:
            self._after_cr = False
            self.offset = self.boundary = offset + at
        return data[at:]

    def _read(self, data: bytes, events: list[Event]) -> None:
        """Read lines, however they end, and keep the last where it does not end yet."""
        line_start = self.offset - len(self._line)
        self.offset += len(data)
        if self._after_cr:
            self._after_cr = False
            if data.startswith(b"\n"):
                data = data[1:]
                if self.boundary == line_start:
                    self.boundary += 1
                line_start += 1
                if not data:
                    return
        # Unlike those of str, the lines of bytes end at LF, CR and CRLF and nowhere else.
        lines = data.splitlines(keepends=True)
        self._after_cr = data.endswith(b"\r")
        rest = b"" if data.endswith((b"\n", b"\r")) else lines.pop()
        if lines:
            if self._line:
                lines[0] = bytes(self._line) + lines[0]
                self._line.clear()
            self._read_lines(lines, line_start, events)
        self._line += rest

    def close(self) -> list[Event]:
        """Take the clean end of the stream and give the event that lacks its blank line, if there is one.

        The standard drops such an event, yet it may be the last word of a server that forgot a line feed.
        It is given with `complete=False`, for whoever knows what its data should look like to judge.
        `boundary` does not move. Not to be called after a transport error. Raises
        `EventTooLargeError` if `feed` has; a second call gives nothing.
        """
        if self._too_large:
            self._refuse()
        if self._finished:
            return []
        self._finished = True
        self.besides = []
        line = bytes(self._line)
        if len(line) == self.offset:
            line = line.removeprefix(_BOM)
        if line:
            self._read_field(line)
        return [] if self._data is None else [self._make_event(self._data, self.offset, complete=False)]

    def _read_lines(self, lines: list[bytes], start: int, events: list[Event]) -> None:
        for line in lines:
            end = start + len(line)
            text = line.rstrip(b"\r\n")
            if start == 0:
                text = text.removeprefix(_BOM)
            if text:
                self._read_field(text)
            # A blank line ends a block; a comment where a block would begin is one of its own.
            if not text or (start == self.boundary and text.startswith(b":")):
                # Without the line end, which is not yet there if it comes with the next read.
                if start - self.boundary + len(line.rstrip(b"\r\n")) > self.max_event_size:
                    self._fail(events)
                if self._data is not None:
                    events.append(self._make_event(self._data, end))
                    self._data = None
                elif self._event:
                    self.besides.append(self._event)
                self._event = b""
                self._retry = None
                self.boundary = end
            start = end

    def _read_field(self, line: bytes) -> None:
        name, _, value = line.partition(b":")
        if value.startswith(b" "):
            value = value[1:]
        if name == b"data":
            if self._data is None:
                self._data = value
            else:
                if isinstance(self._data, bytes):
                    self._data = bytearray(self._data)  # grows in place, where bytes would be copied
                self._data += b"\n"
                self._data += value
        elif name == b"event":
            if self._event:
                self.besides.append(self._event)
            self._event = value
        else:
            self.besides.append(line)
            self._read_besides(name, value)

    def _read_besides(self, name: bytes, value: bytes) -> None:
        if name == b"":
            self.comments += 1
        elif name == b"id":
            if b"\0" not in value:
                self._id = value.decode("utf-8", "replace")
        elif name == b"retry" and value.isdigit() and len(value) <= _MAX_RETRY_DIGITS:
            # Longer ones are no time anybody means, and beyond some length int() refuses them.
            self._retry = int(value)

    def _make_event(self, data: bytes | bytearray, end: int, *, complete: bool = True) -> Event:
        # Bytes are decoded only in whole lines: no character straddles a line end, whatever the reads were.
        event = self._event.decode("utf-8", "replace") if self._event else "message"
        try:
            text, valid = data.decode(), True
        except UnicodeDecodeError:
            text, valid = data.decode("utf-8", "replace"), False
        return Event(event, text, self._id, self._retry, self.boundary, end, complete, valid)

    def _fail(self, events: Sequence[Event]) -> NoReturn:
        self._finished = self._too_large = True
        raise EventTooLargeError(self.max_event_size, events)

    def _refuse(self) -> NoReturn:
        if self._too_large:
            raise EventTooLargeError(self.max_event_size)
        raise RuntimeError("feed() after close()")


def in_one_line(stream: bytes) -> bytes:
    """Give the bytes of whole events with the data of each in one line, without what told lines apart."""
    return _DATA_LINES.sub(lambda found: _NEXT_LINE.sub(b"", found[0]), stream)


def encode(data: str | bytes, *, event: str | None = None) -> bytes:
    """Give the bytes of one event, with one `data:` line for each line of `data`.

    CR and CRLF come out as LF at the other end, since the format carries no other. Lone surrogates
    become "?". Raises `ValueError` when `event` is more than one line.
    """
    payload = data.encode("utf-8", "replace") if isinstance(data, str) else data
    block = b""
    if event is not None:
        if "\r" in event or "\n" in event:
            raise ValueError(f"event must be a single line, not {event!r}")
        block = b"event: " + event.encode("utf-8", "replace") + b"\n"
    lines = payload.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
    return block + b"data: " + b"\ndata: ".join(lines) + b"\n\n"
