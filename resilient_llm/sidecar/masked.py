"""What providers say of a failure, with the keys of this side left out, should one of them repeat what it was sent.

Of bodies only those of errors and redirects are looked at, compressed or not. One that cannot be looked at, since it is
encoded in a way that is not known here or has many megabytes, is left out altogether.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from resilient_llm.event_stream import EventStream
from resilient_llm.message import DIGESTS
from resilient_llm.policies._recording import RecordedStream
from resilient_llm.providers import decode_body
from resilient_llm.streams import BufferedStream, read_up_to

if TYPE_CHECKING:
    from resilient_llm.message import ByteStream, Headers

__all__ = ["Secrets", "leaks", "without_secrets"]

logger = logging.getLogger("resilient_llm")

_MOST = 4 * 1024 * 1024
_MASK = b"***"
_SPELLED_ONE_WAY = re.compile(r"[A-Za-z0-9._~-]*")
"""What no URL has to escape (RFC 3986, 2.3), nor any JSON."""
_OF_THE_BYTES = DIGESTS | {b"content-encoding", b"content-length", b"etag"}


class Secrets:
    """Find keys, as they are and as URLs and JSON may spell them, and mask them."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        found = [(secret.encode(), _spellings(secret)) for secret in set(secrets)]
        self._keys = sorted(found, key=lambda one: -len(one[0]))  # one may begin with another

    def __bool__(self) -> bool:
        return bool(self._keys)

    def are_in(self, text: bytes, *, least: int = 0) -> bool:
        """Tell whether there is one of them in it that has `least` bytes."""
        for key, spellings in self._keys:
            if len(key) < least:
                return False  # as have all that follow
            if key in text or (spellings is not None and spellings.search(text)):
                return True
        return False

    def masked(self, text: bytes) -> bytes:
        """Give the text with asterisks in the place of each."""
        for key, spellings in self._keys:
            text = text.replace(key, _MASK) if spellings is None else spellings.sub(_MASK, text)
        return text


async def without_secrets(
    stream: ByteStream, headers: Headers, secrets: Secrets
) -> tuple[ByteStream, Headers]:
    """Give a body with every one of `secrets` masked, and the headers for it; their names are in lower case.

    A body in which there is none has the bytes it had; one in which there is loses its encoding. Raises what the
    stream raises.
    """
    body, read = await read_up_to(stream, _MOST)
    if not secrets:
        return read, headers
    text: bytes | None = None
    if read.whole:
        text = decode_body(headers, body, max_size=_MOST + 1)
    else:
        await read.aclose()
    if text is None or len(text) > _MOST:
        logger.warning("a provider's error was left out: it could not be searched for keys")
        text = b""
    elif not secrets.are_in(text) and not secrets.are_in(body):
        return read, [*(one for one in headers if one[0] != b"content-length"), _length(body)]
    text = secrets.masked(text)
    return BufferedStream([text]), [*(one for one in headers if one[0] not in _OF_THE_BYTES), _length(text)]


def leaks(stream: ByteStream) -> bool:
    """Tell whether a key is in a part of a stream that has just been read, and cannot be masked: it is encoded."""
    while isinstance(stream, RecordedStream):
        stream = stream.stream
    if not (isinstance(stream, EventStream) and stream.leaks):
        return False
    logger.warning("a provider's stream was broken off: there is a key in its error, which is encoded")
    return True


def _spellings(secret: str) -> re.Pattern[bytes] | None:
    """Give what finds a key however it is spelled; `None` for one that everybody writes as it is."""
    if _SPELLED_ONE_WAY.fullmatch(secret):
        return None
    return re.compile(b"".join(map(_spelling, secret)))


def _spelling(character: str) -> bytes:
    """Give a pattern of what may stand for a character: which of them are escaped differs, and so does the case."""
    if _SPELLED_ONE_WAY.fullmatch(character):
        return re.escape(character).encode()
    plain = character.encode()
    in_url = "".join(f"%{byte:02x}" for byte in plain).encode()
    in_json = "".join(
        f"\\\\u{unit}" for unit in re.findall("....", character.encode("utf-16-be").hex())
    ).encode()
    return rb"(?:\\?%b|(?i:%b|%b))" % (re.escape(plain), in_url, in_json)


def _length(body: bytes) -> tuple[bytes, bytes]:
    return b"content-length", str(len(body)).encode()
