"""Writes by TLS of which it is heard when the client has taken them.

What is encrypted waits in a transport below, which takes all that one write brings. Whoever wrote it hears only at the
next write that it was too much. What is written is not known here.
"""

from __future__ import annotations

from collections.abc import Iterable

from resilient_llm.transports.batched import BatchedTransport

__all__ = ["SecureTransport"]

_RECORD = 16_384
"""Bytes that TLS encrypts together at most."""


class SecureTransport(BatchedTransport):
    """Have the protocol paused while what was written is more than the transport below may have."""

    __slots__ = ()

    def pause_early(self) -> None:
        """Begin with it; the protocol may be paused at once."""
        self.set_write_buffer_limits(high=1, low=0)  # what waits here does so behind what waits below

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Write, now or at the end of the turn; of much the last part waits for the client to have taken the rest."""
        if len(data) <= _RECORD:
            super().write(data)
            return
        self.flush()
        if not self._transport.is_closing():
            view = memoryview(data)
            self._transport.write(view[:-_RECORD])
            self._transport.write(view[-_RECORD:])

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        """Write one after another, as one: there are fewer records of TLS then."""
        self.write(b"".join(list_of_data))
