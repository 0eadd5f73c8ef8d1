"""Recognise an event that is like an earlier one but for its words.

The events of an answer differ in the text they bring and in a few numbers. A shape is the JSON of one of them
with holes in those places; what fits it has the same structure, so its meaning is known without parsing it,
which would cost more than all the rest. What events mean must not enter here.
"""

from __future__ import annotations

import json
import re
from itertools import pairwise
from typing import NamedTuple, TypeAlias

__all__ = ["MAX_LEARNT", "TEXTS", "Shape", "learn"]

MAX_LEARNT = 4096
"""The longest event, in characters, that a shape is made of; the longer ones are rare, and shapes take memory."""

TEXTS = frozenset(
    {
        "arguments",
        "completion",
        "content",
        "delta",
        "partial_json",
        "reasoning",
        "reasoning_content",
        "refusal",
        "text",
        "thinking",
    }
)
"""Names of the strings that an answer's characters are counted in. What they say changes no meaning."""

_IDS = frozenset({"created_at", "event_id", "id", "item_id", "obfuscation", "responseId", "timestamp"})
"""Names of strings that may differ from event to event, and do not matter after the first."""

_NUMBERS = frozenset({"created", "sequence_number"})
_COUNTS = ("tokens", "TokenCount")

_OBJECTS = frozenset({"functionCall", "input"})
"""Arguments that come as objects: their length is not that of a string under one of the names above."""

_STRING = re.compile(r'"([^"\\]*+(?:\\.[^"\\]*+)*+)"(\s*+:\s*+)?')
_NUMBER = re.compile(r"(?:0|[1-9][0-9]{0,17})(?![0-9.eE])")
_DECODER = json.JSONDecoder()


class _Place(NamedTuple):
    start: int
    end: int
    text: bool
    number: bool


_Hole: TypeAlias = tuple[bool, bool, str, int]
"""Whether there is text in it, or a number; what stands between it and the next, if there is one; how long that is.

A named tuple would take longer to be taken apart.
"""


class Shape:
    """Hold what all events of one shape have in common."""

    __slots__ = (
        "_bodies",
        "_head",
        "_holes",
        "_left",
        "_open",
        "_skeleton",
        "_start",
        "_tail",
        "event",
        "settles",
    )

    def __init__(self, event: str, data: str, places: list[_Place], previous: Shape | None) -> None:
        self.event = event
        """The event type that goes with it."""
        self.settles = '"usage' in data or '"sequence_number"' in data
        """Whether the last event of this shape tells something that the earlier ones do not."""
        self._bodies = [data[place.start : place.end] for place in places]
        ends = [0, *[place.end for place in places]]
        starts = [*[place.start for place in places], len(data)]
        self._skeleton = [data[end:start] for end, start in zip(ends, starts, strict=True)]
        # Only text and what has been seen to differ are holes: each costs time.
        self._open = {number for number, place in enumerate(places) if place.text}
        if previous is not None and previous._skeleton == self._skeleton:
            bodies = zip(self._bodies, previous._bodies, strict=True)
            self._open |= previous._open
            self._open |= {number for number, (new, old) in enumerate(bodies) if new != old}
        holes = [places[number] for number in sorted(self._open)]
        self._head = data[: holes[0].start]
        self._tail = data[holes[-1].end :]
        self._start = len(self._head)
        self._left = len(self._tail)
        rest = [data[hole.end : after.start] for hole, after in pairwise(holes)]
        self._holes: list[_Hole] = [
            (hole.text, hole.number, until, len(until))
            for hole, until in zip(holes, [*rest, ""], strict=True)
        ]

    def match(self, data: str) -> int:
        """Give how many characters of text there are in `data`; 0 if it is not of this shape.

        If it is, it is well-formed JSON of the structure of the event that the shape was learnt from, and
        differs from it only in what stands in the holes: strings that are as little empty as there, numbers.
        """
        if not data.startswith(self._head) or not data.endswith(self._tail):
            return 0
        position = self._start
        last = len(data) - self._left
        characters = 0
        for text, number, until, size in self._holes:
            end = data.find(until, position, last) if size else last
            if end <= position:
                return 0
            body = data[position:end]
            if number:
                # As JSON has it, and not so long that Python would refuse it.
                if (
                    not body.isdigit()
                    or not body.isascii()
                    or (body[0] == "0" and body != "0")
                    or len(body) > 18
                ):
                    return 0
            elif '"' in body or "\\" in body or not body.isprintable():
                length = _length(body)
                if not length:
                    return 0
                characters += length if text else 0
            elif text:
                characters += end - position
            position = end + size
        return characters


def learn(event: str, data: str, characters: int, previous: Shape | None) -> Shape | None:
    """Make a shape of the data of an event that parsed as JSON and has `characters` of text.

    `previous` is the shape it did not fit, which may differ in a number only. `None` when the event is too
    long, or its characters are not those of all its texts, so that those of others could not be told.
    """
    if len(data) > MAX_LEARNT:
        return None
    places = _places(data)
    texts = [_length(data[place.start : place.end]) for place in places if place.text]
    if not texts or sum(texts) != characters:
        return None
    return Shape(event, data, places, previous)


def _places(data: str) -> list[_Place]:
    """Find the strings that are not empty, and the numbers, that may differ between events of one meaning.

    There are none where a name is written in a way that hides it, or the text is not all in strings.
    """
    places = []
    name, value = "", -1  # the last name, and where its value begins
    for match in _STRING.finditer(data):
        string, colon = match.groups()
        if colon is None:
            if string and (name in TEXTS or name in _IDS) and match.start() == value:
                places.append(_Place(match.start(1), match.end(1), text=name in TEXTS, number=False))
            continue
        name, value = string, match.end()
        if "\\" in name or name in _OBJECTS:
            return []
        if name in _NUMBERS or name.endswith(_COUNTS):
            number = _NUMBER.match(data, value)
            if number is not None:
                places.append(_Place(number.start(), number.end(), text=False, number=True))
    return places


def _length(body: str) -> int:
    """Give the length of what the body of a JSON string stands for; 0 when it is none."""
    try:
        text, end = _DECODER.raw_decode(f'"{body}"')
    except ValueError:
        return 0
    return len(text) if end == len(body) + 2 else 0
