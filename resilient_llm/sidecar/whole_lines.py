"""A stream of lines that several processes write to, so that none of them lands within another's.

POSIX keeps a write of up to `PIPE_BUF` bytes to a pipe in one piece, and no longer one. What is written is not seen
here.
"""

from __future__ import annotations

import io
import os
import select
import stat

__all__ = ["LinesLostError", "WholeLines"]


class LinesLostError(OSError):
    """Not all could be written: `lines` of it were not, or not whole."""

    def __init__(self, lines: int, cause: OSError) -> None:
        super().__init__(cause.errno, cause.strerror)
        self.lines = lines


class WholeLines(io.TextIOBase):
    """Write lines to a file descriptor as they come, as many at once as stay in one piece.

    A file takes any number. A line that is longer than a pipe takes may be torn if that is full, and one on a disk that
    is; what comes after it begins a new line.
    """

    def __init__(self, fd: int) -> None:
        super().__init__()
        self._fd = fd
        self._most = None if stat.S_ISREG(os.fstat(fd).st_mode) else select.PIPE_BUF
        self._torn = False
        """Whether the last line has no end."""

    def write(self, text: str) -> int:
        """Write whole lines; raises `LinesLostError` for what cannot be."""
        lines = text.encode()
        before = b"\n" if self._torn else b""
        lines = before + lines
        most = self._most or len(lines)
        begin = 0
        try:
            while begin < len(lines):
                end = min(begin + most, len(lines))
                if end < len(lines):
                    end = lines.rfind(b"\n", begin, end) + 1 or lines.find(b"\n", end) + 1 or len(lines)
                while begin < end:
                    begin += os.write(self._fd, lines[begin:end])
        except OSError as error:
            if begin:
                self._torn = not lines[:begin].endswith(b"\n")
            raise LinesLostError(lines.count(b"\n", max(begin, len(before))), error) from error
        self._torn = False
        return len(text)
