"""Writes of many connections, done together at the end of a turn of the event loop.

A write wakes whoever reads at the other end. Where each write is followed by the work of another task, they have
answered, and fallen asleep again, by the time of the next; to be woken costs several times what the write does. What is
written, and to whom, is not known here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

__all__ = ["Batch", "BatchedTransport"]

_MOST_BYTES = 65_536
"""That a connection may have put off."""

_MOST_WRITES = 32
"""That may be put off: being woken is cheap then, and who was first waits no longer for a turn that has much to do."""


class Batch:
    """Put off the writes of one event loop's connections, as long as there are several in a turn.

    One that is by itself is done at once: to put it off would make it late, and wake nobody less.
    """

    __slots__ = ("_count", "_together", "_waiting", "loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._count = 0
        """Writes in this turn."""
        self._together = False
        """Whether there were several in the last turn that had any."""
        self._waiting: list[BatchedTransport] = []

    def puts_off(self, transport: BatchedTransport) -> bool:
        """Tell whether a write is to wait until `transport` is told to `flush`."""
        self._count += 1
        if self._count == 1:
            self.loop.call_soon(self._end_turn)
        if self._together:
            if len(self._waiting) >= _MOST_WRITES:
                self._write()
            self._waiting.append(transport)
        return self._together

    def _end_turn(self) -> None:
        self._together = self._count > 1
        self._count = 0
        self._write()

    def _write(self) -> None:
        waiting, self._waiting = self._waiting, []
        for transport in waiting:
            try:
                transport.flush()
            except Exception as error:  # noqa: BLE001 - reported, as of any callback; the others have theirs to write
                self.loop.call_exception_handler(
                    {"message": "A write failed", "exception": error, "transport": transport}
                )


class BatchedTransport(asyncio.Transport):
    """Write to `transport` when its `Batch` says so; all else is done at once, and after what was written before it.

    But for `abort`, as of any transport: what was put off is dropped.
    """

    __slots__ = ("_batch", "_pieces", "_size", "_transport")

    def __init__(self, transport: asyncio.Transport, batch: Batch) -> None:
        super().__init__()
        self._transport = transport
        self._batch = batch
        self._pieces: list[bytes] = []
        self._size = 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Write, now or at the end of the turn."""
        if self._pieces or self._batch.puts_off(self):
            self._add(data)
        else:
            self._transport.write(data)

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        """Write one after another, now or at the end of the turn."""
        if self._pieces or self._batch.puts_off(self):
            for data in list_of_data:
                self._add(data)
        else:
            self._transport.writelines(list_of_data)

    def _add(self, data: bytes | bytearray | memoryview) -> None:
        self._pieces.append(bytes(data))  # which are the same, if they are bytes
        self._size += len(data)
        if self._size > _MOST_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what was put off."""
        pieces = self._pieces
        if not pieces:
            return
        self._pieces, self._size = [], 0
        if self._transport.is_closing():
            return  # there is nobody to have it
        if len(pieces) == 1:
            self._transport.write(pieces[0])
        else:
            self._transport.writelines(pieces)

    def write_eof(self) -> None:
        """Say that no more comes."""
        self.flush()
        self._transport.write_eof()

    def close(self) -> None:
        """Close, once all is written."""
        self.flush()
        self._transport.close()

    def abort(self) -> None:
        """Close at once."""
        self._pieces, self._size = [], 0
        self._transport.abort()

    def is_closing(self) -> bool:
        """Tell whether it is closed, or about to be."""
        return self._transport.is_closing()

    def can_write_eof(self) -> bool:
        """Tell whether `write_eof` is known here."""
        return self._transport.can_write_eof()

    def get_write_buffer_size(self) -> int:
        """Give the bytes that are still to be taken by the system."""
        return self._size + self._transport.get_write_buffer_size()

    def get_write_buffer_limits(self) -> tuple[int, int]:
        """Give the bytes at which the protocol is paused, and resumed."""
        return self._transport.get_write_buffer_limits()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Set the bytes at which the protocol is paused, and resumed."""
        self._transport.set_write_buffer_limits(high, low)

    def is_reading(self) -> bool:
        """Tell whether anything is read."""
        return self._transport.is_reading()

    def pause_reading(self) -> None:
        """Read nothing for now."""
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Read on."""
        self._transport.resume_reading()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Have another protocol told what comes."""
        self._transport.set_protocol(protocol)

    def get_protocol(self) -> asyncio.BaseProtocol:
        """Give the protocol that is told what comes."""
        return self._transport.get_protocol()

    def get_extra_info(self, name: str, default: Any = None) -> Any:  # noqa: ANN401 - as asyncio has it
        """Give what is known of the connection."""
        return self._transport.get_extra_info(name, default)
