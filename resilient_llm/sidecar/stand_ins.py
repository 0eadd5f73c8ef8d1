"""What stands for the parts of a configuration that are wrong, so that the others can be looked at all the same.

Pure. A stand-in is right by itself, and keeps others right that name it. What is wrong is found elsewhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from resilient_llm.sidecar.problems import Problem

__all__ = ["Document", "StandIns"]

Document: TypeAlias = dict[str, Any]

_ANYWHERE = "http://placeholder.invalid/v1"
_NOWHERE: Document = {"server": {"port": 0}, "admin": {"enabled": False}}
_NAMED = frozenset({"canary", "models", "targets", "tenants", "tiers"})


class StandIns:
    """Put stand-ins into a document, each once; `known` are the tables there can be."""

    def __init__(self, document: Document, known: Iterable[str]) -> None:
        self.document = dict(document)
        self._known = frozenset(known)
        self._there: set[tuple[str, ...]] = set()

    def replace(self, problems: Iterable[Problem]) -> bool:
        """Put one in the place of whatever a problem is about: a table, or one of those that have names.

        Tells whether that was possible for all of them, so that what is found now is about others.
        """
        replaced = [self._replace(problem.path) for problem in problems]
        return all(replaced)

    def _replace(self, path: tuple[str | int, ...]) -> bool:
        place = tuple(map(str, path[: 2 if path and path[0] in _NAMED else 1]))
        if not place or place[0] not in self._known or (place[0] in _NAMED and len(place) < 2):
            return False
        before = len(self._there)
        self._there.add(place)
        if len(place) == 1:
            self.document[place[0]] = _NOWHERE.get(place[0], {})
            if place[0] not in _NOWHERE:
                del self.document[place[0]]
        else:
            self._replace_named(*place)
        return len(self._there) > before

    def _replace_named(self, table: str, name: str) -> None:
        others = {one: value for one, value in self.document[table].items() if one != name}
        stand_in: Document | None = None
        if table == "targets":
            stand_in = {"url": _ANYWHERE}
        elif table == "tenants":
            stand_in = {"key_sha256": hashlib.sha256(f"stand-in for {name}".encode()).hexdigest()}
        elif table == "models" and (target := self._any_of("targets")):
            stand_in = {"targets": target}
        elif table == "tiers" and (model := self._any_of("models")):
            stand_in = {"tiers": [{"model": model}]}
        self.document[table] = others if stand_in is None else {**others, name: stand_in}

    def _any_of(self, table: str) -> str | None:
        """Give the name of one that stands in a table, if that is a table and there is one."""
        named = self.document.get(table)
        return next(iter(named), None) if isinstance(named, dict) else None
