"""Where lines of the log go: gathered for a moment, then written together, so that a request does not wait for a pipe.

What stands in a line is a formatter's. Nothing is held back at the end of the process, or once something went wrong.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from typing import Protocol

__all__ = ["LineHandler"]

_DELAY = 0.05
_MOST = 65_536
_ENTRY = 512
"""About as many characters has a line of the access log."""


class Writable(Protocol):
    """What lines are written to."""

    def write(self, text: str, /) -> object:
        """Write text."""
        ...

    def flush(self) -> object:
        """Keep nothing back."""
        ...


class LineHandler(logging.Handler):
    """Write lines to a stream, at most `delay` seconds after they were logged.

    At once where no asyncio event loop runs, and for warnings and what is worse, with all that came before them. In an
    event loop the stream is never flushed, which may take time: it must not keep what is written to it.
    """

    def __init__(self, stream: Writable, *, delay: float = _DELAY) -> None:
        super().__init__()
        self._stream = stream
        self._delay = delay
        self._lines: list[str | logging.LogRecord] = []
        self._size = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        """The loop that is going to write what there is; one that has ended never will."""
        self._thread = 0
        """The thread that it runs in."""

    def emit(self, record: logging.LogRecord) -> None:
        """Take a record."""
        try:
            if hasattr(record, "fields") and not record.args and not record.exc_info:
                # Such a record stays what it is, and many that are put into words together take half as long.
                self._lines.append(record)
                self._size += _ENTRY
            else:
                line = self.format(record)
                self._lines.append(line)
                self._size += len(line)
            if not self._is_awaited():
                self.flush()
            elif record.levelno >= logging.WARNING or self._size > _MOST:
                self._write()
        except Exception:  # noqa: BLE001 - as of every handler: logging breaks nothing
            self.handleError(record)

    def flush(self) -> None:
        """Write what there is, and see it written; called by `logging` at the end of the process, too."""
        self._write()
        self._stream.flush()

    def _write(self) -> None:
        with self.lock or contextlib.nullcontext():
            kept, self._lines, self._size = self._lines, [], 0
            lines = [line for one in kept if (line := one if isinstance(one, str) else self._formatted(one))]
            if lines:
                self._stream.write("\n".join(lines) + "\n")

    def _formatted(self, record: logging.LogRecord) -> str:
        try:
            return self.format(record)
        except Exception:  # noqa: BLE001 - as of every handler: logging breaks nothing
            self.handleError(record)
            return ""

    def _is_awaited(self) -> bool:
        """See to it that the lines are written in time; tell whether somebody will."""
        if self._loop is not None and self._thread == threading.get_ident() and self._loop.is_running():
            return True
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return False
        if self._loop is not loop:
            self._loop, self._thread = loop, threading.get_ident()
            loop.call_later(self._delay, self._come_back)
        return True

    def _come_back(self) -> None:
        self._loop = None
        self._write()
