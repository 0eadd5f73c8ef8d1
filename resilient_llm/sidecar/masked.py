"""Errors of providers, with the keys of this side left out, should one of them repeat what it was sent.

Only what is told in an error is looked at, compressed or not. A body that cannot be looked at, since it is encoded in
a way that is not known here or has many megabytes, is left out altogether.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from resilient_llm.providers import decode_body
from resilient_llm.streams import BufferedStream, read_up_to

if TYPE_CHECKING:
    from resilient_llm.message import ByteStream, Headers

__all__ = ["without_secrets"]

logger = logging.getLogger("resilient_llm")

_MOST = 4 * 1024 * 1024
_MASK = b"***"
_OF_THE_BYTES = frozenset(
    {b"content-digest", b"content-encoding", b"content-length", b"content-md5", b"digest", b"etag"}
)


async def without_secrets(
    stream: ByteStream, headers: Headers, secrets: Sequence[bytes]
) -> tuple[ByteStream, Headers]:
    """Give the body and headers of an error with every one of `secrets` masked; names of headers are in lower case.

    A body in which there is none has the bytes it had; one in which there is loses its encoding. Raises what the
    stream raises.
    """
    body, read = await read_up_to(stream, _MOST)
    if not secrets:
        return read, headers
    secrets = sorted(secrets, key=len, reverse=True)  # one may begin with another
    headers = [(name, _masked(value, secrets)) for name, value in headers]
    text: bytes | None = None
    if read.whole:
        text = decode_body(headers, body, max_size=_MOST + 1)
    else:
        await read.aclose()
    if text is None or len(text) > _MOST:
        logger.warning("a provider's error was left out: it could not be searched for keys")
        text = b""
    elif not any(secret in text or secret in body for secret in secrets):
        return read, [*(one for one in headers if one[0] != b"content-length"), _length(body)]
    text = _masked(text, secrets)
    return BufferedStream([text]), [*(one for one in headers if one[0] not in _OF_THE_BYTES), _length(text)]


def _masked(text: bytes, secrets: Sequence[bytes]) -> bytes:
    for secret in secrets:
        text = text.replace(secret, _MASK)
    return text


def _length(body: bytes) -> tuple[bytes, bytes]:
    return b"content-length", str(len(body)).encode()
