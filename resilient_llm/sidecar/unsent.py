"""How much of what was written to a client it has not taken yet: here, and where the system can be asked, in there.

A client that reads slowly empties the system's buffer first, and for as long nothing moves in the event loop's.
"""

from __future__ import annotations

import asyncio
import sys

__all__ = ["unsent"]


def unsent(transport: asyncio.Transport) -> int:
    """Give the bytes that a client has not acknowledged."""
    sock = transport.get_extra_info("socket")
    in_system = 0 if sock is None else _in_system(sock.fileno())
    return transport.get_write_buffer_size() + in_system


def _in_system(fd: int) -> int:
    try:
        from fcntl import ioctl  # noqa: PLC0415 - not on Windows
        from termios import TIOCOUTQ  # noqa: PLC0415 - on Linux the same number as SIOCOUTQ, for sockets
    except ImportError:
        return 0
    try:
        return int.from_bytes(ioctl(fd, TIOCOUTQ, bytes(4)), sys.byteorder)
    except OSError:
        return 0
