"""A stream that is written to by a thread of its own, so that whoever logs never waits for whoever reads.

Bounded: what a reader that has stopped does not take is left out, and counted, as is what cannot be written. What a
line looks like is not known here.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

from resilient_llm.sidecar.whole_lines import LinesLostError

__all__ = ["LogWriter"]

_MOST = 4 * 1024 * 1024
_PATIENCE = 2.0


class Writable(Protocol):
    """What text is written to in the end; may block."""

    def write(self, text: str, /) -> object:
        """Write text; raises `OSError` for what cannot be, and `LinesLostError` if some of it was."""
        ...


class LogWriter:
    """Take text at once, and write it to `stream` as fast as that takes it.

    At most `most` characters wait; of what comes meanwhile nothing is kept, and what `lost` makes of the number of its
    lines is written as soon as there is room; so is what it makes of lines that could not be written, before the next
    that can. `flush` waits for all that was taken, for `patience` seconds at most.
    """

    def __init__(
        self,
        stream: Writable,
        *,
        lost: Callable[[int], str],
        most: int = _MOST,
        patience: float = _PATIENCE,
    ) -> None:
        self._stream = stream
        self._lost = lost
        self._most = most
        self._patience = patience
        self._changed = threading.Condition()
        self._waiting: deque[str] = deque()
        self._size = 0
        """Characters that are taken and not yet written."""
        self._left_out = 0
        self._failed = 0
        """Lines that could not be written, and which nobody was told of yet; for the thread alone."""
        self._thread: threading.Thread | None = None

    def write(self, text: str, /) -> None:
        """Take text that ends with its line."""
        with self._changed:
            if self._size and self._size + len(text) > self._most:
                self._left_out += text.count("\n")
                return
            self._take(text)
            if self._thread is None:
                # A daemon: at the end of the process one that hangs in a pipe holds up nobody.
                self._thread = threading.Thread(target=self._run, name="log", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def flush(self) -> None:
        """Wait until everything is written that was taken, or `patience` is over."""
        with self._changed:
            self._changed.wait_for(lambda: not self._size, self._patience)

    def _take(self, text: str) -> None:
        self._waiting.append(text)
        self._size += len(text)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                text = self._waiting.popleft()
            try:
                self._stream.write(self._lost(self._failed) + text if self._failed else text)
                self._failed = 0
            except OSError as error:  # nobody reads any more, or there is no room
                lines = text.count("\n")
                self._failed += min(error.lines, lines) if isinstance(error, LinesLostError) else lines
            with self._changed:
                self._size -= len(text)
                if self._left_out:
                    self._take(self._lost(self._left_out))
                    self._left_out = 0
                self._changed.notify_all()
