"""How URLs, JSON and HTML spell what is written in them, in as many layers as anybody makes.

Pure. What is looked for is not known here.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from html import unescape
from operator import attrgetter
from typing import NamedTuple
from urllib.parse import unquote_to_bytes

__all__ = ["unspelled", "without"]

_LAYERS = 4
"""How often what is spelled in one way may be spelled in another on top, as JSON is in a string of JSON."""


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


def unspelled(text: bytes, trail: list[list[_Change]] | None = None) -> bytes:
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


def without(text: bytes, mask: bytes, told: Iterable[bytes]) -> bytes:
    """Give a text with a mask wherever it tells one of these, in the place of all that is written for them."""
    trail: list[list[_Change]] = []
    plain = unspelled(text, trail)
    parts: list[bytes] = []
    at = 0
    for start, end in sorted(_lying(plain, told)):
        for changes in reversed(trail):
            start, end = _before(changes, start, end)  # noqa: PLW2901 - the same place, one change earlier
        if start >= at:
            parts += (text[at:start], mask)
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
