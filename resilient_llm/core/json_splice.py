"""Take elements out of an array in a JSON document, and leave every other byte as it is.

What goes is decided elsewhere. Nothing is written anew in here.
"""

from __future__ import annotations

from collections.abc import Collection

from resilient_llm.core.json_walk import elements, members, text_of, written

__all__ = ["without_elements"]


def without_elements(document: bytes, key: str, indexes: Collection[int]) -> bytes:
    """Give a JSON object without some elements of the array that is its member `key`.

    An element goes with the comma and the white space before it; the first that stays takes the place of the first.
    Of several members with that name the last one counts, as it does for parsers. Linear time.

    Raises `ValueError` for a document that is no JSON object in UTF-8, and where there is no such array or element.
    """
    text = text_of(document)
    spans = _elements(text, key)
    gone = set(indexes)
    if not gone <= set(range(len(spans))):
        raise ValueError(f"{key!r} has {len(spans)} elements, not those of {sorted(gone)}")
    if not gone:
        return document
    parts = [text[: spans[0][0]]]
    for index, (start, end) in enumerate(spans):
        if index not in gone:
            parts.append(text[start if len(parts) == 1 else spans[index - 1][1] : end])
    parts.append(text[spans[-1][1] :])
    return written(parts)


def _elements(text: str, key: str) -> list[tuple[int, int]]:
    """Give where each element of the array begins and ends."""
    place: int | None = None
    for name, start, _ in members(text):
        if name == key:
            place = start
    if place is None or not text.startswith("[", place):
        raise ValueError(f"{key!r} is no array")
    return list(elements(text, place))
