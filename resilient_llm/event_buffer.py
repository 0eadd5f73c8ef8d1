"""What of an event stream may be passed on by now: whole events, and nothing after one that is an error.

Bytes in, bytes out, with what the provider's reader says beside them. When to read, and what an end of the stream means
for a call, must not enter here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Literal

from resilient_llm.core.sse import in_one_line
from resilient_llm.providers import EventKind

if TYPE_CHECKING:
    from resilient_llm.core.sse import Event
    from resilient_llm.providers import StreamReader

__all__ = ["AFTER_END", "EventBuffer"]

AFTER_END = 1.0
"""Seconds that a stream may last which has said that it is at its end: its caller waits, and others for its slot."""

# Asked for with each event; through its class it costs eight times a global on 3.11.
_CONTENT = EventKind.CONTENT


class EventBuffer:
    """Keep the bytes of a stream until they make whole events.

    With `whole_events` an error can be put after what was passed on; otherwise everything passes as it comes. Events of
    the kinds `skipped` are left out. `stop` is set where the stream fails by its own account: after the error it tells,
    or with `stop_before_error` before it, or where it becomes `unreadable`: because an event is too large, or the
    terminal marker stands where no answer was.

    Every event that is no answer goes through `masked`: a server may say in any what it has to say, also in one that
    its API does not know. So does all that is passed on together where something is to be masked in comments and in
    other fields.
    """

    __slots__ = (
        "_all",
        "_asides",
        "_bytes",
        "_gone",
        "_masked",
        "_reads",
        "_skipped",
        "_split",
        "_stop_before_error",
        "_told",
        "_type",
        "_whole_events",
        "content",
        "leaks",
        "reader",
        "stop",
        "unreadable",
    )

    def __init__(
        self,
        reader: StreamReader,
        *,
        whole_events: bool,
        skipped: Collection[EventKind] = (),
        stop_before_error: bool = False,
        masked: Callable[[bytes], bytes] | None = None,
    ) -> None:
        self.reader = reader
        self.content = False
        """Whether there was content in what came last."""
        self.stop: int | None = None
        """The offset up to which the stream may be passed on, once it has failed."""
        self.unreadable = False
        self.leaks = False
        """Whether something was said that is to be masked, and cannot be in a stream that has a content encoding."""
        self._masked = masked
        self._asides: list[tuple[int, int, bool]] = []  # where there is something else than the answer
        self._split = False  # whether any of that has several lines
        self._all = False  # whether all that is kept is to be searched
        self._type = "message"  # of events, which has been searched
        self._reads: deque[tuple[int, int]] = deque()  # where each of an encoded stream ends, decoded and not
        self._bytes = bytearray()
        self._gone = 0  # how many bytes of the stream are kept no more: passed on, or skipped
        self._whole_events = whole_events
        self._skipped = skipped if whole_events else ()
        self._stop_before_error = stop_before_error
        self._told: int | None = None  # the offset where the error ends by which the stream fails

    def __len__(self) -> int:
        return len(self._bytes)

    def take(self, chunk: bytes) -> bytes | Literal[True]:
        """Give what may be passed on of the next bytes; `True` when that is nothing, and nothing ever will be."""
        if self._bytes or self._skipped or not self._whole_events:
            self.keep(chunk)
        else:
            # Mostly a read is an event, or several: there is nothing to put together, and nothing to keep.
            reader = self.reader
            events = reader.feed(chunk)
            whole = reader.boundary == self._gone + len(chunk)
            plain = whole and len(events) == 1 and events[0][0] is _CONTENT and not reader.besides
            if plain and events[0][1].event == self._type:
                self.content = True
            else:
                self._hear(events)
            if whole and self.stop is None:
                self._gone = reader.boundary
                return self._searched(chunk) if self._asides or self._all else chunk
            self._bytes += chunk
        return self.ready() or (True if self.stop is not None else b"")

    def keep(self, chunk: bytes) -> None:
        """Take the next bytes, and pass nothing on yet."""
        self._bytes += chunk
        reader = self.reader
        self._hear(reader.feed(chunk))
        if reader.encoded and self._masked is not None:
            self._reads.append((reader.offset, self._gone + len(self._bytes)))

    def ready(self) -> bytes:
        """Give what may be passed on of what is kept."""
        kept = self._bytes
        if not kept:
            return b""
        whole = self._whole()
        if whole <= 0:
            return b""
        ready = bytes(kept[:whole])
        del kept[:whole]
        self._gone += whole
        return self._searched(ready) if self._asides or self._all else ready

    def quote(self) -> bytes:
        """Give what is kept of a stream that tells why it failed: that error is the last of it."""
        return self._without_keys(
            bytes(self._bytes if self._told is None else self._bytes[: self._told - self._gone]), self._split
        )

    def rest(self) -> bytes:
        """Give whatever is kept, at the end."""
        rest = bytes(self._bytes)
        self._bytes.clear()
        self._mind_besides()
        return self._without_keys(rest, split=True)  # for all that is known

    def _searched(self, passed: bytes) -> bytes:
        """Give what is passed on without keys, wherever it is not the answer."""
        asides, all_of_it, split = self._asides, self._all, self._split
        began = self._gone - len(passed)
        self._asides = [aside for aside in asides if aside[0] >= self._gone]
        if not self._bytes:  # else some of it may be what was minded
            self._all = self._split = False
        if all_of_it:
            return self._without_keys(passed, split)
        parts: list[bytes] = []
        at = 0
        for start, end, has_lines in asides[: len(asides) - len(self._asides)]:
            aside = passed[start - began : end - began]
            parts += (passed[at : start - began], self._without_keys(aside, has_lines))
            at = end - began
        return b"".join([*parts, passed[at:]])

    def _without_keys(self, said: bytes, split: bool) -> bytes:  # noqa: FBT001 - of private methods
        if self._masked is None:
            return said
        said = self._masked(said)
        if split and self._masked(joined := in_one_line(said)) != joined:
            return self._masked(joined)
        return said

    def _whole(self) -> int:
        reader = self.reader
        if self._whole_events:
            return (reader.boundary if self.stop is None else min(reader.boundary, self.stop)) - self._gone
        if reader.unreadable or (reader.encoded and self._masked is None):
            return len(self._bytes)
        if reader.encoded:
            return self._of_whole_events() - self._gone
        return reader.boundary - self._gone

    def _of_whole_events(self) -> int:
        """Give up to where an encoded stream can be passed on without a part of an event that is not searched yet."""
        whole = self._gone
        while self._reads and self._reads[0][0] <= self.reader.boundary:
            whole = self._reads.popleft()[1]
        return whole

    def _mind(self, said: bytes) -> bool:
        """Mind what is said besides the answer if it is to be masked, and tell so."""
        if self._masked is None or self._masked(said) == said:
            return False
        self._all = True
        self.leaks = self.leaks or self.reader.encoded
        return True

    def _mind_besides(self) -> None:
        for line in self.reader.besides:
            self._mind(line)

    def _mind_type(self, name: str) -> None:
        if name != self._type and not self._mind(name.encode()):
            self._type = name

    def _mind_data(self, event: Event) -> None:
        has_lines = "\n" in event.data
        self._split = self._split or has_lines
        if self.reader.encoded:
            self._mind(event.data.encode())
        elif self._masked is not None:
            self._asides.append((event.start, event.end, has_lines))

    def _hear(self, events: list[tuple[EventKind, Event]]) -> None:
        reader = self.reader
        content = reader.encoded and reader.blind  # whatever it is
        self._mind_besides()
        for kind, event in events:
            self._mind_type(event.event)
            if kind is _CONTENT:
                content = True
                continue
            self._mind_data(event)
            if kind is EventKind.ERROR:
                if self._whole_events and self.stop is None:
                    self._told = event.end
                    self.stop = event.start if self._stop_before_error else event.end
            elif kind is EventKind.END and reader.failure is not None and self._whole_events:
                if self.stop is None:  # the end of no answer: nobody is to take it for one
                    self.stop = event.start
                    self.unreadable = True
            elif kind in self._skipped and self.stop is None:  # nothing after that is passed on anyway
                start, end = event.start - self._gone, event.end - self._gone
                del self._bytes[start:end]
                self._gone += end - start
                self._asides = [
                    (begins + end - start, ends + end - start, has_lines)  # as what is kept before it is
                    for begins, ends, has_lines in self._asides[:-1]
                ]
        self.content = content
        if reader.failure is not None:
            self._all = True
            if self.stop is None and self._whole_events:
                self.stop = reader.boundary
                self.unreadable = True
