"""Where in a TOML file each key stands, which `tomllib` does not tell.

A reader of lines, not of TOML: it is asked only about files that could be parsed, and a key that it does not find
(one of an inline table, say) has the line of what it belongs to.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from typing import TypeAlias

__all__ = ["Path", "line_of", "lines_of"]

Path: TypeAlias = tuple[str | int, ...]

_TABLE = re.compile(r"\s*(\[\[?)\s*([^\[\]]+?)\s*\]\]?\s*(?:#.*)?$")
_KEY = re.compile(r"""\s*((?:[\w-]+|"[^"]*"|'[^']*')(?:\s*\.\s*(?:[\w-]+|"[^"]*"|'[^']*'))*)\s*=""")
_PART = re.compile(r"""[\w-]+|"[^"]*"|'[^']*'""")


def lines_of(text: str) -> Mapping[Path, int]:
    """Give the line, from 1, of each table and key of a TOML document."""
    lines: dict[Path, int] = {}
    table: Path = ()
    counts: dict[Path, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if found := _TABLE.match(line):
            table = _parts(found[2])
            if found[1] == "[[":
                index = counts[table] = counts.get(table, -1) + 1
                table = (*table, index)
            for end in range(1, len(table) + 1):
                lines.setdefault(table[:end], number)
        elif found := _KEY.match(line):
            path = (*table, *_parts(found[1]))
            lines.setdefault(path, number)
    return lines


def line_of(lines: Mapping[Path, int], path: Sequence[str | int]) -> int | None:
    """Give the line of a key, or of what it belongs to as far as that is known."""
    for end in range(len(path), 0, -1):
        known = lines.get(tuple(path[:end]))
        if known is not None:
            return known
    return None


def _parts(dotted: str) -> Path:
    return tuple(_read(part) for part in _PART.findall(dotted))


def _read(part: str) -> str:
    if "\\" not in part or part.startswith("'"):
        return part.strip("\"'")
    try:
        name: str = tomllib.loads(f"name = {part}")["name"]
    except ValueError:  # what looks like a key may be a line of a string
        return part.strip('"')
    return name
