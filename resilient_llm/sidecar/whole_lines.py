"""A stream of lines that several processes write to, so that none of them lands within another's.

POSIX keeps a write of up to `PIPE_BUF` bytes to a pipe in one piece, and no longer one. What is written is not seen
here.
"""

from __future__ import annotations

import io
import os
import select
import stat

__all__ = ["WholeLines"]


class WholeLines(io.TextIOBase):
    """Write lines to a file descriptor as they come, as many at once as stay in one piece.

    A file takes any number. A line that is longer than a pipe takes may be torn if that is full.
    """

    def __init__(self, fd: int) -> None:
        super().__init__()
        self._fd = fd
        self._most = None if stat.S_ISREG(os.fstat(fd).st_mode) else select.PIPE_BUF

    def write(self, text: str) -> int:
        """Write whole lines."""
        lines = text.encode()
        most = self._most or len(lines)
        begin = 0
        while begin < len(lines):
            end = begin + most
            if end < len(lines):
                end = lines.rfind(b"\n", begin, end) + 1 or lines.find(b"\n", end) + 1 or len(lines)
            self._write(lines[begin:end])
            begin = end
        return len(text)

    def _write(self, piece: bytes) -> None:
        while piece:
            piece = piece[os.write(self._fd, piece) :]
