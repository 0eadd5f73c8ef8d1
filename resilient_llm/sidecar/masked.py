"""What providers say of a failure, with the keys of this side left out, should one of them repeat what it was sent.

Of bodies only those of errors and redirects are looked at, compressed or not. One that cannot be looked at, since it is
encoded in a way that is not known here or has many megabytes, is left out altogether.
"""

from __future__ import annotations

import logging
import re
from base64 import b64encode
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, lru_cache
from html import unescape
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import unquote_to_bytes

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
_LAYERS = 4
"""How often what is spelled in one way may be spelled in another on top, as JSON is in a string of JSON."""
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
        plain = _unspelled(text)
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
        text = _without(text, self._spelled)
        return _MASK if self._are_spelled_in(text) else text  # for all that is known

    def _are_spelled_in(self, text: bytes) -> bool:
        plain = _unspelled(text)
        return any(told in plain for told in self._spelled)

    @cached_property
    def _told(self) -> list[tuple[bytes, bytes]]:
        return [(key, _unspelled(key) or key) for key in self._keys]

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


class _Change(NamedTuple):
    """Hold where something lies that was put in the place of something else, and where that lay."""

    start: int
    end: int
    start_before: int
    end_before: int


_START = attrgetter("start")


def _of_percents(found: re.Match[bytes]) -> bytes:
    return unquote_to_bytes(found[0])


def _of_units(found: re.Match[bytes]) -> bytes:
    units = found[0].translate(None, b"\\u").decode()
    return bytes.fromhex(units).decode("utf-16-be", "replace").encode()


def _of_reference(found: re.Match[bytes]) -> bytes:
    number, hexadecimal = found.groups()  # without the zeros before it
    if number is not None:
        return _referred(b"&#%b;" % number)
    return _referred(found[0] if hexadecimal is None else b"&#x%b;" % hexadecimal)


@lru_cache(maxsize=1024)
def _referred(reference: bytes) -> bytes:
    return unescape(reference.decode()).encode()


# What each begins with, what it looks like, and what it means. All take a time that is linear in what they are
# given, whoever wrote that; of numbers no more is read than characters have.
_SPELLINGS: Sequence[tuple[bytes, re.Pattern[bytes], Callable[[re.Match[bytes]], bytes]]] = (
    (b"%", re.compile(rb"(?:%[0-9A-Fa-f]{2})++"), _of_percents),
    (b"\\u", re.compile(rb"(?<!\\)(?:\\++u[0-9A-Fa-f]{4})++"), _of_units),
    (b"\\", re.compile(rb"\\++"), lambda _found: b""),
    (
        b"&",
        re.compile(rb"&(?:#0*+([0-9]{1,7}+);?|#[xX]0*+([0-9A-Fa-f]{1,6}+);?|[A-Za-z][A-Za-z0-9]{1,31}+;?)"),
        _of_reference,
    ),
)


def _unspelled(text: bytes, trail: list[list[_Change]] | None = None) -> bytes:
    """Give a text as it is where nothing is escaped any more, backslashes left out; add all changes to the trail."""
    for _ in range(_LAYERS):
        before = text
        for mark, spelled, meant in _SPELLINGS:
            if mark not in text:
                continue
            if trail is None:
                text = spelled.sub(meant, text)
            else:
                text, changes = _changed(text, spelled, meant)
                trail.append(changes)
        if text == before:
            break
    return text


def _changed(
    text: bytes, spelled: re.Pattern[bytes], meant: Callable[[re.Match[bytes]], bytes]
) -> tuple[bytes, list[_Change]]:
    parts: list[bytes] = []
    changes: list[_Change] = []
    at = size = 0
    for found in spelled.finditer(text):
        start, end = found.span()
        new = meant(found)
        parts += (text[at:start], new)
        size += start - at
        changes.append(_Change(size, size + len(new), start, end))
        size += len(new)
        at = end
    return b"".join([*parts, text[at:]]), changes


def _without(text: bytes, told: Iterable[bytes]) -> bytes:
    """Give a text with asterisks wherever it tells one of these, with all that is written for them."""
    trail: list[list[_Change]] = []
    plain = _unspelled(text, trail)
    parts: list[bytes] = []
    at = 0
    for start, end in sorted(_lying(plain, told)):
        for changes in reversed(trail):
            start, end = _before(changes, start, end)  # noqa: PLW2901 - the same place, one change earlier
        if start >= at:
            parts += (text[at:start], _MASK)
        at = max(at, end)
    return b"".join([*parts, text[at:]])


def _lying(plain: bytes, told: Iterable[bytes]) -> Iterator[tuple[int, int]]:
    for one in told:
        start = plain.find(one)
        while start >= 0:
            yield start, start + len(one)
            start = plain.find(one, start + len(one))


def _before(changes: Sequence[_Change], start: int, end: int) -> tuple[int, int]:
    """Give where something lay before these changes; all of what was put together with an end of it."""
    if at := bisect_right(changes, start, key=_START):
        last = changes[at - 1]
        within = start < last.end or start == last.start
        start = last.start_before if within else last.end_before + start - last.end
    if at := bisect_left(changes, end, key=_START):
        last = changes[at - 1]
        end = last.end_before if end <= last.end else last.end_before + end - last.end
    return start, end


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
