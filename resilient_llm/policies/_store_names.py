"""By what names policies of this process keep their state in a store: two that differ must not share one.

What is kept there, and how, must not enter here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

__all__ = ["claim", "claimed_anew"]

_in_use: WeakKeyDictionary[object, dict[tuple[str, str], object]] = WeakKeyDictionary()


def claim(store: object, kind: str, name: str, options: object) -> bool:
    """Tell whether state of a kind may be kept by a name; `False` when a policy with other options keeps its own."""
    return _in_use.setdefault(store, {}).setdefault((kind, name), options) == options


@contextmanager
def claimed_anew(store: object | None) -> Iterator[None]:
    """Let policies be made that take the place, and the names, of those there are; all is as before if that fails."""
    if store is None:
        yield
        return
    before = _in_use.pop(store, {})
    made: dict[tuple[str, str], object] = {}
    try:
        yield
        made = _in_use.get(store, {})
    finally:
        _in_use[store] = {**before, **made}
