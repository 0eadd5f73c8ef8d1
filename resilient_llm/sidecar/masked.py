"""Errors of providers, with the keys of this side left out, should one of them repeat what it was sent.

Only what is told in an error is looked at. A body that is compressed, or of many megabytes, is passed on as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from resilient_llm.streams import BufferedStream, read_up_to

if TYPE_CHECKING:
    from resilient_llm.message import ByteStream, Headers

__all__ = ["without_secrets"]

_MOST = 4 * 1024 * 1024
_MASK = b"***"


async def without_secrets(
    stream: ByteStream, headers: Headers, secrets: Sequence[bytes]
) -> tuple[ByteStream, Headers]:
    """Give a body with every one of `secrets` masked, and its headers with the length it has then.

    Raises what the stream raises.
    """
    body, read = await read_up_to(stream, _MOST)
    if not read.whole:
        return read, headers
    for secret in secrets:
        body = body.replace(secret, _MASK)
    kept = [header for header in headers if header[0] != b"content-length"]
    return BufferedStream([body]), [*kept, (b"content-length", str(len(body)).encode())]
