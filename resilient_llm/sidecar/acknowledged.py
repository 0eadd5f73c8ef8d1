"""How much a client has taken of what it was sent, by which one that is slow is told from one that takes nothing.

A client that reads slowly empties the system's buffer first, and for as long nothing moves in the event loop's. What
waits below TLS is seen by nobody.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from contextlib import suppress

__all__ = ["acknowledged"]

_BYTES_ACKED = slice(120, 128)
"""Of Linux's `struct tcp_info`: `tcpi_bytes_acked`."""


def acknowledged(transport: asyncio.Transport) -> int:
    """Give a number that grows with each byte that a client takes, and as long as nothing is written only by that."""
    sock = transport.get_extra_info("socket")
    if sock is not None and sys.platform == "linux":
        with suppress(OSError):  # it is closed
            known: bytes = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_ACKED.stop)
            if len(known) == _BYTES_ACKED.stop:  # older systems know less
                return int.from_bytes(known[_BYTES_ACKED], sys.byteorder)
    return -transport.get_write_buffer_size()
