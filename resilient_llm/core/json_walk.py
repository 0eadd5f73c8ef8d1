"""Reading a JSON object member by member, for changes that leave every byte as it is that they are not about.

Where values begin and end, and nothing of what they mean or what becomes of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import NamedTuple, cast

__all__ = ["Member", "elements", "members", "text_of", "written"]

_SPACE = re.compile(r"[ \t\n\r]*")
_raw_decode = json.JSONDecoder().raw_decode


class Member(NamedTuple):
    """Hold a member's name, and where its value begins and ends."""

    name: str
    start: int
    end: int


def text_of(document: bytes) -> str:
    """Give a document as text to walk; halves of characters, which parsers let pass, are kept."""
    return document.decode("utf-8", "surrogatepass")


def written(parts: list[str]) -> bytes:
    """Give text as the document it is of."""
    return "".join(parts).encode("utf-8", "surrogatepass")


def members(text: str) -> Iterator[Member]:
    """Give the members of the object that a text is; in linear time. Raises `ValueError` where it is none."""
    at = _expect(text, _skip(text, 0), "{")
    while not text.startswith("}", at):
        if not text.startswith('"', at):
            raise ValueError(f"no name at {at}")
        name, at = _read(text, at)
        start = _expect(text, _skip(text, at), ":")
        _, end = _read(text, start)
        yield Member(str(name), start, end)
        at = _next(text, end, "}")


def elements(text: str, at: int) -> Iterator[tuple[int, int]]:
    """Give where each element begins and ends of the array at a place of a text, which has been read as one."""
    at = _expect(text, at, "[")
    while not text.startswith("]", at):
        _, end = _read(text, at)
        yield at, end
        at = _next(text, end, "]")


def _read(text: str, at: int) -> tuple[object, int]:
    """Read a value, and give it with where it ends."""
    return cast("tuple[object, int]", _raw_decode(text, at))


def _next(text: str, at: int, closing: str) -> int:
    """Give where the next item begins, or the end of them is."""
    at = _skip(text, at)
    if text.startswith(",", at):
        return _skip(text, at + 1)
    if not text.startswith(closing, at):
        raise ValueError(f"neither ',' nor {closing!r} at {at}")
    return at


def _skip(text: str, at: int) -> int:
    space = _SPACE.match(text, at)
    return at if space is None else space.end()


def _expect(text: str, at: int, character: str) -> int:
    if not text.startswith(character, at):
        raise ValueError(f"no {character!r} at {at}")
    return _skip(text, at + 1)
