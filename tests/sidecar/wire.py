"""A connection to the sidecar, in memory: what comes is given to it read by read, and what it wrote is kept."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable


class Wire(asyncio.Transport):
    """A connection to a client that takes everything, write by write."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)})
        self.writes: list[bytes] = []
        self.closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert not self.closed
        self.writes.append(bytes(data))

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        self.write(b"".join(list_of_data))

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def pause_reading(self) -> None:
        """Nothing comes that was not given."""

    def resume_reading(self) -> None:
        """Nothing comes that was not given."""

    def can_write_eof(self) -> bool:
        return False
