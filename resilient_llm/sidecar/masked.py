"""What providers say of a failure, with the keys of this side left out, should one of them repeat what it was sent.

Of bodies only those of errors and redirects are looked at, compressed or not. One that cannot be looked at, since it is
encoded in a way that is not known here or has many megabytes, is left out altogether.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING
from urllib.parse import quote

from resilient_llm.event_stream import EventStream
from resilient_llm.message import DIGESTS
from resilient_llm.policies._recording import RecordedStream
from resilient_llm.providers import decode_body
from resilient_llm.streams import BufferedStream, read_up_to

if TYPE_CHECKING:
    from resilient_llm.message import ByteStream, Headers

__all__ = ["Secrets", "partly_searched", "searched", "without_secrets"]

logger = logging.getLogger("resilient_llm")

_MOST = 4 * 1024 * 1024
_MASK = b"***"
_OF_THE_BYTES = DIGESTS | {b"content-encoding", b"content-length", b"etag"}


class Secrets:
    """Find keys, as they are and as URLs and JSON spell them, and mask them."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        spelled = {form.encode() for secret in secrets for form in _forms(secret)}
        self._forms = sorted(spelled, key=len, reverse=True)  # one may begin with another

    def __bool__(self) -> bool:
        return bool(self._forms)

    def are_in(self, text: bytes) -> bool:
        """Tell whether there is one of them in it."""
        for form in self._forms:  # noqa: SIM110 - a generator would take longer than the search
            if form in text:
                return True
        return False

    def masked(self, text: bytes) -> bytes:
        """Give the text with asterisks in the place of each."""
        for form in self._forms:
            text = text.replace(form, _MASK)
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


def partly_searched(stream: ByteStream) -> EventStream | None:
    """Give the stream of events in which errors stand between others, or are encoded: its end does not tell of them."""
    while isinstance(stream, RecordedStream):
        stream = stream.stream
    return stream if isinstance(stream, EventStream) and not stream.whole_events else None


def searched(chunk: bytes, secrets: Secrets, events: EventStream | None) -> bytes | None:
    """Give a part of a stream that has failed with `secrets` masked; `None` if it has one, and is encoded.

    `events` is what `partly_searched` gave.
    """
    if events is not None and events.encoded and secrets.are_in((events.told or "").encode()):
        logger.warning("a provider's stream was broken off: there is a key in its error, which is encoded")
        return None
    return secrets.masked(chunk)


def _forms(secret: str) -> set[str]:
    in_json = json.dumps(secret)[1:-1]
    return {secret, quote(secret, safe=""), in_json, in_json.replace("/", r"\/")}


def _length(body: bytes) -> tuple[bytes, bytes]:
    return b"content-length", str(len(body)).encode()
