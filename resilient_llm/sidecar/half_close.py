"""The end of what is said over a connection that is still listened to, with TLS and without.

asyncio knows none for TLS, which has one (RFC 8446, 6.1). When the connection is closed is not decided here.
"""

from __future__ import annotations

import ssl
from contextlib import suppress

from resilient_llm.transports.batched import BatchedTransport

__all__ = ["say_no_more"]


def say_no_more(transport: BatchedTransport) -> None:
    """Tell the client that nothing comes any more behind what was written, and read on."""
    if transport.can_write_eof():
        transport.write_eof()
        return
    secure = transport.get_extra_info("ssl_object")
    if secure is None or transport.is_closing():
        return
    transport.flush()
    with suppress(ssl.SSLError):  # the client has not said the same: it need not
        secure.unwrap()
    # What waits to be sent goes out with the next read: this is one.
    transport.pause_reading()
    transport.resume_reading()
