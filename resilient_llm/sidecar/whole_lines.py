"""A stream of lines that several processes write to, so that none of them lands within another's.

POSIX keeps a write of up to `PIPE_BUF` bytes to a pipe in one piece, and no longer one. What is written is not seen
here.
"""

from __future__ import annotations

import io
import os
import select

__all__ = ["WholeLines"]


class WholeLines(io.TextIOBase):
    """Write lines to a file descriptor as they come, as many at once as stay in one piece.

    A line that is longer than that by itself may be torn if the pipe is full.
    """

    def __init__(self, fd: int) -> None:
        super().__init__()
        self._fd = fd

    def write(self, text: str) -> int:
        """Write whole lines."""
        piece = b""
        for line in text.encode().splitlines(keepends=True):
            if piece and len(piece) + len(line) > select.PIPE_BUF:
                self._write(piece)
                piece = b""
            piece += line
        self._write(piece)
        return len(text)

    def _write(self, piece: bytes) -> None:
        while piece:
            piece = piece[os.write(self._fd, piece) :]
