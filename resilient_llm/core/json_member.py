"""Give a member of a JSON object another value, and leave every other byte as it is.

Which member, and what value, is decided elsewhere. Nothing is written anew in here.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

from resilient_llm.core.json_walk import members, text_of, written

__all__ = ["with_member"]

_STRING = re.compile(rb'[ \t\n\r]*:[ \t\n\r]*("[^"\\]*")')


class _Written(NamedTuple):
    plain: bytes
    """A key as every encoder writes it."""
    escapes: tuple[bytes, ...]
    """What is in a document that has the key, or a letter of it, escaped."""


def with_member(document: bytes, key: str, value: bytes) -> bytes:
    """Give a JSON object with `value`, which is JSON too, in place of that of its member `key`.

    `key` is of ASCII letters. `document` is an object that a parser has read and found to have that member; of several
    with this name all are changed, since parsers differ in which counts. Linear time, and none to speak of where the
    key stands once in the whole document, quotes and all, and no letter of it is escaped: that is the member then,
    since quotes inside of a text are escaped.

    Raises `ValueError` for what is no JSON object in UTF-8.
    """
    plain, escapes = _forms_of(key)
    start = document.find(plain)
    if (
        start > 0
        and document.find(plain, start + 1) < 0
        and not any(escape in document for escape in escapes)
    ):
        found = _STRING.match(document, start + len(plain))
        if found is not None:
            return document[: found.start(1)] + value + document[found.end(1) :]
    return _by_reading(document, key, value)


@lru_cache(maxsize=16)
def _forms_of(key: str) -> _Written:
    return _Written(f'"{key}"'.encode(), tuple({f"\\u00{ord(letter) >> 4:x}".encode() for letter in key}))


def _by_reading(document: bytes, key: str, value: bytes) -> bytes:
    """Do it by reading the document member by member."""
    text = text_of(document)
    parts, kept = list[str](), 0
    for name, start, end in members(text):
        if name == key:
            parts += text[kept:start], value.decode()
            kept = end
    return written([*parts, text[kept:]])
