"""What providers say of a failure, with the keys of this side left out, should one of them repeat what it was sent.

Of bodies only those of errors and redirects are looked at, compressed or not. One that cannot be looked at, since it is
encoded in a way that is not known here or has many megabytes, is left out altogether.
"""

from __future__ import annotations

import logging
import re
from base64 import b64encode
from collections.abc import Iterable
from functools import cached_property
from typing import TYPE_CHECKING

from resilient_llm.event_stream import EventStream
from resilient_llm.message import DIGESTS
from resilient_llm.policies._recording import RecordedStream
from resilient_llm.providers import decode_body
from resilient_llm.sidecar.spellings import unspelled, without
from resilient_llm.streams import BufferedStream, read_up_to

if TYPE_CHECKING:
    from resilient_llm.message import ByteStream, Headers

__all__ = ["Secrets", "leaks", "without_secrets"]

logger = logging.getLogger("resilient_llm")

_MOST = 4 * 1024 * 1024
_MASK = b"***"
_PERCENT, _BACKSLASH, _AMPERSAND = b"%\\&"
_URL_SAFE = bytes.maketrans(b"+/", b"-_")
_ESCAPED = re.compile(rb"[+/]")
"""What of base64 URLs and JSON may escape."""
_OF_THE_BYTES = DIGESTS | {b"content-encoding", b"content-length", b"etag"}


class Secrets:
    """Find keys, as they are and as URLs, JSON and HTML may spell them; mask them, and what base64 makes of them."""

    def __init__(self, secrets: Iterable[str | bytes] = ()) -> None:
        keys = {secret.encode() if isinstance(secret, str) else secret for secret in secrets}
        self._keys = sorted(keys, key=len, reverse=True)  # one may begin with another
        self._least = len(self._keys[-1]) if self._keys else 1

    def __bool__(self) -> bool:
        return bool(self._keys)

    def may_be_in(self, text: bytes, *, least: int = 0) -> bool:
        """Tell, soon, whether it is worth looking for one of them that has `least` bytes."""
        for key in self._keys:
            if len(key) < least:
                break  # as have all that follow
            if text.count(key):  # takes a third of the time that `in` does
                return True
        return _PERCENT in text or _BACKSLASH in text or _AMPERSAND in text

    def are_in(self, text: bytes, *, least: int = 0) -> bool:
        """Tell whether there is one of them in it that has `least` bytes."""
        if not self.may_be_in(text, least=least):
            return False
        if not self._keys:
            return False
        plain = unspelled(text)
        return any(key in text or told in plain for key, told in self._told if len(key) >= least)

    def are_in_name(self, name: bytes, *, least: int = 0) -> bool:
        """Tell whether one of `least` bytes is in the name of a header, whose case does not matter."""
        return any(key.lower() in name.lower() for key in self._keys if len(key) >= least)

    def masked(self, text: bytes) -> bytes:
        """Give the text with asterisks in the place of each."""
        if len(text) < self._least:
            return text
        for form in self._encoded:
            if form in text:
                text = text.replace(form, _MASK)
        if not self.may_be_in(text):
            return text
        for key in self._keys:
            text = text.replace(key, _MASK)
        if not self._are_spelled_in(text):
            return text
        text = without(text, _MASK, self._spelled)
        return _MASK if self._are_spelled_in(text) else text  # for all that is known

    def _are_spelled_in(self, text: bytes) -> bool:
        plain = unspelled(text)
        return any(told in plain for told in self._spelled)

    @cached_property
    def _told(self) -> list[tuple[bytes, bytes]]:
        return [(key, unspelled(key) or key) for key in self._keys]

    @cached_property
    def _spelled(self) -> list[bytes]:
        return [told for _key, told in self._told] + [form for form in self._encoded if _ESCAPED.search(form)]

    @cached_property
    def _encoded(self) -> list[bytes]:
        return [form for key in self._keys for form in _in_base64(key)]


async def without_secrets(
    stream: ByteStream, headers: Headers, secrets: Secrets
) -> tuple[ByteStream, Headers]:
    """Give a body and headers with every one of `secrets` masked; names of headers are in lower case.

    A body in which there is none has the bytes it had; one in which there is loses its encoding. Raises what the
    stream raises.
    """
    body, read = await read_up_to(stream, _MOST)
    if not secrets:
        return read, headers
    headers = [(name, secrets.masked(value)) for name, value in headers]
    text: bytes | None = None
    if read.whole:
        text = decode_body(headers, body, max_size=_MOST + 1)
    else:
        await read.aclose()
    if text is None or len(text) > _MOST:
        logger.warning("a provider's error was left out: it could not be searched for keys")
        told = b""
    else:
        told = secrets.masked(text)
        if told == text and secrets.masked(body) == body:
            return read, [*(one for one in headers if one[0] != b"content-length"), _length(body)]
    return BufferedStream([told]), [*(one for one in headers if one[0] not in _OF_THE_BYTES), _length(told)]


def leaks(stream: ByteStream) -> bool:
    """Tell whether a key is in a part of a stream that has just been read, and cannot be masked: it is encoded."""
    while isinstance(stream, RecordedStream):
        stream = stream.stream
    if not (isinstance(stream, EventStream) and stream.leaks):
        return False
    logger.warning("a provider's stream was broken off: there is a key in its error, which is encoded")
    return True


def _in_base64(key: bytes) -> set[bytes]:
    """Give what base64 makes of a key wherever it stands, but for characters that it shares with its neighbours."""
    forms = set()
    for before in range(3):
        written = b64encode(bytes(before) + key)
        whole = (before + len(key)) * 8 // 6
        form = written[-(-before * 8 // 6) : whole]
        forms |= {form, form.translate(_URL_SAFE)}
    return forms


def _length(body: bytes) -> tuple[bytes, bytes]:
    return b"content-length", str(len(body)).encode()
